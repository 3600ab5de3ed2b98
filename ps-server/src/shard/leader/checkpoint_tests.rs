//! Tests of `checkpoint`.

use super::*;
use crate::shard::leader::tests::shard_of;
use paraft_common::config::ServerJob;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Due(u64, Option<u32>),
    Fetch(u64),
    Drop,
    Passes(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (1u64..5, prop::option::weighted(0.8, 0u32..2)).prop_map(|(s, w)| Op::Due(s, w)),
        4 => (1u64..5).prop_map(Op::Fetch),
        2 => Just(Op::Drop),
        1 => (1u64..90).prop_map(Op::Passes),
    ]
}

#[test]
fn fetched_part_is_not_taken_again_for_later_pulls() {
    let shard = shard_of(&ServerJob::new("images", Mode::Bsp, 16, 8));
    let conf = shard.configured().expect("configured");
    let (writer, other, step) = (WorkerId(0), WorkerId(1), Step(50));
    let mut kept = CheckpointSlot::default();
    assert!(kept.is_due(step, other, Some(writer)), "whoever is first");
    kept.put(shard.read(|m| CheckpointPart::of(step, &conf, m)), Some(writer), Instant::now());
    assert!(
        !kept.is_due(step, other, Some(writer)) && !kept.is_due(step, writer, Some(writer)),
        "it is there"
    );
    drop(kept.fetch(step).expect("there"));
    assert!(!kept.is_due(step, other, Some(writer)), "nobody would fetch it");
    assert!(kept.is_due(step, writer, Some(writer)), "it has come back for it");
    assert!(kept.is_due(Step(100), other, Some(writer)), "the next one");
}

#[test]
fn a_part_of_an_ended_job_is_taken_for_any_step() {
    let shard = shard_of(&ServerJob::new("images", Mode::Bsp, 16, 8));
    let conf = shard.configured().expect("configured");
    let mut kept = CheckpointSlot::default();
    // Another worker was stopped a step later.
    let part = kept.fetch_now(&shard, &conf, Step(50), Some(Step(51)), Instant::now());
    assert_eq!(part.map(|part| part.step), Some(Step(50)));
}

proptest! {
    /// One part is kept at a time. The first requester of its step gets it. It gives way only if it is not being
    /// fetched and its writer has left or has been silent for long.
    #[test]
    fn one_part_is_kept_until_it_is_fetched(ops in prop::collection::vec(op(), 1..60)) {
        let shard = shard_of(&ServerJob::new("images", Mode::Bsp, 16, 8));
        let conf = shard.configured().expect("configured");
        let mut kept = CheckpointSlot::default();
        let (mut now, mut held) = (Instant::now(), Vec::<CheckpointPart>::new());
        // The worker and step of the part that was not requested yet, and since when it waits.
        let mut waits: Option<(u64, Option<u32>, Instant)> = None;
        for op in ops {
            match op {
                Op::Due(step, writer) => {
                    let waited_for = waits.is_some_and(|(_, w, since)| {
                        w.is_some() && w == writer && now - since < FETCH_TIMEOUT
                    });
                    let may = held.is_empty() && !waited_for;
                    prop_assert_eq!(kept.may_keep(writer.map(WorkerId), now), may);
                    if may {
                        kept.put(shard.read(|m| CheckpointPart::of(Step(step), &conf, m)), writer.map(WorkerId), now);
                        waits = Some((step, writer, now));
                    }
                }
                Op::Fetch(step) => {
                    let first = waits.filter(|(s, ..)| *s == step).is_some();
                    let got = kept.fetch(Step(step));
                    prop_assert_eq!(got.as_ref().map(|s| s.step), first.then_some(Step(step)));
                    waits = waits.filter(|_| !first);
                    held.extend(got.map(|part| *part));
                }
                Op::Drop => held.clear(),
                Op::Passes(seconds) => now += Duration::from_secs(seconds),
            }
            let step = waits.map(|(s, ..)| s).or(held.first().map(|s| s.step.0));
            prop_assert!((1..5).all(|s| kept.has(Step(s)) == (step == Some(s))));
        }
    }
}
