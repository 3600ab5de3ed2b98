//! A snapshot that a replica receives piece by piece.

use super::types::SnapshotMeta;
use paraft_common::Payload;
use std::time::Instant;

/// A partly received snapshot.
pub(super) struct Incoming {
    pub last: Instant,
    pub image: u64,
    pub meta: SnapshotMeta,
    pub head: Vec<u8>,
    pub parts: Vec<Payload>,
}
