//! Tests of `pieces`.

use super::*;
use paraft_proto::Refused;

fn piece(bucket: u32, payload: &[u8]) -> VersionMessage {
    let piece = VersionPiece {
        bucket,
        version: 3,
        digest: xxh3_64(payload),
        payload: payload.to_vec().into(),
        code: Code::Whole.number(),
    };
    VersionMessage { kind: Some(Kind::Piece(piece)) }
}

fn of(step: u64, reached: u64) -> VersionOf {
    VersionOf { step, reached, ..VersionOf::default() }
}

fn pieces() -> Pieces<'static> {
    Pieces { of: of(7, 6), buckets: &[1, 4], width: 2, old: None, arrived: Vec::new() }
}

fn why(result: Result<(), Failed>) -> String {
    match result {
        Err(Failed::Replica(why)) => why,
        Err(Failed::Passed(reached)) => format!("passed {reached}"),
        Err(Failed::Ended(last)) => format!("ended {last}"),
        Err(Failed::OtherFounding) => "founding".into(),
        Err(Failed::Late) => "late".into(),
        Err(Failed::Error(error)) => error.to_string(),
        Ok(()) => "fine".into(),
    }
}

#[test]
fn damaged_swapped_and_missing_pieces_are_noticed() {
    let mut whole = pieces();
    assert_eq!(why(whole.take(VersionMessage { kind: Some(Kind::Of(of(7, 7))) })), "fine", "it waits");
    assert_eq!(why(whole.take(piece(1, b"first"))), "fine");
    assert_eq!(why(whole.take(piece(4, b"last"))), "fine");
    assert_eq!(why(whole.take(piece(4, b"last"))), "bucket 4 is out of place");
    assert_eq!(why(whole.take(VersionMessage { kind: Some(Kind::Of(of(7, 9))) })), "fine", "the end");
    assert_eq!(whole.whole().map(|(of, all)| (of.reached, all.len())).ok(), Some((9, 2)));
    assert_eq!(why(pieces().take(piece(4, b"swapped"))), "bucket 4 is out of place");
    for bit in [0, 17, 39] {
        let mut flipped = piece(1, b"first");
        if let Some(Kind::Piece(p)) = &mut flipped.kind {
            let mut bytes = p.payload.to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            p.payload = bytes.into();
        }
        assert_eq!(why(pieces().take(flipped)), "bucket 1 was damaged on its way");
    }
    let mut early = pieces();
    assert_eq!(why(early.take(piece(1, b"first"))), "fine");
    assert_eq!(
        why(early.take(VersionMessage { kind: Some(Kind::Of(of(7, 7))) })),
        "a message is out of place"
    );
    assert_eq!(why(early.whole().map(drop)), "its answer ended early");
    assert_eq!(
        why(pieces().take(VersionMessage { kind: Some(Kind::Of(of(8, 8))) })),
        "a message is out of place"
    );
}

#[test]
fn passed_version_says_how_far_the_shard_is() {
    let mut waits = pieces();
    assert_eq!(why(waits.take(VersionMessage { kind: Some(Kind::Of(of(7, 9))) })), "fine");
    let refused = Refused { kind: WireKind::NoVersion as i32, ..Refused::default() };
    assert_eq!(why(waits.take(VersionMessage { kind: Some(Kind::Refused(refused)) })), "passed 9");
    let over = VersionOf { over: true, ..of(7, 6) };
    assert_eq!(why(pieces().take(VersionMessage { kind: Some(Kind::Of(over)) })), "ended 6");
}

/// What a server sends of `new` to a reader that has `old`.
fn difference(bucket: u32, old: &[u8], new: &[u8]) -> VersionMessage {
    let (code, bytes) = paraft_common::difference::encode(2, old, new).expect("it is shorter");
    let piece =
        VersionPiece { bucket, version: 4, digest: xxh3_64(new), payload: bytes.into(), code: code.number() };
    VersionMessage { kind: Some(Kind::Piece(piece)) }
}

#[test]
fn difference_to_other_values_than_the_readers_is_noticed() {
    let [old, new, other] = [(1, 9), (2, 9), (1, 7)].map(|(some, rest)| {
        let values = (0..400u16).map(|i| if i % 50 == 0 { some } else { rest });
        Bytes::from(values.flat_map(u16::to_le_bytes).collect::<Vec<_>>())
    });
    let has = BTreeMap::from([(1, old.clone()), (4, old.clone())]);
    let pieces = || Pieces { of: of(8, 8), buckets: &[1, 4], width: 2, old: Some(&has), arrived: Vec::new() };
    let mut whole = pieces();
    assert_eq!(why(whole.take(difference(1, &old, &new))), "fine");
    assert_eq!(why(whole.take(difference(4, &old, &old))), "fine", "nothing has changed");
    let arrived = whole.whole().map(|(_, all)| all).unwrap_or_default();
    assert_eq!(arrived.iter().map(|a| &a.values).collect::<Vec<_>>(), [&new, &old]);
    assert!(arrived[0].received < 100 && arrived[1].received == 0, "{}", arrived[0].received);
    // An old piece under a new number, or a swapped one: its difference is to other values.
    assert_eq!(why(pieces().take(difference(1, &other, &new))), "bucket 1 was damaged on its way");
    for at in 0..arrived[0].received as usize {
        let mut flipped = difference(1, &old, &new);
        if let Some(Kind::Piece(p)) = &mut flipped.kind {
            let mut bytes = p.payload.to_vec();
            bytes[at] ^= 1 << (at % 8);
            p.payload = bytes.into();
        }
        let why = why(pieces().take(flipped));
        assert!(why.starts_with("bucket 1") || why == "fine", "{why}");
    }
    let none = Pieces { old: None, ..pieces() }.take(difference(1, &old, &new));
    assert_eq!(why(none), "bucket 1: a difference to what the reader has not");
}
