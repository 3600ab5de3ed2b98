//! Tests of `switching`.

use super::*;
use proptest::prelude::*;
use tokio::sync::oneshot;

proptest! {
    /// Each switch is proposed once and has a greater number than the one in force. Each requester gets one
    /// answer, and a positive one only for its own switch or one that is over.
    #[test]
    fn a_switch_is_proposed_once_and_told_once(
        ops in prop::collection::vec((0u8..4, prop::option::of(1u64..6), 0u32..3), 1..60),
    ) {
        let job = ServerJob::new("switching", Mode::Ssp(1), 8, 8);
        let mut now = InForce::first(Mode::Ssp(1), None);
        let mut switching = Switching::default();
        let mut waits: Vec<(u64, oneshot::Receiver<SwitchResult>)> = Vec::new();
        let mut proposed: Option<(u64, Mode)> = None;
        for (op, number, bound) in ops {
            match op {
                0 | 1 => {
                    let (tx, mut rx) = oneshot::channel();
                    let mode = Mode::Ssp(bound);
                    let answer = switching.ask(number, RequestedMode::Choice(mode.into()), Some(tx.into()), now, &job);
                    match answer {
                        Some((asker, switched)) => {
                            let over = number.is_some_and(|n| n <= now.number);
                            prop_assert_eq!(switched.is_ok(), over, "{:?}", switched);
                            asker.answer(switched);
                            prop_assert!(rx.try_recv().is_ok());
                        }
                        None => waits.push((number.unwrap_or(now.number + 1), rx)),
                    }
                }
                2 => {
                    let Some((number, mode, auto)) = switching.propose() else { continue };
                    prop_assert!(number > now.number && auto.is_none());
                    prop_assert!(proposed.is_none_or(|(n, _)| n < number), "twice");
                    proposed = Some((number, mode));
                }
                _ => {
                    let Some((number, mode)) = proposed.take() else { continue };
                    now = InForce { number, mode, ..now };
                    switching.over().into_iter().for_each(|asker| asker.answer(Ok(now)));
                    prop_assert!(!switching.is_under_way());
                    // A request that a greater number overtook is released without an answer.
                    waits.retain_mut(|(n, rx)| match rx.try_recv() {
                        Ok(told) => { assert!(*n <= number.max(*n) && told.is_ok()); false }
                        Err(oneshot::error::TryRecvError::Closed) => false,
                        Err(oneshot::error::TryRecvError::Empty) => true,
                    });
                    prop_assert!(waits.is_empty(), "nobody waits for a switch that is over");
                }
            }
            prop_assert_eq!(waits.is_empty() || switching.is_under_way(), true);
        }
    }
}
