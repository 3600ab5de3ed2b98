//! When a lock-step round closes: after all pushes, or earlier.
//!
//! A round consists of the pushes of one step to one bucket. The rule sets the number of pushes after
//! which it closes. A later push of that step is dropped: it is never applied, its worker is notified,
//! and the worker continues with the others.
//!
//! Backup workers: Chen, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", ICLR
//! Workshop 2016. Of `n + b` workers a round takes the first `n` pushes. If the time of a step is
//! exponential with rate `mu`, a round of all takes `H(n + b) / mu` on average, and one of the first
//! `n` takes `(H(n + b) - H(b)) / mu`, with the harmonic numbers `H`.

use serde::{Deserialize, Serialize};

/// The `[round]` table of a job: `kind` and the options of that kind. Used only in mode `bsp`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum RoundConfig {
    /// Waits for all pushes.
    All(All),
    /// Waits for all pushes except the slowest few.
    Backup(Backup),
}

crate::kinds!(RoundConfig {
    "all" => Self::All,
    "backup" => Self::Backup,
});

/// A round waits for all workers that train.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct All {}

/// A round closes without the slowest few pushes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Backup {
    /// Pushes that a round leaves out, from 0, below the job's workers. Default 1.
    pub spare: u32,
}

impl Default for Backup {
    fn default() -> Self {
        Self { spare: 1 }
    }
}

/// `spare` is too large for the job's workers.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("[round] spare = {0}: must be less than train.workers")]
pub struct RoundError(u32);

impl Default for RoundConfig {
    fn default() -> Self {
        Self::All(All {})
    }
}

impl RoundConfig {
    /// The kind's name in the job file.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::All(_) => "all",
            Self::Backup(_) => "backup",
        }
    }

    /// Checks the options, for a job with this many workers.
    pub fn validate(&self, workers: u32) -> Result<(), RoundError> {
        match self {
            Self::Backup(Backup { spare }) if *spare >= workers => Err(RoundError(*spare)),
            _ => Ok(()),
        }
    }

    /// Whether a round may close before all pushes have arrived.
    pub fn drops_late(&self) -> bool {
        matches!(self, Self::Backup(_))
    }

    /// Pushes after which a round closes, with this many training workers.
    pub fn needs(&self, active: usize) -> usize {
        match self {
            Self::All(_) => active,
            Self::Backup(Backup { spare }) => active.saturating_sub(*spare as usize).max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Exponential times from a fixed recurrence: this crate has no dependency for random numbers.
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
            let needs = RoundConfig::Backup(Backup { spare }).needs(100);
            let rounds = 4000;
            let sum: f64 = (0..rounds).map(|_| times(100, &mut state)[needs - 1]).sum();
            let mean = sum / f64::from(rounds);
            assert!((mean / expected - 1.0).abs() < 0.02, "without {spare}: {mean} for {expected}");
        }
    }

    #[test]
    fn it_does_without_no_more_than_its_spare_and_never_without_all() {
        let needs = |active| RoundConfig::Backup(Backup { spare: 2 }).needs(active);
        assert_eq!((needs(5), needs(2), needs(0)), (3, 1, 1));
        let valid = |spare| RoundConfig::Backup(Backup { spare }).validate(3).is_ok();
        assert!(!valid(3) && valid(2) && RoundConfig::default().validate(1).is_ok());
    }
}
