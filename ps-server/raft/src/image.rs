//! A snapshot in Raft's format: bytes.

use bytes::Bytes;
use paraft_common::Payload;
use xxhash_rust::xxh3::Xxh3;

/// The whole state of a group at one log index. The parts share the live state's memory until it changes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RawImage {
    /// The small part, in its owner's format.
    pub head: Bytes,
    /// The bulk; each part is at most a bucket.
    pub parts: Vec<Payload>,
}

impl RawImage {
    /// XXH3 over the whole state: equal on replicas that applied the same log. Each part is released after it is
    /// hashed, so that later changes need not copy it.
    pub fn into_digest(self) -> u64 {
        let mut hash = Xxh3::new();
        let mut add = |part: Payload| {
            part.pieces().iter().for_each(|piece| hash.update(piece));
            hash.update(&(part.len() as u64).to_le_bytes());
        };
        add(self.head.into());
        self.parts.into_iter().for_each(add);
        hash.digest()
    }

    /// Bytes of the bulk.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.len() as u64).sum()
    }
}
