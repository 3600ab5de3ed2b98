//! Restarted workers: each process counts from zero, while the record continues.

use crate::count;
use crate::event::{Event, Train, Worker};
use paraft_common::WorkerId;
use std::collections::BTreeMap;

/// What the earlier processes of the workers have done. Takes the events of one run in the order of its file.
#[derive(Clone, Debug, Default)]
pub struct Incarnations {
    workers: BTreeMap<WorkerId, Incarnation>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Incarnation {
    /// Of the incarnations before this one.
    samples: u64,
    wait_seconds: f64,
    /// How much later than the first incarnation this one began.
    later: f64,
    /// Unix time at which the first one's training clock stood at zero.
    began: f64,
    /// The last line of this incarnation, as it was written.
    last: (u64, f64),
    incarnations: u32,
}

impl Incarnations {
    /// The event with the counts of the whole run.
    pub fn follow(&mut self, event: Event) -> Event {
        match event {
            Event::Train(t) => Event::Train(self.train(t)),
            Event::Worker(w) => Event::Worker(self.worker(w)),
            other => other,
        }
    }

    /// Whether any worker was started again.
    pub fn any(&self) -> bool {
        self.workers.values().any(|l| l.incarnations > 1)
    }

    fn train(&mut self, mut t: Train) -> Train {
        let incarnation = self.workers.entry(t.worker).or_default();
        let began = t.wall - t.seconds;
        if incarnation.incarnations == 0 {
            (incarnation.incarnations, incarnation.began) = (1, began);
        } else if t.samples < incarnation.last.0 {
            incarnation.incarnations += 1;
            incarnation.samples = count([incarnation.samples, incarnation.last.0]);
            incarnation.wait_seconds += incarnation.last.1;
            incarnation.later = (began - incarnation.began).max(incarnation.later);
        }
        incarnation.last = (t.samples, t.wait_seconds);
        t.samples = count([t.samples, incarnation.samples]);
        t.wait_seconds += incarnation.wait_seconds;
        t.seconds += incarnation.later;
        t
    }

    fn worker(&self, mut w: Worker) -> Worker {
        if let Some(incarnation) = self.workers.get(&w.worker) {
            w.samples = count([w.samples, incarnation.samples]);
            w.wait_seconds += incarnation.wait_seconds;
            w.seconds += incarnation.later;
        }
        w
    }
}

#[cfg(test)]
#[path = "incarnations_tests.rs"]
mod tests;
