//! Tests of `wire`.

use super::*;
use crate::{
    testing::write,
    types::{Committed, LogId, SnapshotMeta},
};
use openraft::raft::{TransferLeaderRequest, VoteRequest};
use proptest::prelude::*;

/// Decodes the bytes as every type that is read from a peer.
fn read_as_anything(bytes: &[u8]) {
    let _ = decode::<AppendEntriesRequest<Types>>(bytes);
    let _ = decode::<VoteRequest<Types>>(bytes);
    let _ = decode::<TransferLeaderRequest<Types>>(bytes);
    let _ = decode::<(Vote, SnapshotPiece)>(bytes);
    let _ = decode::<(SnapshotMeta, Vec<u8>)>(bytes);
}

fn append() -> (AppendEntriesRequest<Types>, Vec<Payload>) {
    let log_id = |index| LogId::new(Committed::new(3), index);
    let payloads = [
        EntryPayload::Normal(write(4, b"abcd".to_vec())),
        EntryPayload::Blank,
        EntryPayload::Normal(write(1, Vec::new())),
    ];
    let entries: Vec<Entry> =
        (7u64..).zip(payloads).map(|(i, payload)| Entry { log_id: log_id(i), payload }).collect();
    let beside = super::payloads(&entries);
    let vote = Vote::new_committed(3, 1);
    (AppendEntriesRequest { vote, prev_log_id: Some(log_id(6)), entries, leader_commit: None }, beside)
}

#[test]
fn payloads_are_reattached_to_their_entries() {
    let (request, beside) = append();
    let header = encode(&request).expect("encodes");
    assert!(!header.windows(4).any(|w| w == b"abcd"), "the bulk is not in the header");
    let mut back: AppendEntriesRequest<Types> = decode(&header).expect("decodes");
    attach(&mut back, beside.clone()).expect("fits");
    assert_eq!(super::payloads(&back.entries), beside);
    assert_eq!(format!("{back:?}"), format!("{request:?}"));
    for wrong in [beside[..1].to_vec(), [&beside[..], &beside[..1]].concat()] {
        assert!(attach(&mut back, wrong).is_err(), "a payload too few or too many");
    }
}

#[test]
fn a_length_that_the_bytes_do_not_hold_is_refused() {
    // A vector of 2^60 elements, in eight bytes.
    assert!(decode::<Vec<u64>>(&(1u64 << 60).to_le_bytes()).is_err());
    assert!(decode::<String>(&u64::MAX.to_le_bytes()).is_err());
}

proptest! {
    #[test]
    fn any_header_decodes_or_fails_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
        read_as_anything(&bytes);
    }

    #[test]
    fn a_damaged_header_decodes_or_fails_without_a_panic(
        at in any::<prop::sample::Index>(), value in any::<u8>(), keep in any::<prop::sample::Index>(),
    ) {
        let mut bytes = encode(&append().0).expect("encodes").to_vec();
        read_as_anything(&bytes[..keep.index(bytes.len() + 1)]);
        let at = at.index(bytes.len());
        bytes[at] = value;
        read_as_anything(&bytes);
    }
}
