//! How many peers and requests were refused, and a log line about each host from time to time.

use super::Origin;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    fmt::Display,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// Interval between log lines about one host.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of hosts with such an entry.
const MAX_HOSTS: usize = 1024;

/// Refused peers and requests.
#[derive(Default)]
pub struct Refusals {
    count: AtomicU64,
    hosts: Mutex<HashMap<Origin, (Instant, u64)>>,
}

impl Refusals {
    /// Their number, since the process began.
    pub fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Counts a refusal, and logs it unless the host has an entry of late.
    pub fn note(&self, from: Origin, what: impl Display) {
        self.count.fetch_add(1, Relaxed);
        let mut hosts = self.hosts.lock();
        if hosts.len() >= MAX_HOSTS {
            hosts.retain(|_, (at, _)| at.elapsed() < LOG_INTERVAL);
        }
        if hosts.len() >= MAX_HOSTS {
            return;
        }
        match hosts.get_mut(&from) {
            Some((at, unsaid)) if at.elapsed() < LOG_INTERVAL => *unsaid += 1,
            known => {
                let unsaid = known.map_or(0, |(_, unsaid)| *unsaid);
                hosts.insert(from, (Instant::now(), 0));
                tracing::warn!(%from, more = unsaid, "refused: {what}");
            }
        }
    }
}
