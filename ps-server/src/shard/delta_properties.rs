//! Properties of state deltas, over random pushes, deltas, crashes and snapshots.
//!
//! The oracle is a shard at a quorum level. It gets, as update entries, exactly the pushes that the committed
//! markers cover, and must reach the same state, bit for bit.

use super::{
    Command, Contribution, InitPart, Outcome, Proposal, Shard,
    delta::{DeltaId, DeltaRecord},
    leader::working::{DeltaPiece, PushPlace, WorkingCopies, add},
    properties::{a_job, admit, join, new, over_the_wire, sent},
    staged_delta::StagedDelta,
};
use paraft_common::{
    BucketId, Durability, Encoding, Payload, Seq, SessionId, Step, WorkerId, codec::put_f32_le,
    config::ServerJob, optim::Gradient,
};
use proptest::prelude::*;
use std::time::Instant;

const WORKERS: u32 = 3;

/// The next event.
#[derive(Clone, Debug)]
enum Op {
    /// A worker's push for its next step of a bucket.
    Push { worker: u32, bucket: usize, value: f32 },
    /// Pushes that an earlier leader acknowledged are lost: the next step is `by` steps later.
    Skip { worker: u32, bucket: usize, by: u64 },
    /// The leader starts a delta, if none is in flight.
    Delta,
    /// The log receives this many pieces of the delta in flight.
    Commit { pieces: usize },
    /// Another leader is elected.
    Crash,
    /// A worker joins in a new session, behind a delta.
    Join { worker: u32 },
    /// A worker leaves, behind a delta.
    Leave { worker: u32 },
    /// An entry that no leader here wrote: a repeated piece, one out of order, or one of an unknown delta.
    Stray { part: u32, parts: u32, term: u64 },
    /// A replica starts from a snapshot.
    Snapshot,
}

fn an_op() -> impl Strategy<Value = Op> {
    let (worker, bucket) = (|| 0..WORKERS, || 0usize..5);
    let value = prop::num::f32::NORMAL.prop_map(|v| v.clamp(-1e3, 1e3));
    prop_oneof![
        12 => (worker(), bucket(), value).prop_map(|(worker, bucket, value)| Op::Push { worker, bucket, value }),
        1 => (worker(), bucket(), 1u64..4).prop_map(|(worker, bucket, by)| Op::Skip { worker, bucket, by }),
        4 => Just(Op::Delta),
        6 => (1usize..4).prop_map(|pieces| Op::Commit { pieces }),
        1 => Just(Op::Crash),
        1 => worker().prop_map(|worker| Op::Join { worker }),
        1 => worker().prop_map(|worker| Op::Leave { worker }),
        1 => (0u32..3, 0u32..3, 0u64..9).prop_map(|(part, parts, term)| Op::Stray { part, parts, term }),
        1 => Just(Op::Snapshot),
    ]
}

/// A leader, its replicas, and the oracle.
struct World {
    job: ServerJob,
    replicas: Vec<Shard>,
    oracle: Shard,
    working: WorkingCopies,
    /// Pushes since the last delta, and those in the delta in flight.
    open: Vec<Pushed>,
    under_way: Vec<Pushed>,
    term: u64,
    deltas: u64,
    /// There was a stray entry since the last crash.
    strayed: bool,
    /// Pushes of committed deltas, which must persist.
    replicated: Vec<(usize, WorkerId, SessionId, Step)>,
}

#[derive(Clone)]
enum Pushed {
    Update(Proposal, usize, Contribution),
    Skipped(WorkerId, SessionId, usize, Step, u64),
}

impl World {
    fn new(job: ServerJob) -> Self {
        let images = ServerJob { durability: Durability::Leader, ..job };
        let (first, oracle) = (new(), new());
        assert_eq!(first.apply(&admit(&images)), Outcome::Done);
        // Only the level differs, and with it the job's text.
        let updates = ServerJob { durability: Durability::QuorumMemory, ..images.clone() };
        assert_eq!(oracle.apply(&admit(&updates)), Outcome::Done);
        let mut world = Self {
            job: images,
            replicas: vec![first, new()],
            oracle,
            working: WorkingCopies::default(),
            open: Vec::new(),
            under_way: Vec::new(),
            term: 1,
            deltas: 0,
            strayed: false,
            replicated: Vec::new(),
        };
        world.replicas[1].apply(&over_the_wire(&admit(&world.job)));
        let conf = world.replicas[0].configured().expect("configured");
        for b in &conf.buckets {
            let payload = Payload::from(vec![0u8; b.spec.len * 4]);
            world.log(
                &Proposal { command: Command::Init { bucket: b.id, part: InitPart::FRESH }, payload },
                true,
            );
        }
        for w in 0..WORKERS {
            world.log(&join(w).into(), true);
        }
        world
    }

    /// Commits an entry on every replica, and on the oracle if both forms have this kind of entry.
    fn log(&mut self, p: &Proposal, both: bool) -> Outcome {
        let outcome = self.replicas[0].apply(p);
        for r in &self.replicas[1..] {
            assert_eq!(outcome, r.apply(&over_the_wire(p)), "{p:?}");
        }
        if both {
            assert_eq!(outcome, self.oracle.apply(p), "{p:?}");
        }
        self.replicas[0].read(|m| self.working.follow(&m.members));
        outcome
    }

    fn delta(&mut self) {
        let conf = self.replicas[0].configured().expect("configured");
        let last = self.replicas[0].read(|m| m.last_cut);
        let delta = DeltaId { term: self.term, number: self.deltas + 1 };
        // A vector has up to 24 bytes: deltas have several parts, with one and with several vectors.
        if self.working.delta(&conf, delta, last, 60) {
            self.deltas += 1;
            self.under_way = std::mem::take(&mut self.open);
        }
    }

    fn commit(&mut self, pieces: usize) {
        let conf = self.replicas[0].configured().expect("configured");
        for _ in 0..pieces {
            match self.working.next(&conf) {
                None => return,
                Some(DeltaPiece::Part(p)) if self.log(&p, false) == Outcome::Done => {}
                Some(DeltaPiece::Marker(p)) if self.log(&p, false) == Outcome::Done => self.committed(),
                Some(_) if self.strayed => return self.crash(), // the stray ended this delta; the leader restarts
                Some(piece) => panic!("refused: {piece:?}"),
            }
        }
    }

    fn committed(&mut self) {
        self.working.committed();
        for p in std::mem::take(&mut self.under_way) {
            match p {
                Pushed::Update(p, bucket, c) => {
                    let outcome = self.oracle.apply(&p);
                    assert!(matches!(outcome, Outcome::Updated { applied: true, .. }), "{outcome:?}");
                    self.replicated.push((bucket, c.worker, c.session, c.step));
                }
                Pushed::Skipped(worker, session, bucket, step, lost) => {
                    // The state of an oracle that lost these pushes.
                    let mut meta = self.oracle.meta_mut();
                    meta.pushes_lost += lost;
                    meta.members.pushed(worker, session, Seq(0), bucket, step);
                }
            }
        }
    }

    fn crash(&mut self) {
        self.working = WorkingCopies::default();
        self.open.clear();
        self.under_way.clear();
        self.term += 1;
        self.strayed = false;
    }

    fn behind_a_cut(&mut self, command: Command) {
        while !self.working.is_level() {
            self.delta();
            self.commit(usize::MAX);
        }
        self.log(&command.into(), true);
    }

    fn push(&mut self, worker: u32, bucket: usize, value: f32) {
        let worker = WorkerId(worker);
        let conf = self.replicas[0].configured().expect("configured");
        let bucket = bucket % conf.buckets.len();
        let Some(member) = self.replicas[0].read(|m| m.members.get(worker).cloned()) else { return };
        let active = self.replicas[0].read(|m| m.members.active_count());
        let seen = self.working.member(worker, &member);
        let (session, step) = (seen.session, seen.steps()[bucket].next());
        let pulled = self.working.data(&conf, bucket).version;
        let seq = Seq(seen.last_seq.0 + 1);
        let c = Contribution { worker, session, seq, step, pulled, samples: 1 };
        let values: Vec<f32> = (0..conf.buckets[bucket].spec.len).map(|i| value * (i as f32 + 0.3)).collect();
        let mut le = Vec::new();
        put_f32_le(&values, &mut le);
        let payload = Payload::from(le);
        let gradient = Gradient { payload: &payload, encoding: Encoding::F32, scale: 0.5 };
        let now = Instant::now();
        let mut data = self.working.lend(&conf, bucket);
        add(&mut data, &conf, bucket, active, &c, paraft_common::optim::Overrides::default(), gradient);
        let at = PushPlace { conf: &conf, replicated: &member, bucket, now };
        self.working.pushed(at, &c, payload.len(), data);
        let command = Command::Update {
            bucket: conf.buckets[bucket].id,
            contributions: vec![c],
            encoding: Encoding::F32,
            factor: 0.5,
            closes: false,
            rate: None,
        };
        self.open.push(Pushed::Update(Proposal { command, payload }, bucket, c));
    }

    fn skip(&mut self, worker: u32, bucket: usize, by: u64) {
        let worker = WorkerId(worker);
        let conf = self.replicas[0].configured().expect("configured");
        let bucket = bucket % conf.buckets.len();
        let Some(member) = self.replicas[0].read(|m| m.members.get(worker).cloned()) else { return };
        let upto = Step(self.working.member(worker, &member).steps()[bucket].0 + by);
        let at = PushPlace { conf: &conf, replicated: &member, bucket, now: Instant::now() };
        let lost = self.working.skip(at, worker, upto);
        assert_eq!(lost, by);
        self.open.push(Pushed::Skipped(worker, member.session, bucket, upto, lost));
    }

    fn play(&mut self, op: &Op) {
        match *op {
            Op::Push { worker, bucket, value } => self.push(worker, bucket, value),
            Op::Skip { worker, bucket, by } => self.skip(worker, bucket, by),
            Op::Delta => self.delta(),
            Op::Commit { pieces } => self.commit(pieces),
            Op::Crash => self.crash(),
            Op::Join { worker } => self.behind_a_cut(join(worker)),
            Op::Leave { worker } => {
                let worker = WorkerId(worker);
                let session = self.replicas[0].read(|m| m.members.get(worker).map(|m| m.session));
                self.behind_a_cut(Command::Leave { worker, session: session.unwrap_or_default() });
            }
            Op::Stray { part, parts, term } => {
                self.strayed = true;
                // No leader uses this number, so nothing of it may ever take effect.
                let delta = DeltaId { term, number: 1_000_000 };
                let vectors = vec![(BucketId(0), 0)];
                let payload = Payload::from(vec![1u8; 24]);
                self.log(&Proposal { command: Command::DeltaPart { delta, part, vectors }, payload }, false);
                let record = DeltaRecord { pushes: 77, ..DeltaRecord::default() };
                let after = Some(DeltaId { term: 0, number: 5 });
                let stray = Command::Delta { delta, after, parts, buckets: Vec::new(), record };
                let outcome = self.log(&stray.into(), false);
                assert!(matches!(outcome, Outcome::Refused(_)), "{outcome:?}");
                let staged: Option<StagedDelta> = self.replicas[0].cut().staged;
                assert_eq!(staged, None, "whatever a marker finds staged is gone after it");
            }
            Op::Snapshot => {
                let image = sent(&self.replicas[0].cut());
                let late = new();
                late.install(&image).expect("its own snapshot");
                self.replicas.push(late);
            }
        }
    }

    fn check(&self) {
        let image = self.replicas[0].cut();
        for r in &self.replicas[1..] {
            assert_eq!(image.digest(), r.cut().digest(), "replicas differ");
        }
        let oracle = self.oracle.cut();
        assert_eq!(image.buckets, oracle.buckets, "images and updates differ");
        let small = |s: &Shard| {
            s.read(|m| (m.members.clone(), m.delays.clone(), m.pushes, m.bytes_pushed, m.pushes_lost))
        };
        assert_eq!(small(&self.replicas[0]), small(&self.oracle));
        for (bucket, worker, session, step) in &self.replicated {
            let done = self.replicas[0]
                .read(|m| m.members.in_session(*worker, *session).map(|m| m.steps()[*bucket]));
            assert!(done.is_none_or(|done| done >= *step), "{worker} {session} {step} was acknowledged");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn deltas_equal_updates_on_every_replica_despite_crashes(
        job in a_job(), ops in prop::collection::vec(an_op(), 1..150),
    ) {
        let mut world = World::new(job);
        for op in &ops {
            world.play(op);
            world.check();
        }
    }
}

/// A world with one delta of several parts, of which the log has `committed` pieces.
fn half_a_cut(committed: usize) -> World {
    let job = toml::from_str("kind = \"adam\"").expect("defaults");
    let mut world = World::new(super::properties::job(job, 0));
    world.push(0, 0, 1.0);
    world.push(1, 1, 2.0);
    world.delta();
    world.commit(committed);
    world
}

#[test]
fn a_snapshot_between_a_part_and_its_marker_still_takes_the_cut() {
    for pieces in 1..=3 {
        let mut world = half_a_cut(pieces);
        assert!(world.replicas[0].cut().staged.is_some());
        world.play(&Op::Snapshot);
        world.commit(usize::MAX);
        world.check();
        assert_eq!(world.replicas[2].read(|m| m.pushes), 2);
    }
}

#[test]
fn half_a_cut_dies_with_its_leader() {
    for pieces in 0..=3 {
        let mut world = half_a_cut(pieces);
        world.crash();
        world.push(0, 0, 3.0);
        world.delta();
        world.commit(usize::MAX);
        world.check();
        assert_eq!(world.replicas[0].read(|m| m.pushes), 1, "only the second leader's push is in");
    }
}

#[test]
fn marker_takes_effect_once_and_only_on_its_base_state() {
    let mut world = half_a_cut(3);
    let conf = world.replicas[0].configured().expect("configured");
    let Some(DeltaPiece::Marker(marker)) = world.working.next(&conf) else {
        panic!("three parts, then the marker")
    };
    // An update of the same bucket in between, which the images do not contain.
    let member = world.replicas[0].read(|m| m.members.get(WorkerId(2)).cloned()).expect("a member");
    let (worker, session) = (WorkerId(2), member.session);
    let c = Contribution {
        worker,
        session,
        seq: Seq(1),
        step: Step(1),
        pulled: conf.buckets[0].version(),
        samples: 1,
    };
    let command = Command::Update {
        bucket: conf.buckets[0].id,
        contributions: vec![c],
        encoding: Encoding::F32,
        factor: 1.0,
        closes: false,
        rate: None,
    };
    let payload = vec![0u8; conf.buckets[0].spec.len * 4].into();
    world.log(&Proposal { command, payload }, true);
    assert!(matches!(world.log(&marker, false), Outcome::Refused(_)), "bucket 0 has moved");
    world.crash();
    world.check();

    let mut world = half_a_cut(3);
    let Some(DeltaPiece::Marker(marker)) = world.working.next(&conf) else {
        panic!("three parts, then the marker")
    };
    assert_eq!(world.log(&marker, false), Outcome::Done);
    world.committed();
    assert!(matches!(world.log(&marker, false), Outcome::Refused(_)), "it is in");
    world.check();
}
