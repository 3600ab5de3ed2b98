//! A snapshot as Raft sees it: bytes.

use bytes::Bytes;
use paraft_common::Payload;

/// The whole state of a group at one log index. The parts share the live state's memory until it changes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RawImage {
    /// The small part; its owner knows the layout.
    pub head: Bytes,
    /// The bulk: each at most a bucket.
    pub parts: Vec<Payload>,
}

impl RawImage {
    /// FNV-1a over the whole state: equal on replicas that applied the same log.
    pub fn digest(&self) -> u64 {
        self.clone().into_digest() // the parts are shared
    }

    /// As [`Self::digest`], letting each part go when it is hashed: what changes meanwhile need not be copied any
    /// more.
    pub fn into_digest(self) -> u64 {
        let mut h = Fnv::default();
        h.bytes(&self.head.into());
        self.parts.into_iter().for_each(|p| h.bytes(&p));
        h.0
    }

    /// Bytes of the bulk.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.len() as u64).sum()
    }
}

struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    // Eight bytes at a time: the classic byte loop would take a second per GB.
    fn bytes(&mut self, bytes: &Payload) {
        let mut reader = bytes.reader();
        // Neither can fail: no more than there is.
        let words = |run: &[[u8; 8]]| run.iter().for_each(|w| self.word(u64::from_le_bytes(*w)));
        let _ = reader.words(bytes.len() / 8, words);
        let rest = |run: &[[u8; 1]]| run.iter().for_each(|[b]| self.word(u64::from(*b)));
        let _ = reader.words(reader.left(), rest);
        self.word(bytes.len() as u64);
    }

    fn word(&mut self, w: u64) {
        self.0 = (self.0 ^ w).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }
}
