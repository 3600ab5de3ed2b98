//! Messages with bulk are ordinary protobuf, however they are cut in transit.

use bytes::Bytes;
use paraft_common::Payload;
use paraft_proto::{
    Ack, CheckpointPart, FromShard, Heartbeat, Init, PeerRequest, Piece, Push, ToShard, Weights,
    bulk::{
        Bulk, WithBulk,
        decode::{BulkError, Inbox},
        encode::Outbox,
    },
    checkpoint_part, from_shard, to_shard,
};
use proptest::prelude::*;
use prost::Message;

const LIMIT: usize = 1 << 20;

/// The wire bytes of `messages`.
fn sent<M: Bulk>(messages: &[WithBulk<M>]) -> Vec<u8> {
    let mut out = Outbox::default();
    messages.iter().for_each(|m| out.put(m));
    let pieces: Vec<Bytes> = std::iter::from_fn(|| out.pop()).collect();
    assert!(pieces.iter().all(|p| !p.is_empty()), "h2 takes empty frames for an attack");
    pieces.into_iter().flatten().collect()
}

/// gRPC's frame around a message that prost has encoded as a whole.
fn framed(message: &impl Message) -> Vec<u8> {
    let body = message.encode_to_vec();
    let mut framed = vec![0];
    framed.extend((body.len() as u32).to_be_bytes());
    framed.extend(body);
    framed
}

/// Reads everything, handed over in pieces that end at each of `cuts`.
fn received<M: Bulk>(bytes: &[u8], cuts: &[prop::sample::Index]) -> Result<Vec<WithBulk<M>>, BulkError> {
    let mut cuts: Vec<usize> =
        cuts.iter().map(|c| c.index(bytes.len() + 1)).chain([0, bytes.len()]).collect();
    cuts.sort_unstable();
    let mut inbox = Inbox::new(LIMIT);
    let mut messages = Vec::new();
    for w in cuts.windows(2) {
        inbox.put(Bytes::copy_from_slice(&bytes[w[0]..w[1]]));
        while let Some(m) = inbox.message()? {
            messages.push(m);
        }
    }
    if inbox.is_empty() { Ok(messages) } else { Err(BulkError::CutShort) }
}

fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 % 251) as u8).collect()
}

fn push(len: usize) -> ToShard {
    let push = Push {
        seq: 300,
        step: 7,
        bucket: 3,
        version: 70_000,
        sum_of_squares: 0.5,
        payload: payload(len).into(),
        samples: 64,
        rate: Some(0.25),
        overrides: None,
        clipped: false,
        skip: true,
    };
    ToShard { kind: Some(to_shard::Kind::Push(push)) }
}

fn weights(len: usize) -> FromShard {
    let w = Weights {
        bucket: 9,
        version: 5,
        payload: payload(len).into(),
        last: true,
        done: 6,
        slowest: 5,
        stop: true,
        finishers: vec![1, 2, 300],
        checkpoint: true,
        not_modified: false,
        clock: 6,
        mode: "ssp:4".into(),
        mode_number: 2,
        save: true,
        skipped: 3,
        share: 1,
        shares: 300,
    };
    FromShard { kind: Some(from_shard::Kind::Weights(w)) }
}

/// Lengths on both sides of every threshold.
const LENGTHS: [usize; 9] = [0, 1, 100, 4096, 4097, 16_000, 16_384, 16_500, 300_001];

/// The message is read back unchanged, and the bytes are what prost would read: with the payload in its
/// field.
fn there_and_back<M: Bulk + Clone + PartialEq + std::fmt::Debug>(message: M) {
    let sent = sent(&[WithBulk::from(message.clone())]);
    assert_eq!(M::decode(&sent[5..]).expect("protobuf"), message, "a stock reader");
    assert_eq!(sent.len(), framed(&message).len());
    let back = received::<M>(&framed(&message), &[]).expect("a message");
    assert_eq!(back, [WithBulk::from(message.clone())], "from a stock writer");
    assert_eq!(received::<M>(&sent, &[]).expect("a message"), [WithBulk::from(message)]);
}

#[test]
fn a_stock_client_and_ours_read_each_other() {
    for len in LENGTHS {
        there_and_back(push(len));
        let init = Init {
            bucket: 1,
            payload: payload(len).into(),
            part: 2,
            version: 8,
            clock: 1.5,
            ..Init::default()
        };
        there_and_back(ToShard { kind: Some(to_shard::Kind::Init(init)) });
        there_and_back(weights(len));
        let piece = Piece { bucket: 1, part: 0, payload: payload(len).into(), version: 3, clock: 2.5 };
        there_and_back(CheckpointPart { kind: Some(checkpoint_part::Kind::Piece(piece)) });
        let payloads = vec![payload(len).into(), Bytes::new(), payload(10).into()];
        let call = PeerRequest {
            group: 1,
            from: 2,
            to: 3,
            call: 1,
            header: payload(200).into(),
            fleet: 0,
            payloads,
        };
        there_and_back(call);
    }
    there_and_back(ToShard { kind: Some(to_shard::Kind::Heartbeat(Heartbeat::default())) });
    there_and_back(FromShard {
        kind: Some(from_shard::Kind::Ack(Ack { seq: 1, version: 2, dropped: false })),
    });
    there_and_back(ToShard { kind: None });
}

#[test]
fn the_pieces_that_were_received_are_the_payload() {
    let bytes = Bytes::from(framed(&push(300_000)));
    let mut inbox = Inbox::new(LIMIT);
    let pieces: Vec<Bytes> =
        (0..bytes.len()).step_by(65_536).map(|i| bytes.slice(i..bytes.len().min(i + 65_536))).collect();
    pieces.iter().cloned().for_each(|p| inbox.put(p));
    let m: WithBulk<ToShard> = inbox.message().expect("read").expect("whole");
    let payload = m.payload();
    assert_eq!(payload.pieces().len(), pieces.len());
    assert_eq!(payload.pieces()[1].as_ptr(), pieces[1].as_ptr(), "nothing was copied");
}

#[test]
fn small_kept_message_releases_the_receive_buffer() {
    let bytes = Bytes::from([framed(&push(1000)), vec![0; 1 << 20]].concat());
    let mut inbox = Inbox::new(LIMIT);
    inbox.put(bytes.slice(..framed(&push(1000)).len()));
    let m: WithBulk<ToShard> = inbox.message().expect("read").expect("whole");
    let at = m.payload().to_bytes().as_ptr() as usize;
    let buffer = bytes.as_ptr() as usize;
    assert!(!(buffer..buffer + bytes.len()).contains(&at));
}

#[test]
fn what_is_sent_shares_the_payload() {
    let bytes = Bytes::from(payload(100_000));
    let m = ToShard { kind: Some(to_shard::Kind::Push(Push { payload: bytes.clone(), ..Push::default() })) };
    let mut out = Outbox::default();
    out.put(&WithBulk::from(m));
    let pieces: Vec<Bytes> = std::iter::from_fn(|| out.pop()).collect();
    assert!(pieces.iter().any(|p| p.as_ptr() == bytes.as_ptr() && p.len() == bytes.len()), "{pieces:?}");
}

#[test]
fn a_length_beyond_the_limit_is_refused_before_its_bytes_come() {
    let mut inbox = Inbox::new(LIMIT);
    inbox.put(Bytes::from_static(&[0, 0xff, 0xff, 0xff, 0xff]));
    assert_eq!(inbox.message::<ToShard>(), Err(BulkError::TooLong { len: u32::MAX as usize, limit: LIMIT }));
    let mut inbox = Inbox::new(LIMIT);
    inbox.put(Bytes::from_static(&[1, 0, 0, 0, 1, 0]));
    assert_eq!(inbox.message::<ToShard>(), Err(BulkError::Compressed));
}

#[test]
fn message_with_two_kinds_or_overlong_field_is_refused() {
    let two = [framed(&push(20_000))[5..].to_vec(), framed(&push(20_000))[5..].to_vec()].concat();
    let mut bytes = vec![0];
    bytes.extend((two.len() as u32).to_be_bytes());
    bytes.extend(two);
    assert!(matches!(received::<ToShard>(&bytes, &[]), Err(BulkError::Malformed(_))));
    let mut long = framed(&push(20_000));
    long.truncate(15_000 + 5);
    long[1..5].copy_from_slice(&15_000u32.to_be_bytes());
    assert!(received::<ToShard>(&long, &[]).is_err());
    let mut long = framed(&push(20_000));
    long.truncate(18_000 + 5);
    long[1..5].copy_from_slice(&18_000u32.to_be_bytes());
    assert!(matches!(received::<ToShard>(&long, &[]), Err(BulkError::Malformed(_))));
}

/// Whatever came before it: the payload of a kind that a later kind replaced belongs to nothing.
#[test]
fn the_last_kind_counts_and_has_its_own_payload() {
    let beat = ToShard { kind: Some(to_shard::Kind::Heartbeat(Heartbeat::default())) };
    for len in [100, 20_000] {
        let both = [push(len).encode_to_vec(), beat.encode_to_vec()].concat();
        let mut bytes = vec![0];
        bytes.extend((both.len() as u32).to_be_bytes());
        bytes.extend(both);
        assert_eq!(received(&bytes, &[]), Ok(vec![WithBulk::from(beat.clone())]), "{len}");
    }
}

proptest! {
    #[test]
    fn the_cuts_change_nothing(
        lengths in prop::collection::vec(0usize..40_000, 1..5),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let messages: Vec<WithBulk<ToShard>> = lengths.iter().map(|l| push(*l).into()).collect();
        let bytes = sent(&messages);
        prop_assert_eq!(received::<ToShard>(&bytes, &cuts).expect("messages"), messages);
    }

    #[test]
    fn what_is_in_pieces_goes_out_whole(
        len in 0usize..100_000, cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let bytes = payload(len);
        let mut at: Vec<usize> = cuts.iter().map(|c| c.index(len + 1)).chain([0, len]).collect();
        at.sort_unstable();
        let pieces: Payload = at.windows(2).map(|w| Bytes::copy_from_slice(&bytes[w[0]..w[1]])).collect();
        let empty = PeerRequest { group: 1, ..PeerRequest::default() };
        let out = sent(&[WithBulk { message: empty.clone(), bulk: vec![pieces.clone(), pieces] }]);
        let whole = PeerRequest { payloads: vec![bytes.clone().into(), bytes.into()], ..empty };
        prop_assert_eq!(PeerRequest::decode(&out[5..]).expect("protobuf"), whole);
    }

    #[test]
    fn damaged_bytes_are_read_or_refused(
        at in any::<prop::sample::Index>(), value in any::<u8>(), keep in any::<prop::sample::Index>(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
    ) {
        for mut bytes in [sent(&[WithBulk::from(push(20_000))]), sent(&[WithBulk::from(push(100))])] {
            let head = bytes.len().min(60);
            bytes[at.index(head)] = value;
            let _ = received::<ToShard>(&bytes, &cuts);
            let _ = received::<FromShard>(&bytes, &cuts);
            let _ = received::<PeerRequest>(&bytes, &cuts);
            let _ = received::<ToShard>(&bytes[..keep.index(bytes.len())], &cuts);
        }
    }
}
