//! The rule that chooses the staleness bound ([`paraft_common::auto`]), as the leader of shard 0 follows it: it counts for a
//! window what its workers wait for, how late their pushes are and what their loss is, and decides on a switch.

use paraft_common::{
    AutoConfig, Mode, Version,
    auto::{Next, Watch, Window},
};
use std::time::{Duration, Instant};

/// A window, and what is remembered of those before.
#[derive(Debug, Default)]
pub struct Controller {
    watch: Watch,
    window: Seen,
}

/// What a window has brought so far.
#[derive(Debug, Default)]
struct Seen {
    /// `None`: no pull yet.
    began: Option<Instant>,
    pulls: u64,
    waited: Duration,
    gap: u64,
    /// Sum and count.
    delays: (u64, u64),
    /// Sum and count.
    losses: (f64, u64),
}

impl Seen {
    fn from(began: Instant) -> Self {
        Self { began: Some(began), ..Self::default() }
    }

    /// A pull that was held up since `held` waits no more, or the window ends.
    fn wait_ends(&mut self, held: Option<Instant>, now: Instant) {
        if let Some((held, began)) = held.zip(self.began) {
            self.waited += now.saturating_duration_since(held.max(began));
        }
    }
}

impl Controller {
    /// A worker says its loss.
    pub fn loss(&mut self, loss: Option<f32>) {
        if let Some(loss) = loss.filter(|l| l.is_finite()) {
            self.window.losses.0 += f64::from(loss);
            self.window.losses.1 += 1;
        }
    }

    /// A push is applied that was computed from weights of the version `pulled`; `version` is its bucket's after it.
    pub fn pushed(&mut self, version: Version, pulled: Version) {
        let (sum, n) = self.window.delays;
        self.window.delays = (sum + version.0.saturating_sub(pulled.0 + 1), n + 1);
    }

    /// A pull is answered whole. `held`: since when it waited for others; `gap`: steps that its worker is ahead.
    pub fn pulled(&mut self, held: Option<Instant>, gap: u64, now: Instant) {
        self.window.began.get_or_insert(now);
        self.window.pulls += 1;
        self.window.gap = self.window.gap.max(gap);
        self.window.wait_ends(held, now);
    }

    /// Another mode is in force: what was seen under the one before says nothing of it.
    pub fn begin_window(&mut self, now: Instant) {
        self.window = Seen::from(now);
    }

    /// At the end of a window: what the rule makes of it. `loosest` is what the decision before has left; `held`: since when
    /// the pulls wait that wait now.
    pub fn decide(
        &mut self,
        rule: &AutoConfig,
        (mode, loosest): (Mode, Mode),
        members: usize,
        held: impl Iterator<Item = Option<Instant>>,
        now: Instant,
    ) -> Option<Next> {
        let began = self.window.began.filter(|_| members > 0)?;
        if self.window.pulls < u64::from(rule.window) * members as u64 {
            return None;
        }
        held.for_each(|held| self.window.wait_ends(held, now));
        let seen = std::mem::replace(&mut self.window, Seen::from(now));
        let all = (now - began).as_secs_f64() * members as f64;
        let mean = |sum: f64, n: u64| (n > 0).then(|| sum / n as f64);
        let window = Window {
            idle: if all > 0.0 { seen.waited.as_secs_f64() / all } else { 0.0 },
            delay: mean(seen.delays.0 as f64, seen.delays.1).unwrap_or(0.0),
            members,
            gap: seen.gap,
            loss: mean(seen.losses.0, seen.losses.1),
        };
        let next = self.watch.decide(rule, &window, mode, loosest)?;
        tracing::info!(mode = %next.mode, why = %next.why, ?window, "the staleness bound is changed");
        Some(next)
    }
}
