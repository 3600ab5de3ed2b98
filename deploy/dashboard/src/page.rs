//! A live page that a command serves itself, without a server of the fleet.

use crate::{LocalControl, Options, Source, Token, serve};
use paraft_fleet::failure::{Failure, exit};
use serde_json::Value;
use std::{future::pending, net::SocketAddr, time::Duration};
use tokio::{net::TcpListener, runtime, sync::watch};

/// A served page; drop ends it.
pub struct Page {
    /// Its own runtime, so the caller keeps its thread.
    runtime: Option<runtime::Runtime>,
}

impl Drop for Page {
    /// An action in progress may finish.
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

impl Page {
    /// Serves the page and prints its address. `sweep`: the sweep that it shows.
    ///
    /// # Errors
    ///
    /// The address is in use, or the token of the environment is invalid.
    pub fn serve(
        at: SocketAddr,
        source: Source,
        sweep: Option<watch::Receiver<Value>>,
        here: LocalControl,
    ) -> Result<Self, Failure> {
        let token = match Token::given() {
            Some(given) => given.map_err(|e| Failure::new(exit::CONFIG, e))?,
            None => Token::draw().map_err(|e| {
                Failure::new(exit::IO, format!("no random numbers for the page's token: {e}"))
            })?,
        };
        let cannot = |e| {
            Failure::new(exit::IO, format!("the page cannot be served on {at}: {e}"))
                .help("give another address, or port 0 for any that is free")
        };
        let runtime =
            runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().map_err(cannot)?;
        let listener = runtime.block_on(TcpListener::bind(at)).map_err(cannot)?;
        let bound = listener.local_addr().map_err(cannot)?;
        eprintln!("page    {}", token.link(&bound.to_string()));
        let options = Options { source, token, sweep, here };
        runtime.spawn(async move {
            if let Err(e) = serve(listener, options, pending()).await {
                eprintln!("the page is served no more: {e}");
            }
        });
        Ok(Self { runtime: Some(runtime) })
    }
}
