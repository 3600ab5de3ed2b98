//! Tests of `deltas`.

use super::*;
use crate::shard::{
    Command, Contribution, Shard,
    leader::{
        tests::shard_of,
        working::{PushPlace, add},
    },
};
use paraft_common::{
    Durability, Encoding, LeaderWindow, Mode, Payload, Seq, SessionId, Step, optim::Gradient,
};
use proptest::prelude::*;
use std::time::Duration;

const WINDOW: u64 = 4;

/// A shard with one member.
fn shard() -> Shard {
    let leader_window = LeaderWindow { ms: 60, pushes: WINDOW };
    let durability = Durability::Leader;
    let shard =
        shard_of(&ServerJob { durability, leader_window, ..ServerJob::new("deltas", Mode::Asp, 16, 8) });
    shard.apply(&Command::Join { worker: WorkerId(0), session: SessionId(1) }.into());
    shard
}

fn push(deltas: &mut Deltas, shard: &Shard, step: u64, now: Instant) {
    let conf = shard.configured().expect("configured");
    let replicated = shard.read(|m| m.members.get(WorkerId(0)).cloned()).expect("a member");
    let (worker, session, seq) = (WorkerId(0), SessionId(1), Seq(step));
    let pulled = paraft_common::Version(0);
    let c = Contribution { worker, session, seq, step: Step(step), pulled, samples: 1 };
    let payload = Payload::from(vec![0u8; 32]);
    let mut data = deltas.working_mut().lend(&conf, 0);
    let gradient = Gradient { payload: &payload, encoding: Encoding::F32, scale: 1.0 };
    add(&mut data, &conf, 0, 1, &c, paraft_common::optim::Overrides::default(), gradient);
    let at = PushPlace { conf: &conf, replicated: &replicated, bucket: 0, now };
    deltas.working_mut().pushed(at, &c, 32, data);
}

proptest! {
    /// A command goes to the log behind a marker with everything that was pushed before it, in the order of
    /// arrival. The window is never exceeded, and never too old when a push is accepted.
    #[test]
    fn a_command_is_behind_everything_that_was_pushed_before_it(ops in prop::collection::vec((0u8..9, 0u64..20), 1..150)) {
        let shard = shard();
        let conf = shard.configured().expect("configured");
        let (mut deltas, mut now, mut number) = (Deltas::default(), Instant::now(), 0);
        // Pushes so far; pushes in the delta in flight; pushes in the last proposed marker.
        let (mut pushed, mut in_cut, mut marked) = (0u64, 0u64, 0u64);
        let (mut said, mut heard) = (0u64, 0u64);
        let mut tags: Vec<u64> = Vec::new();
        let mut log: Vec<Proposal> = Vec::new();
        let number_of = |purpose: &Purpose| match purpose {
            Purpose::Join(conn) => *conn,
            other => panic!("{other:?}"),
        };
        for (op, passes) in ops {
            now += Duration::from_millis(passes);
            match op {
                0..4 => {
                    if deltas.has_room(&conf.job, now) {
                        prop_assert!(pushed - shard.read(|m| m.pushes) < WINDOW);
                        pushed += 1;
                        push(&mut deltas, &shard, pushed, now);
                    }
                }
                4 => {
                    tags.push(pushed);
                    said += 1;
                    let command = Command::Fence.into();
                    if let Some((purpose, _)) = deltas.behind(Purpose::Join(said), command) {
                        prop_assert_eq!(number_of(&purpose), said);
                        prop_assert_eq!((marked, heard + 1), (pushed, said), "something is not in the log");
                        heard = said;
                    }
                }
                5 | 6 => {
                    let delta = DeltaId { term: 1, number: number + 1 };
                    let last = shard.read(|m| m.last_cut);
                    if deltas.begin_if_due(&conf, delta, last, now, Moment(number)) {
                        number += 1;
                        in_cut = pushed;
                    }
                    while let Some(next) = deltas.propose(&conf) {
                        match next {
                            DeltaProposal::Part(part) => log.push(part),
                            DeltaProposal::Marker(marker, _, behind) => {
                                log.push(marker);
                                marked = in_cut;
                                for (purpose, _) in behind {
                                    heard += 1;
                                    prop_assert_eq!(number_of(&purpose), heard);
                                    prop_assert!(tags[heard as usize - 1] <= marked);
                                }
                            }
                        }
                    }
                }
                7 => {
                    for p in std::mem::take(&mut log) {
                        prop_assert_eq!(shard.apply(&p), crate::shard::Outcome::Done);
                        match p.command {
                            Command::Delta { .. } => deltas.applied(),
                            _ => deltas.part_applied(),
                        }
                    }
                    shard.read(|m| deltas.follow(&m.members));
                    prop_assert_eq!(shard.read(|m| m.pushes), marked);
                }
                _ => deltas.request_delta(),
            }
            prop_assert_eq!(deltas.working().is_level(), shard.read(|m| m.pushes) == pushed);
            prop_assert_eq!(deltas.working().unreplicated(), pushed - shard.read(|m| m.pushes));
            let working = deltas.working();
            prop_assert_eq!(deltas.due(&conf.job).is_none(), working.is_level() || working.cutting());
        }
    }
}
