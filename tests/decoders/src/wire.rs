//! Messages of workers and servers.

use crate::input::{Input, payload, pieces};
use paraft_common::optim::Overrides;
use paraft_common::{
    BucketId, Encoding, Mode, Payload, Seq, Step, Version, WorkerId,
    config::{ChunkPlan, MAX_STEP, ServerJob},
    encoding::{Values, all_finite, sum_of_squares},
    optim::OptimizerConfig,
};
use paraft_common::{SessionId, ShardId};
use paraft_lanes::{Pool, frame};
use paraft_proto::{
    CheckpointPart, CheckpointRequest, DescribeReply, FromShard, NoteCheckpointsRequest, PeerReply,
    PeerRequest, ReportReply, ReportRequest, ToShard, WithBulk,
    bulk::{Bulk, decode::Inbox, encode::Outbox},
    limits::MAX_MESSAGE_BYTES,
    no_leader,
};
use paraft_server::{
    rpc::{
        control::{from_directive, from_report, to_report},
        convert, jobs,
        shape::shape_of,
    },
    shard::{
        Command, Contribution, InitPart, Outcome, Proposal, Shard, batched::BatchedPushes, begin::JOB_FORM,
        leader::Message,
    },
};
use prost::{
    Message as _,
    encoding::{WireType, encode_key, encode_varint},
};
use std::sync::{Arc, LazyLock};

/// A stream of messages in pieces. Bits: the type of message (3), whether the rest is one message that is to be framed,
/// whether that is to be made long: longer ones are taken apart by code of ours, shorter ones by prost.
pub fn bulk(data: &[u8]) {
    let mut input = Input(data);
    let (how, cuts) = (input.byte(), [input.word(), input.word(), input.word()]);
    let (framed, long, rest) = (how & 8 > 0, how & 16 > 0, input.rest());
    let read = match how & 7 {
        0 => stream::<ToShard>,
        1 => stream::<FromShard>,
        2 => stream::<PeerRequest>,
        3 => stream::<CheckpointPart>,
        4 => stream::<PeerReply>,
        _ => stream::<CheckpointRequest>,
    };
    read(rest, cuts, framed, long);
}

/// No message has this field: readers skip it.
const UNKNOWN_FIELD: u32 = 100;
/// Longer than what is copied and left to prost (`SMALL` of `proto/src/bulk/decode.rs`).
const LONG: usize = 17 << 10;

fn stream<M: Bulk>(bytes: &[u8], cuts: [u16; 3], framed: bool, long: bool) {
    if !framed {
        let mut inbox = Inbox::new(MAX_MESSAGE_BYTES);
        for piece in pieces(bytes, cuts) {
            inbox.put(piece);
            while let Ok(Some(m)) = inbox.message::<M>() {
                there_and_back(&m);
            }
        }
        return;
    }
    let mut message = bytes.to_vec();
    if long {
        encode_key(UNKNOWN_FIELD, WireType::LengthDelimited, &mut message);
        encode_varint(LONG as u64, &mut message);
        message.resize(message.len() + LONG, 7);
    }
    let mut frame = vec![0];
    frame.extend((message.len() as u32).to_be_bytes());
    frame.extend(&message);
    let mut inbox = Inbox::new(MAX_MESSAGE_BYTES);
    pieces(&frame, cuts).into_iter().for_each(|p| inbox.put(p));
    // Where the cuts are makes no difference, and prost has read the same wherever we have read something.
    let read = inbox.message::<M>();
    let mut whole = Inbox::new(MAX_MESSAGE_BYTES);
    whole.put(frame.into());
    assert_eq!(
        read.as_ref().ok().map(Option::as_ref).map(plain),
        whole.message::<M>().as_ref().ok().map(Option::as_ref).map(plain)
    );
    if let Ok(m) = &read {
        let m = m.as_ref().expect("a whole message");
        let stock: WithBulk<M> = M::decode(&message[..]).expect("what we have read is protobuf").into();
        assert_eq!(plain(Some(m)), plain(Some(&stock)), "prost has read something else");
        there_and_back(m);
    }
}

/// A message as bytes: a NaN is not equal to itself.
fn plain<M: Bulk>(m: Option<&WithBulk<M>>) -> (Vec<u8>, Vec<Vec<u8>>) {
    let Some(m) = m else { return Default::default() };
    (m.message.encode_to_vec(), m.bulk.iter().map(|p| p.to_bytes().to_vec()).collect())
}

fn there_and_back<M: Bulk>(m: &WithBulk<M>) {
    let mut out = Outbox::default();
    out.put(m);
    let mut inbox = Inbox::new(2 * MAX_MESSAGE_BYTES);
    std::iter::from_fn(|| out.pop()).for_each(|p| inbox.put(p));
    let back = inbox.message::<M>().expect("what was sent can be read").expect("and is whole");
    assert_eq!(plain(Some(&back)), plain(Some(m)));
    assert!(inbox.is_empty());
}

/// Frames of a lane, read in parts. Bits: the type of message (1).
pub fn lane(data: &[u8]) {
    let mut input = Input(data);
    let (how, most) = (input.byte(), usize::from(input.word()).max(1));
    match how & 1 {
        0 => frames::<ToShard>(input.rest(), most),
        _ => frames::<FromShard>(input.rest(), most),
    }
}

fn frames<M: Bulk>(bytes: &[u8], most: usize) {
    static POOL: LazyLock<Arc<Pool>> = LazyLock::new(|| Pool::new(1 << 20));
    let read = |mut rest: &[u8], most: usize| {
        let (mut inbox, mut read) = (frame::Inbox::new(MAX_MESSAGE_BYTES, None, POOL.clone()), Vec::new());
        loop {
            match inbox.message::<M>() {
                Ok(Some(m)) => read.push(m),
                Ok(None) if rest.is_empty() => return (read, inbox.is_between()),
                Ok(None) => {
                    let space = inbox.space();
                    let n = space.len().min(most).min(rest.len());
                    space[..n].copy_from_slice(&rest[..n]);
                    inbox.filled(n);
                    rest = &rest[n..];
                }
                Err(_) => return (read, false),
            }
        }
    };
    let (messages, _) = read(bytes, most);
    let mut out = frame::Outbox::default();
    messages.iter().for_each(|m| out.put(m, None));
    let written: Vec<u8> = out.pieces().iter().flatten().copied().collect();
    let (back, whole) = read(&written, usize::MAX);
    assert!(whole, "what was sent can be read");
    let plain = |all: &[WithBulk<M>]| all.iter().map(|m| plain(Some(m))).collect::<Vec<_>>();
    // A message without a field is a sign of life.
    let some: Vec<_> = messages.into_iter().filter(|m| m.message.encoded_len() + m.bulk.len() > 0).collect();
    assert_eq!(plain(&back), plain(&some));
}

/// The job of a shard that a target writes to.
pub fn small_job(encoding: Encoding, leased: bool) -> ServerJob {
    let mode = if leased { Mode::Ssp(2) } else { Mode::Asp };
    let job = ServerJob::new("fuzz", mode, 10, 4);
    ServerJob {
        encoding,
        buffers_len: 3,
        optimizer: if leased { toml_of("kind = \"adam\"\nlr = 0.1") } else { OptimizerConfig::sgd(0.5) },
        chunks: leased.then_some(ChunkPlan { per_epoch: 5, epochs: 2 }),
        ..job
    }
}

fn toml_of(text: &str) -> OptimizerConfig {
    toml::from_str(text).expect("an optimizer")
}

/// Shard 0 of 2 with a job: buckets 0 (4 parameters), 2 (2 parameters).
pub fn shard(encoding: Encoding, leased: bool) -> Shard {
    let shard = Shard::new(ShardId(0), 2);
    let job = small_job(encoding, leased).to_toml().expect("a job");
    assert_eq!(shard.apply(&Command::Admit { form: JOB_FORM, job }.into()), Outcome::Done);
    shard
}

static SHARDS: LazyLock<Vec<Shard>> = LazyLock::new(|| {
    Encoding::ALL.into_iter().flat_map(|e| [false, true].map(|leased| shard(e, leased))).collect()
});

/// A worker's message against a shard: what comes through fits it, and can be applied.
pub fn push(data: &[u8]) {
    let mut input = Input(data);
    let which = usize::from(input.byte()) % SHARDS.len();
    let cuts = [input.word(), input.word(), input.word()];
    let Ok(mut message) = ToShard::decode(input.rest()) else { return };
    let bulk = message.detach();
    let cut = |p: Payload| payload(&p.to_bytes(), cuts);
    let m = WithBulk { message, bulk: bulk.into_iter().map(cut).collect() };
    let (ours, leased) = (&SHARDS[which], !which.is_multiple_of(2));
    let conf = ours.configured().expect("configured");
    let Ok(Some(message)) = convert::message(ours, m) else { return };
    match message {
        Message::Push { payload, overrides, skip: true, .. } => {
            assert!(payload.is_empty() && overrides == Overrides::default());
        }
        Message::Push { seq, step, bucket, pulled, sum_of_squares, payload, overrides, .. } => {
            let rate = overrides.rate;
            assert!(rate.is_none_or(|r| r >= 0.0 && (r as f32).is_finite()));
            let encoding = conf.encoding(bucket);
            let len = conf.buckets[bucket].spec.len;
            assert_eq!(all_finite(&payload, encoding, len), Ok(true));
            assert!(sum_of_squares.is_finite() && sum_of_squares >= 0.0);
            let bucket = conf.buckets[bucket].id;
            apply_push(encoding, leased, bucket, (seq, step, pulled), payload);
        }
        Message::Init { bucket, part, payload } => {
            let local = conf.local(bucket).expect("a bucket of this shard");
            assert_eq!(all_finite(&payload, Encoding::F32, conf.buckets[local].spec.len), Ok(true));
            if let InitPart::Weights { version, clock } = part {
                assert!(version.0 <= MAX_STEP && clock >= 0.0 && clock <= MAX_STEP as f64);
            }
            let fresh = shard(Encoding::F32, leased);
            let proposal = Proposal { command: Command::Init { bucket, part }, payload };
            assert_eq!(fresh.apply(&proposal), Outcome::Done, "it was let through");
        }
        Message::Norm { sum_of_squares, .. } => {
            assert!(sum_of_squares.is_finite() && sum_of_squares >= 0.0);
        }
        Message::Pull { done, have, .. } => {
            assert!(done.0 <= MAX_STEP && (have.is_empty() || have.len() == conf.buckets.len()));
        }
        Message::Advance { step } => assert!(step.0 <= MAX_STEP),
        Message::Acquire { request, .. } => assert!(leased && request > 0),
        Message::Pause | Message::Resume { .. } => assert!(leased),
        _ => {}
    }
}

fn apply_push(
    encoding: Encoding,
    leased: bool,
    bucket: BucketId,
    (seq, step, pulled): (Seq, Step, Version),
    payload: Payload,
) {
    let shard = shard(encoding, leased);
    let worker = WorkerId(1);
    let Outcome::Joined { session, .. } =
        shard.apply(&Command::Join { worker, session: SessionId(1) }.into())
    else {
        panic!("a worker may join")
    };
    assert_eq!(session, SessionId(1));
    let contributions = vec![Contribution { worker, session, seq, step, pulled, samples: 1 }];
    let command = Command::Update { bucket, contributions, encoding, factor: 1.0, closes: false, rate: None };
    let outcome = shard.apply(&Proposal { command, payload });
    // Step 0 is "nothing done yet": admission refuses it, and apply takes it for one that is in.
    assert_eq!(outcome, Outcome::Updated { version: Version(u64::from(step.0 > 0)), applied: step.0 > 0 });
}

/// What servers and tools tell each other about the fleet.
pub fn control_wire(data: &[u8]) {
    let mut input = Input(data);
    let which = input.byte();
    let rest = input.rest();
    match which % 4 {
        0 => {
            let Ok(request) = ReportRequest::decode(rest) else { return };
            let report = from_report(request);
            // What this version knows of it goes out again as it is.
            let again = from_report(to_report(1, &report));
            assert_eq!(format!("{again:?}"), format!("{report:?}"));
        }
        1 => {
            let Ok(request) = NoteCheckpointsRequest::decode(rest) else { return };
            let n = request.held.len();
            if let Ok(held) = jobs::held_in(request) {
                assert_eq!(held.len(), n);
                assert!(held.iter().all(|h| h.loss.is_none_or(f64::is_finite)));
            }
        }
        2 => {
            let Ok(reply) = ReportReply::decode(rest) else { return };
            reply.directives.iter().for_each(|d| _ = from_directive(d));
        }
        _ => {
            let Ok(mut reply) = DescribeReply::decode(rest) else { return };
            let _ = shape_of(reply.shape.as_ref());
            let _ = (reply.can_agree(), reply.silent().count(), reply.draining().count());
            let _ = reply.depend_on(1, &[2]);
            reply.note_silent(1);
            let _ = no_leader(&[("a:1".to_string(), Ok(reply))]);
        }
    }
}

/// The values of a payload, whatever its encoding, its length and its cuts.
pub fn encodings(data: &[u8]) {
    let mut input = Input(data);
    let how = input.byte();
    let encoding = Encoding::ALL[usize::from(how & 7) % Encoding::ALL.len()];
    let (count, split) = (usize::from(input.word()), input.word());
    let cuts = [input.word(), input.word(), input.word()];
    let mut bytes = input.rest().to_vec();
    if how & 8 > 0 {
        // As many bytes as the count needs: the fuzzer need not find a long input to see two blocks with a scale.
        let n = encoding.encoded_len(count);
        bytes = bytes.iter().copied().cycle().take(if bytes.is_empty() { 0 } else { n }).collect();
    }
    let cut = payload(&bytes, cuts);
    let whole = Payload::from(bytes.clone());
    // Two pushes of a round in one log entry; it has bounds of its own, and its sum those of the bucket.
    if let Ok(batched) = BatchedPushes::read(&cut, encoding, 2, count) {
        assert_eq!(batched.sum().len(), 4 * count);
    }
    // The length alone decides where no places and no stretches are in the payload.
    let exact = !matches!(encoding, Encoding::TopK(_) | Encoding::PowerSgd(_));
    let Ok(mut values) = Values::new(&cut, encoding, count) else {
        assert!(!exact || encoding.encoded_len(count) != bytes.len());
        assert!(all_finite(&cut, encoding, count).is_err() && sum_of_squares(&cut, encoding, count).is_err());
        return;
    };
    assert!(bytes.len() <= encoding.encoded_len(count));
    assert!(bytes.len() == encoding.encoded_len(count) || matches!(encoding, Encoding::PowerSgd(_)));
    let mut out = vec![0f32; count];
    // In two goes, against all at once.
    let middle = (usize::from(split) * count) >> 16;
    let (first, second) = out.split_at_mut(middle);
    assert_eq!(values.read(first), Ok(()));
    assert_eq!(values.read(second), Ok(()));
    assert!(values.read(&mut [0.0]).is_err() && values.left() == 0);
    let mut one = vec![0f32; count];
    assert_eq!(Values::new(&whole, encoding, count).expect("as before").read(&mut one), Ok(()));
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&out), bits(&one));
    let mut sum = vec![0f32; count];
    assert_eq!(Values::new(&cut, encoding, count).expect("as before").add_to(&mut sum), Ok(()));
    assert!(sum.iter().zip(&out).all(|(s, v)| s == v || v.is_nan()));

    let finite = out.iter().all(|v| v.is_finite());
    assert_eq!(all_finite(&cut, encoding, count), Ok(finite));
    let squares = |p| sum_of_squares(p, encoding, count).expect("as before");
    let (of_cut, of_whole) = (squares(&cut), squares(&whole));
    // A NaN has many forms.
    assert!(of_cut.to_bits() == of_whole.to_bits() || of_cut.is_nan() && of_whole.is_nan());
    if finite {
        let plain: f64 = out.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
        assert!((plain - of_cut).abs() <= plain * 1e-9, "{plain} {of_cut}");
        // Narrow values are values of an f32 too; of the others scale or places may come out as others.
        if matches!(encoding, Encoding::F32 | Encoding::Bf16 | Encoding::F16) {
            let mut again = Vec::new();
            encoding.encode(&out, &mut again);
            assert_eq!(again, bytes);
        }
    }
}
