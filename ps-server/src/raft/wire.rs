//! Encodes and decodes openraft's messages.
//!
//! Small values (log ids, votes, commands) are headers; the bulk is sent beside them as protobuf `bytes`, so that
//! it is never copied byte by byte.

use super::{
    replicated::LogChange,
    types::{Entry, Types, Vote},
};
use crate::header;
use bytes::Bytes;
use openraft::{EntryPayload, raft::AppendEntriesRequest};
use paraft_common::Payload;
use serde::{Serialize, de::DeserializeOwned};

/// Bytes of a peer that are no valid message.
#[derive(Debug, thiserror::Error)]
#[error("a peer's message cannot be read: {0}")]
pub struct WireError(String);

impl WireError {
    /// Creates it from a reason.
    pub fn new(e: impl std::fmt::Display) -> Self {
        Self(e.to_string())
    }
}

/// Encodes a header.
pub fn encode<T: Serialize>(value: &T) -> Result<Bytes, WireError> {
    header::encode(value).map(Bytes::from).map_err(WireError::new)
}

/// Decodes a header; trailing bytes are an error.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    header::decode(bytes).map_err(WireError::new)
}

/// CRC-32 of a payload.
pub fn checksum(payload: &Payload) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    payload.pieces().iter().for_each(|p| hasher.update(p));
    hasher.finalize()
}

/// The payloads of a request's entries: one per proposal, including empty ones.
pub fn payloads<C: LogChange>(entries: &[Entry<C>]) -> Vec<Payload> {
    entries
        .iter()
        .filter_map(
            |e| if let EntryPayload::Normal(p) = &e.payload { Some(p.payload().clone()) } else { None },
        )
        .collect()
}

/// Restores the payloads that serde omitted.
pub fn attach<C: LogChange>(
    request: &mut AppendEntriesRequest<Types<C>>,
    payloads: Vec<Payload>,
) -> Result<(), WireError> {
    let mut rest = payloads.into_iter();
    for e in &mut request.entries {
        if let EntryPayload::Normal(p) = &mut e.payload {
            p.attach(rest.next().ok_or_else(|| WireError("a payload is missing".into()))?);
        }
    }
    match rest.next() {
        None => Ok(()),
        Some(_) => Err(WireError("a payload belongs to no entry".into())),
    }
}

/// One piece of a snapshot for a follower: piece 0 is the header, piece i the i-th part.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct SnapshotPiece {
    /// Identifies the image by its header's checksum. The same image may be sent again, after a break or by another
    /// leader, and resumes where it stopped.
    pub image: u64,
    /// Position, from 0.
    pub index: u64,
    /// Number of pieces.
    pub of: u64,
    /// CRC-32 of the piece.
    pub crc: u32,
}

/// The follower's answer to a piece.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub enum SnapshotAnswer {
    /// It has everything before this piece.
    Next(u64),
    /// It has installed everything, or refused the sender's term: its vote.
    Done(Vote),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raft::{
        testing::Write,
        types::{Committed, LogId, SnapshotMeta},
    };
    use openraft::raft::{TransferLeaderRequest, VoteRequest};
    use proptest::prelude::*;

    /// Decodes the bytes as every type that is read from a peer.
    fn read_as_anything(bytes: &[u8]) {
        let _ = decode::<AppendEntriesRequest<Types<Write>>>(bytes);
        let _ = decode::<VoteRequest<Types<Write>>>(bytes);
        let _ = decode::<TransferLeaderRequest<Types<Write>>>(bytes);
        let _ = decode::<(Vote, SnapshotPiece)>(bytes);
        let _ = decode::<(SnapshotMeta, Vec<u8>, Vec<u32>)>(bytes);
    }

    fn append() -> (AppendEntriesRequest<Types<Write>>, Vec<Payload>) {
        let log_id = |index| LogId::new(Committed::new(3), index);
        let payloads = [
            EntryPayload::Normal(Write::new(4, b"abcd".to_vec())),
            EntryPayload::Blank,
            EntryPayload::Normal(Write::new(1, Vec::new())),
        ];
        let entries: Vec<Entry<Write>> = (7u64..)
            .zip(payloads)
            .map(|(i, payload)| Entry::<Write> { log_id: log_id(i), payload })
            .collect();
        let beside = super::payloads(&entries);
        let vote = Vote::new_committed(3, 1);
        (AppendEntriesRequest { vote, prev_log_id: Some(log_id(6)), entries, leader_commit: None }, beside)
    }

    #[test]
    fn payloads_are_reattached_to_their_entries() {
        let (request, beside) = append();
        let header = encode(&request).expect("encodes");
        assert!(!header.windows(4).any(|w| w == b"abcd"), "the bulk is not in the header");
        let mut back: AppendEntriesRequest<Types<Write>> = decode(&header).expect("decodes");
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
}
