//! The figures of a group: each over its seeds, as a mean and how far the seeds lie apart.

use super::Group;
use crate::{RunRecord, Summary, total};
use serde::Serialize;

/// One figure over the runs of a group that have it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The mean.
    pub mean: f64,
    /// The sample's standard deviation (n - 1); none for one run.
    pub deviation: Option<f64>,
    /// The least.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// Runs that have it.
    pub runs: usize,
}

impl Spread {
    /// Of the finite ones among `values`; `None` where there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.into_iter().filter(|v| v.is_finite()).collect();
        let runs = values.len();
        if runs == 0 {
            return None;
        }
        let mean = total(values.iter().copied()) / runs as f64;
        let squares = total(values.iter().map(|v| (v - mean) * (v - mean)));
        let deviation = (runs > 1).then(|| (squares / (runs - 1) as f64).sqrt());
        let (min, max) = values.iter().fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(*v), h.max(*v)));
        Some(Self { mean, deviation, min, max, runs })
    }
}

/// The figures of a group, over the runs that count. `None`: no run has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Training clock at the target, over the runs that reached it.
    pub seconds_to_target: Option<Spread>,
    /// Fleet samples at the target, likewise.
    pub samples_to_target: Option<Spread>,
    /// 0 to 1.
    pub final_accuracy: Option<Spread>,
    /// Held out.
    pub final_loss: Option<Spread>,
    /// The longest training clock of a worker.
    pub seconds: Option<Spread>,
    /// Of the fleet.
    pub samples: Option<Spread>,
    /// Of the fleet.
    pub samples_per_s: Option<Spread>,
    /// Time in pulls over training time, of all workers together; 0 to 1.
    pub wait_share: Option<Spread>,
    /// Mean delay of a push, in versions.
    pub delay_mean: Option<Spread>,
    /// Payload.
    pub bytes_pushed: Option<Spread>,
    /// Payload.
    pub bytes_pulled: Option<Spread>,
}

impl Figures {
    /// See [`Group::figures`].
    pub(super) fn of(group: &Group<'_>) -> Self {
        let runs: Vec<(&RunRecord, &Summary)> = group
            .cells
            .iter()
            .zip(&group.summaries)
            .filter(|(c, _)| c.counts())
            .map(|(c, s)| (&c.record, s))
            .collect();
        let over = |value: &dyn Fn(&RunRecord, &Summary) -> Option<f64>| {
            Spread::of(runs.iter().filter_map(|(r, s)| value(r, s)))
        };
        Self {
            seconds_to_target: over(&|_, s| s.seconds_to_target),
            samples_to_target: over(&|_, s| s.samples_to_target.map(|n| n as f64)),
            final_accuracy: over(&|_, s| s.final_accuracy),
            final_loss: over(&|_, s| s.final_loss),
            seconds: over(&|_, s| Some(s.seconds)),
            samples: over(&|_, s| Some(s.samples as f64)),
            samples_per_s: over(&|_, s| Some(s.samples_per_s)),
            wait_share: over(&|r, _| r.wait_share()),
            delay_mean: over(&|r, _| r.delay_mean()),
            bytes_pushed: over(&|_, s| Some(s.bytes_pushed as f64)),
            bytes_pulled: over(&|_, s| Some(s.bytes_pulled as f64)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_that_of_a_sample() {
        let s = Spread::of([2.0, 4.0, f64::NAN, 6.0]).unwrap();
        assert_eq!((s.mean, s.deviation, s.min, s.max, s.runs), (4.0, Some(2.0), 2.0, 6.0, 3));
        assert_eq!(Spread::of([7.0]).unwrap().deviation, None);
        assert_eq!(Spread::of([f64::INFINITY]), None);
    }
}
