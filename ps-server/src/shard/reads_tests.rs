//! Tests of `reads`.

use super::*;
use crate::shard::{
    Command, Contribution, InitPart, Outcome, Proposal,
    properties::{admit, join},
};
use paraft_common::{
    BucketId, Encoding, Mode, Payload, Seq, SessionId, ShardId, Step, WorkerId, config::ServerJob,
};
use paraft_proto::Weights;
use paraft_session::serve::Read;

fn value(v: f32) -> Payload {
    v.to_le_bytes().to_vec().into()
}

/// Two buckets of one value, one worker.
fn shard() -> (Shard, SessionId) {
    let shard = Shard::new(ShardId(0), 1);
    shard.apply(&admit(&ServerJob::new("reads", Mode::Asp, 2, 1)));
    for b in 0..2 {
        let command = Command::Init { bucket: BucketId(b), part: InitPart::FRESH };
        shard.apply(&Proposal { command, payload: value(0.0) });
    }
    match shard.apply(&join(0).into()) {
        Outcome::Joined { session, .. } => (shard, session),
        other => panic!("{other:?}"),
    }
}

fn push((shard, session): &(Shard, SessionId), bucket: u32, step: u64) {
    let contribution = Contribution {
        worker: WorkerId(0),
        session: *session,
        seq: Seq(step * 2 + u64::from(bucket)),
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
    let outcome = shard.apply(&Proposal { command, payload: value(1.0) });
    assert!(matches!(outcome, Outcome::Updated { applied: true, .. }), "{outcome:?}");
}

/// Buckets, versions and values that are sent; a full stop behind the last.
fn take(read: &mut Read, shard: &Shard) -> Vec<String> {
    let next = || {
        let due = read.due(shard)?;
        read.take(due, shard, ())
    };
    let all = std::iter::from_fn(next);
    let all: Vec<Weights> = all.collect();
    let name = |w: &Weights| {
        let value = f32::from_le_bytes(w.payload[..].try_into().expect("one value"));
        format!("{}v{}: {value}{}", w.bucket, w.version, if w.last { "." } else { "" })
    };
    all.iter().map(name).collect()
}

#[test]
fn a_bucket_goes_out_once_when_its_version_is_applied_here() {
    let world = shard();
    let mut read = Read::new(Vec::new(), vec![Version(0), Version(2)]);
    assert_eq!(take(&mut read, &world.0), ["0v0: 0"]);
    push(&world, 0, 1);
    push(&world, 1, 1);
    assert!(take(&mut read, &world.0).is_empty() && !read.is_over(), "bucket 1 is at version 1");
    push(&world, 1, 2);
    push(&world, 1, 3);
    assert_eq!(take(&mut read, &world.0), ["1v3: -3."]);
    assert!(read.is_over());
}

#[test]
fn read_without_versions_sends_requested_buckets_only() {
    let world = shard();
    push(&world, 1, 1);
    assert_eq!(take(&mut Read::new(Vec::new(), Vec::new()), &world.0), ["0v0: 0", "1v1: -1."]);
    assert_eq!(take(&mut Read::new(vec![1], Vec::new()), &world.0), ["1v1: -1."]);
}

#[test]
fn reader_holds_its_room_and_nothing_of_the_state() {
    let world = shard();
    let mut read = Read::new(vec![1], Vec::new());
    let room = std::sync::Arc::new(());
    let due = read.due(&world.0).expect("it is there");
    assert_eq!(due.bytes, 4);
    let weights = read.take(due, &world.0, room.clone()).expect("it is due");
    push(&world, 1, 1);
    let conf = world.0.configured().expect("a job");
    assert_eq!(conf.outdated_bytes(), 0, "the update has copied nothing");
    assert_eq!((&weights.payload[..], std::sync::Arc::strong_count(&room)), (&[0; 4][..], 2));
    drop(weights);
    assert_eq!(std::sync::Arc::strong_count(&room), 1);
}

#[test]
fn nothing_goes_out_before_the_job_has_begun_here() {
    let empty = Shard::new(ShardId(0), 1);
    let mut read = Read::new(Vec::new(), Vec::new());
    assert!(take(&mut read, &empty).is_empty() && !read.is_over());
}
