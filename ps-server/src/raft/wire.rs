//! openraft's messages to bytes and back.
//!
//! Small things (log ids, votes, commands) are bincode in its legacy layout; the bulk travels beside them as
//! protobuf `bytes`, so that it is never copied byte by byte. This is the only file that names bincode on the
//! wire, and every decode has a limit.

use super::types::{Entry, Types};
use bytes::Bytes;
use openraft::{EntryPayload, raft::AppendEntriesRequest};
use serde::{Serialize, de::DeserializeOwned};

/// The longest header: thousands of small entries, or the members of a large job.
const MAX_HEADER_BYTES: usize = 16 << 20;

/// A peer's bytes that are no message.
#[derive(Debug, thiserror::Error)]
#[error("a peer's message cannot be read: {0}")]
pub struct WireError(String);

impl WireError {
    /// From anything that says what is wrong.
    pub fn new(e: impl std::fmt::Display) -> Self {
        Self(e.to_string())
    }
}

/// Encodes a header.
pub fn encode<T: Serialize>(value: &T) -> Result<Bytes, WireError> {
    bincode::serde::encode_to_vec(value, bincode::config::legacy())
        .map(Bytes::from)
        .map_err(|e| WireError(e.to_string()))
}

/// Decodes a header; trailing bytes are an error.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    let config = bincode::config::legacy().with_limit::<MAX_HEADER_BYTES>();
    match bincode::serde::decode_from_slice(bytes, config) {
        Ok((value, used)) if used == bytes.len() => Ok(value),
        Ok((_, used)) => Err(WireError(format!("{} bytes too many", bytes.len() - used))),
        Err(e) => Err(WireError(e.to_string())),
    }
}

/// The payloads of a request's entries: one for each proposal, empty ones included.
pub fn payloads(entries: &[Entry]) -> Vec<Bytes> {
    entries.iter().filter_map(|e| if let EntryPayload::Normal(p) = &e.payload { Some(p.payload.clone()) } else { None }).collect()
}

/// Puts the payloads back where serde skipped them.
pub fn attach(request: &mut AppendEntriesRequest<Types>, payloads: Vec<Bytes>) -> Result<(), WireError> {
    let mut rest = payloads.into_iter();
    for e in &mut request.entries {
        if let EntryPayload::Normal(p) = &mut e.payload {
            p.payload = rest.next().ok_or_else(|| WireError("a payload is missing".into()))?;
        }
    }
    match rest.next() {
        None => Ok(()),
        Some(_) => Err(WireError("a payload belongs to no entry".into())),
    }
}

/// One piece of a snapshot on its way to a follower: piece 0 is the header, piece i the i-th vector.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct SnapshotPiece {
    /// Names the transfer; pieces of another one start over.
    pub transfer: u64,
    /// Position, from 0.
    pub index: u64,
    /// Number of pieces.
    pub of: u64,
}
