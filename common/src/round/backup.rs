//! Backup workers: Chen, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", ICLR Workshop 2016.
//!
//! Of `n + b` workers a round takes the first `n` pushes. Where the time of a step is exponential with rate `mu`, a round
//! of all takes `H(n + b) / mu` on average, one of the first `n` takes `(H(n + b) - H(b)) / mu`, with the harmonic numbers `H`.

use super::{RoundError, RoundRule};
use serde::{Deserialize, Serialize};

/// A round closes without the slowest few.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Backup {
    /// Workers whose pushes a round does without, from 0, less than the job has. Default 1.
    pub spare: u32,
}

impl Default for Backup {
    fn default() -> Self {
        Self { spare: 1 }
    }
}

impl RoundRule for Backup {
    fn validate(&self, workers: u32) -> Result<(), RoundError> {
        if self.spare < workers {
            return Ok(());
        }
        Err(RoundError { key: "spare", value: self.spare.into(), range: "less than train.workers" })
    }

    fn needs(&self, active: usize) -> usize {
        active.saturating_sub(self.spare as usize).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::round::RoundConfig;
    use std::time::Duration;

    /// Exponential times from a fixed recurrence: there is no random crate here.
    fn times(n: usize, state: &mut u64) -> Vec<f64> {
        let mut next = || {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((*state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
        };
        let mut times: Vec<f64> = (0..n).map(|_| -next().ln()).collect();
        times.sort_by(f64::total_cmp);
        times
    }

    #[test]
    fn a_round_of_the_first_takes_the_expected_time() {
        let mut state = 7;
        // 100 workers, rate 1: H(100) - H(b).
        for (spare, expected) in [(0, 5.187), (4, 3.104), (6, 2.737), (10, 2.258)] {
            let rule = RoundConfig::Backup(Backup { spare });
            let rounds = 4000;
            let closed = |times: &[f64]| {
                let at = (1..=100).find(|n| rule.closes(*n, 100, Duration::ZERO)).expect("it closes");
                times[at - 1]
            };
            let mean = (0..rounds).map(|_| closed(&times(100, &mut state))).sum::<f64>() / f64::from(rounds);
            assert!((mean / expected - 1.0).abs() < 0.02, "without {spare}: {mean} for {expected}");
        }
    }

    #[test]
    fn it_does_without_no_more_than_its_spare_and_never_without_all() {
        let rule = RoundConfig::Backup(Backup { spare: 2 });
        let closes = |arrived, active| rule.closes(arrived, active, Duration::ZERO);
        assert!(!closes(2, 5) && closes(3, 5) && closes(1, 2) && !closes(0, 2));
        assert!(Backup { spare: 3 }.validate(3).is_err() && Backup { spare: 2 }.validate(3).is_ok());
    }
}
