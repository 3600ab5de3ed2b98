//! Frames, cut at any place; and invalid frames.

use super::*;
use paraft_proto::{Heartbeat, PeerRequest, Push, ToShard, limits, to_shard::Kind};
use proptest::prelude::*;

fn push(seq: u64, payload: Vec<u8>) -> WithBulk<ToShard> {
    ToShard { kind: Some(Kind::Push(Push { seq, payload: payload.into(), ..Push::default() })) }.into()
}

fn heartbeat() -> WithBulk<ToShard> {
    ToShard { kind: Some(Kind::Heartbeat(Heartbeat::default())) }.into()
}

/// Their wire bytes.
fn bytes_of<M: Bulk>(messages: &[WithBulk<M>]) -> Vec<u8> {
    let mut out = Outbox::default();
    messages.iter().for_each(|m| out.put(m, None));
    let said = out.bytes();
    let wire = out.pieces().iter().flatten().copied().collect::<Vec<u8>>();
    assert_eq!(wire.len(), said);
    wire
}

/// Reads bytes that arrive in pieces of at most `most`.
fn read<M: Bulk>(wire: &[u8], most: usize) -> Result<Vec<WithBulk<M>>, FrameError> {
    let mut inbox = Inbox::new(limits::MAX_MESSAGE_BYTES, None, Pool::new(1 << 20));
    let (mut rest, mut read) = (wire, Vec::new());
    loop {
        while let Some(m) = inbox.message()? {
            read.push(m);
        }
        if rest.is_empty() {
            return if inbox.is_between() { Ok(read) } else { Err(FrameError::CutShort) };
        }
        let space = inbox.space();
        let n = space.len().min(most).min(rest.len());
        space[..n].copy_from_slice(&rest[..n]);
        inbox.filled(n);
        rest = &rest[n..];
    }
}

fn a_message() -> impl Strategy<Value = WithBulk<ToShard>> {
    prop_oneof![
        (any::<u64>(), prop::collection::vec(any::<u8>(), 0..9000)).prop_map(|(seq, p)| push(seq, p)),
        Just(heartbeat()),
    ]
}

proptest! {
    #[test]
    fn messages_come_as_they_went_wherever_they_are_cut(
        messages in prop::collection::vec(a_message(), 0..6), most in 1usize..20_000,
    ) {
        let wire = bytes_of(&messages);
        prop_assert_eq!(read::<ToShard>(&wire, most), Ok(messages));
        for cut in [1, wire.len() / 2, wire.len().saturating_sub(1)] {
            if let Some(short @ [_, ..]) = wire.get(..cut) {
                // It ends between two messages, or is cut short; no message is invented.
                let whole = read::<ToShard>(short, most);
                prop_assert!(whole.as_ref().is_ok_and(|m| bytes_of(m) == short) || whole == Err(FrameError::CutShort));
            }
        }
    }

    #[test]
    fn what_is_sent_in_part_goes_on_where_it_stopped(
        messages in prop::collection::vec(a_message(), 1..4), parts in prop::collection::vec(1usize..9000, 1..40),
    ) {
        let wire = bytes_of(&messages);
        let mut out = Outbox::default();
        messages.iter().for_each(|m| out.put(m, None));
        let (mut sent, mut parts) = (Vec::new(), parts.into_iter().cycle());
        while out.bytes() > 0 {
            let all = out.pieces().iter().flatten().copied().collect::<Vec<u8>>();
            let n = parts.next().unwrap_or(1).min(all.len());
            sent.extend_from_slice(&all[..n]);
            out.sent(n);
        }
        prop_assert_eq!(sent, wire);
    }

    #[test]
    fn no_bytes_are_too_much_for_it(wire in prop::collection::vec(any::<u8>(), 0..600), most in 1usize..100) {
        let _ = read::<ToShard>(&wire, most);
        let _ = read::<PeerRequest>(&wire, most);
    }
}

#[test]
fn length_beyond_bounds_is_refused_before_allocation() {
    let frame = |header: u32, bulks: &[u32]| {
        let mut wire = [header, bulks.len() as u32].map(u32::to_le_bytes).concat();
        for b in bulks {
            wire.extend_from_slice(&b.to_le_bytes());
            wire.extend_from_slice(&INLINE.to_le_bytes());
        }
        wire
    };
    for (what, wire) in [
        ("a header", frame(u32::MAX - 3, &[])),
        ("a number of payloads", [0u32, u32::MAX].map(u32::to_le_bytes).concat()),
        ("a message", frame(0, &[u32::MAX])),
        ("a message", frame(0, &[1 << 20, 1 << 20])),
    ] {
        let got = read::<PeerRequest>(&wire, 100);
        assert!(matches!(got, Err(FrameError::TooLong { what: w, .. }) if w == what), "{what}: {got:?}");
    }
    // A message with many entries has a long header; a worker's has not.
    let long = frame(MAX_HEADER_BYTES as u32 + 1, &[]);
    let refused = read::<ToShard>(&long, 100);
    assert!(matches!(refused, Err(FrameError::TooLong { what: "a header", .. })), "{refused:?}");
    assert!(matches!(read::<PeerRequest>(&long, 100), Err(FrameError::CutShort)));
}

#[test]
fn a_message_has_as_many_payloads_as_its_kind() {
    let mut more = push(1, vec![1; 9]);
    more.bulk.push(vec![2; 9].into());
    let mut beside = heartbeat();
    beside.bulk.push(vec![1].into());
    let mut none = push(1, vec![1]);
    none.bulk.clear();
    for (m, expected, got) in [(more, 1, 2), (beside, 0, 1), (none, 1, 0)] {
        assert_eq!(
            read(&bytes_of(&[m]), 1000),
            Err::<Vec<WithBulk<ToShard>>, _>(FrameError::Bulks { expected, got })
        );
    }
    // A repeated field has any number of them.
    for n in [0, 1, 5] {
        let message = PeerRequest { group: 7, ..PeerRequest::default() };
        let m = WithBulk { message, bulk: vec![vec![3; 5000].into(); n] };
        assert_eq!(read(&bytes_of(std::slice::from_ref(&m)), 1000), Ok(vec![m]));
    }
}

#[test]
fn a_sign_of_life_is_no_message() {
    let mut out = Outbox::default();
    out.put_alive();
    out.put(&heartbeat(), None);
    out.put_alive();
    let wire = out.pieces().iter().flatten().copied().collect::<Vec<u8>>();
    assert_eq!(read(&wire, 3), Ok(vec![heartbeat()]));
}

#[test]
fn bulk_lands_in_a_buffer_of_its_own_size() {
    let sent = push(1, (0..100_000u32).map(|i| i as u8).collect());
    let got = read::<ToShard>(&bytes_of(std::slice::from_ref(&sent)), usize::MAX).expect("whole");
    assert_eq!(got[0], sent);
    assert_eq!(got[0].bulk[0].pieces().len(), 1);
}
