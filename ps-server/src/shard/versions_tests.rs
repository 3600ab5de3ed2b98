//! Tests of `versions`.

use super::*;
use crate::{
    raft::Replicated,
    shard::{
        Command, Contribution, InitPart, Outcome,
        properties::{admit, join},
    },
};
use paraft_common::{
    BucketId, Encoding, Mode, Payload, Seq, SessionId, ShardId, Version, WorkerId, config::ServerJob,
};
use proptest::prelude::*;
use std::collections::BTreeMap;

const BUCKETS: u32 = 3;

fn value(v: f32) -> Payload {
    v.to_le_bytes().to_vec().into()
}

/// Buckets of one value, and the sessions of these workers.
fn shard_of(workers: u32) -> (Shard, Vec<SessionId>, Vec<Proposal>) {
    let shard = Shard::new(ShardId(0), 1);
    let job = ServerJob { workers, ..ServerJob::new("versions", Mode::Asp, BUCKETS as usize, 1) };
    let mut log = vec![admit(&job)];
    log.extend((0..BUCKETS).map(|b| {
        let command = Command::Init { bucket: BucketId(b), part: InitPart::FRESH };
        Proposal { command, payload: value(0.0) }
    }));
    log.iter().for_each(|p| assert_eq!(shard.apply(p), Outcome::Done));
    let mut sessions = Vec::new();
    for worker in 0..workers {
        let command = join(worker);
        match shard.apply(&command.clone().into()) {
            Outcome::Joined { session, .. } => sessions.push(session),
            other => panic!("{other:?}"),
        }
        log.push(command.into());
    }
    (shard, sessions, log)
}

fn push(worker: usize, session: SessionId, bucket: u32, step: u64) -> Proposal {
    let contribution = Contribution {
        worker: WorkerId(worker as u32),
        session,
        seq: Seq(step * u64::from(BUCKETS) + u64::from(bucket)),
        step: Step(step),
        pulled: Version(0),
        samples: 1,
    };
    let command = Command::Update {
        bucket: BucketId(bucket),
        contributions: vec![contribution],
        encoding: Encoding::F32,
        factor: 1.0,
        closes: false,
        rate: None,
    };
    Proposal { command, payload: value((worker + 1) as f32) }
}

fn least(step: Step) -> Wanted {
    Wanted::AtLeast(step)
}

fn weights(shard: &Shard) -> Vec<f32> {
    let conf = shard.configured().expect("configured");
    conf.buckets.iter().map(|b| b.peek(|data| data.weights[0])).collect()
}

fn kept(version: &KeptVersion) -> Option<Vec<f32>> {
    let buckets = version.buckets().ok()??;
    let value = |b: &Arc<KeptBucket>| f32::from_le_bytes(b.bytes()[..].try_into().expect("one value"));
    Some(buckets.iter().map(value).collect())
}

/// What a worker does next: a push of its next bucket; or it leaves, comes again, or finishes.
#[derive(Clone, Copy, Debug)]
enum Op {
    Push,
    Leave,
    Join,
    Finish,
}

/// A log of these ops, and the weights at the first place of each version.
fn log_of(workers: u32, ops: &[(usize, Op)]) -> (Shard, Vec<Proposal>, BTreeMap<u64, Vec<f32>>) {
    let (shard, mut sessions, mut log) = shard_of(workers);
    let mut next = vec![(1u64, 0u32); workers as usize];
    let mut places = BTreeMap::from([(0, weights(&shard))]);
    let mut newest = 0;
    for (worker, op) in ops {
        let worker = worker % workers as usize;
        let (id, session) = (WorkerId(worker as u32), sessions[worker]);
        let trains = shard.read(|m| m.members.get(id).is_some_and(|m| !m.finished));
        let p: Proposal = match op {
            Op::Push if trains => {
                let (step, bucket) = next[worker];
                next[worker] = if bucket + 1 < BUCKETS { (step, bucket + 1) } else { (step + 1, 0) };
                push(worker, session, bucket, step)
            }
            Op::Leave => Command::Leave { worker: id, session }.into(),
            Op::Join if !trains => join(worker as u32).into(),
            Op::Finish => Command::Finish { worker: id, session }.into(),
            Op::Push | Op::Join => continue,
        };
        if let Outcome::Joined { session, .. } = shard.apply(&p) {
            sessions[worker] = session;
            next[worker] = (shard.read(|m| m.members.get(id).expect("it joined").clock()).0 + 1, 0);
        }
        log.push(p);
        let (Step(reached), _) = shard.reached();
        assert!(reached >= newest, "versions never go back");
        newest = reached;
        places.entry(reached).or_insert_with(|| weights(&shard));
    }
    (shard, log, places)
}

fn ops() -> impl Strategy<Value = Vec<(usize, Op)>> {
    let op =
        prop_oneof![60 => Just(Op::Push), 1 => Just(Op::Leave), 3 => Just(Op::Join), 1 => Just(Op::Finish)];
    prop::collection::vec((0usize..4, op), 1..300)
}

proptest! {
    /// However entries are grouped, and whenever readers come.
    #[test]
    fn version_has_the_weights_of_one_place_of_the_log(
        workers in 1u32..4,
        ops in ops(),
        runs in prop::collection::vec((1usize..12, prop::option::of((any::<bool>(), 0u64..4))), 1..200),
        snapshots in prop::collection::vec(0usize..40, 0..4),
    ) {
        let (whole, log, places) = log_of(workers, &ops);
        let replica = Shard::new(ShardId(0), 1);
        let mut held: Vec<Arc<KeptVersion>> = Vec::new();
        let mut rest = &log[..];
        for (number, (run, reader)) in runs.iter().cycle().enumerate() {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at((*run).min(rest.len()));
            rest = later;
            let now: Vec<_> = now.iter().collect();
            if snapshots.contains(&number) {
                // It is behind, and gets the state after these entries instead of them.
                let ahead = Shard::new(ShardId(0), 1);
                ahead.install(&replica.cut()).expect("its own");
                Replicated::apply_run(&ahead, &now).expect("memory");
                let raw = ahead.cut().to_raw();
                let mut parts = raw.parts.into_iter().map(|part| Ok(part.read()));
                replica.install_parts(&raw.head, &mut parts).expect("a snapshot");
            } else {
                Replicated::apply_run(&replica, &now).expect("memory");
            }
            held.iter().for_each(|version| replica.take_if_unchanged(version));
            if let Some((exactly, ahead)) = reader {
                let step = Step(replica.reached().0.0 + ahead);
                let wanted = if *exactly { Wanted::Exactly(step) } else { least(step) };
                if let Ok(version) = replica.version_for_reader(wanted) {
                    prop_assert!(version.step() >= step);
                    held.push(version);
                }
            }
            while held.len() > MAX_VERSIONS {
                held.remove(0);
            }
            for version in &held {
                if let Some(weights) = kept(version) {
                    prop_assert_eq!(&weights, &places[&version.step().0], "version {:?}", version.step());
                }
            }
        }
        // Nothing is applied any more: what the last place of the log has can be had, unless it has more.
        let (reached, unchanged) = replica.reached();
        held.clear();
        prop_assert_eq!((reached, unchanged), whole.reached());
        if let Ok(version) = replica.version_for_reader(Wanted::Exactly(reached)) {
            replica.take_if_unchanged(&version);
            prop_assert!(unchanged);
            prop_assert_eq!(kept(&version), Some(places[&reached.0].clone()));
        }
    }
}

#[test]
fn versions_for_readers_are_few_and_named_when_passed() {
    let (shard, sessions, _) = shard_of(1);
    let apply = |bucket, step| {
        let p = push(0, sessions[0], bucket, step);
        Replicated::apply(&shard, &p).expect("memory");
    };
    let ask = |wanted| shard.version_for_reader(wanted);
    let exactly = |step| Wanted::Exactly(Step(step));
    let first = ask(least(Step(0))).expect("the initial weights");
    assert!(kept(&first).is_none(), "it is taken when its reader looks");
    shard.take_if_unchanged(&first);
    assert_eq!(kept(&first), Some(vec![0.0; 3]));
    apply(0, 1);
    let later = ask(least(Step(1))).expect("the next");
    let also = ask(least(Step(0))).expect("the version that is kept");
    assert_eq!((later.step(), also.step()), (Step(1), Step(0)));
    let held: Vec<_> = [2, 3].map(|step| ask(exactly(step)).expect("room for four")).into();
    assert!(matches!(ask(exactly(4)), Err(RefusalKind::Overloaded(_))));
    assert!(Arc::ptr_eq(&ask(exactly(1)).expect("awaited already"), &later), "readers share a version");
    drop((first, also));
    (1..3).for_each(|bucket| apply(bucket, 1));
    assert_eq!(kept(&later), Some(vec![-1.0; 3]));
    (0..3).for_each(|bucket| apply(bucket, 2));
    apply(0, 3);
    drop(held);
    let passed = ask(exactly(2)).expect_err("its readers have gone");
    let of = RefusalKind::NoVersion { shard: ShardId(0), step: Step(2), reached: Step(2) };
    assert_eq!(passed, of);
    assert_eq!(kept(&later), Some(vec![-1.0; 3]), "it is kept while a reader has it");
}

#[test]
fn reader_of_the_next_version_does_not_wait_for_a_far_one() {
    let (shard, sessions, _) = shard_of(1);
    shard.apply(&push(0, sessions[0], 0, 1));
    let ask = |wanted| shard.version_for_reader(wanted).expect("room");
    let far = ask(least(Step(150)));
    assert_eq!(far.step(), Step(150));
    let next = ask(least(Step(0)));
    assert_eq!(next.step(), Step(1));
    let soon = ask(Wanted::Exactly(Step(4)));
    let shared = ask(least(Step(3)));
    assert!(Arc::ptr_eq(&soon, &shared), "one that follows a step later serves both");
    let last = ask(Wanted::Exactly(Step(40)));
    let any = ask(least(Step(20)));
    assert!(Arc::ptr_eq(&last, &any), "there is no room for another");
}

/// A reader comes while an entry is applied: the weights that it would find are of no version.
#[test]
fn version_asked_for_amid_an_entry_is_passed() {
    let (shard, sessions, _) = shard_of(1);
    (0..3).for_each(|bucket| _ = shard.apply(&push(0, sessions[0], bucket, 1)));
    let before = shard.version_step();
    let asked = shard.version_for_reader(least(Step(0))).expect("it is unchanged yet");
    assert_eq!(asked.step(), Step(1));
    shard.apply(&push(0, sessions[0], 0, 2));
    shard.keep_versions(Some(before));
    assert_eq!(asked.buckets().expect_err("half of step 2 is in the weights"), Passed);
}

#[test]
fn replica_remembers_two_versions_for_differences() {
    let (shard, ..) = shard_of(1);
    let of = |values: &'static [u8]| BTreeMap::from([(BucketId(0), bytes::Bytes::from_static(values))]);
    let f32 = Encoding::F32;
    let first = shard.remember(Step(1), f32, of(b"1111")).expect("there is memory");
    assert!(shard.remember(Step(1), f32, of(b"1111")).is_none(), "it is known");
    assert!(shard.base(Step(1), Encoding::Bf16).is_none(), "another type");
    assert_eq!(shard.base(Step(1), f32).map(|base| base.step), Some(Step(1)));
    let second = shard.remember(Step(2), f32, of(b"2222")).expect("there is memory");
    let both = BTreeMap::from([(BucketId(1), bytes::Bytes::from_static(b"more"))]);
    let second_and_more = shard.remember(Step(2), f32, both).expect("another bucket");
    assert_eq!(shard.base(Step(2), f32).map(|base| base.buckets.len()), Some(2));
    assert_eq!(shard.forget_base(&second), None, "it was replaced");
    shard.remember(Step(3), f32, of(b"3333")).expect("there is memory");
    assert_eq!([1, 2, 3].map(|step| shard.base(Step(step), f32).is_some()), [false, true, true]);
    assert_eq!(shard.forget_base(&first), None, "the oldest is forgotten");
    assert!(shard.forget_base(&second_and_more).is_some_and(|left| left > BASE_TIME / 2));
}
