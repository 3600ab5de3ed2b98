//! Tests of `rounds`.

use super::*;
use paraft_common::{Seq, SessionId, round::Backup};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Push(u32, usize),
    Apply(usize),
    Pause(u32),
    Resume(u32),
    Leave(u32),
    Join(u32),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => (0u32..4, 0usize..3).prop_map(|(w, b)| Op::Push(w, b)),
        4 => (0usize..3).prop_map(Op::Apply),
        1 => (0u32..4).prop_map(Op::Pause),
        1 => (0u32..4).prop_map(Op::Resume),
        1 => (0u32..4).prop_map(Op::Leave),
        1 => (0u32..4).prop_map(Op::Join),
    ]
}

fn rule() -> impl Strategy<Value = RoundConfig> {
    prop_oneof![Just(RoundConfig::default()), Just(RoundConfig::Backup(Backup { spare: 1 })),]
}

proptest! {
    /// A check of the touched rounds closes the same rounds as a check of all.
    #[test]
    fn a_round_that_nobody_looks_at_is_one_that_does_not_close(
        ops in prop::collection::vec(op(), 1..120), rule in rule(),
    ) {
        let mut members = Members::default();
        (0..4).for_each(|w| members.join(WorkerId(w), SessionId(1), 3, true));
        let (mut some, mut all) = (Rounds::default(), Rounds::default());
        let mut leaving = BTreeSet::new();
        let mut closed: Vec<(Key, Vec<WorkerId>)> = Vec::new();
        for op in ops {
            match op {
                Op::Push(w, unit) => {
                    let worker = WorkerId(w);
                    let Some(m) = members.get(worker).filter(|m| m.is_active()) else { continue };
                    let step = m.step(unit).unwrap_or_default().next();
                    // Admission makes it wait until that round is applied.
                    if !some.is_closed(unit, step) {
                        some.add(step, unit, worker);
                        all.add(step, unit, worker);
                    }
                }
                Op::Apply(unit) => {
                    let Some(at) = closed.iter().position(|((_, b), _)| *b == unit) else { continue };
                    let ((step, _), workers) = closed.remove(at);
                    workers.into_iter().for_each(|w| members.pushed(w, SessionId(1), Seq(1), unit, step));
                    members.drop_late(unit, step);
                    some.touch(unit);
                    [&mut some, &mut all].into_iter().for_each(|r| r.applied(unit, step));
                }
                Op::Pause(w) => members.pause(WorkerId(w), SessionId(1)),
                Op::Resume(w) => _ = members.resume(WorkerId(w), SessionId(1), false),
                Op::Leave(w) if leaving.insert(WorkerId(w)) => {}
                Op::Leave(w) => {
                    leaving.remove(&WorkerId(w));
                    members.leave(WorkerId(w), SessionId(1));
                    [&mut some, &mut all].into_iter().for_each(|r| r.forget(WorkerId(w)));
                }
                Op::Join(w) if members.get(WorkerId(w)).is_none() => {
                    members.join(WorkerId(w), SessionId(1), 3, true);
                }
                Op::Join(_) => {}
            }
            if matches!(op, Op::Pause(_) | Op::Resume(_) | Op::Leave(_) | Op::Join(_)) {
                some.touch_all();
            }
            all.touch_all();
            prop_assert_eq!(some.take_dropped(&members), all.take_dropped(&members));
            let keys = some.complete(&members, &leaving, &rule);
            prop_assert_eq!(&keys, &all.complete(&members, &leaving, &rule));
            for key in keys {
                let workers = some.close(key, true);
                prop_assert_eq!(&workers, &all.close(key, true));
                closed.push((key, workers.into_iter().collect()));
            }
            for (unit, step) in (0..3).flat_map(|b| (1..40).map(move |s| (b, Step(s)))) {
                let is_closed = closed.iter().any(|((s, b), _)| *b == unit && *s >= step);
                prop_assert_eq!(some.is_closed(unit, step), is_closed);
            }
        }
    }
}
