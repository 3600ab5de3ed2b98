//! Properties of the replicated state machine, over random commands.

use super::{
    Command, Contribution, InitPart, Outcome, Proposal, Shard,
    batched::BatchedPushes,
    begin::JOB_FORM,
    bucket::{BucketData, BucketUpdate},
    command::{EvalSums, PushEntry},
    cut::Cut,
};
use crate::header;
use bytes::Bytes;
use paraft_common::{
    BucketId, Encoding, Mode, ParamGroup, Payload, Seq, SessionId, ShardId, Step, Version, WorkerId,
    algorithm::AlgorithmConfig,
    codec::put_f32_le,
    config::{EarlyStop, ServerJob},
    constraint::{self, Constraint, Rule},
    optim::{ClipConfig, Gradient, LrScale, OptimizerConfig, Overrides, ScheduleConfig, Shape},
    round::{Backup, RoundConfig},
};
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

pub(super) const SHARDS: u32 = 2;
pub(super) const WORKERS: u32 = 3;

pub(super) fn job(optimizer: OptimizerConfig, buffers_len: usize) -> ServerJob {
    ServerJob {
        workers: 2,
        buffers_len,
        grace_ms: 0,
        early_stop: Some(EarlyStop { patience: 3, min_delta: 0.1 }),
        optimizer,
        schedule: ScheduleConfig { warmup: 3, ..ScheduleConfig::default() },
        clip: ClipConfig { value: Some(2.0), norm: None },
        ..ServerJob::new("properties", Mode::Asp, 40, 6)
    }
}

/// Constraints for 40 values, in buckets of 6.
fn some_constraints() -> impl Strategy<Value = Vec<Constraint>> {
    let of = |offset, values, rule| Constraint { offset, values, rule };
    prop::sample::select(vec![
        Vec::new(),
        vec![
            of(0, 9, Rule::Clamp { min: Some(-0.05), max: Some(0.02) }),
            of(9, 12, Rule::UnitNorm { row: 4 }),
            of(24, 16, Rule::MaxNorm { row: 8, max: 0.1 }),
        ],
    ])
}

pub(super) fn a_job() -> impl Strategy<Value = ServerJob> {
    let kinds = [
        "sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "adadelta", "adamax", "nadam",
        "radam",
    ];
    (prop::sample::select(kinds.to_vec()), 0usize..10, some_constraints()).prop_map(
        |(kind, buffers, constraints)| {
            let optimizer = toml::from_str(&format!("kind = \"{kind}\"")).expect("every kind has defaults");
            ServerJob { constraints, ..job(optimizer, buffers) }
        },
    )
}

/// A job with any algorithm, including those that keep state per worker.
fn a_job_of_any_algorithm() -> impl Strategy<Value = ServerJob> {
    let any = || {
        let kinds =
            ["asgd", "staleness-aware", "dc-asgd-c", "dc-asgd-a", "gap-aware", "multi-asgd", "dana-zero"];
        prop::sample::select(kinds.to_vec())
    };
    (a_job(), any()).prop_map(|(job, kind)| {
        let algorithm: AlgorithmConfig =
            toml::from_str(&format!("kind = \"{kind}\"")).expect("every kind has defaults");
        let nesterov = || toml::from_str("kind = \"nesterov\"").expect("it has defaults");
        let fits = algorithm.algorithm().validate(&job.optimizer).is_ok();
        let optimizer = if fits { job.optimizer.clone() } else { nesterov() };
        ServerJob { algorithm, optimizer, ..job }
    })
}

/// The next command of the log. Sessions and steps are picked from the state when the command is made, so that most
/// commands fit, and some do not.
#[derive(Clone, Debug)]
enum Op {
    Configure { other: bool },
    Init { bucket: u32, value: f32 },
    Join { worker: u32 },
    Leave { worker: u32, stale: bool },
    Advance { worker: u32, by: u64 },
    Finish { worker: u32 },
    Update { bucket: u32, who: Vec<(u32, bool, i8)>, encoding: Encoding, factor: f32, value: f32, cut: bool },
    Report { worker: u32, epoch: u64, loss: f64, count: u64 },
    Pull { worker: u32, stale: bool },
}

fn an_op() -> impl Strategy<Value = Op> {
    let worker = || 0..WORKERS;
    let value = || prop::num::f32::NORMAL.prop_map(|v| v.clamp(-1e3, 1e3));
    let who = prop::collection::vec(
        (worker(), prop::bool::weighted(0.1), prop_oneof![8 => Just(1i8), 1 => -1i8..4]),
        1..4,
    );
    prop_oneof![
        1 => any::<bool>().prop_map(|other| Op::Configure { other }),
        2 => (0u32..12, value()).prop_map(|(bucket, value)| Op::Init { bucket, value }),
        3 => worker().prop_map(|worker| Op::Join { worker }),
        1 => (worker(), any::<bool>()).prop_map(|(worker, stale)| Op::Leave { worker, stale }),
        1 => (worker(), 0u64..4).prop_map(|(worker, by)| Op::Advance { worker, by }),
        1 => worker().prop_map(|worker| Op::Finish { worker }),
        12 => (0u32..12, who, prop::sample::select(Encoding::ALL.to_vec()), value(), value(), prop::bool::weighted(0.05))
            .prop_map(|(bucket, who, encoding, factor, value, cut)| {
                Op::Update { bucket, who, encoding, factor, value, cut }
            }),
        2 => (worker(), 0u64..5, any::<f64>(), any::<u64>())
            .prop_map(|(worker, epoch, loss, count)| Op::Report { worker, epoch, loss, count }),
        4 => (worker(), prop::bool::weighted(0.1)).prop_map(|(worker, stale)| Op::Pull { worker, stale }),
    ]
}

/// The entry for an op, made from the current state of `shard`.
fn proposal(shard: &Shard, job: &ServerJob, op: &Op) -> Proposal {
    let session = |w: u32| {
        let of = shard.read(|m| m.members.get(WorkerId(w)).map(|m| m.session));
        of.unwrap_or(SessionId(999))
    };
    let payload = |bucket: u32, encoding: Encoding, value: f32, cut: bool| {
        let len = job.layout().bucket(BucketId(bucket)).map_or(3, |b| b.len) - usize::from(cut);
        let values: Vec<f32> = (0..len).map(|i| value * (i as f32 + 0.3)).collect();
        let mut le = Vec::new();
        encoding.encode(&values, &mut le);
        // In pieces, as the network delivers it.
        let mut pieces = Bytes::from(le);
        Payload::from_pieces(vec![pieces.split_to(pieces.len() / 3), pieces])
    };
    match *op {
        Op::Configure { other } => {
            let name = if other { "another" } else { "properties" };
            let text = ServerJob { name: name.into(), ..job.clone() }.to_toml().expect("a valid job");
            Command::Admit { form: JOB_FORM, job: text }.into()
        }
        Op::Init { bucket, value } => Proposal {
            command: Command::Init { bucket: BucketId(bucket), part: InitPart::FRESH },
            payload: payload(bucket, Encoding::F32, value, false),
        },
        Op::Join { worker } => join(worker).into(),
        Op::Leave { worker, stale } => {
            let session =
                if stale { SessionId(session(worker).0.saturating_sub(1)) } else { session(worker) };
            Command::Leave { worker: WorkerId(worker), session }.into()
        }
        Op::Advance { worker, by } => {
            let at = shard.read(|m| m.members.get(WorkerId(worker)).map(|m| m.clock())).unwrap_or_default();
            Command::Advance { worker: WorkerId(worker), session: session(worker), step: Step(at.0 + by) }
                .into()
        }
        Op::Finish { worker } => {
            Command::Finish { worker: WorkerId(worker), session: session(worker) }.into()
        }
        Op::Update { bucket, ref who, encoding, factor, value, cut } => {
            let local = shard.configured().and_then(|c| c.local(BucketId(bucket))).unwrap_or(0);
            let mut seen = BTreeSet::new();
            let recorded = |local: usize, w: WorkerId| {
                let data = shard.configured()?.buckets.get(local)?.image();
                Some(data.kept.get(&w)?.pulled.as_ref()?.0)
            };
            let contributions: Vec<_> = who
                .iter()
                .filter(|(w, ..)| seen.insert(*w))
                .map(|(w, stale, by)| {
                    let done = shard
                        .read(|m| m.members.get(WorkerId(*w)).map(|m| m.steps()[local]))
                        .unwrap_or_default();
                    let step = Step(done.0.saturating_add_signed(i64::from(*by)));
                    let session =
                        if *stale { SessionId(session(*w).0.saturating_sub(1)) } else { session(*w) };
                    Contribution {
                        worker: WorkerId(*w),
                        session,
                        seq: Seq(step.0),
                        step,
                        pulled: recorded(local, WorkerId(*w)).unwrap_or(Version(done.0)),
                        samples: 1,
                    }
                })
                .collect();
            let payload = match contributions.len() {
                1 => payload(bucket, encoding, value, cut),
                n => {
                    let len = job.layout().bucket(BucketId(bucket)).map_or(3, |b| b.len) - usize::from(cut);
                    let pushes = (0..n).map(|i| payload(bucket, encoding, value * i as f32, cut)).collect();
                    let batched = BatchedPushes::of(pushes, encoding, len).expect("they fit each other");
                    batched.payload(batched.sum())
                }
            };
            let rate = (value > 0.5).then_some(f64::from(value) * 0.01);
            let (bucket, contributions, closes) = (BucketId(bucket), contributions.as_slice(), false);
            if value < -500.0 {
                return Command::Skip { bucket, contributions: contributions.to_vec(), closes }.into();
            }
            let overrides = Overrides::rate(rate);
            let entry = PushEntry { bucket, contributions, encoding, factor, closes, overrides };
            Proposal { command: Command::of_pushes(entry), payload }
        }
        Op::Pull { worker, stale } => {
            let session =
                if stale { SessionId(session(worker).0.saturating_sub(1)) } else { session(worker) };
            let buckets =
                shard.configured().map(|c| c.buckets.iter().map(|b| b.id).collect()).unwrap_or_default();
            Command::Pull { worker: WorkerId(worker), session, buckets }.into()
        }
        Op::Report { worker, epoch, loss, count } => {
            let sums = EvalSums { loss_sum: loss, correct: count, count };
            Command::Report { worker: WorkerId(worker), session: session(worker), epoch, sums }.into()
        }
    }
}

/// A proposal as another replica reads it: through the log's bytes.
pub(super) fn over_the_wire(p: &Proposal) -> Proposal {
    let bytes = header::encode(p).expect("encodes");
    let mut back: Proposal = header::decode(&bytes).expect("decodes");
    back.payload = p.payload.clone();
    back
}

/// A snapshot as a follower receives it: header and vectors as bytes.
pub(super) fn sent(cut: &Cut) -> Cut {
    let raw = cut.to_raw();
    Cut::from_raw(&raw.head, raw.parts.into_iter().map(|part| Ok(part.read())))
        .expect("the vectors of its own header")
}

/// The entry with which the leader admits a job.
pub(super) fn admit(job: &ServerJob) -> Proposal {
    Command::Admit { form: JOB_FORM, job: job.to_toml().expect("a valid job") }.into()
}

/// A worker joins, in a new session.
pub(super) fn join(worker: u32) -> Command {
    static LAST: AtomicU64 = AtomicU64::new(0);
    Command::Join { worker: WorkerId(worker), session: SessionId(LAST.fetch_add(1, Relaxed) + 1) }
}

/// A worker joins; its session number is its own number plus one.
fn first_session(worker: u32) -> Proposal {
    let session = SessionId(u64::from(worker) + 1);
    Command::Join { worker: WorkerId(worker), session }.into()
}

pub(super) fn new() -> Shard {
    Shard::new(ShardId(0), SHARDS)
}

/// Outcomes as text, so that a NaN loss is equal to itself.
fn apply(shard: &Shard, p: &Proposal) -> String {
    format!("{:?}", shard.apply(p))
}

pub(super) fn configured(job: &ServerJob) -> (Shard, Proposal) {
    let shard = new();
    let configure = admit(job);
    assert_eq!(shard.apply(&configure), Outcome::Done);
    (shard, configure)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn replicas_that_apply_the_same_log_are_the_same_bit_for_bit(
        job in a_job_of_any_algorithm(), ops in prop::collection::vec(an_op(), 1..120),
    ) {
        let (a, configure) = configured(&job);
        let b = new();
        b.apply(&over_the_wire(&configure));
        for op in &ops {
            let p = proposal(&a, &job, op);
            prop_assert_eq!(apply(&a, &p), apply(&b, &over_the_wire(&p)));
        }
        prop_assert_eq!(a.cut().digest(), b.cut().digest());
    }

    #[test]
    fn batched_apply_equals_one_by_one_apply(
        job in a_job_of_any_algorithm(), ops in prop::collection::vec(an_op(), 1..120), run in 1usize..20,
    ) {
        let (a, configure) = configured(&job);
        let b = new();
        b.apply(&configure);
        let (mut proposals, mut outcomes) = (Vec::new(), Vec::new());
        for op in &ops {
            let p = proposal(&a, &job, op);
            outcomes.push(apply(&a, &p));
            proposals.push(p);
        }
        let together = proposals.chunks(run).flat_map(|run| b.apply_run(&run.iter().collect::<Vec<_>>()).expect("room"));
        let together: Vec<_> = together.map(|o| format!("{o:?}")).collect();
        prop_assert_eq!(together, outcomes);
        prop_assert_eq!(a.cut().digest(), b.cut().digest());
    }

    #[test]
    fn snapshot_start_equals_whole_log_replay(
        job in a_job_of_any_algorithm(), ops in prop::collection::vec(an_op(), 1..120), cut in any::<prop::sample::Index>(),
    ) {
        let (whole, _) = configured(&job);
        let late = new();
        let cut = cut.index(ops.len());
        for (i, op) in ops.iter().enumerate() {
            let p = proposal(&whole, &job, op);
            let outcome = apply(&whole, &p);
            if i == cut {
                let image = sent(&whole.cut());
                prop_assert_eq!(image.digest(), whole.cut().digest());
                late.install(&image).expect("its own snapshot");
            } else if i > cut {
                prop_assert_eq!(outcome, apply(&late, &p), "{:?}", p);
            }
            if i >= cut {
                // A push from before the cut is still recognised as a duplicate.
                prop_assert_eq!(apply(&whole, &p), apply(&late, &p));
            }
        }
        prop_assert_eq!(whole.cut().digest(), late.cut().digest());
    }

    #[test]
    fn no_push_of_a_session_is_ever_in_the_weights_twice(
        job in a_job_of_any_algorithm(), ops in prop::collection::vec(an_op(), 1..120),
    ) {
        let (shard, _) = configured(&job);
        let mut applied = BTreeSet::new();
        for op in &ops {
            let p = proposal(&shard, &job, op);
            for again in [false, true] {
                let before: Vec<_> = shard.cut().buckets;
                let outcome = shard.apply(&p);
                let Some(PushEntry { bucket, contributions, .. }) = p.command.pushes() else { break };
                if let Outcome::Updated { applied: true, .. } = outcome {
                    prop_assert!(!again, "applied twice: {:?}", p);
                    for c in contributions {
                        let member = shard.read(|m| m.members.in_session(c.worker, c.session).is_some());
                        let first = applied.insert((bucket, c.worker, c.session, c.step));
                        prop_assert!(first || !member, "{:?} is in already", c);
                    }
                } else {
                    prop_assert_eq!(before, shard.cut().buckets, "refused or a duplicate, and changed weights");
                }
            }
        }
    }

    #[test]
    fn a_damaged_snapshot_is_refused_and_never_a_panic(
        job in a_job_of_any_algorithm(), ops in prop::collection::vec(an_op(), 1..20),
        which in any::<prop::sample::Index>(), len in any::<u64>(), slots in any::<u32>(), drop in any::<bool>(),
    ) {
        let (shard, _) = configured(&job);
        for op in &ops {
            shard.apply(&proposal(&shard, &job, op));
        }
        let image = shard.cut();
        let mut header = image.header();
        let mut vectors: Vec<Payload> = image.to_raw().parts.iter().map(|p| vec![0u8; p.len()].into()).collect();
        let which = which.index(header.buckets.len());
        if drop {
            vectors.remove(which);
        } else {
            header.buckets[which].len = len;
            header.buckets[which].slots = slots;
        }
        let same = (len, slots) == (image.buckets[which].weights.len() as u64, image.buckets[which].slots.len() as u32);
        if let Ok(image) = Cut::assemble(header, vectors.into_iter().map(Ok)) {
            prop_assert!(!drop && same);
            prop_assert!(new().install(&image).is_ok());
        }
    }
}

/// One worker, one bucket, SGD with rate 1: each push of ones subtracts 1.
fn ledger() -> (Shard, Proposal) {
    let job = ServerJob { schedule: ScheduleConfig::default(), ..job(OptimizerConfig::sgd(1.0), 0) };
    let (shard, _) = configured(&job);
    let Outcome::Joined { worker, session } = shard.apply(&join(0).into()) else { panic!("a join joins") };
    let c = Contribution { worker, session, seq: Seq(1), step: Step(1), pulled: Version(0), samples: 1 };
    let command = Command::Update {
        bucket: BucketId(0),
        contributions: vec![c],
        encoding: Encoding::F32,
        factor: 1.0,
        closes: false,
        rate: None,
    };
    (shard, Proposal { command, payload: 1f32.to_le_bytes().repeat(6).into() })
}

fn weight(shard: &Shard) -> f32 {
    shard.cut().buckets[0].weights[0]
}

#[test]
fn a_proposal_that_is_committed_twice_is_applied_once() {
    let (shard, push) = ledger();
    assert_eq!(shard.apply(&push), Outcome::Updated { version: Version(1), applied: true });
    assert_eq!(shard.apply(&push), Outcome::Updated { version: Version(1), applied: false });
    assert_eq!((weight(&shard), shard.read(|m| (m.pushes, m.duplicates))), (-1.0, (1, 1)));
}

/// A check of the test: without the record of pushes in `apply`, the ledger would show a double push.
#[test]
fn ledger_shows_double_push_without_push_record() {
    let (shard, push) = ledger();
    shard.apply(&push);
    let conf = shard.configured().expect("configured");
    let gradient = Gradient { payload: &push.payload, encoding: Encoding::F32, scale: 1.0 };
    let Command::Update { contributions, .. } = &push.command else { panic!("a push is an update") };
    let update = BucketUpdate {
        job: &conf.job,
        gradient,
        contributions,
        overrides: Overrides::default(),
        members: 1,
        gone: &[],
    };
    conf.buckets[0].update(update, &conf);
    assert_eq!(weight(&shard), -2.0);
}

#[test]
fn round_closed_before_rejoin_counts_for_new_session() {
    let (shard, _) = ledger();
    let join = |w: u32| match shard.apply(&join(w).into()) {
        Outcome::Joined { session, .. } => session,
        other => panic!("{other:?}"),
    };
    let (a, b) = (join(0), join(1));
    let part = |w: u32, session| Contribution {
        worker: WorkerId(w),
        session,
        seq: Seq(1),
        step: Step(1),
        pulled: Version(0),
        samples: 1,
    };
    let round = |contributions| {
        let command = Command::Update {
            bucket: BucketId(0),
            contributions,
            encoding: Encoding::F32,
            factor: 0.5,
            closes: false,
            rate: None,
        };
        Proposal { command, payload: 2f32.to_le_bytes().repeat(6).into() }
    };
    // Order in the log: worker 0 rejoins, then the round with its predecessor's push.
    let back = join(0);
    shard.apply(&round(vec![part(0, a), part(1, b)]));
    let done = |w: u32| shard.read(|m| m.members.get(WorkerId(w)).map(|m| m.steps()[0]));
    assert_eq!((done(0), done(1), weight(&shard)), (Some(Step(1)), Some(Step(1)), -1.0));
    assert_eq!(
        shard.apply(&round(vec![part(0, back)])),
        Outcome::Updated { version: Version(1), applied: false },
        "its step is in"
    );
}

/// A round may close without a member only if the member's push waits in a round. An update that closes no round is
/// of an asynchronous mode, which accepts late pushes.
#[test]
fn only_an_update_that_closes_a_round_passes_anybody_over() {
    for closes in [false, true] {
        let round = RoundConfig::Backup(Backup { spare: 1 });
        let schedule = ScheduleConfig::default();
        let job = ServerJob { schedule, round, ..job(OptimizerConfig::sgd(1.0), 0) };
        let (shard, _) = configured(&job);
        let join = |w: u32| match shard.apply(&join(w).into()) {
            Outcome::Joined { session, .. } => session,
            other => panic!("{other:?}"),
        };
        let (a, b) = (join(0), join(1));
        let update = |w: u32, session, closes| {
            let (worker, seq, step, pulled) = (WorkerId(w), Seq(1), Step(1), Version(0));
            let contributions = vec![Contribution { worker, session, seq, step, pulled, samples: 1 }];
            let (bucket, encoding) = (BucketId(0), Encoding::F32);
            let command =
                Command::Update { bucket, contributions, encoding, factor: 1.0, closes, rate: None };
            Proposal { command, payload: 1f32.to_le_bytes().repeat(6).into() }
        };
        shard.apply(&update(0, a, closes));
        assert_eq!(shard.read(|m| m.dropped), u64::from(closes));
        let late = shard.apply(&update(1, b, false));
        assert_eq!(matches!(late, Outcome::Updated { applied: true, .. }), !closes, "{late:?}");
        assert_eq!(weight(&shard), if closes { -1.0 } else { -2.0 });
    }
}

#[test]
fn an_evaluation_that_is_reported_again_counts_once() {
    let (shard, _) = ledger();
    let session = shard.read(|m| m.members.get(WorkerId(0)).map(|m| m.session)).expect("joined");
    let report = |epoch, loss_sum| {
        let sums = EvalSums { loss_sum, correct: u64::MAX, count: 1 };
        shard.apply(&Command::Report { worker: WorkerId(0), session, epoch, sums }.into())
    };
    let list = |outcome| match outcome {
        Outcome::Evaluated(list) => {
            list.iter().map(|c| (c.evaluated.epoch, c.evaluated.stop)).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(list(report(1, 1.0)), [(1, false)]);
    assert_eq!(list(report(2, 0.5)), [(2, false)]);
    // A new leader: workers resend everything they keep, more often than patience (3) allows.
    for _ in 0..5 {
        assert_eq!(list(report(1, 1.0)), []);
        assert_eq!(list(report(2, 0.5)), [(2, false)], "the latest is answered again");
    }
    assert!(!shard.read(|m| m.stop), "no evaluation was bad");
}

#[test]
fn early_stop_comes_after_patience_bad_evaluations() {
    let (shard, _) = ledger();
    let session = shard.read(|m| m.members.get(WorkerId(0)).map(|m| m.session)).expect("joined");
    let stops: Vec<bool> = [1.0, 0.5, 0.45, f64::NAN, 0.6, 0.1]
        .into_iter()
        .zip(1..)
        .map(|(loss_sum, epoch)| {
            let sums = EvalSums { loss_sum, correct: 0, count: 1 };
            shard.apply(&Command::Report { worker: WorkerId(0), session, epoch, sums }.into());
            shard.read(|m| m.stop)
        })
        .collect();
    assert_eq!(stops, [false, false, false, false, true, true], "min_delta 0.1, patience 3");
}

/// A shard with these workers, whose rule stops after three evaluations without an improvement.
fn evaluated_by(workers: &[u32]) -> (Shard, BTreeMap<u32, SessionId>) {
    let (shard, _) = ledger();
    let others: Vec<_> = shard.read(|m| m.members.iter().map(|(w, m)| (w, m.session)).collect());
    let sessions = workers.iter().map(|w| (*w, joins(&shard, *w))).collect();
    others.into_iter().for_each(|(worker, session)| {
        shard.apply(&Command::Leave { worker, session }.into());
    });
    (shard, sessions)
}

fn joins(shard: &Shard, worker: u32) -> SessionId {
    match shard.apply(&join(worker).into()) {
        Outcome::Joined { session, .. } => session,
        other => panic!("{other:?}"),
    }
}

/// Evaluations that a worker's report of `count` samples with this mean loss completes: epochs and samples.
fn reports(
    shard: &Shard,
    (worker, session): (u32, SessionId),
    epoch: u64,
    loss: f64,
    count: u64,
) -> Vec<(u64, u64)> {
    let sums = EvalSums { loss_sum: loss * count as f64, correct: 0, count };
    let report = Command::Report { worker: WorkerId(worker), session, epoch, sums };
    match shard.apply(&report.into()) {
        Outcome::Evaluated(list) => {
            list.iter().map(|c| (c.evaluated.epoch, c.evaluated.sums.count)).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_a_share_is_missing_of_stops_no_job() {
    let (shard, sessions) = evaluated_by(&[7, 8]);
    let (a, b) = ((7, sessions[&7]), (8, sessions[&8]));
    let whole = |epoch, loss| {
        assert!(reports(&shard, a, epoch, loss, 5).is_empty());
        assert_eq!(reports(&shard, b, epoch, loss, 5), [(epoch, 10)]);
    };
    whole(1, 1.0);
    whole(2, 0.5);
    // The other share is easier, and lost: the loss over all samples is unknown.
    for epoch in 3..9 {
        reports(&shard, a, epoch, 0.1, 5);
    }
    let left = shard.apply(&Command::Leave { worker: WorkerId(8), session: b.1 }.into());
    let Outcome::Evaluated(closed) = left else { panic!("{left:?}") };
    assert!(closed.len() == 6 && closed.iter().all(|c| c.incomplete), "{closed:?}");
    assert_eq!(shard.read(|m| m.stopping(None).evaluated.map(|e| e.number)), Some(2));
    // An evaluation whose share was lost before any worker had reported.
    assert_eq!(reports(&shard, a, 9, 0.1, 5), [(9, 5)]);
    for (epoch, loss) in [(10, 0.39), (11, 0.28)] {
        assert_eq!(reports(&shard, a, epoch, loss, 10), [(epoch, 10)]);
        assert!(!shard.read(|m| m.stop), "a fall below 0.5");
    }
    // From here on, the same number of samples each time, and fewer than before.
    assert_eq!(reports(&shard, a, 12, 0.1, 4), [(12, 4)]);
    for (epoch, stops) in [(13, false), (14, false), (15, true)] {
        reports(&shard, a, epoch, 0.28, 4);
        assert_eq!(shard.read(|m| m.stop), stops);
    }
}

#[test]
fn who_has_begun_anew_is_not_waited_for_in_what_is_behind_it() {
    let (shard, sessions) = evaluated_by(&[7, 8]);
    let a = (7, sessions[&7]);
    for epoch in 1..4 {
        assert!(reports(&shard, a, epoch, 1.0, 5).is_empty());
    }
    let b = (8, joins(&shard, 8));
    assert_eq!(reports(&shard, b, 3, 1.0, 5), [(1, 5), (2, 5), (3, 10)]);
    assert_eq!(
        shard.read(|m| m.stopping(None).best_loss),
        f64::INFINITY,
        "of each a share was lost with the session"
    );
    assert!(reports(&shard, a, 4, 1.0, 5).is_empty());
    assert_eq!(reports(&shard, b, 4, 1.0, 5), [(4, 10)]);
    assert_eq!(shard.read(|m| m.stopping(None).best_loss), 1.0);
}

#[test]
fn evaluation_is_none_when_all_sample_holders_left() {
    let (shard, sessions) = evaluated_by(&[8, 9]);
    // The second worker joined after the first had taken all samples.
    assert!(reports(&shard, (9, sessions[&9]), 1, 0.0, 0).is_empty());
    let left = shard.apply(&Command::Leave { worker: WorkerId(8), session: sessions[&8] }.into());
    assert!(matches!(left, Outcome::Evaluated(list) if list.is_empty()), "nobody has evaluated anything");
    // It rejoins where the others are, and evaluates.
    assert_eq!(reports(&shard, (8, joins(&shard, 8)), 1, 2.0, 2), [(1, 2)]);
    assert!(!shard.read(|m| m.stop));
}

/// Two workers, one bucket, rate 1 and an algorithm that keeps what workers pull.
fn compensated() -> (Shard, [SessionId; 2]) {
    let algorithm = toml::from_str("kind = \"dc-asgd-c\"\nlambda = 1.0").expect("valid");
    let job = ServerJob {
        schedule: ScheduleConfig::default(),
        clip: ClipConfig::default(),
        algorithm,
        ..job(OptimizerConfig::sgd(1.0), 0)
    };
    let (shard, _) = configured(&job);
    let session = |w| match shard.apply(&join(w).into()) {
        Outcome::Joined { session, .. } => session,
        other => panic!("{other:?}"),
    };
    let sessions = [session(0), session(1)];
    (shard, sessions)
}

fn pull(shard: &Shard, worker: u32, session: SessionId) -> Version {
    let command = Command::Pull { worker: WorkerId(worker), session, buckets: vec![BucketId(0)] };
    assert_eq!(shard.apply(&command.into()), Outcome::Done);
    shard.configured().expect("configured").buckets[0].version()
}

fn push(shard: &Shard, worker: u32, session: SessionId, step: u64, pulled: Version, value: f32) {
    let worker = WorkerId(worker);
    let contributions =
        vec![Contribution { worker, session, seq: Seq(step), step: Step(step), pulled, samples: 1 }];
    let (bucket, encoding) = (BucketId(0), Encoding::F32);
    let command = Command::Update { bucket, contributions, encoding, factor: 1.0, closes: false, rate: None };
    let outcome = shard.apply(&Proposal { command, payload: value.to_le_bytes().repeat(6).into() });
    assert!(matches!(outcome, Outcome::Updated { applied: true, .. }), "{outcome:?}");
}

#[test]
fn a_late_push_is_compensated_for_the_way_since_its_own_pull() {
    let (shard, [a, b]) = compensated();
    let (at_a, at_b) = (pull(&shard, 0, a), pull(&shard, 1, b));
    push(&shard, 0, a, 1, at_a, 1.0);
    assert_eq!(weight(&shard), -1.0, "not late");
    // Late by one update, which moved the weight by -1: 2 + 1 * 2 * 2 * (-1 - 0).
    push(&shard, 1, b, 1, at_b, 2.0);
    assert_eq!(weight(&shard), -1.0 - (2.0 - 4.0));
    let data = shard.cut().buckets[0].clone();
    assert_eq!(data.kept[&WorkerId(0)].pulled.as_ref().expect("recorded").1[0], 0.0, "as it was pulled");
}

#[test]
fn worker_state_is_dropped_by_first_update_after_leave() {
    let (shard, [a, b]) = compensated();
    let (at, _) = (pull(&shard, 0, a), pull(&shard, 1, b));
    let whose = || shard.cut().buckets[0].kept.keys().map(|w| w.0).collect::<Vec<_>>();
    shard.apply(&Command::Leave { worker: WorkerId(1), session: b }.into());
    assert_eq!(whose(), [0, 1]);
    push(&shard, 0, a, 1, at, 1.0);
    assert_eq!(whose(), [0]);
}

#[test]
fn pulls_of_one_version_share_their_copy() {
    let (shard, [a, b]) = compensated();
    pull(&shard, 0, a);
    pull(&shard, 1, b);
    let data = shard.cut().buckets[0].clone();
    let copies: Vec<_> = data.kept.values().filter_map(|k| k.pulled.as_ref()).collect();
    assert!(std::sync::Arc::ptr_eq(&copies[0].1, &copies[1].1));
}

/// A round that the log holds as separate pushes, against the same round as a sum: all replicated state must be
/// equal, except that the byte counts are those of the pushes.
#[test]
fn a_round_as_its_pushes_came_gives_the_bits_of_their_sum() {
    const LEN: usize = 1500;
    let adam = OptimizerConfig::adam(0.01);
    for encoding in Encoding::ALL {
        let job = ServerJob {
            workers: 3,
            encoding,
            optimizer: adam.clone(),
            ..ServerJob::new("several", Mode::Bsp, LEN, LEN)
        };
        let [as_they_came, added_up] = [(); 2].map(|()| {
            let shard = Shard::new(ShardId(0), 1);
            shard.apply(&admit(&job));
            let mut zeros = Vec::new();
            put_f32_le(&[0.5; LEN], &mut zeros);
            let command = Command::Init { bucket: BucketId(0), part: InitPart::FRESH };
            shard.apply(&Proposal { command, payload: zeros.into() });
            shard
        });
        let mut pushed = 0;
        for shard in [&as_they_came, &added_up] {
            (0..3).for_each(|w| _ = shard.apply(&first_session(w)));
        }
        for step in 1..=3 {
            let contribution = |w: u32| Contribution {
                worker: WorkerId(w),
                session: SessionId(u64::from(w) + 1),
                seq: Seq(step),
                step: Step(step),
                pulled: Version(step - 1),
                samples: 1,
            };
            let contributions: Vec<_> = (0..3).map(contribution).collect();
            let push = |w: u32| {
                let value = |i: usize| ((i * 31 + w as usize * 7) % 101) as f32 * 0.01 - step as f32 * 0.2;
                let mut out = Vec::new();
                encoding.encode(&(0..LEN).map(value).collect::<Vec<_>>(), &mut out);
                Payload::from(out)
            };
            let batched = BatchedPushes::of((0..3).map(push).collect(), encoding, LEN).expect("they fit");
            pushed += batched.pushed();
            let proposal = |encoding, payload| {
                let (bucket, contributions) = (BucketId(0), contributions.clone());
                let factor = 1.0 / 3.0;
                Proposal {
                    command: Command::Update {
                        bucket,
                        contributions,
                        encoding,
                        factor,
                        closes: false,
                        rate: None,
                    },
                    payload,
                }
            };
            let all = proposal(encoding, batched.payload(batched.sum()));
            let sum = proposal(Encoding::F32, batched.sum());
            let applied = Outcome::Updated { version: Version(step), applied: true };
            assert_eq!(
                (as_they_came.apply(&all), added_up.apply(&sum)),
                (applied.clone(), applied),
                "{encoding}"
            );
        }
        let [a, b] = [&as_they_came, &added_up].map(Shard::cut);
        assert_eq!(a.buckets, b.buckets, "{encoding}");
        assert_eq!(a.meta.members, b.meta.members);
        assert_eq!((a.meta.pushes, a.meta.bytes_pushed), (9, pushed), "{encoding}");
    }
}

/// A rate that workers send replaces the optimizer's rate times the schedule's factor; the factor for the number of
/// pushes stays.
#[test]
fn an_update_at_a_rate_is_that_of_a_job_with_that_rate() {
    for kind in ["sgd", "adagrad", "adamw", "nadam"] {
        for scale in [LrScale::None, LrScale::Linear] {
            let optimizer = |lr: f64| {
                toml::from_str::<OptimizerConfig>(&format!("kind = \"{kind}\"\nlr = {lr:?}")).expect("a kind")
            };
            let shape = Shape::Step { steps: 1, gamma: 0.5 };
            let falls = ScheduleConfig { shape, warmup: 5, scale };
            let constant = ScheduleConfig { scale, ..ScheduleConfig::default() };
            let [said, own] = [(0.9, falls), (0.125, constant)].map(|(lr, schedule)| {
                let (shard, _) = configured(&ServerJob { schedule, ..job(optimizer(lr), 0) });
                (0..2).for_each(|w| _ = shard.apply(&first_session(w)));
                shard
            });
            for step in 1..=4u64 {
                let contribution = |w: u32| Contribution {
                    worker: WorkerId(w),
                    session: SessionId(u64::from(w) + 1),
                    seq: Seq(step),
                    step: Step(step),
                    pulled: Version(step - 1),
                    samples: 1,
                };
                let contributions = [contribution(0), contribution(1)];
                for (shard, rate) in [(&said, Some(0.125)), (&own, None)] {
                    let (bucket, encoding, factor, closes) = (BucketId(0), Encoding::F32, 0.5, false);
                    let entry = PushEntry {
                        bucket,
                        contributions: &contributions,
                        encoding,
                        factor,
                        closes,
                        overrides: Overrides::rate(rate),
                    };
                    let payload = (step as f32).to_le_bytes().repeat(6).into();
                    let outcome = shard.apply(&Proposal { command: Command::of_pushes(entry), payload });
                    assert_eq!(outcome, Outcome::Updated { version: Version(step), applied: true });
                }
                let [a, b] = [&said, &own].map(|shard| shard.cut().buckets[0].clone());
                assert_eq!(a, b, "{kind} {scale:?}");
            }
        }
    }
}

/// With constraints, an update equals the update without them followed by the projection; so does the
/// initialisation.
#[test]
fn constraints_project_the_initial_weights_and_each_update() {
    let rule = Rule::MaxNorm { row: 3, max: 0.25 };
    let constraints = vec![
        Constraint { offset: 0, values: 12, rule },
        Constraint { offset: 12, values: 28, rule: Rule::Clamp { min: Some(-0.125), max: Some(0.25) } },
    ];
    let free = job(OptimizerConfig::adam(0.1), 9);
    let held = ServerJob { constraints: constraints.clone(), ..free.clone() };
    let (shard, _) = configured(&held);
    let Outcome::Joined { session, worker } = shard.apply(&join(0).into()) else { panic!("not joined") };
    let conf = shard.configured().expect("configured");
    for b in &conf.buckets {
        let part = InitPart::Weights { version: Version(0), clock: 0.0 };
        let weights: Vec<f32> = (0..b.spec.len).map(|i| i as f32 - 2.0).collect();
        let mut expected = weights.clone();
        constraint::apply(&constraints, b.spec.range(), &mut expected);
        let mut payload = Vec::new();
        put_f32_le(&weights, &mut payload);
        let init = Proposal { command: Command::Init { bucket: b.id, part }, payload: payload.into() };
        assert_eq!(shard.apply(&init), Outcome::Done);
        assert_eq!(b.peek(|d| d.weights.to_vec()), expected, "{:?}", b.spec);
        assert_eq!(expected != weights, b.spec.offset < 40, "statistics are held to nothing");
    }
    for (step, b) in (1..=4u64).flat_map(|step| conf.buckets.iter().map(move |b| (step, b))) {
        let (seq, step, pulled) = (Seq(step), Step(step), Version(step - 1));
        let contributions = vec![Contribution { worker, session, seq, step, pulled, samples: 1 }];
        let payload: Payload = (step.0 as f32 - 2.5).to_le_bytes().repeat(b.spec.len).into();
        let mut expected = (*b.image()).clone();
        let gradient = Gradient { payload: &payload, encoding: Encoding::F32, scale: 1.0 };
        let update = BucketUpdate {
            job: &free,
            gradient,
            contributions: &contributions,
            overrides: Overrides::default(),
            members: 1,
            gone: &[],
        };
        expected.update(b.spec, update);
        constraint::apply(&constraints, b.spec.range(), &mut expected.weights);
        let (encoding, bucket) = (Encoding::F32, b.id);
        let command =
            Command::Update { bucket, contributions, encoding, factor: 1.0, closes: false, rate: None };
        shard.apply(&Proposal { command, payload });
        assert_eq!(*b.image(), expected, "{:?} at {step}", b.spec);
    }
}

/// Weights that an algorithm looks ahead to are held to the constraints, too.
#[test]
fn constraints_project_weights_that_are_ahead() {
    let rule = Rule::Clamp { min: Some(0.0), max: None };
    let constraints = vec![Constraint { offset: 0, values: 40, rule }];
    let algorithm = toml::from_str("kind = \"dana-zero\"").expect("a kind");
    let nesterov = toml::from_str("kind = \"nesterov\"").expect("a kind");
    let free = ServerJob { algorithm, ..job(nesterov, 0) };
    let held = ServerJob { constraints, ..free.clone() };
    let (shard, _) = configured(&held);
    let Outcome::Joined { session, worker } = shard.apply(&join(0).into()) else { panic!("not joined") };
    let conf = shard.configured().expect("configured");
    for b in &conf.buckets {
        let (seq, step, pulled) = (Seq(1), Step(1), Version(0));
        let contributions = vec![Contribution { worker, session, seq, step, pulled, samples: 1 }];
        let (encoding, bucket) = (Encoding::F32, b.id);
        let command =
            Command::Update { bucket, contributions, encoding, factor: 1.0, closes: false, rate: None };
        let payload = 1.0f32.to_le_bytes().repeat(b.spec.len).into();
        shard.apply(&Proposal { command, payload });
        let ahead = |job: &ServerJob| b.peek(|d| d.look_ahead(job, b.spec)).expect("it looks ahead");
        assert!(ahead(&free).iter().all(|w| *w < 0.0), "{:?}", ahead(&free));
        assert!(ahead(&held).iter().all(|w| *w == 0.0), "{:?}", ahead(&held));
    }
}

/// The buckets of a job after three updates with a gradient of 1, 2 and 3, and these options of the workers.
fn updated(job: &ServerJob, overrides: Overrides) -> Vec<Arc<BucketData>> {
    let (shard, _) = configured(job);
    let join = shard.apply(&join(0).into());
    let Outcome::Joined { session, worker } = join else { panic!("{join:?}") };
    let conf = shard.configured().expect("configured");
    for (step, bucket) in (1..=3u64).flat_map(|step| conf.buckets.iter().map(move |b| (step, b))) {
        let (seq, step, pulled) = (Seq(step), Step(step), Version(step - 1));
        let contributions = &[Contribution { worker, session, seq, step, pulled, samples: 1 }];
        let (encoding, bucket, len) = (Encoding::F32, bucket.id, bucket.spec.len);
        let (factor, closes) = (1.0, false);
        let entry = PushEntry { bucket, contributions, encoding, factor, closes, overrides };
        let payload = (step.0 as f32).to_le_bytes().repeat(len).into();
        let outcome = shard.apply(&Proposal { command: Command::of_pushes(entry), payload });
        assert!(matches!(outcome, Outcome::Updated { applied: true, .. }), "{outcome:?}");
    }
    shard.cut().buckets
}

/// A bucket of a group is updated with the group's rate, decay and optimizer, as if the job's optimizer were so.
#[test]
fn each_group_of_parameters_has_its_own_optimizer() {
    let of = |kind: &str| -> OptimizerConfig { toml::from_str(kind).expect("a kind") };
    let none = Overrides::default();
    for (kind, other) in [
        ("kind = \"sgd\"", None),
        ("kind = \"adamw\"", Some("kind = \"adamw\"\nbeta1 = 0.5\neps = 0.01")),
        ("kind = \"radam\"", Some("kind = \"nadam\"")),
    ] {
        let (optimizer, own) = (of(kind), other.map(of));
        let (first, second) = (ParamGroup::new(12, 0.5, 0.25), ParamGroup::new(28, 0.125, 0.0));
        let alone = own.as_ref().unwrap_or(&optimizer).with(0.125, 0.0);
        let groups = vec![first, ParamGroup { optimizer: own.clone(), ..second }];
        let both = updated(&ServerJob { groups, ..job(optimizer.clone(), 9) }, none);
        let (first, second) =
            (updated(&job(optimizer.with(0.5, 0.25), 9), none), updated(&job(alone, 9), none));
        // This shard has buckets 0, 2, 4, 6 and statistics; bucket 0 is of the first group.
        assert_eq!(both[0], first[0], "{kind}");
        assert_eq!(both[1..], second[1..], "{kind}");
        assert_ne!(both[0], second[0], "{kind}");
    }
}

/// Buckets have as many state vectors as the group that needs most, and the others' stay zero.
#[test]
fn groups_of_several_kinds_have_room_for_the_most_state() {
    let adam = Some(OptimizerConfig::adam(0.125));
    let second = ParamGroup { optimizer: adam, maximize: true, ..ParamGroup::new(28, 0.125, 0.0) };
    let groups = vec![ParamGroup::new(12, 0.5, 0.0), second];
    let both = updated(&ServerJob { groups, ..job(OptimizerConfig::sgd(0.5), 0) }, Overrides::default());
    let first = updated(&job(OptimizerConfig::sgd(0.5), 0), Overrides::default());
    assert_eq!((&both[0].weights, both[0].slots.len()), (&first[0].weights, 2));
    assert!(both[0].slots.iter().flatten().all(|v| *v == 0.0));
    let second = updated(&job(OptimizerConfig::adam(0.125), 0), Overrides::default());
    for (up, down) in both[1..].iter().zip(&second[1..]) {
        let climbs = up.weights.iter().zip(down.weights.iter()).all(|(up, down)| *up > 0.0 && *down < 0.0);
        assert!(climbs, "it maximizes");
    }
}

/// Options that workers send act as if the job's optimizer had them.
#[test]
fn options_of_workers_replace_the_jobs() {
    let of = |kind: &str| -> OptimizerConfig { toml::from_str(kind).expect("a kind") };
    let none = Overrides::default();
    for (kind, set, same) in [
        ("kind = \"sgd\"", Overrides { weight_decay: Some(0.25), ..none }, "weight_decay = 0.25"),
        ("kind = \"nesterov\"", Overrides { momentum: Some(0.25), ..none }, "momentum = 0.25"),
        ("kind = \"adam\"", Overrides { square: Some(0.5), ..none }, "beta2 = 0.5"),
        ("kind = \"adadelta\"", Overrides { eps: Some(0.5), ..none }, "eps = 0.5"),
        ("kind = \"adagrad\"", Overrides { eps: Some(0.5), ..none }, "eps = 0.5"),
    ] {
        let theirs = updated(&job(of(kind), 9), set);
        let own = updated(&job(of(&format!("{kind}\n{same}")), 9), none);
        assert_eq!(theirs, own, "{kind}");
        assert_ne!(theirs, updated(&job(of(kind), 9), none), "{kind}");
    }
    let clip = ClipConfig { value: Some(0.5), norm: None };
    let clipped = updated(&job(OptimizerConfig::sgd(1.0), 0), Overrides { clip_value: Some(0.5), ..none });
    assert_eq!(clipped, updated(&ServerJob { clip, ..job(OptimizerConfig::sgd(1.0), 0) }, none));
}

/// A skipped push counts once: the schedule's clock advances, and nothing else changes.
#[test]
fn a_skip_counts_as_pushed_and_changes_no_weight() {
    let job = ServerJob { mode: Mode::Bsp.into(), ..job(OptimizerConfig::adam(0.1), 0) };
    let (shard, _) = configured(&job);
    let join = |w: u32| match shard.apply(&join(w).into()) {
        Outcome::Joined { session, .. } => session,
        other => panic!("{other:?}"),
    };
    let sessions = [join(0), join(1)];
    let round = |step: u64, skip: bool| {
        let part = |(w, session): (u32, &SessionId)| Contribution {
            worker: WorkerId(w),
            session: *session,
            seq: Seq(step),
            step: Step(step),
            pulled: Version(0),
            samples: 1,
        };
        let (bucket, contributions) = (BucketId(0), (0..).zip(&sessions).map(part).collect());
        let (encoding, factor, closes) = (Encoding::F32, 0.5, false);
        let (command, payload) = match skip {
            true => (Command::Skip { bucket, contributions, closes }, Payload::EMPTY),
            false => (
                Command::Update { bucket, contributions, encoding, factor, closes, rate: None },
                1f32.to_le_bytes().repeat(6).into(),
            ),
        };
        shard.apply(&Proposal { command, payload })
    };
    let data = || (*shard.cut().buckets[0]).clone();
    let members = || shard.read(|m| (m.members.slowest_in(0), m.skipped.clone(), m.duplicates, m.pushes));
    let at = |version, applied| Outcome::Updated { version: Version(version), applied };
    assert_eq!(round(1, false), at(1, true));
    let before = data();
    assert_eq!(members(), (Step(1), Default::default(), 0, 2));
    assert_eq!(round(2, true), at(1, true));
    assert_eq!(data(), BucketData { clock: before.clock + 1.0, ..before.clone() });
    let skipped = BTreeMap::from([(WorkerId(0), 1), (WorkerId(1), 1)]);
    assert_eq!(members(), (Step(2), skipped.clone(), 0, 2));
    assert_eq!((round(2, true), round(2, false)), (at(1, false), at(1, false)), "it is in");
    assert_eq!(members(), (Step(2), skipped.clone(), 2, 2));
    // Snapshots hold the count; a snapshot without skips has its old format.
    assert_eq!(sent(&shard.cut()), shard.cut());
    let mut image = shard.cut();
    image.meta.skipped.clear();
    let head = image.to_raw().head;
    assert_eq!(header::encode(&image.header()).as_deref(), Ok(&head[..]));
    assert_ne!(head, shard.cut().to_raw().head);
    assert_eq!(Cut::header_of(&head).expect("decodes").meta.skipped, BTreeMap::new());
    // A new session starts to count.
    join(1);
    assert_eq!(shard.read(|m| m.skipped.clone()), BTreeMap::from([(WorkerId(0), 1)]));
}

/// Logs from before the other encodings use these numbers.
#[test]
fn encodings_keep_their_numbers_in_the_log() {
    for (number, encoding) in
        (0u32..).zip([Encoding::F32, Encoding::Bf16, Encoding::F16, Encoding::Int8, Encoding::Sign])
    {
        let bytes = header::encode(&encoding).expect("small");
        assert_eq!(bytes[1..], number.to_le_bytes(), "behind the format's number");
    }
    for encoding in Encoding::ALL {
        let bytes = header::encode(&encoding).expect("small");
        assert_eq!(header::decode(&bytes).ok(), Some(encoding));
    }
}
