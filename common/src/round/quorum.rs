//! Quorum and grace: Douillard et al., "Decoupled DiLoCo", 2025 (the merge of replicas that come and go).
//!
//! A round closes once `quorum` pushes are in and `grace_ms` have passed since, or when everyone's is in. Pushes may weigh
//! by the samples that they were computed from:
//!
//! ```text
//!  g = sum of n_m g_m / sum of n_m
//! ```

use super::{RoundError, RoundRule};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How the pushes of a round weigh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Weight {
    /// All alike.
    #[default]
    Equal,
    /// By the samples that each was computed from.
    Samples,
}

/// A round closes with a quorum, and with who comes soon after it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Quorum {
    /// Pushes without which no round closes, from 1 to the job's workers (or to those that are left of them). Default 1.
    pub quorum: u32,
    /// How long a round waits for the others then, in ms, 0 to 3600000. Default 0.
    pub grace_ms: u64,
    /// How pushes weigh: `equal` or `samples`. Default `samples`.
    pub weight: Weight,
}

impl Default for Quorum {
    fn default() -> Self {
        Self { quorum: 1, grace_ms: 0, weight: Weight::Samples }
    }
}

impl RoundRule for Quorum {
    fn validate(&self, workers: u32) -> Result<(), RoundError> {
        if !(1..=workers).contains(&self.quorum) {
            let range = "from 1 to train.workers";
            return Err(RoundError { key: "quorum", value: self.quorum.into(), range });
        }
        if self.grace_ms > 3_600_000 {
            return Err(RoundError { key: "grace_ms", value: self.grace_ms, range: "0 to 3600000" });
        }
        Ok(())
    }

    fn needs(&self, active: usize) -> usize {
        (self.quorum as usize).min(active)
    }

    fn grace(&self) -> Duration {
        Duration::from_millis(self.grace_ms)
    }

    fn weight(&self) -> Weight {
        self.weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::round::{All, RoundConfig};

    /// When a round closes, and with how many, for arrivals in ms.
    fn merge(rule: RoundConfig, arrivals: &[u64]) -> (u64, usize) {
        let active = arrivals.len();
        for now in 0.. {
            let arrived = arrivals.iter().filter(|at| **at <= now).count();
            let mut sorted = arrivals.to_vec();
            sorted.sort_unstable();
            let needed = sorted[rule.rule().needs(active) - 1];
            let since = Duration::from_millis(now.saturating_sub(needed));
            if rule.closes(arrived, active, since) {
                return (now, arrived);
            }
        }
        unreachable!("everyone arrives");
    }

    #[test]
    fn a_round_closes_when_the_closed_form_says() {
        let arrivals = [5, 30, 10, 80, 42];
        let mut sorted = arrivals;
        sorted.sort_unstable();
        for quorum in 1..=5u32 {
            for grace_ms in [0, 3, 20, 1000] {
                let rule = RoundConfig::Quorum(Quorum { quorum, grace_ms, weight: Weight::Equal });
                let at = (sorted[quorum as usize - 1] + grace_ms).min(80);
                let with = sorted.iter().filter(|t| **t <= at).count();
                assert_eq!(merge(rule, &arrivals), (at, with), "quorum {quorum}, grace {grace_ms}");
            }
        }
        assert_eq!(merge(RoundConfig::All(All {}), &arrivals), (80, 5));
    }

    #[test]
    fn a_quorum_of_all_is_everyone_whatever_the_grace() {
        let rule = RoundConfig::Quorum(Quorum { quorum: 5, grace_ms: 3_600_000, weight: Weight::Samples });
        assert_eq!(merge(rule, &[5, 30, 10, 80, 42]), (80, 5));
        assert!(Quorum { quorum: 0, ..Quorum::default() }.validate(3).is_err());
        assert!(Quorum { quorum: 4, ..Quorum::default() }.validate(3).is_err());
    }
}
