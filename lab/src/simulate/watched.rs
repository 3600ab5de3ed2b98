//! The live page of a simulated fleet: what the fleet says goes to the page as if servers had said it.

use paraft_dashboard::{
    Options, Source, TOKEN, Token,
    facts::{self, Facts},
};
use paraft_fleet::failure::Failure;
use paraft_sim::watched::{Said, Watcher};
use paraft_worker::exit;
use std::{future::pending, net::SocketAddr};
use tokio::{net::TcpListener, runtime, sync::watch};

/// A page that is served as long as this lives.
pub struct Page {
    facts: watch::Sender<Facts>,
    /// The simulation has the thread that it runs on for itself.
    _runtime: runtime::Runtime,
}

impl Page {
    /// Serves it there, and says where.
    pub fn serve(at: SocketAddr) -> Result<Self, Failure> {
        let token = match std::env::var(TOKEN).ok().filter(|t| !t.is_empty()) {
            Some(given) => Token::new(&given).map_err(|e| Failure::new(exit::CONFIG, e))?,
            None => Token::draw().map_err(|e| {
                Failure::new(exit::IO, format!("no random numbers for the page's token: {e}"))
            })?,
        };
        let cannot = |e| {
            Failure::new(exit::IO, format!("the page cannot be served on {at}: {e}"))
                .help("give --dashboard another address, or port 0 for any that is free")
        };
        let runtime =
            runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().map_err(cannot)?;
        let listener = runtime.block_on(TcpListener::bind(at)).map_err(cannot)?;
        let bound = listener.local_addr().map_err(cannot)?;
        eprintln!("page    {}", token.link(&bound.to_string()));
        let (facts, told) = watch::channel(Facts::default());
        let options = Options { source: Source::Facts(told), token };
        runtime.spawn(async move {
            if let Err(e) = paraft_dashboard::serve(listener, options, pending()).await {
                eprintln!("the page is served no more: {e}");
            }
        });
        Ok(Self { facts, _runtime: runtime })
    }

    /// What shows it the fleet. Times on the page are simulated, from now on.
    pub fn watcher(&self) -> Watcher {
        let (facts, began) = (self.facts.clone(), facts::now());
        Box::new(move |said| _ = facts.send(put_together(began, said)))
    }
}

fn put_together(began: u64, said: Said) -> Facts {
    let Said { at, mut fleet, servers } = said;
    fleet.jobs.iter_mut().for_each(|j| j.first_seen_ms = began);
    let mut facts = facts::put_together(began + at.as_millis() as u64, &fleet, &servers);
    facts.simulated = true;
    for s in &mut facts.servers {
        // It has neither an address nor a process.
        s.address.clear();
        (s.cpu_seconds, s.peak_rss_bytes) = (None, None);
    }
    facts
}
