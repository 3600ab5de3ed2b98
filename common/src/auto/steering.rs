//! The remote side of the rule. It receives periodic reports of the counters of shard 0's leader, forms
//! windows from them, and returns the switch that the rule wants until a report shows it in force.
//!
//! All state here may be lost at any moment. A successor starts with its own window, and detects a
//! plateau of the loss again. The limit on the bound is part of the report, so it is not lost.

use super::{AutoConfig, Next, SwitchReason, WINDOW, Watch, Window};
use crate::consistency::Mode;
use std::time::Duration;

/// A leader's counters since it leads, or since the last switch of the mode.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counted {
    /// Time from the first pull to the last.
    pub lasted: Duration,
    /// Answered pulls.
    pub pulls: u64,
    /// Total time that pulls waited for other workers.
    pub waited: Duration,
    /// The sum of the pushes' delays, in versions, and the number of pushes.
    pub delays: (u64, u64),
    /// The sum of the reported training losses, and their number.
    pub losses: (f64, u64),
    /// The largest lead, in steps, of a worker over the slowest since the previous report.
    pub lead: u64,
}

/// The report of shard 0's leader on a job in mode `auto`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// The Raft term of the leader that counts.
    pub term: u64,
    /// The job's rule.
    pub rule: AutoConfig,
    /// The number of the switch to the current mode.
    pub number: u64,
    /// The current mode.
    pub mode: Mode,
    /// The loosest mode that the rule may still choose.
    pub loosest: Mode,
    /// Members that train.
    pub members: u32,
    /// The counters.
    pub counted: Counted,
}

/// A switch that the rule wants. If a switch with this or a later number is in force, it is done or
/// obsolete.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Switch {
    /// Its number.
    pub number: u64,
    /// The new mode.
    pub mode: Mode,
    /// The loosest mode that the rule may choose from then on.
    pub loosest: Mode,
}

/// The state for a job between reports.
#[derive(Clone, Copy, Debug, Default)]
pub struct Steering {
    watch: Watch,
    window: Option<OpenWindow>,
    wanted: Option<(Switch, SwitchReason)>,
}

/// An open window.
#[derive(Clone, Copy, Debug)]
struct OpenWindow {
    /// The Raft term of the leader that counts.
    term: u64,
    /// The number of the switch since which it counts.
    number: u64,
    /// The counters at the start of the window.
    from: Counted,
    /// The largest lead since, and the reported number of pulls at the last report.
    lead: u64,
    heard: u64,
}

impl Steering {
    /// Handles a report. Returns the switch that the rule wants, and why, at every report until it is
    /// in force.
    pub fn hear(&mut self, report: &Report) -> Option<(Switch, SwitchReason)> {
        let Report { term, rule, number, mode, loosest, members, counted } = *report;
        self.wanted = self.wanted.filter(|(w, _)| w.number > number);
        if self.wanted.is_some() {
            return self.wanted;
        }
        let same = |w: &OpenWindow| (w.term, w.number) == (term, number) && w.from.pulls <= counted.pulls;
        let begun = match self.window {
            Some(window) if same(&window) => window,
            // The counters restarted at the switch, so all of them belong to the current mode.
            Some(_) => OpenWindow { term, number, from: Counted::default(), lead: 0, heard: 0 },
            // Another instance may have decided on the counts so far.
            None => OpenWindow { term, number, from: counted, lead: 0, heard: counted.pulls },
        };
        // A report may arrive twice.
        let lead = if counted.pulls > begun.heard { counted.lead.max(begun.lead) } else { begun.lead };
        let begun = OpenWindow { lead, heard: counted.pulls, ..begun };
        self.window = Some(begun);
        let pulls = counted.pulls - begun.from.pulls;
        if members == 0 || pulls < u64::from(WINDOW) * u64::from(members) {
            return None;
        }
        self.window = Some(OpenWindow { from: counted, lead: 0, ..begun });
        let window = between(&begun, &counted, members);
        let Next { mode, loosest, why } = self.watch.decide(&rule, &window, mode, loosest)?;
        self.wanted = Some((Switch { number: number + 1, mode, loosest }, why));
        self.wanted
    }
}

/// The window between `begun` and `now`.
fn between(begun: &OpenWindow, now: &Counted, members: u32) -> Window {
    let OpenWindow { from, lead, .. } = begun;
    let mean = |sum: f64, n: u64| (n > 0).then(|| sum / n as f64);
    let all = now.lasted.saturating_sub(from.lasted).as_secs_f64() * f64::from(members);
    let waited = now.waited.saturating_sub(from.waited).as_secs_f64();
    let delays = (now.delays.0.saturating_sub(from.delays.0), now.delays.1.saturating_sub(from.delays.1));
    Window {
        idle: if all > 0.0 { waited / all } else { 0.0 },
        delay: mean(delays.0 as f64, delays.1).unwrap_or(0.0),
        members: members as usize,
        lead: *lead,
        loss: mean(now.losses.0 - from.losses.0, now.losses.1.saturating_sub(from.losses.1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Mode::{Asp, Ssp};
    use proptest::prelude::*;

    /// A leader that counts, as shard 0's does.
    #[derive(Clone, Copy)]
    struct Leader(Report);

    impl Leader {
        fn new(rule: AutoConfig) -> Self {
            let (mode, loosest) = (rule.first(), Asp);
            let counted = Counted::default();
            Self(Report { term: 1, rule, number: 0, mode, loosest, members: 2, counted })
        }

        /// Adds pulls of 10 ms each at this loss, of which they waited for the share `idle`.
        fn pulls(&mut self, pulls: u32, idle: f64, loss: f64) {
            let c = &mut self.0.counted;
            c.pulls += u64::from(pulls);
            // Two workers run in parallel.
            c.lasted += Duration::from_millis(10) * pulls / 2;
            c.waited += (Duration::from_millis(10) * pulls).mul_f64(idle);
            c.losses = (c.losses.0 + loss * f64::from(pulls), c.losses.1 + u64::from(pulls));
        }

        /// A switch takes effect.
        fn takes(&mut self, s: Switch) {
            let Switch { number, mode, loosest } = s;
            self.0 = Report { number, mode, loosest, counted: Counted::default(), ..self.0 };
        }

        /// Another leader with counters at zero.
        fn dies(&mut self) {
            self.0 = Report { term: self.0.term + 1, counted: Counted::default(), ..self.0 };
        }
    }

    /// Pulls of the leader's two workers in a window.
    const PULLS: u32 = 2 * WINDOW;

    #[test]
    fn a_switch_is_wanted_until_it_is_in_force() {
        let (mut leader, mut steering) = (Leader::new(AutoConfig::default()), Steering::default());
        assert_eq!(steering.hear(&leader.0), None);
        leader.pulls(PULLS - 1, 0.9, 1.0);
        assert_eq!(steering.hear(&leader.0), None, "a pull is missing");
        leader.pulls(1, 0.9, 1.0);
        let wanted = steering.hear(&leader.0);
        let switch = Switch { number: 1, mode: Asp, loosest: Asp };
        assert_eq!(wanted, Some((switch, SwitchReason::Stragglers)));
        leader.dies();
        leader.pulls(5 * PULLS, 0.0, 1.0);
        assert_eq!(steering.hear(&leader.0), wanted, "also of the next leader");
        leader.takes(switch);
        assert_eq!(steering.hear(&leader.0), None);
        // A user's switch takes the number that the rule wanted next.
        let mut other = leader;
        leader.pulls(PULLS, 0.0, 1.0);
        assert!(steering.hear(&leader.0).is_some_and(|(w, _)| w.number == 2));
        other.takes(Switch { number: 2, mode: Ssp(3), ..switch });
        assert_eq!(steering.hear(&other.0), None, "it was overtaken");
    }

    /// A successor knows the limit on the bound, and nothing else.
    #[test]
    fn a_successor_starts_with_its_own_window() {
        let (mut leader, mut steering) = (Leader::new(AutoConfig::default()), Steering::default());
        let mut modes = Vec::new();
        for _ in 0..14 {
            leader.pulls(PULLS, 0.9, 1.0);
            if let Some((wanted, _)) = steering.hear(&leader.0) {
                modes.push(wanted.mode);
                leader.takes(wanted);
            }
        }
        assert_eq!(modes, [Asp, Ssp(16), Ssp(8), Ssp(4)], "the loss falls no more");
        assert_eq!(leader.0.loosest, Ssp(4));
        leader.pulls(PULLS, 0.9, 1.0);
        let mut next = Steering::default();
        assert_eq!(next.hear(&leader.0), None, "whose window that was it does not know");
        leader.pulls(PULLS, 0.9, 1.0);
        assert_eq!(next.hear(&leader.0), None, "not looser than what is left");
        for times in 1..4 {
            leader.pulls(PULLS, 0.9, 1.0);
            assert_eq!(next.hear(&leader.0), None, "no lower loss {times} times");
        }
        leader.pulls(PULLS, 0.9, 1.0);
        let (wanted, why) = next.hear(&leader.0).expect("four times");
        assert_eq!((wanted.mode, why), (Ssp(2), SwitchReason::Plateau));
    }

    proptest! {
        /// Reports arrive at random, and leaders and followers of the rule fail. There is at most one
        /// switch per window of pulls, each with the next number, and the bound stays within the limits
        /// of the rule and of earlier decisions.
        #[test]
        fn one_switch_a_window_within_what_is_left(
            ops in prop::collection::vec((0u8..10, 1u32..320, 0f64..1.0, 0f64..4.0), 1..200),
        ) {
            let rule = AutoConfig::default();
            let (mut leader, mut steering) = (Leader::new(rule), Steering::default());
            let bound = |m: Mode| m.staleness().unwrap_or(u64::MAX);
            let (mut pulls, mut on_its_way) = (0u64, None::<Switch>);
            for (op, n, idle, loss) in ops {
                match op {
                    0..4 => {
                        leader.pulls(n, idle, loss);
                        leader.0.counted.lead = u64::from(n);
                        pulls += u64::from(n);
                    }
                    4 => leader.dies(),
                    5 => (steering, on_its_way) = (Steering::default(), None),
                    6 => {
                        if let Some(wanted) = on_its_way.take().filter(|w| w.number > leader.0.number) {
                            leader.takes(wanted);
                            pulls = 0;
                        }
                    }
                    _ => {
                        let wanted = steering.hear(&leader.0).map(|(w, _)| w);
                        if let Some(s) = wanted {
                            let r = &leader.0;
                            prop_assert_eq!(s.number, r.number + 1);
                            prop_assert!(on_its_way.is_none_or(|w| w == s), "it changes its mind");
                            if on_its_way.is_none() {
                                prop_assert!(pulls >= u64::from(PULLS), "after {} pulls", pulls);
                            }
                            prop_assert!(bound(s.mode) <= bound(r.loosest).max(bound(r.mode)));
                            prop_assert!(bound(s.loosest) <= bound(r.loosest));
                            prop_assert_ne!(s.mode, r.mode);
                            prop_assert!(s.mode != Mode::Bsp && rule.from_mode(s.mode) == s.mode);
                        }
                        on_its_way = wanted;
                    }
                }
            }
        }
    }
}
