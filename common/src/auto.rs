//! The staleness bound chosen by a rule, `train.mode = "auto"`: loose while workers wait for each other, tight when the
//! loss falls no more.
//!
//! ```text
//!  tight ◀── ssp:0 ── ssp:1 ── ssp:2 ── ssp:4 ── ... ── ssp:max ── asp ──▶ loose
//! ```
//!
//! The leader of the control group looks at windows of [`WINDOW`] steps of each worker, made of what the leader of
//! shard 0 counts ([`steering`]), and goes at most one switch a window ([`Watch::decide`]). The first of these that
//! holds decides:
//!
//! | what it sees | what it does |
//! |---|---|
//! | the mean loss is a quarter above the best window's | half the bound, and never looser again |
//! | no window of the last 4 had a mean loss that is lower by 1 % | likewise |
//! | the mean delay is above 4 times that of workers in step (members - 1) | likewise |
//! | workers waited for more than 30 % of their time: stragglers dominate | as loose as is still allowed |
//! | they waited for more than 10 % of it | twice the bound |
//! | they waited for less than 5 %, and half the bound would have delayed no worker | half the bound |
//!
//! What the rule has decided is a switch of the mode like any other, in the log; how loose the bound may become again is part
//! of it, so the next leader knows it.

mod choice;
pub mod steering;

pub use choice::{ModeChoice, ParseChoiceError};
pub use steering::{Counted, Report, Steering, Switch};

use crate::consistency::Mode;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The bounds between which the rule chooses; a job file has the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AutoConfig {
    /// The tightest bound, 0 to `max_staleness`.
    pub min_staleness: u32,
    /// The loosest bound, 1 to 1000000. If it does not suffice, the rule chooses ASP.
    pub max_staleness: u32,
}

impl Default for AutoConfig {
    fn default() -> Self {
        Self { min_staleness: 0, max_staleness: 16 }
    }
}

/// An option outside its range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} must be {range}")]
pub struct AutoError {
    /// The key.
    pub key: &'static str,
    /// The allowed range, for people.
    pub range: &'static str,
}

/// Steps of each worker in a window, on average. One slow step or one hard minibatch must not decide.
pub const WINDOW: u32 = 32;
/// A loss this much above the best is rising: a share of the best.
const RISE_SHARE: f64 = 0.25;
/// The share of the best loss by which the loss must fall. A smaller fall is within the noise of a
/// window.
const PLATEAU_SHARE: f64 = 0.01;
/// The number of windows for that fall: a single window without a fall may be chance.
const PLATEAU_WINDOWS: u32 = 4;
/// The bound on the mean delay, relative to that of workers in step: beyond it plain gradients may
/// diverge.
const MAX_DELAY_RATIO: f64 = 4.0;
/// The share of the workers' time that they may wait: less waiting does not justify later gradients.
const MAX_IDLE_SHARE: f64 = 0.1;
/// Stragglers dominate if workers wait for this multiple of [`MAX_IDLE_SHARE`].
const STRAGGLER_FACTOR: f64 = 3.0;

impl AutoConfig {
    /// Checks the ranges.
    pub fn validate(&self) -> Result<(), AutoError> {
        for (ok, key, range) in [
            ((1..=1_000_000).contains(&self.max_staleness), "auto.max_staleness", "from 1 to 1000000"),
            (self.min_staleness <= self.max_staleness, "auto.min_staleness", "from 0 to auto.max_staleness"),
        ] {
            if !ok {
                return Err(AutoError { key, range });
            }
        }
        Ok(())
    }

    /// The mode at the start of a job.
    pub fn first(&self) -> Mode {
        Mode::Ssp(self.min_staleness.max(1).min(self.max_staleness))
    }

    /// The mode with which the rule takes over from `mode`: the same mode, if the rule may choose it.
    pub fn from_mode(&self, mode: Mode) -> Mode {
        match mode {
            Mode::Asp => mode,
            Mode::Ssp(s) if (self.min_staleness..=self.max_staleness).contains(&s) => mode,
            _ => self.first(),
        }
    }

    /// Half the bound; `None` if that is too tight.
    fn tighter(&self, mode: Mode) -> Option<Mode> {
        match mode {
            Mode::Asp => Some(Mode::Ssp(self.max_staleness)),
            Mode::Ssp(s) if s > self.min_staleness => Some(Mode::Ssp((s / 2).max(self.min_staleness))),
            _ => None,
        }
    }

    /// Twice the bound; `None` if no mode is looser.
    fn looser(&self, mode: Mode) -> Option<Mode> {
        match mode {
            Mode::Ssp(s) if s < self.max_staleness => {
                Some(Mode::Ssp(s.saturating_mul(2).clamp(1, self.max_staleness)))
            }
            Mode::Ssp(_) => Some(Mode::Asp),
            _ => None,
        }
    }
}

/// The measurements of a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// The share of the members' time that they waited for other workers.
    pub idle: f64,
    /// The mean delay of the pushes, in versions.
    pub delay: f64,
    /// Members that train.
    pub members: usize,
    /// The largest lead, in steps, of a worker over the slowest.
    pub lead: u64,
    /// Mean training loss; `None` if no worker has reported it.
    pub loss: Option<f64>,
}

/// Why the rule changes the bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwitchReason {
    /// The loss has risen.
    Rising,
    /// The loss no longer falls.
    Plateau,
    /// Gradients are too late.
    Late,
    /// Waiting for stragglers dominates.
    Stragglers,
    /// Workers wait.
    Waiting,
    /// Half the bound suffices.
    Unneeded,
}

impl fmt::Display for SwitchReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SwitchReason::Rising => "the loss rises",
            SwitchReason::Plateau => "the loss falls no more",
            SwitchReason::Late => "gradients are late",
            SwitchReason::Stragglers => "stragglers dominate",
            SwitchReason::Waiting => "workers wait",
            SwitchReason::Unneeded => "no worker needs more",
        })
    }
}

/// A decision of the rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Next {
    /// The new mode.
    pub mode: Mode,
    /// The loosest mode that the rule may choose from now on.
    pub loosest: Mode,
    /// The reason.
    pub why: SwitchReason,
}

/// The state of the rule between windows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Watch {
    best: Option<f64>,
    /// Windows since the best loss.
    bad: u32,
}

impl Watch {
    /// Decides after a window in `mode`; `loosest` is the limit that the previous decision set.
    pub fn decide(&mut self, rule: &AutoConfig, window: &Window, mode: Mode, loosest: Mode) -> Option<Next> {
        let bound = |m: Mode| m.staleness().unwrap_or(u64::MAX);
        let rising = window.loss.zip(self.best).is_some_and(|(l, best)| l > best + RISE_SHARE * best.abs());
        if let Some(loss) = window.loss {
            match self.best {
                Some(best) if loss >= best - PLATEAU_SHARE * best.abs() => self.bad += 1,
                _ => (self.best, self.bad) = (Some(loss), 0),
            }
        }
        let in_step = window.members.saturating_sub(1).max(1) as f64;
        let harm = [
            (rising, SwitchReason::Rising),
            (self.bad >= PLATEAU_WINDOWS, SwitchReason::Plateau),
            (window.delay > MAX_DELAY_RATIO * in_step, SwitchReason::Late),
        ];
        if let Some((_, why)) = harm.into_iter().find(|(holds, _)| *holds) {
            // Reset, so that the new mode gets time to show an effect.
            self.bad = 0;
            return rule.tighter(mode).map(|mode| Next { mode, loosest: mode, why });
        }
        if window.idle > MAX_IDLE_SHARE {
            let all = window.idle > STRAGGLER_FACTOR * MAX_IDLE_SHARE;
            let (to, why) = match all {
                true => (Some(loosest), SwitchReason::Stragglers),
                false => (rule.looser(mode), SwitchReason::Waiting),
            };
            let to = to.filter(|to| bound(*to) > bound(mode) && bound(*to) <= bound(loosest));
            return to.map(|mode| Next { mode, loosest, why });
        }
        let enough = |m: &Mode| window.lead.saturating_mul(2) <= bound(*m);
        let tighter = rule.tighter(mode).filter(|m| window.idle < MAX_IDLE_SHARE / 2.0 && enough(m));
        tighter.map(|mode| Next { mode, loosest, why: SwitchReason::Unneeded })
    }
}

#[cfg(test)]
#[path = "auto_tests.rs"]
mod tests;
