//! The live page of a simulated fleet: what the fleet says goes to the page as if servers had said it.

use paraft_dashboard::{
    LocalControl, Source,
    facts::{self, Facts},
};
use paraft_fleet::failure::Failure;
use paraft_host::clock::unix_ms;
use paraft_sim::watched::{FleetSnapshot, Watcher};
use std::net::SocketAddr;
use tokio::sync::watch;

/// A page that is served as long as this lives.
pub struct Page {
    facts: watch::Sender<Facts>,
    _page: paraft_dashboard::Page,
}

impl Page {
    /// Serves it there, and says where.
    pub fn serve(at: SocketAddr) -> Result<Self, Failure> {
        let (facts, told) = watch::channel(Facts::default());
        Ok(Self {
            facts,
            _page: paraft_dashboard::Page::serve(at, Source::Facts(told), None, LocalControl::default())?,
        })
    }

    /// What shows it the fleet. Times on the page are simulated, from now on.
    pub fn watcher(&self) -> Watcher {
        let (facts, began) = (self.facts.clone(), unix_ms());
        Box::new(move |said| _ = facts.send(put_together(began, said)))
    }
}

fn put_together(began: u64, said: FleetSnapshot) -> Facts {
    let FleetSnapshot { at, mut fleet, servers } = said;
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
