//! A consistent copy of a shard's state: what a snapshot holds, and what the digest is taken over.

use super::{
    bucket::BucketData,
    cut::{Staged, StagedHeader},
    state::Meta,
};
use paraft_common::{
    Version,
    codec::{get_f32_le, put_f32_le},
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The whole replicated state of a shard at one log index.
#[derive(Clone, Debug, PartialEq)]
pub struct Image {
    /// The small part.
    pub meta: Meta,
    /// The buckets, by rising id.
    pub buckets: Vec<Arc<BucketData>>,
    /// The parts of an image cut that waits for its marker.
    pub staged: Option<Staged>,
}

/// What a snapshot says before its vectors: everything but the bulk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ImageHeader {
    /// The small part.
    pub meta: Meta,
    /// For each bucket: version, schedule clock, initialised, length, slots.
    pub buckets: Vec<(Version, f64, bool, u64, u32)>,
    /// Of the parts of an image cut that waits for its marker.
    pub staged: Option<StagedHeader>,
}

impl Image {
    /// The header that announces [`Self::vectors`].
    pub fn header(&self) -> ImageHeader {
        let buckets = self
            .buckets
            .iter()
            .map(|b| (b.version, b.clock, b.initialised, b.weights.len() as u64, b.slots.len() as u32))
            .collect();
        ImageHeader { meta: self.meta.clone(), buckets, staged: self.staged.as_ref().map(Staged::header) }
    }

    /// The bulk in order: for each bucket its weights, then its slots; then what is staged.
    pub fn vectors(&self) -> impl Iterator<Item = &[f32]> {
        let staged = self.staged.iter().flat_map(|s| s.vectors.iter().map(|(_, v)| v.as_slice()));
        self.buckets
            .iter()
            .flat_map(|b| std::iter::once(b.weights.as_slice()).chain(b.slots.iter().map(Vec::as_slice)))
            .chain(staged)
    }

    /// Builds an image from a header and its vectors (little-endian), which must fit it exactly.
    pub fn assemble(header: ImageHeader, vectors: &[bytes::Bytes]) -> Result<Self, String> {
        let mut rest = vectors.iter();
        let mut next = |len: u64| -> Result<Vec<f32>, String> {
            let le = rest.next().ok_or("the snapshot ends early")?;
            if Some(le.len() as u64) != len.checked_mul(4) {
                return Err(format!("a vector of the snapshot has {} bytes instead of 4 x {len}", le.len()));
            }
            let mut v = vec![0.0; len as usize];
            get_f32_le(le, &mut v);
            Ok(v)
        };
        let mut buckets = Vec::new();
        for (version, clock, initialised, len, slots) in header.buckets {
            let weights = next(len)?;
            let slots = (0..slots).map(|_| next(len)).collect::<Result<_, _>>()?;
            buckets.push(Arc::new(BucketData { weights, slots, version, clock, initialised }));
        }
        let staged = header.staged.map(|s| {
            let vectors = s.vectors.into_iter().map(|(of, len)| Ok((of, Arc::new(next(len)?))));
            Ok::<_, String>(Staged {
                cut: s.cut,
                parts: s.parts,
                vectors: vectors.collect::<Result<_, String>>()?,
            })
        });
        let staged = staged.transpose()?;
        if rest.next().is_some() {
            return Err("the snapshot holds more vectors than its header names".into());
        }
        Ok(Self { meta: header.meta, buckets, staged })
    }

    /// FNV-1a over the whole state: equal on replicas that applied the same log.
    pub fn digest(&self) -> u64 {
        let mut h = Fnv::default();
        let header = bincode::serde::encode_to_vec(self.header(), bincode::config::legacy());
        h.bytes(&header.unwrap_or_default());
        let mut le = Vec::new();
        for v in self.vectors() {
            le.clear();
            put_f32_le(v, &mut le);
            h.bytes(&le);
        }
        h.0
    }

    /// Bytes of the bulk.
    pub fn bytes(&self) -> u64 {
        self.vectors().map(|v| v.len() as u64 * 4).sum()
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
    fn bytes(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for w in words {
            self.word(u64::from_le_bytes(*w));
        }
        for b in rest {
            self.word(u64::from(*b));
        }
        self.word(bytes.len() as u64);
    }

    fn word(&mut self, w: u64) {
        self.0 = (self.0 ^ w).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }
}
