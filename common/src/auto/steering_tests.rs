//! Tests of `steering`.

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
