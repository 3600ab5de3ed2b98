//! The progress of a training, for people: losses, samples, and which worker waits for which. Counted since the
//! process started.

use paraft_common::WorkerId;
use paraft_trace::Moment;
use std::{collections::BTreeMap, time::Duration};

/// The counts. Everything only grows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// The sum of the training losses that workers reported with their pulls, and their number.
    pub losses: (f64, u64),
    /// Samples behind the applied pushes of the shard's first bucket.
    pub samples: u64,
    /// How long one worker waited for another: the one whose push closed the round, or came last before the pull
    /// was answered.
    waits: BTreeMap<(WorkerId, WorkerId), WaitTotal>,
    /// The worker whose push came last.
    last: Option<WorkerId>,
}

/// Waiting time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitTotal {
    /// Total time.
    pub time: Duration,
    /// Number of waits.
    pub times: u64,
}

/// Bound on the pairs of workers: workers that come and go must not grow the table without end.
const MAX_PAIRS: usize = 1 << 16;

impl Progress {
    /// Adds a worker's loss.
    pub fn loss(&mut self, loss: Option<f32>) {
        if let Some(loss) = loss.filter(|l| l.is_finite()) {
            self.losses.0 += f64::from(loss);
            self.losses.1 += 1;
        }
    }

    /// Records a push.
    pub fn pushed(&mut self, by: WorkerId) {
        self.last = Some(by);
    }

    /// Adds the waits of a closed round whose pushes arrived at these times.
    pub fn round(&mut self, pushes: &[(WorkerId, Moment)]) {
        let Some((last, closed)) = pushes.iter().max_by_key(|(_, at)| *at) else { return };
        for (worker, at) in pushes.iter().filter(|(worker, _)| worker != last) {
            self.wait(*worker, *last, closed.since(*at));
        }
    }

    /// Adds the wait of a pull that was held up.
    pub fn waited(&mut self, worker: WorkerId, time: Duration) {
        if let Some(of) = self.last.filter(|of| *of != worker) {
            self.wait(worker, of, time);
        }
    }

    fn wait(&mut self, worker: WorkerId, of: WorkerId, time: Duration) {
        if self.waits.len() < MAX_PAIRS || self.waits.contains_key(&(worker, of)) {
            let waited = self.waits.entry((worker, of)).or_default();
            waited.time += time;
            waited.times += 1;
        }
    }

    /// Each waiting worker, the worker that it waited for, and the time.
    pub fn waits(&self) -> impl Iterator<Item = (WorkerId, WorkerId, WaitTotal)> + '_ {
        self.waits.iter().map(|((worker, of), waited)| (*worker, *of, *waited))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_for_who_came_last() {
        let (a, b) = (WorkerId(0), WorkerId(1));
        let mut progress = Progress::default();
        progress.waited(a, Duration::from_secs(9)); // no worker to wait for
        for by in [b, a] {
            progress.pushed(by);
            progress.waited(a, Duration::from_secs(1));
            progress.waited(b, Duration::from_secs(2));
        }
        let of = |seconds| WaitTotal { time: Duration::from_secs(seconds), times: 1 };
        assert_eq!(progress.waits().collect::<Vec<_>>(), [(a, b, of(1)), (b, a, of(2))]);
        let mut rounds = Progress::default();
        rounds.round(&[(a, Moment(5)), (b, Moment(9))]);
        rounds.round(&[(a, Moment(12))]);
        let waited = WaitTotal { time: Duration::from_nanos(4), times: 1 };
        assert_eq!(rounds.waits().collect::<Vec<_>>(), [(a, b, waited)]);
        [Some(1.5), None, Some(f32::NAN), Some(0.5)].into_iter().for_each(|l| progress.loss(l));
        assert_eq!(progress.losses, (2.0, 2));
    }
}
