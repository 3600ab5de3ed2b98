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

/// The `round` table of a server job: `kind` and the options of that kind. Used only in mode `bsp`.
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
#[error("[round] spare = {0}: must be less than workers")]
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
#[path = "round_tests.rs"]
mod tests;
