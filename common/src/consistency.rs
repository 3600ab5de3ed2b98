//! The inequality that decides which worker may start its next step.
//!
//! A worker that has finished `done` steps may start the next one when `slowest + staleness >= done`
//! (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS
//! 2013). BSP is staleness 0, with the pushes of one step averaged into one update. SSP(s) applies
//! pushes as they arrive. ASP has no bound.

use crate::id::Step;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// How far workers may drift apart, and whether their pushes are averaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Lock-step: the pushes of a step are averaged into one update.
    Bsp,
    /// Bounded staleness: pushes are applied as they arrive; the fastest worker is at most this many steps
    /// ahead of the slowest.
    Ssp(u32),
    /// Asynchronous (Hogwild): pushes are applied as they arrive, and no worker waits.
    Asp,
}

impl Mode {
    /// The bound in steps; `None` for ASP.
    pub fn staleness(self) -> Option<u64> {
        match self {
            Mode::Bsp => Some(0),
            Mode::Ssp(s) => Some(u64::from(s)),
            Mode::Asp => None,
        }
    }

    /// Whether the pushes of one step become one averaged update.
    pub fn averages(self) -> bool {
        self == Mode::Bsp
    }

    /// The inequality: whether a worker that finished `done` may continue while the slowest finished
    /// `slowest`.
    pub fn may_proceed(self, slowest: Step, done: Step) -> bool {
        self.staleness().is_none_or(|s| slowest.0.saturating_add(s) >= done.0)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mode::Bsp => f.write_str("bsp"),
            Mode::Ssp(s) => write!(f, "ssp:{s}"),
            Mode::Asp => f.write_str("asp"),
        }
    }
}

/// The current mode of a shard, with the switch to it. Part of the replicated state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InForce {
    /// The number of the switch: a shard accepts only greater numbers. 0: no switch yet.
    pub number: u64,
    /// The mode.
    pub mode: Mode,
    /// The mode before the switch.
    pub before: Mode,
    /// Pushes up to this step still use the previous mode.
    pub after: Step,
    /// In mode `auto` ([`crate::auto`]): the loosest mode that the rule may still choose. On shard 0
    /// only. It has no effect here; it is reported so that the next follower of the rule learns it.
    pub auto: Option<Mode>,
}

impl InForce {
    /// The mode at the start of a job.
    pub fn first(mode: Mode, auto: Option<Mode>) -> Self {
        Self { number: 0, mode, before: mode, after: Step(0), auto }
    }

    /// The mode for a push of `step`.
    pub fn of_push(&self, step: Step) -> Mode {
        if step <= self.after { self.before } else { self.mode }
    }
}

impl Default for InForce {
    fn default() -> Self {
        Self::first(Mode::Bsp, None)
    }
}

/// A text is not a valid mode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no consistency mode; write `bsp`, `ssp:S` with S from 0 to 1000000, or `asp`")]
pub struct ParseModeError(String);

impl FromStr for Mode {
    type Err = ParseModeError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let bad = || ParseModeError(s.to_string());
        match s {
            "bsp" => Ok(Mode::Bsp),
            "asp" => Ok(Mode::Asp),
            _ => {
                let n: u32 = s.strip_prefix("ssp:").ok_or_else(bad)?.parse().map_err(|_| bad())?;
                if n <= 1_000_000 { Ok(Mode::Ssp(n)) } else { Err(bad()) }
            }
        }
    }
}

impl Serialize for Mode {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mode {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
#[path = "consistency_tests.rs"]
mod tests;
