//! Counts for the rule that chooses the staleness bound ([`paraft_common::auto`]), made by the leader of shard 0:
//! how long its workers wait, how stale their pushes are, and their loss. The leader of the control group decides
//! with them.

use paraft_common::{Version, auto::Counted};
use std::time::Instant;

/// The counts since the epoch started, or since the last switch of the mode.
#[derive(Debug, Default)]
pub struct Tally {
    /// When the first pull was answered.
    began: Option<Instant>,
    counted: Counted,
}

impl Tally {
    /// Restarts the counts for a new mode: counts of the old mode do not apply to it.
    pub fn begin(&mut self, now: Instant) {
        *self = Self { began: Some(now), counted: Counted::default() };
    }

    /// Adds a worker's loss.
    pub fn loss(&mut self, loss: Option<f32>) {
        if let Some(loss) = loss.filter(|l| l.is_finite()) {
            self.counted.losses.0 += f64::from(loss);
            self.counted.losses.1 += 1;
        }
    }

    /// Adds an applied push that was computed from weights of version `pulled`; `version` is the bucket's after it.
    pub fn pushed(&mut self, version: Version, pulled: Version) {
        let (sum, n) = self.counted.delays;
        self.counted.delays = (sum + version.0.saturating_sub(pulled.0 + 1), n + 1);
    }

    /// Adds a fully answered pull. `held`: since when it waited for others; `lead`: steps that its worker is ahead.
    pub fn pulled(&mut self, held: Option<Instant>, lead: u64, now: Instant) {
        let began = *self.began.get_or_insert(now);
        let c = &mut self.counted;
        c.pulls += 1;
        c.lasted = now.saturating_duration_since(began);
        c.lead = c.lead.max(lead);
        if let Some(held) = held {
            c.waited += now.saturating_duration_since(held.max(began));
        }
    }

    /// Returns the counts; the next leads count from here.
    pub fn take(&mut self) -> Counted {
        let counted = self.counted;
        self.counted.lead = 0;
        counted
    }
}

#[cfg(test)]
#[path = "tally_tests.rs"]
mod tests;
