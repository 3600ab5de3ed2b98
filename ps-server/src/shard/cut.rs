//! A cut: a shard's state at one moment. Any replica can make one, and everything that needs a consistent state walks
//! over one: checkpoints, snapshots and digests.

use super::{
    bucket::{BucketData, Shared, vector_bytes},
    partition::{Partition, RowsHeader, RowsImage},
    shard_config::ShardConfig,
    staged_delta::{StagedDelta, StagedDeltaHeader},
    state::{Meta, Shard},
    worker_state::WorkerStateHeader,
};
use crate::{
    header,
    raft::{ApplyError, ImagePart, RawImage},
};
use bytes::Bytes;
use paraft_common::{Payload, Version, codec::value_bytes, config::ServerJob};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Kinds and lengths of blank buckets: trained values and running statistics, each with a shorter last bucket.
const BLANKS: usize = 4;

/// The state of a shard at one moment. It shares the vectors until they change (copy on write).
#[derive(Clone, Debug, PartialEq)]
pub struct Cut {
    /// The small part.
    pub meta: Meta,
    /// The buckets, ascending by id.
    pub buckets: Vec<Arc<BucketData>>,
    /// The rows of the last buckets, which are partitions of tables.
    pub rows: Vec<RowsImage>,
    /// The parts of a state delta that waits for its marker. Only snapshots and digests need them.
    pub staged: Option<StagedDelta>,
}

/// One vector of a cut.
#[derive(Clone, Debug)]
pub struct Part {
    /// The bucket's index on the shard.
    pub place: usize,
    /// The vector's index in the bucket.
    pub vector: usize,
    /// Updates in the bucket.
    pub version: Version,
    /// The bucket's schedule clock.
    pub clock: f64,
    /// The values, little-endian.
    pub payload: Bytes,
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

/// Of a job with tables, the part behind all vectors: for each partition its table, its number there and its header. Its
/// tiles follow.
type RowsHeaders = Vec<(u16, u32, RowsHeader)>;

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

/// The walker over the vectors of a cut: the first `vectors` of each bucket.
fn parts_of(
    buckets: Vec<Arc<BucketData>>,
    vectors: fn(&BucketData) -> usize,
) -> impl Iterator<Item = Part> + Send {
    buckets.into_iter().enumerate().flat_map(move |(place, data)| {
        (0..vectors(&data)).map(move |vector| {
            let payload = vector_bytes(&data, vector);
            Part { place, vector, version: data.version, clock: data.clock, payload }
        })
    })
}

impl Cut {
    /// The state now; `meta` belongs to `conf`. A task other than the one that applies must hold the state's lock: `apply`
    /// changes a bucket before it records the step, so the buckets contain everything recorded, and at most one push
    /// more.
    pub fn of(conf: Option<&Arc<ShardConfig>>, meta: &Meta) -> Self {
        let buckets = conf.map(|c| c.buckets.iter().map(|b| b.image()).collect());
        let rows = conf.map(|c| c.partitions().map(RowsImage::of).collect());
        let (buckets, rows) = (buckets.unwrap_or_default(), rows.unwrap_or_default());
        Self { meta: meta.clone(), buckets, rows, staged: None }
    }

    /// Walks over the first `vectors` of each bucket. A bucket is released behind its last part, so that later changes
    /// need not copy it.
    pub fn into_parts(self, vectors: fn(&BucketData) -> usize) -> impl Iterator<Item = Part> + Send {
        parts_of(self.buckets, vectors)
    }

    /// The header that announces the parts of [`Self::to_raw`].
    pub fn header(&self) -> ImageHeader {
        let buckets = self.buckets.iter().map(|b| BucketHeader::of(b)).collect();
        ImageHeader {
            meta: self.meta.clone(),
            buckets,
            staged: self.staged.as_ref().map(StagedDelta::header),
        }
    }

    /// Builds a cut from a snapshot's header and its vectors (little-endian), which must fit it exactly. Each vector is
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
        let rows = rows_of(&header.meta.job, &mut rest)?;
        match rest.next() {
            None => {}
            Some(Err(e)) => return Err(e.into()),
            Some(Ok(_)) => return Err("the snapshot holds more vectors than its header names".into()),
        }
        Ok(Self { meta: header.meta, buckets, rows, staged })
    }

    /// The cut in Raft's format: for each bucket its weights, its slots and the state kept per worker; then the staged
    /// parts; then rows. On a little-endian host the parts share the buckets' memory: nothing is copied. Tiles of rows are
    /// copied when they are read.
    pub fn into_raw(self) -> RawImage {
        let head = header::encode(&self.header());
        let headers: RowsHeaders = self.rows.iter().map(RowsImage::named_header).collect();
        let headers = (!headers.is_empty()).then(|| header::encode(&headers).unwrap_or_default());
        let buckets = parts_of(self.buckets, BucketData::vectors).map(|part| part.payload);
        let staged = self.staged.into_iter().flat_map(|s| s.vectors);
        let staged = staged.map(|(_, v)| value_bytes(Shared(v)));
        let rows = self.rows.into_iter().flat_map(RowsImage::into_parts).map(ImagePart::Lazy);
        let parts = buckets.chain(staged).chain(headers.map(Bytes::from)).map(Payload::from);
        RawImage {
            head: head.unwrap_or_default().into(),
            parts: parts.map(ImagePart::from).chain(rows).collect(),
        }
    }

    /// As [`Self::into_raw`], of a cut that is kept.
    pub fn to_raw(&self) -> RawImage {
        self.clone().into_raw()
    }

    /// Decodes [`RawImage::head`]. Together with the parts in order it gives the cut again ([`Self::assemble`]).
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
        self.to_raw().into_digest()
    }
}

/// Builds the partitions of a job's tables from the rest of a snapshot.
fn rows_of(
    job: &str,
    rest: &mut impl Iterator<Item = Result<Payload, String>>,
) -> Result<Vec<RowsImage>, ApplyError> {
    let tables = match job.is_empty() {
        true => Vec::new(),
        // A job that cannot be read is refused where it is needed.
        false => ServerJob::decode(job).map(|job| job.tables).unwrap_or_default(),
    };
    if tables.is_empty() {
        return Ok(Vec::new());
    }
    let mut next = || rest.next().ok_or("the snapshot ends early")?.map_err(ApplyError::from);
    let headers = header::decode::<RowsHeaders>(&next()?.to_bytes());
    let headers = headers.map_err(|e| ApplyError::Damaged(format!("the snapshot's tables: {e}")))?;
    let tables: Vec<_> = tables.into_iter().map(Arc::new).collect();
    let of = |(table, number, header): (u16, u32, RowsHeader)| {
        let spec = tables.get(usize::from(table)).ok_or("the snapshot names a table that its job has not")?;
        let partition = Partition::load((table, spec.clone()), number, header, &mut next)?;
        Ok(RowsImage::of_new(partition))
    };
    headers.into_iter().map(of).collect()
}

impl Shard {
    /// A cut of the whole state, with the staged parts of a state delta. Only the apply task may call it.
    pub fn cut(&self) -> Cut {
        let staged = self.staged.read().clone();
        self.view(|conf, meta| Cut { staged, ..Cut::of(conf, meta) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::leader::tests::shard_of;
    use paraft_common::{Mode, config::ServerJob};

    #[test]
    fn walked_bucket_is_released_behind_its_last_part() {
        let shard = shard_of(&ServerJob::new("cut", Mode::Asp, 2, 1));
        let conf = shard.configured().expect("configured");
        let held = || [0, 1].map(|place| Arc::strong_count(&conf.buckets[place].image()) > 2);
        let mut parts = shard.cut().into_parts(BucketData::vectors);
        assert_eq!(held(), [true, true], "the cut holds both");
        let first = parts.next().expect("the weights of bucket 0");
        assert_eq!((first.place, first.vector, first.payload.len()), (0, 0, 4));
        assert_eq!(parts.next().map(|part| (part.place, part.vector)), Some((1, 0)));
        assert_eq!(held(), [false, true], "bucket 0 has no more parts");
        assert!(parts.next().is_none());
        assert_eq!(held(), [false, false]);
    }
}
