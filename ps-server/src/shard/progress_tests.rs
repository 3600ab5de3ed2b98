//! Tests of `progress`.

use super::super::members::Members;
use crate::header;
use paraft_common::{Seq, SessionId, Step, WorkerId};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Join,
    Push(usize),
    DropLate(usize, u64),
    Advance(u64),
    Finish,
    Pause,
    Resume(bool),
    Leave,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => Just(Op::Join),
        12 => (0usize..3).prop_map(Op::Push),
        2 => (0usize..3, 1u64..12).prop_map(|(b, s)| Op::DropLate(b, s)),
        1 => (1u64..9).prop_map(Op::Advance),
        1 => Just(Op::Finish),
        2 => Just(Op::Pause),
        2 => any::<bool>().prop_map(Op::Resume),
        1 => Just(Op::Leave),
    ]
}

proptest! {
    #[test]
    fn what_is_counted_is_what_a_look_at_every_member_gives(
        ops in prop::collection::vec((0u32..4, op()), 1..80), step in 0u64..12,
    ) {
        let mut members = Members::default();
        for (number, (w, op)) in (1..).zip(ops) {
            let worker = WorkerId(w);
            let session = members.get(worker).map_or(SessionId(number), |m| m.session);
            match op {
                Op::Join => members.join(worker, SessionId(number), 3, true),
                Op::Push(b) => {
                    let next = members.get(worker).and_then(|m| m.step(b)).unwrap_or_default().next();
                    members.pushed(worker, session, Seq(number), b, next);
                }
                Op::DropLate(b, step) => _ = members.drop_late(b, Step(step)),
                Op::Advance(step) => members.advance(worker, session, Step(step)),
                Op::Finish => _ = members.finish(worker, session),
                Op::Pause => members.pause(worker, session),
                Op::Resume(level) => _ = members.resume(worker, session, level),
                Op::Leave => _ = members.leave(worker, session),
            }
            let none = Step(u64::MAX);
            prop_assert_eq!(members.active_count(), members.active().count());
            for (_, m) in members.iter() {
                prop_assert_eq!(m.clock(), m.steps().iter().copied().min().unwrap_or_default());
            }
            let clocks = members.active().map(|(_, m)| m.clock());
            prop_assert_eq!(members.slowest(), clocks.min().unwrap_or(none));
            for b in 0..3 {
                let steps = || members.active().filter_map(|(_, m)| m.step(b));
                prop_assert_eq!(members.slowest_in(b), steps().min().unwrap_or(none));
                prop_assert_eq!(members.behind(b, Step(step)), steps().filter(|s| s.0 < step).count());
            }
            let bytes = header::encode(&members).expect("it has a form");
            let read: Members = header::decode(&bytes).expect("as written");
            prop_assert_eq!(&read, &members);
        }
    }
}
