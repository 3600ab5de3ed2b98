//! When a lock-step round closes: after everyone's push, or earlier.
//!
//! A round is the pushes of one step of one bucket. The rules say after how many pushes it may close, how much longer it waits
//! for the others, and how its pushes weigh. What comes after a round has closed is dropped by its step: it is never applied,
//! its worker is told so, and goes on with the others.
//!
//! One file for each rule, with the paper; all behind [`RoundRule`].

mod backup;
mod quorum;

pub use backup::Backup;
pub use quorum::{Quorum, Weight};

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The `[round]` table of a job: `kind` and the options of that kind. Only read while the mode is `bsp`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum RoundConfig {
    /// Everyone's push.
    All(All),
    /// All but the slowest few.
    Backup(Backup),
    /// A quorum, and who comes soon after it.
    Quorum(Quorum),
}

crate::kinds!(RoundConfig {
    "all" => Self::All,
    "backup" => Self::Backup,
    "quorum" => Self::Quorum,
});

/// A round waits for everyone who trains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct All {}

/// An option outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("[round] {key} = {value}: must be {range}")]
pub struct RoundError {
    /// The key in that table.
    pub key: &'static str,
    /// What was given.
    pub value: u64,
    /// What is allowed, in words.
    pub range: &'static str,
}

/// When a round closes.
pub trait RoundRule {
    /// Checks its options, for a job of so many workers.
    fn validate(&self, _workers: u32) -> Result<(), RoundError> {
        Ok(())
    }

    /// Pushes after which a round may close, where so many workers train; from 1 to `active`.
    fn needs(&self, active: usize) -> usize;

    /// How much longer it waits for the others.
    fn grace(&self) -> Duration {
        Duration::ZERO
    }

    /// How pushes weigh.
    fn weight(&self) -> Weight {
        Weight::Equal
    }
}

impl RoundRule for All {
    fn needs(&self, active: usize) -> usize {
        active
    }
}

impl Default for RoundConfig {
    fn default() -> Self {
        Self::All(All {})
    }
}

impl RoundConfig {
    /// Its behaviour.
    pub fn rule(&self) -> &dyn RoundRule {
        match self {
            Self::All(r) => r,
            Self::Backup(r) => r,
            Self::Quorum(r) => r,
        }
    }

    /// As the job file writes it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::All(_) => "all",
            Self::Backup(_) => "backup",
            Self::Quorum(_) => "quorum",
        }
    }

    /// Whether a round may close before everyone's push is in.
    pub fn drops_late(&self) -> bool {
        !matches!(self, Self::All(_))
    }

    /// Whether a round with `arrived` of `active` pushes closes now; `since`: for how long it has had what it needs.
    pub fn closes(&self, arrived: usize, active: usize, since: Duration) -> bool {
        let rule = self.rule();
        arrived >= active || arrived >= rule.needs(active) && since >= rule.grace()
    }
}
