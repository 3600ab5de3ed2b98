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
    lead: u64,
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

    /// A pull is answered whole. `held`: since when it waited for others; `lead`: steps that its worker is ahead.
    pub fn pulled(&mut self, held: Option<Instant>, lead: u64, now: Instant) {
        self.window.began.get_or_insert(now);
        self.window.pulls += 1;
        self.window.lead = self.window.lead.max(lead);
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
            lead: seen.lead,
            loss: mean(seen.losses.0, seen.losses.1),
        };
        let next = self.watch.decide(rule, &window, mode, loosest)?;
        tracing::info!(mode = %next.mode, why = %next.why, ?window, "the staleness bound is changed");
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Nothing is decided before every member has pulled as often as the window says, and nobody waits for longer than the
        /// window has lasted.
        #[test]
        fn a_window_is_as_long_as_it_says(
            ops in prop::collection::vec((0u8..4, 0u64..50, 0u64..80), 1..120), members in 1usize..4, pulls in 1u32..4,
        ) {
            let rule = AutoConfig { window: pulls, patience: 1, ..AutoConfig::default() };
            let (mut controller, mut now) = (Controller::default(), Instant::now());
            let (mut seen, mut began) = (0u64, None);
            for (op, passes, held) in ops {
                now += Duration::from_millis(passes);
                match op {
                    0..3 => {
                        let held = now.checked_sub(Duration::from_millis(held));
                        controller.pulled(held, 1, now);
                        controller.pushed(Version(9), Version(3));
                        controller.loss(Some(f32::NAN));
                        began.get_or_insert(now);
                        seen += 1;
                    }
                    _ => {
                        let of = (Mode::Ssp(1), Mode::Asp);
                        let next = controller.decide(&rule, of, members, std::iter::empty(), now);
                        if seen < u64::from(pulls) * members as u64 {
                            prop_assert_eq!(next, None, "after {} pulls", seen);
                        } else {
                            (seen, began) = (0, Some(now));
                        }
                    }
                }
                let lasted = began.map_or(Duration::ZERO, |b| now - b);
                prop_assert!(controller.window.waited <= lasted * seen as u32);
                prop_assert_eq!(controller.window.pulls, seen);
            }
        }
    }
}
