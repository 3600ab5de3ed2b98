//! Encodes and decodes openraft's messages.
//!
//! Small values (log ids, votes, commands) are headers; the bulk is sent beside them as protobuf `bytes`, so that
//! it is never copied byte by byte.

use super::types::{Entry, Types, Vote};
use bytes::Bytes;
use openraft::{EntryPayload, raft::AppendEntriesRequest};
use paraft_changes::header;
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
pub fn payloads(entries: &[Entry]) -> Vec<Payload> {
    entries
        .iter()
        .filter_map(
            |e| if let EntryPayload::Normal(p) = &e.payload { Some(p.payload().clone()) } else { None },
        )
        .collect()
}

/// Restores the payloads that serde omitted.
pub fn attach(request: &mut AppendEntriesRequest<Types>, payloads: Vec<Payload>) -> Result<(), WireError> {
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
    /// No piece follows.
    pub last: bool,
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
#[path = "wire_tests.rs"]
mod tests;
