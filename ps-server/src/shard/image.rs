//! A consistent copy of a shard's state, for snapshots and digests.

use super::{
    bucket::{BucketData, Shared, vector_bytes},
    delta::{StagedDelta, StagedDeltaHeader},
    state::Meta,
    worker_state::{WorkerState, WorkerStateHeader},
};
use crate::{
    header,
    raft::{ApplyError, RawImage},
};
use paraft_common::{Payload, Version, codec::value_bytes};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Kinds and lengths of blank buckets: trained values and running statistics, each with a shorter last bucket.
const BLANKS: usize = 4;

/// The whole replicated state of a shard at one log index.
#[derive(Clone, Debug, PartialEq)]
pub struct Image {
    /// The small part.
    pub meta: Meta,
    /// The buckets, ascending by id.
    pub buckets: Vec<Arc<BucketData>>,
    /// The parts of a state delta that waits for its marker.
    pub staged: Option<StagedDelta>,
}

/// A snapshot's header: the state without the vectors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ImageHeader {
    /// The small part.
    pub meta: Meta,
    /// The header of each bucket.
    pub buckets: Vec<BucketHeader>,
    /// The header of the parts of a state delta that waits for its marker.
    pub staged: Option<StagedDeltaHeader>,
}

/// A bucket without its bulk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BucketHeader {
    /// Updates applied.
    pub version: Version,
    /// The schedule's clock.
    pub clock: f64,
    /// Whether the initial weights are in.
    pub initialised: bool,
    /// Values in each of its vectors.
    pub len: u64,
    /// Number of state vectors.
    pub slots: u32,
    /// The headers of the state kept per worker.
    pub kept: Vec<WorkerStateHeader>,
}

impl BucketHeader {
    fn of(b: &BucketData) -> Self {
        Self {
            version: b.version,
            clock: b.clock,
            initialised: b.initialised,
            len: b.weights.len() as u64,
            slots: b.slots.len() as u32,
            kept: b.kept.iter().map(|(w, k)| k.header(*w)).collect(),
        }
    }
}

impl Image {
    /// The header that announces [`Self::vectors`].
    pub fn header(&self) -> ImageHeader {
        let buckets = self.buckets.iter().map(|b| BucketHeader::of(b)).collect();
        ImageHeader {
            meta: self.meta.clone(),
            buckets,
            staged: self.staged.as_ref().map(StagedDelta::header),
        }
    }

    /// The vectors in order: for each bucket its weights, its slots and the state kept per worker; then the staged
    /// parts.
    pub fn vectors(&self) -> impl Iterator<Item = &[f32]> {
        let staged = self.staged.iter().flat_map(|s| s.vectors.iter().map(|(_, v)| v.as_slice()));
        self.buckets
            .iter()
            .flat_map(|b| {
                let kept = b.kept.values().flat_map(WorkerState::vectors).map(|v| v.as_slice());
                std::iter::once(&*b.weights).chain(b.slots.iter().map(Vec::as_slice)).chain(kept)
            })
            .chain(staged)
    }

    /// Builds an image from a header and its vectors (little-endian), which must fit it exactly. Each vector is
    /// released before the next is requested.
    pub fn assemble(
        header: ImageHeader,
        vectors: impl IntoIterator<Item = Result<Payload, String>>,
    ) -> Result<Self, ApplyError> {
        let mut rest = vectors.into_iter();
        let mut next = |len: u64| -> Result<Vec<f32>, ApplyError> {
            let le = rest.next().ok_or("the snapshot ends early")??;
            if Some(le.len() as u64) != len.checked_mul(4) {
                let got = le.len();
                return Err(format!("a vector of the snapshot has {got} bytes instead of 4 x {len}").into());
            }
            let mut v = Vec::new();
            v.try_reserve_exact(len as usize)
                .map_err(|e| ApplyError::NoRoom(format!("a vector of the snapshot: {e}")))?;
            v.resize(len as usize, 0.0);
            le.reader().values(&mut v).map_err(|e| e.to_string())?;
            Ok(v)
        };
        let mut buckets: Vec<Arc<BucketData>> = Vec::new();
        let mut blanks: Vec<Arc<BucketData>> = Vec::new();
        for BucketHeader { version, clock, initialised, len, slots, kept } in header.buckets {
            let weights = next(len)?;
            let slots = (0..slots).map(|_| next(len)).collect::<Result<Vec<_>, _>>()?.into();
            let kept = kept.into_iter().map(|k| k.assemble(|| next(len))).collect::<Result<_, _>>()?;
            let data = BucketData { weights: weights.into(), slots, kept, version, clock, initialised };
            // Blank buckets share their data, as before the snapshot.
            let same = blanks.iter().find(|b| !initialised && ***b == data).cloned();
            let new = same.is_none();
            let data = same.unwrap_or_else(|| Arc::new(data));
            if new && !initialised && blanks.len() < BLANKS {
                blanks.push(data.clone());
            }
            buckets.push(data);
        }
        let staged = header.staged.map(|s| {
            let vectors = s.vectors.into_iter().map(|(of, len)| Ok((of, Arc::new(next(len)?))));
            Ok::<_, ApplyError>(StagedDelta {
                delta: s.delta,
                parts: s.parts,
                vectors: vectors.collect::<Result<_, ApplyError>>()?,
            })
        });
        let staged = staged.transpose()?;
        match rest.next() {
            None => {}
            Some(Err(e)) => return Err(e.into()),
            Some(Ok(_)) => return Err("the snapshot holds more vectors than its header names".into()),
        }
        Ok(Self { meta: header.meta, buckets, staged })
    }

    /// The image in Raft's format. On a little-endian host the parts share the buckets' memory: nothing is copied.
    pub fn to_raw(&self) -> RawImage {
        let head = header::encode(&self.header());
        let buckets = self.buckets.iter().flat_map(|b| (0..b.vectors()).map(|i| vector_bytes(b, i)));
        let staged =
            self.staged.iter().flat_map(|s| s.vectors.iter().map(|(_, v)| value_bytes(Shared(v.clone()))));
        RawImage {
            head: head.unwrap_or_default().into(),
            parts: buckets.chain(staged).map(Payload::from).collect(),
        }
    }

    /// Decodes [`RawImage::head`]. Together with the parts in order it gives the image again ([`Self::assemble`]).
    /// Fails if the head does not fit.
    pub fn header_of(head: &[u8]) -> Result<ImageHeader, ApplyError> {
        header::decode(head).map_err(|e| ApplyError::Damaged(format!("the snapshot: {e}")))
    }

    /// Decodes the head and the parts.
    pub fn from_raw(
        head: &[u8],
        parts: impl IntoIterator<Item = Result<Payload, String>>,
    ) -> Result<Self, ApplyError> {
        Self::assemble(Self::header_of(head)?, parts)
    }

    /// XXH3 over the whole state: equal on replicas that applied the same log.
    pub fn digest(&self) -> u64 {
        self.to_raw().digest()
    }

    /// Bytes of the vectors.
    pub fn bytes(&self) -> u64 {
        self.vectors().map(|v| v.len() as u64 * 4).sum()
    }
}
