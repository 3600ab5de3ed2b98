//! The cores of a host that all processes of a fleet share: busy tasks get equal shares.
//!
//! Without a number of cores every process has its own host, and no process slows another.
//!
//! Processor sharing in virtual time: virtual time advances at the rate of each busy task. So the
//! virtual end of a task is known at its start, whatever other tasks do.

use crate::clock::{Clock, Moment};
use parking_lot::Mutex;
use std::{collections::BTreeMap, sync::Arc};
use tokio::sync::oneshot;

/// The shared cores. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Cores {
    clock: Clock,
    shared: Option<Arc<Mutex<Shared>>>,
}

struct Shared {
    cores: f64,
    /// Nanoseconds of work of a task that was busy all the time.
    done: f64,
    /// The moment of that value.
    since: Moment,
    /// Busy tasks by their virtual end. (Positive floats order like their bits.)
    busy: BTreeMap<(u64, u64), oneshot::Sender<()>>,
    number: u64,
    /// The number of the scheduled end; an outdated one finds another number.
    asked: u64,
}

/// Work in progress. Drop before its end, by a process that dies, frees its cores.
struct BusyTask<'a> {
    cores: &'a Cores,
    at: (u64, u64),
}

impl Drop for BusyTask<'_> {
    fn drop(&mut self) {
        let Some(shared) = &self.cores.shared else { return };
        let left = {
            let mut s = shared.lock();
            s.advance(self.cores.clock.now());
            s.busy.remove(&self.at).is_some()
        };
        if left {
            self.cores.next_end();
        }
    }
}

/// Less than half a nanosecond is no work.
const EPSILON: f64 = 0.5;

impl Shared {
    fn rate(&self) -> f64 {
        (self.cores / self.busy.len().max(1) as f64).min(1.0)
    }

    fn advance(&mut self, now: Moment) {
        self.done += (now - self.since) as f64 * self.rate();
        self.since = now;
    }
}

impl Cores {
    /// This many cores for all, or as many as processes.
    pub fn new(clock: Clock, cores: Option<u32>) -> Self {
        let shared = |cores: u32| Shared {
            cores: f64::from(cores),
            done: 0.0,
            since: 0,
            busy: BTreeMap::new(),
            number: 0,
            asked: 0,
        };
        Self { clock, shared: cores.map(|c| Arc::new(Mutex::new(shared(c)))) }
    }

    /// Returns when one thread has done this much work.
    pub async fn work(&self, nanos: u64) {
        let Some(shared) = self.shared.as_ref().filter(|_| nanos > 0) else {
            return self.clock.sleep(nanos).await;
        };
        let (tell, told) = oneshot::channel();
        let at = {
            let mut s = shared.lock();
            s.advance(self.clock.now());
            s.number += 1;
            let at = ((s.done + nanos as f64).to_bits(), s.number);
            s.busy.insert(at, tell);
            at
        };
        let _busy = BusyTask { cores: self, at };
        self.next_end();
        told.await.unwrap_or(());
    }

    /// Schedules the end of the task that ends next.
    fn next_end(&self) {
        let Some(shared) = &self.shared else { return };
        let (at, asked) = {
            let mut s = shared.lock();
            s.asked += 1;
            let Some(((end, _), _)) = s.busy.first_key_value() else { return };
            let left = (f64::from_bits(*end) - s.done).max(0.0);
            (s.since.saturating_add((left / s.rate()).ceil() as u64), s.asked)
        };
        let this = self.clone();
        self.clock.at(at, move || this.ended(asked));
    }

    fn ended(&self, asked: u64) {
        let Some(shared) = &self.shared else { return };
        {
            let mut s = shared.lock();
            if s.asked != asked {
                return;
            }
            s.advance(self.clock.now());
            let done = s.done + EPSILON;
            while let Some(first) = s.busy.first_entry() {
                if f64::from_bits(first.key().0) > done {
                    break;
                }
                let _ = first.remove().send(()); // the task may have been dropped
            }
        }
        self.next_end();
    }
}

#[cfg(test)]
#[path = "cores_tests.rs"]
mod tests;
