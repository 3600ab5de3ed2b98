//! The rule that chooses the staleness bound ([`paraft_common::auto`]), as the leader of shard 0 follows it: it counts for a
//! window what its workers wait for, how late their pushes are and what their loss is, and proposes a switch.

use super::{Owner, switching::Switching};
use crate::shard::{command::Contribution, state::Configured};
use paraft_common::{
    Version,
    auto::{Watch, Window},
};
use std::time::Duration;
use tokio::time::Instant;

/// A window, and what is remembered of those before.
#[derive(Default)]
pub struct Steering {
    watch: Watch,
    window: Seen,
}

/// What a window has brought so far.
#[derive(Default)]
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
    /// A pull that was held up since `held` waits no more, or the window ends.
    fn wait_ends(&mut self, held: Option<Instant>, now: Instant) {
        if let Some((held, began)) = held.zip(self.began) {
            self.waited += now.saturating_duration_since(held.max(began));
        }
    }
}

impl Steering {
    /// A worker says its loss.
    pub(super) fn hear_loss(&mut self, loss: Option<f32>) {
        if let Some(loss) = loss.filter(|l| l.is_finite()) {
            self.window.losses.0 += f64::from(loss);
            self.window.losses.1 += 1;
        }
    }

    /// A push is applied that was computed from weights of the version `pulled`; `version` is its bucket's after it.
    pub(super) fn pushed(&mut self, version: Version, pulled: Version) {
        let (sum, n) = self.window.delays;
        self.window.delays = (sum + version.0.saturating_sub(pulled.0 + 1), n + 1);
    }

    /// A pull is answered whole. `held`: since when it waited for others; `gap`: steps that its worker is ahead.
    pub(super) fn pulled(&mut self, held: Option<Instant>, gap: u64) {
        let now = Instant::now();
        self.window.began.get_or_insert(now);
        self.window.pulls += 1;
        self.window.gap = self.window.gap.max(gap);
        self.window.wait_ends(held, now);
    }
}

impl Owner {
    /// Another mode is in force: what was seen under the one before says nothing of it.
    pub(super) fn begin_window(&mut self) {
        if let Some(lead) = &mut self.lead {
            lead.steering.window = Seen { began: Some(Instant::now()), ..Seen::default() };
        }
    }

    /// Updates are applied that these pushes are in; `version` is their bucket's after it.
    pub(super) fn note_delays(&mut self, contributions: &[Contribution], version: Version, applied: bool) {
        let Some(lead) = self.lead.as_mut().filter(|_| applied) else { return };
        contributions.iter().for_each(|c| lead.steering.pushed(version, c.pulled));
    }

    /// At the end of a window: what the rule makes of it.
    pub(super) fn steer(&mut self, conf: &Configured) {
        let in_force = self.shard.read(|m| m.in_force);
        let (Some(lead), Some(loosest)) = (&mut self.lead, in_force.auto) else { return };
        let members = self.shard.read(|m| m.members.active_count());
        let (rule, seen) = (&conf.job.auto, &mut lead.steering.window);
        let Some(began) = seen.began.filter(|_| members > 0 && lead.switching.is_none()) else { return };
        if seen.pulls < u64::from(rule.window) * members as u64 {
            return;
        }
        let now = Instant::now();
        // Those that wait yet.
        lead.pulls.iter().for_each(|p| seen.wait_ends(p.held, now));
        let all = (now - began).as_secs_f64() * members as f64;
        let mean = |sum: f64, n: u64| (n > 0).then(|| sum / n as f64);
        let window = Window {
            idle: if all > 0.0 { seen.waited.as_secs_f64() / all } else { 0.0 },
            delay: mean(seen.delays.0 as f64, seen.delays.1).unwrap_or(0.0),
            members,
            gap: seen.gap,
            loss: mean(seen.losses.0, seen.losses.1),
        };
        *seen = Seen { began: Some(now), ..Seen::default() };
        let Some(next) = lead.steering.watch.decide(rule, &window, in_force.mode, loosest) else { return };
        tracing::info!(mode = %next.mode, why = %next.why, ?window, "the staleness bound is changed");
        lead.switching = Some(Switching::decided(in_force.number + 1, next));
    }
}
