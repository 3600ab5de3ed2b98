//! Tests of a job's start: it needs room, costs nothing before its weights arrive, and stops the replica if there
//! is no room.

use super::{
    begin::JOB_FORM,
    command::{Command, InitPart, Outcome, Proposal},
    cut::Cut,
    state::Shard,
};
use crate::{
    header::{self, HeaderError},
    raft::{ApplyError, Replicated},
    room::{Allocated, Room},
};
use paraft_common::{
    BucketId, Durability, Encoding, JobShard, Mode, Payload, Seq, SessionId, ShardId, Step, Version,
    WorkerId, config::ServerJob,
};
use paraft_host::memory::{Memory, Pool};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

const GIB: u64 = 1 << 30;

fn room(free: u64) -> Arc<Room> {
    let pool = Pool { id: "h".into(), what: "the host".into(), free, limit: 24 * GIB };
    Room::with(move || Memory { pools: vec![pool.clone()] })
}

/// The largest possible job.
fn largest() -> ServerJob {
    let optimizer = toml::from_str("kind = \"adam\"\nlr = 0.1").expect("valid");
    ServerJob { optimizer, ..ServerJob::new("largest", Mode::Bsp, 1 << 34, 1 << 18) }
}

fn admit(job: &ServerJob) -> Proposal {
    Command::Admit { form: JOB_FORM, job: job.to_toml().expect("valid") }.into()
}

#[test]
fn job_too_large_stops_replica_and_changes_nothing() {
    let shard = Shard::within(room(4 * GIB), JobShard::default(), 3);
    let before = shard.cut();
    let proposal = admit(&largest());
    {
        let unable = shard.carry_out(&proposal).expect_err("64 GiB of 4");
        assert_eq!(io::Error::from(unable.clone()).kind(), io::ErrorKind::OutOfMemory);
        for word in ["needs 6", "weights 21.3 GiB, slots 42.7 GiB", "4.0 GiB free of 24.0 GiB (the host)"] {
            assert!(unable.text().contains(word), "`{word}` is not in: {unable}");
        }
        let applied = Replicated::apply(&shard, &proposal);
        assert_eq!(applied.map_err(|e| e.kind()), Err(io::ErrorKind::OutOfMemory));
    }
    assert!(shard.configured().is_none() && shard.cut() == before);
    assert_eq!(shard.room().promised_to(|_| true), 0, "nothing is set aside for it");
}

/// Before the fix, this took 192 GiB.
#[cfg(target_os = "linux")]
#[test]
fn largest_job_costs_little_before_its_weights() {
    let before = paraft_host::usage().peak_rss_bytes;
    let shard = Shard::new(ShardId(0), 1);
    assert_eq!(shard.apply(&admit(&largest())), Outcome::Done);
    let conf = shard.configured().expect("configured");
    assert_eq!((conf.buckets.len(), conf.bytes(), conf.held()), (1 << 16, 192 * GIB, 0));
    let took = paraft_host::usage().peak_rss_bytes - before;
    assert!(took < 256 << 20, "{took} bytes");
    let payload = Payload::from(vec![0; 1 << 20]);
    shard.apply(&Proposal { command: Command::Init { bucket: BucketId(7), part: InitPart::FRESH }, payload });
    assert_eq!(conf.held(), 3 << 20, "one bucket has its own");
}

#[test]
fn memory_taken_by_others_stops_replica_in_time() {
    let free = Arc::new(AtomicU64::new(4 * GIB));
    let now = free.clone();
    let room = Room::with(move || {
        let (id, what) = (String::new(), "the host".into());
        Memory { pools: vec![Pool { id, what, free: now.load(Relaxed), limit: 24 * GIB }] }
    });
    let shard = Shard::within(room, JobShard::default(), 1);
    let job = ServerJob::new("taken", Mode::Asp, 8, 4);
    assert_eq!(shard.carry_out(&admit(&job)), Ok(Outcome::Done));
    let init = |bucket| Proposal {
        command: Command::Init { bucket: BucketId(bucket), part: InitPart::FRESH },
        payload: vec![0; 16].into(),
    };
    free.store(0, Relaxed);
    assert!(matches!(shard.carry_out(&init(0)), Err(ApplyError::NoRoom(_))));
    free.store(4 * GIB, Relaxed);
    assert_eq!(shard.carry_out(&init(0)), Ok(Outcome::Done));
    assert_eq!(shard.carry_out(&init(1)), Ok(Outcome::Done));
}

#[test]
fn snapshot_too_large_is_refused_before_its_bulk() {
    let whole = Shard::new(ShardId(0), 1);
    whole.apply(&admit(&largest()));
    let header = header::encode(&whole.cut().header()).expect("a header");
    let small = Shard::within(room(4 * GIB), JobShard::default(), 1);
    let mut never = std::iter::from_fn(|| panic!("the bulk was read"));
    for unable in [small.room_for(&header), small.install_parts(&header, &mut never)] {
        assert!(matches!(unable, Err(ApplyError::NoRoom(_))), "{unable:?}");
    }
    assert!(small.configured().is_none());
    assert_eq!(small.room().promised_to(|_| true), 0);
}

#[test]
fn blank_buckets_share_data_after_a_snapshot() {
    let optimizer = largest().optimizer; // trained values have slots, running statistics none
    let job = ServerJob { buffers_len: 9, optimizer, ..ServerJob::new("blank", Mode::Asp, 4 * 100 + 3, 4) };
    let shard = Shard::new(ShardId(0), 1);
    shard.apply(&admit(&job));
    let raw = Replicated::image(&shard);
    let image = Cut::from_raw(&raw.head, raw.parts.iter().map(|part| Ok(part.read()))).expect("fits");
    let mut own: Vec<_> = image.buckets.iter().map(Arc::as_ptr).collect();
    own.sort_unstable();
    own.dedup();
    assert_eq!((own.len(), image == shard.cut()), (4, true), "full and last, of both kinds");
}

#[test]
fn what_a_later_version_wrote_stops_the_replica_in_words() {
    let shard = Shard::new(ShardId(2), 3);
    let later = Command::Admit { form: JOB_FORM + 1, job: "anything".into() };
    let unknown = Command::Admit { form: JOB_FORM, job: "name = \"a\"\nfar_away = 1".into() };
    for command in [later, unknown] {
        let unable = shard.carry_out(&command.into()).expect_err("not known");
        assert_eq!(unable.kind(), io::ErrorKind::Unsupported, "{unable}");
        assert!(unable.text().contains("version"), "{unable}");
    }
    // A kind of command that this version does not know.
    let mut bytes = header::encode(&Command::Fence).expect("encodes");
    bytes[1..5].copy_from_slice(&99u32.to_le_bytes());
    let why = header::decode::<Command>(&bytes).expect_err("not known");
    assert!(matches!(&why, HeaderError::Newer(_)), "{why:?}");
    assert!(why.to_string().contains("later version of paraft"), "{why}");
}

/// Every later release reads old logs, so a command keeps its number.
#[test]
fn commands_keep_the_numbers_that_logs_have_of_them() {
    let (worker, session, step) = (WorkerId(1), SessionId(1), Step(1));
    let bucket = BucketId(0);
    let (delta, parts, buckets, vectors) = (Default::default(), 0, Vec::new(), Vec::new());
    let (encoding, contributions) = (Encoding::F32, Vec::new());
    let all = [
        Command::Admit { form: 1, job: String::new() },
        Command::Init { bucket, part: InitPart::FRESH },
        Command::Join { worker, session },
        Command::Leave { worker, session },
        Command::Advance { worker, session, step },
        Command::Finish { worker, session },
        Command::Update { bucket, contributions, encoding, factor: 1.0, closes: false, rate: None },
        Command::Pull { worker, session, buckets: Vec::new() },
        Command::SwitchMode { number: 1, mode: Mode::Asp, after: step, auto: None },
        Command::DeltaPart { delta, part: 0, vectors },
        Command::Delta { delta, after: None, parts, buckets, record: Default::default() },
        Command::Report { worker, session, epoch: 1, sums: Default::default() },
        Command::Fence,
        Command::Acquire { worker, session, request: 1, epoch: 0, done: None },
        Command::Pause { worker, session },
        Command::Resume { worker, session, level: true },
        Command::Skip { bucket, contributions: Vec::new(), closes: false },
        Command::Stop,
        Command::UpdateWith {
            bucket,
            contributions: Vec::new(),
            encoding,
            factor: 1.0,
            closes: false,
            overrides: Default::default(),
        },
        Command::EditRows { bucket, token: 1, put: false },
    ];
    for (number, command) in (0u8..).zip(&all) {
        let bytes = header::encode(command).expect("encodes");
        assert_eq!(bytes[1..5], [number, 0, 0, 0], "{command:?}: new commands come last, and none goes");
    }
    let number_of_all =
        header::decode::<Command>(&[&[header::FORMAT, all.len() as u8][..], &[0; 64]].concat());
    assert!(matches!(number_of_all, Err(HeaderError::Newer(_))), "a new command is missing here");
}

/// Two buckets with one worker's steps; each weight is its number of steps.
fn trained(steps: u64) -> Shard {
    let job = ServerJob { durability: Durability::QuorumMemory, ..ServerJob::new("race", Mode::Bsp, 2, 1) };
    let shard = Shard::new(ShardId(0), 1);
    shard.apply(&admit(&job));
    for bucket in (0..2).map(BucketId) {
        let payload = 0f32.to_le_bytes().to_vec().into();
        shard.apply(&Proposal { command: Command::Init { bucket, part: InitPart::FRESH }, payload });
    }
    shard.apply(&Command::Join { worker: WorkerId(0), session: SessionId(1) }.into());
    for step in 1..=steps {
        for bucket in (0..2).map(BucketId) {
            let contributions = vec![super::command::Contribution {
                worker: WorkerId(0),
                session: SessionId(1),
                seq: Seq(step * 2 + u64::from(bucket.0)),
                step: Step(step),
                pulled: Version(step - 1),
                samples: 1,
            }];
            let (encoding, payload) = (Encoding::F32, (-1f32).to_le_bytes().to_vec().into());
            let command =
                Command::Update { bucket, contributions, encoding, factor: 1.0, closes: false, rate: None };
            shard.apply(&Proposal { command, payload });
        }
    }
    shard
}

/// A reader during snapshot installs sees the clocks together with their buckets. Before the fix they were read one
/// after the other, and a pull of step 2 got the weights of step 1.
#[test]
fn snapshot_clocks_are_never_seen_with_old_buckets() {
    let (one, two) = (trained(1).cut(), trained(2).cut());
    let shard = Shard::new(ShardId(0), 1);
    shard.install(&one).expect("fits");
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            let until = std::time::Instant::now() + std::time::Duration::from_millis(1500);
            while std::time::Instant::now() < until {
                shard.install(&two).expect("fits");
                shard.install(&one).expect("fits");
            }
            over.store(true, Relaxed);
        });
        let mut looks = [0u64; 2];
        while !over.load(Relaxed) {
            let (clock, version, weight) = shard.view(|conf, m| {
                let bucket = conf.expect("configured").buckets[1].image();
                let clock = m.members.get(WorkerId(0)).expect("a member").clock();
                (clock, bucket.version, bucket.weights[0])
            });
            assert_eq!((clock.0, clock.0 as f32), (version.0, weight), "after {looks:?}");
            looks[clock.0 as usize - 1] += 1;
        }
        assert!(looks.iter().all(|n| *n > 1000), "it was raced {looks:?} times");
    });
}
