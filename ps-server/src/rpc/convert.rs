//! Converts between wire and domain types. Whatever can be refused without the leader's state is refused
//! here, off the leader's task: length, bucket, NaN.

use crate::shard::{
    Shard,
    chunks::Answer,
    command::{Closed, EvalSums, InitPart},
    leader::{Message, Reply, WorkerInfo},
    partition::Partition,
    state::ShardConfig,
};
use paraft_common::{
    BucketId, Encoding, Payload, Seq, ShardId, Step, TensorKind, Version,
    config::MAX_STEP,
    encoding::{BadPayload, WrongLength, all_finite},
    optim::Overrides,
    table::{ID_BYTES, MAX_PULLED_IDS, Rows},
};
use paraft_proto::{
    self as wire, FromShard, Refusal, RefusalKind, ToShard, WithBulk, from_shard, limits::MAX_BUCKET_BYTES,
    to_shard,
};
use paraft_session::serve::Read;
use paraft_trace::Moment;
use std::sync::Arc;

/// Checks a message that follows Open; `None`: it only shows that its worker is alive.
pub fn message(shard: &Shard, message: WithBulk<ToShard>) -> Result<Option<Message>, Refusal> {
    let WithBulk { message, bulk } = message;
    let payload = bulk.into_iter().next().unwrap_or_default();
    match message.kind.ok_or(RefusalKind::NoKind)? {
        to_shard::Kind::Heartbeat(_) => Ok(None),
        kind => {
            let bucket = match &kind {
                to_shard::Kind::Push(m) => Some(BucketId(m.bucket)),
                to_shard::Kind::Init(m) => Some(BucketId(m.bucket)),
                _ => None,
            };
            of_kind(shard, kind, payload).map(Some).map_err(|refusal| named(shard, bucket, refusal))
        }
    }
}

/// A refusal of a message about this bucket, with its table if it is a partition of one.
fn named(shard: &Shard, bucket: Option<BucketId>, refusal: Refusal) -> Refusal {
    match shard.configured().and_then(|conf| Some((conf.local(bucket?)?, conf))) {
        Some((local, conf)) => Refusal { kind: conf.named(local, refusal.kind), ..refusal },
        None => refusal,
    }
}

/// What a worker says of itself, as much as people can look at.
pub fn about(h: &wire::Heartbeat) -> WorkerInfo {
    const WORD: usize = 64;
    const LINES: (usize, usize) = (20, 240);
    // A terminal would obey control characters, and these marks change the order of the characters between
    // them.
    let plain = |c: char| if c.is_control() || is_invisible(c) { '\u{fffd}' } else { c };
    let short = |text: &str, most: usize| text.chars().take(most).map(plain).collect::<String>();
    let said = h.said.iter().rev().take(LINES.0).rev().map(|l| short(l, LINES.1)).collect();
    WorkerInfo { host: short(&h.host, WORD), device: short(&h.device, WORD), said }
}

/// Marks that show nothing and change how other characters are shown: directions, joiners, line separators.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

fn of_kind(shard: &Shard, kind: to_shard::Kind, payload: Payload) -> Result<Message, Refusal> {
    use to_shard::Kind;
    match kind {
        Kind::Open(_) | Kind::Heartbeat(_) => Err(RefusalKind::AlreadyOpen.into()),
        Kind::Init(m) => {
            let bucket = BucketId(m.bucket);
            let conf = configured(shard)?;
            if let Some(rows) = conf.buckets[local(&conf, shard.id(), bucket)?].rows() {
                return init_rows(rows, &m, payload);
            }
            let local = check(&conf, shard.id(), bucket, &payload, None)?;
            let slots = match conf.buckets[local].spec.kind {
                TensorKind::Param => conf.job.slots(),
                TensorKind::Buffer | TensorKind::Result | TensorKind::Rows => 0,
            };
            if m.part as usize > slots {
                return Err(RefusalKind::BadInitPart { bucket, part: m.part, slots }.into());
            }
            if m.version > MAX_STEP || !(0.0..=MAX_STEP as f64).contains(&m.clock) {
                return Err(RefusalKind::BadInitStamp { bucket, version: m.version, clock: m.clock }.into());
            }
            let part = match m.part.checked_sub(1) {
                None => InitPart::Weights { version: Version(m.version), clock: m.clock },
                Some(slot) => InitPart::Slot(slot),
            };
            Ok(Message::Init { bucket, part, payload })
        }
        Kind::Push(m) => {
            let (step, arrived) = (Step(m.step), Moment::now());
            let refuse = |r: Refusal| Refusal { seq: m.seq, ..r };
            let conf = configured(shard).map_err(refuse)?;
            let bucket = match m.skip {
                true => nothing(&conf, shard.id(), BucketId(m.bucket), &payload),
                false => check(&conf, shard.id(), BucketId(m.bucket), &payload, Some(step)),
            };
            let bucket = bucket.map_err(refuse)?;
            if m.seq == 0 {
                return Err(RefusalKind::BadSeq { bucket: BucketId(m.bucket) }.into());
            }
            if !m.sum_of_squares.is_finite() {
                let kind = RefusalKind::NotFinite { bucket: BucketId(m.bucket), step };
                return Err(refuse(kind.into()));
            }
            let overrides = match m.skip {
                true => Overrides::default(),
                false => overrides(&conf, bucket, &m).map_err(|kind| refuse(kind.into()))?,
            };
            Ok(Message::Push {
                seq: Seq(m.seq),
                step,
                bucket,
                pulled: Version(m.version),
                samples: m.samples.max(1),
                sum_of_squares: m.sum_of_squares.max(0.0),
                payload,
                overrides,
                skip: m.skip,
                clipped: m.clipped,
                arrived,
            })
        }
        Kind::Pull(m) => pull(shard, m),
        Kind::Norm(m) => {
            let fine = |bound: f64| bound as f32 > 0.0 && !bound.is_nan();
            if !m.sum_of_squares.is_finite() || m.sum_of_squares < 0.0 || !m.bound.is_none_or(fine) {
                let (step, got) = (Step(m.step), m.bound.unwrap_or(m.sum_of_squares));
                return Err(RefusalKind::BadNorm { step, got }.into());
            }
            Ok(Message::Norm { step: Step(m.step), sum_of_squares: m.sum_of_squares, bound: m.bound })
        }
        Kind::Report(m) => {
            let sums = EvalSums { loss_sum: m.loss_sum, correct: m.correct, count: m.count };
            Ok(Message::Report { epoch: m.epoch, sums })
        }
        Kind::Finish(_) => Ok(Message::Finish),
        Kind::Leave(_) => Ok(Message::Leave),
        Kind::Acquire(_) if !is_leased(shard) => Err(no_chunks("Acquire")),
        Kind::Acquire(_) if shard.id() != ShardId(0) => {
            let why = "shard 0 gives out the chunks, and this is another";
            Err(RefusalKind::NoChunks { message: "Acquire", why }.into())
        }
        Kind::Acquire(m) if m.request == 0 => Err(RefusalKind::BadRequest.into()),
        Kind::Acquire(m) => Ok(Message::Acquire { request: m.request, epoch: m.epoch, done: m.done }),
        Kind::Pause(_) if !is_leased(shard) => Err(no_chunks("Pause")),
        Kind::Resume(_) if !is_leased(shard) => Err(no_chunks("Resume")),
        Kind::SwitchMode(m) => {
            let mode = m.mode.parse().map_err(|_| bad_mode(&m.mode))?;
            if !(1..=MAX_SWITCHES).contains(&m.number) {
                let why = format!("a switch of the mode has number {}: they go from 1 to 2^53", m.number);
                return Err(RefusalKind::BadSwitch(why).into());
            }
            Ok(Message::SwitchMode { number: m.number, mode })
        }
        Kind::Pause(_) => Ok(Message::Pause),
        Kind::Resume(m) => Ok(Message::Resume { level: m.level }),
        Kind::Advance(m) if m.step > MAX_STEP => {
            Err(RefusalKind::BadStep { message: "Advance", got: Step(m.step) }.into())
        }
        Kind::Advance(m) => Ok(Message::Advance { step: Step(m.step) }),
    }
}

/// Rows of a partition from a checkpoint.
fn init_rows(rows: &Partition, m: &wire::Init, payload: Payload) -> Result<Message, Refusal> {
    let bucket = BucketId(m.bucket);
    if m.version > MAX_STEP || !(0.0..=MAX_STEP as f64).contains(&m.clock) {
        return Err(RefusalKind::BadInitStamp { bucket, version: m.version, clock: m.clock }.into());
    }
    if m.part >= m.parts {
        return Err(RefusalKind::BadInitPart { bucket, part: m.part, slots: m.parts as usize }.into());
    }
    if payload.len() > MAX_BUCKET_BYTES {
        let (expected, got) = (MAX_BUCKET_BYTES, payload.len());
        return Err(RefusalKind::BucketLength { bucket, expected, got }.into());
    }
    let (part, parts, version, clock) = (m.part, m.parts, Version(m.version), m.clock);
    let bytes = payload.to_bytes();
    let (fits, part) = match m.history {
        true => (rows.check_history(&bytes).map(drop), InitPart::History { part, parts, version, clock }),
        false => (rows.check_rows(&bytes), InitPart::Rows { part, parts, version, clock }),
    };
    fits.map_err(|why| Refusal::from(RefusalKind::BadPayload { bucket, why }))?;
    Ok(Message::Init { bucket, part, payload })
}

/// What a push sets in place of the job's options, if its bucket is trained.
fn overrides(conf: &ShardConfig, bucket: usize, push: &wire::Push) -> Result<Overrides, RefusalKind> {
    let target = &conf.buckets[bucket];
    let set = push.overrides.unwrap_or_default();
    let overrides = Overrides {
        rate: push.rate,
        weight_decay: set.weight_decay,
        momentum: set.momentum,
        square: set.square,
        eps: set.eps,
        clip_value: set.clip_value,
    };
    let bad = |option, got, why| Err(RefusalKind::BadRate { bucket: target.id, option, got, why });
    match target.spec.kind {
        _ if overrides == Overrides::default() => return Ok(overrides),
        TensorKind::Param | TensorKind::Rows => {}
        TensorKind::Buffer | TensorKind::Result => return Ok(Overrides::default()),
    }
    // Optimizers compute with it as an f32.
    if let Some(got) = push.rate
        && (got.is_sign_negative() && got != 0.0 || !(got as f32).is_finite())
    {
        return bad("rate", got, "it must be a finite number, 0 or more");
    }
    if let Some(got) = set.clip_value
        && !(got as f32 > 0.0 && (got as f32).is_finite())
    {
        return bad("clip_value", got, "it must be a finite number above 0");
    }
    if conf.job.algorithm.algorithm().looks_ahead() {
        let got = push.rate.unwrap_or(f64::NAN);
        let why =
            "this job's algorithm looks ahead at the job's own options, so its workers cannot say theirs";
        return bad("rate", got, why);
    }
    if target.spec.kind == TensorKind::Rows {
        let other = Overrides { rate: None, ..overrides };
        return match other == Overrides::default() {
            true => Ok(overrides),
            false => bad("option", f64::NAN, "a table takes the rate from a push, and no other option"),
        };
    }
    match conf.job.optimizer_of(target.spec.group).overridden(&overrides).map(|o| o.validate()) {
        Some(Ok(())) => Ok(overrides),
        Some(Err(e)) => bad(e.key, e.value, e.range),
        None => {
            let first = set.momentum.or(set.square).or(set.eps).unwrap_or(f64::NAN);
            bad("option", first, "the bucket's optimizer has no such option, or cannot change it")
        }
    }
}

/// More switches than a job's operators can make, so that the next number always exists.
pub const MAX_SWITCHES: u64 = 1 << 53;

/// The refusal of an unknown mode, with as much of the sent text as may be shown.
pub fn bad_mode(got: &str) -> RefusalKind {
    const SHOWN: usize = 40;
    RefusalKind::BadMode(got.chars().filter(|c| !c.is_control()).take(SHOWN).collect())
}

fn pull(shard: &Shard, m: wire::Pull) -> Result<Message, Refusal> {
    if m.done > MAX_STEP {
        return Err(RefusalKind::BadStep { message: "Pull", got: Step(m.done) }.into());
    }
    versions(shard, "have", &m.have)?;
    for (beside, set) in [("final", m.r#final), ("checkpoint", m.checkpoint), ("barrier", m.barrier)] {
        if set && !m.only.is_empty() {
            return Err(RefusalKind::OnlyOfWhole { beside }.into());
        }
    }
    let only = only(shard, &m.only)?;
    let rows = rows(shard, &only, &m.rows)?;
    Ok(Message::Pull {
        only,
        rows,
        done: Step(m.done),
        last: m.r#final,
        checkpoint: m.checkpoint,
        barrier: m.barrier,
        have: m.have.into_iter().map(Version).collect(),
        loss: m.loss,
    })
}

/// The rows of a pull: for each of its buckets the ids, if there are any.
fn rows(shard: &Shard, only: &[usize], rows: &[bytes::Bytes]) -> Result<Vec<Vec<u64>>, Refusal> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let conf = configured(shard)?;
    if rows.len() != only.len() {
        let (buckets, got) = (only.len(), rows.len());
        return Err(RefusalKind::BadVersions { field: "rows", shard: shard.id(), buckets, got }.into());
    }
    let ids = |(local, ids): (&usize, &bytes::Bytes)| {
        let bucket = &conf.buckets[*local];
        let bad = |why: String| {
            Refusal::from(conf.named(*local, RefusalKind::BadPayload { bucket: bucket.id, why }))
        };
        let (ids, rest) = ids.as_chunks::<8>();
        let partition = bucket
            .rows()
            .ok_or_else(|| bad("rows of it are wanted, and it is no partition of a table".into()))?;
        if !rest.is_empty() || ids.len() * partition.spec().dim * 4 > MAX_BUCKET_BYTES {
            return Err(bad(format!(
                "{} rows and {} bytes are wanted; rows have 8 bytes each, and their values at most 1 MiB in all",
                ids.len(),
                rest.len()
            )));
        }
        let ids: Vec<u64> = ids.iter().map(|id| u64::from_le_bytes(*id)).collect();
        match ids.iter().find(|id| partition.spec().partition_of(**id) != partition.place().1) {
            Some(id) => Err(bad(format!("id {id} belongs to another partition"))),
            None => Ok(ids),
        }
    };
    let wanted: usize = rows.iter().map(|ids| ids.len() / ID_BYTES).sum();
    if wanted > MAX_PULLED_IDS {
        let why = format!("{wanted} rows are wanted, and a pull names at most {MAX_PULLED_IDS}");
        let bucket = only.first().map_or(BucketId(0), |at| conf.buckets[*at].id);
        return Err(RefusalKind::BadPayload { bucket, why }.into());
    }
    only.iter().zip(rows).map(ids).collect()
}

/// Checks a reader's request. The shard has a job.
pub fn read(shard: &Shard, m: wire::ReadRequest) -> Result<Read, Refusal> {
    versions(shard, "at_least", &m.at_least)?;
    let only = only(shard, &m.only)?;
    Ok(Read::new(only, m.at_least.into_iter().map(Version).collect()))
}

/// One version for each bucket of the shard, or none at all.
fn versions(shard: &Shard, field: &'static str, list: &[u64]) -> Result<(), Refusal> {
    let (buckets, got) = (shard.configured().map_or(0, |c| c.buckets.len()), list.len());
    if got == 0 || got == buckets {
        return Ok(());
    }
    Err(RefusalKind::BadVersions { field, shard: shard.id(), buckets, got }.into())
}

/// The indices of these buckets on the shard, in rising order.
pub(super) fn only(shard: &Shard, buckets: &[u32]) -> Result<Vec<usize>, Refusal> {
    if !buckets.is_sorted_by(|a, b| a < b) {
        return Err(RefusalKind::BadOnly.into());
    }
    if buckets.is_empty() {
        return Ok(Vec::new());
    }
    let conf = configured(shard)?;
    buckets.iter().map(|b| local(&conf, shard.id(), BucketId(*b))).collect()
}

fn is_leased(shard: &Shard) -> bool {
    shard.configured().is_some_and(|c| c.job.chunks.is_some())
}

fn no_chunks(message: &'static str) -> Refusal {
    RefusalKind::NoChunks { message, why: "this job gives out no chunks of its data" }.into()
}

/// The shard's job and buckets.
fn configured(shard: &Shard) -> Result<Arc<ShardConfig>, Refusal> {
    shard.configured().ok_or_else(|| RefusalKind::NotOpened.into())
}

/// The bucket's index on this shard.
fn local(conf: &ShardConfig, shard: ShardId, id: BucketId) -> Result<usize, Refusal> {
    conf.local(id).ok_or_else(|| RefusalKind::WrongBucket { bucket: id, shard }.into())
}

/// The bucket's index on this shard, if the payload fits it and is finite. A push (which has a step) is in
/// the job's encoding for the bucket, initial state in f32.
fn check(
    conf: &ShardConfig,
    shard: ShardId,
    id: BucketId,
    payload: &Payload,
    step: Option<Step>,
) -> Result<usize, Refusal> {
    let local = local(conf, shard, id)?;
    if let (Some(partition), Some(step)) = (conf.buckets[local].rows(), step) {
        if payload.len() > MAX_BUCKET_BYTES {
            return Err(RefusalKind::BucketLength {
                bucket: id,
                expected: MAX_BUCKET_BYTES,
                got: payload.len(),
            }
            .into());
        }
        return match Rows::read(payload, partition.spec(), partition.place().1) {
            Ok(rows) if rows.all_finite() => Ok(local),
            Ok(_) => Err(RefusalKind::NotFinite { bucket: id, step }.into()),
            Err(e) => Err(RefusalKind::BadPayload { bucket: id, why: e.to_string() }.into()),
        };
    }
    let encoding = if step.is_some() { conf.encoding(local) } else { Encoding::F32 };
    match all_finite(payload, encoding, conf.buckets[local].spec.len) {
        Ok(true) => Ok(local),
        Ok(false) => Err(RefusalKind::NotFinite { bucket: id, step: step.unwrap_or_default() }.into()),
        Err(BadPayload::Length(WrongLength { expected, got, .. })) => {
            Err(RefusalKind::BucketLength { bucket: id, expected, got }.into())
        }
        Err(e @ BadPayload::Form { .. }) => {
            Err(RefusalKind::BadPayload { bucket: id, why: e.to_string() }.into())
        }
    }
}

/// The index of the bucket of a push that skips it.
fn nothing(conf: &ShardConfig, shard: ShardId, id: BucketId, payload: &Payload) -> Result<usize, Refusal> {
    if !payload.is_empty() {
        let why = format!("it is skipped, and has {} bytes", payload.len());
        return Err(RefusalKind::BadPayload { bucket: id, why }.into());
    }
    local(conf, shard, id)
}

/// Converts a reply to its wire form.
pub fn reply(server: u64, reply: Reply) -> FromShard {
    use from_shard::Kind;
    let kind = match reply.taken() {
        Reply::Opened { session, last_seq, clock, initialised, term, founding } => {
            Kind::Opened(wire::Opened {
                session: session.0,
                last_seq: last_seq.0,
                clock: clock.0,
                initialised,
                term,
                server,
                founding,
            })
        }
        Reply::Ack { seq, version } => {
            Kind::Ack(wire::Ack { seq: seq.0, version: version.0, dropped: false })
        }
        Reply::Dropped { seq } => Kind::Ack(wire::Ack { seq: seq.0, version: 0, dropped: true }),
        Reply::Weights(w) => Kind::Weights(wire::Weights {
            bucket: w.bucket.0,
            version: w.version.0,
            payload: w.payload,
            not_modified: w.not_modified,
            last: w.last,
            done: w.done.0,
            slowest: w.slowest.0,
            stop: w.stop,
            finishers: w.finishers.iter().map(|w| w.0).collect(),
            mode: if w.last { w.in_force.mode.to_string() } else { String::new() },
            mode_number: w.in_force.number,
            clock: w.clock.0,
            checkpoint: w.checkpoint,
            save: w.save,
            skipped: if w.last { w.skipped } else { 0 },
            share: w.share.map_or(0, |s| s.place),
            shares: w.share.map_or(0, |s| s.of),
        }),
        Reply::RoundNorm { step, sum_of_squares } => {
            Kind::RoundNorm(wire::RoundNorm { step: step.0, sum_of_squares })
        }
        Reply::Evaluated(Closed { evaluated: e, incomplete }) => Kind::Reported(wire::Reported {
            epoch: e.epoch,
            loss_sum: e.sums.loss_sum,
            correct: e.sums.correct,
            count: e.sums.count,
            stop: e.stop,
            incomplete,
        }),
        Reply::Acquired { request, answer } => {
            let taken = wire::Acquired { request, ..wire::Acquired::default() };
            Kind::Acquired(match answer {
                Answer::Train { epoch, chunk } => {
                    wire::Acquired { kind: wire::Chunk::Train as i32, epoch, chunk, ..taken }
                }
                Answer::Wait => wire::Acquired { kind: wire::Chunk::Wait as i32, ..taken },
                Answer::Over { epochs, write } => {
                    wire::Acquired { kind: wire::Chunk::Over as i32, epoch: epochs, write, ..taken }
                }
                Answer::Ended => wire::Acquired { kind: wire::Chunk::Ended as i32, ..taken },
            })
        }
        Reply::Resumed { clock } => Kind::Resumed(wire::Resumed { clock: clock.0 }),
        Reply::Left => Kind::Left(wire::Left {}),
        Reply::Refused(r) => return r.into(),
    };
    FromShard { kind: Some(kind) }
}

#[cfg(test)]
#[path = "convert_tests.rs"]
mod tests;
