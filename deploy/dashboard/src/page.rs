//! A live page that a command serves itself, not a server.

use crate::{LocalControl, Options, Source, Token, serve};
use paraft_fleet::failure::{Failure, exit};
use serde_json::Value;
use std::{future::pending, net::SocketAddr, time::Duration};
use tokio::{net::TcpListener, runtime, sync::watch};

/// A page that is served as long as this lives.
pub struct Page {
    /// Who has work of its own to do keeps its thread.
    runtime: Option<runtime::Runtime>,
}

impl Drop for Page {
    /// What a person has just asked for may come to its end.
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

impl Page {
    /// Serves it there, and says where. `sweep`: of which sweep it is.
    ///
    /// # Errors
    /// The address is not free, or the token of the environment is none.
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
