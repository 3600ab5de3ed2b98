//! The fixed part of a shard once its job is known: the job and the buckets.

use super::{
    bucket::{Bucket, BucketData},
    partition::Partition,
    replaced_vectors::ReplacedVectors,
};
use crate::{
    raft::{ApplyError, OutdatedMemory},
    room::{Allocated, Reserved},
};
use paraft_common::{
    BucketId, Encoding, Layout, ShardId, TableSpec, TensorKind, codec::F32_BYTES, config::ServerJob,
    placement,
};
use paraft_lanes::shared::Memory;
use paraft_proto::RefusalKind;
use std::{
    collections::BTreeMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

/// Shared memory for replaced weights, counted twice, at most.
const MAX_COPY_BYTES: usize = 128 << 20;
/// Page rounding of a bucket's three copies.
const PAGE_ROUNDING_BYTES: usize = 3 * 4096;

/// The fixed part of a shard once its job is known.
#[derive(Debug)]
pub struct ShardConfig {
    /// The job.
    pub job: ServerJob,
    /// The shard's buckets, ascending by id.
    pub buckets: Vec<Bucket>,
    /// Bytes of weights and optimizer slots of all buckets, allocated or not.
    fixed: u64,
    /// Bytes kept per worker at present.
    kept: AtomicU64,
    /// Replaced bucket data that readers still hold.
    pub(super) replaced: ReplacedVectors,
    /// The reserved part of this server's memory.
    aside: Reserved,
    /// Memory for weights that workers of this host pull, once one does; inner `None`: it is not available.
    memory: OnceLock<Option<Arc<Memory>>>,
    /// The initial weights of every bucket were found to be complete, which is final.
    initialised: AtomicBool,
}

impl ShardConfig {
    pub(super) fn new(job: ServerJob, buckets: Vec<Bucket>, aside: Reserved) -> Arc<Self> {
        let mut conf = Self {
            job,
            buckets,
            fixed: 0,
            kept: AtomicU64::new(0),
            replaced: ReplacedVectors::default(),
            aside,
            memory: OnceLock::new(),
            initialised: AtomicBool::new(false),
        };
        let of = |b: &Bucket| (b.spec.len * F32_BYTES * (1 + conf.slots(b.spec.kind))) as u64;
        conf.fixed = conf.buckets.iter().map(of).sum();
        let kept: u64 = conf.buckets.iter().map(|b| b.peek(BucketData::kept_bytes)).sum();
        conf.kept.store(kept, Relaxed);
        let conf = Arc::new(conf);
        conf.aside.for_use_by(&conf);
        conf
    }

    /// Bytes of all buckets: weights, optimizer slots, and state kept per worker.
    pub fn bytes(&self) -> u64 {
        self.fixed + self.kept_bytes() + self.partitions().map(|p| p.bytes()).sum::<u64>()
    }

    /// Bytes of the state kept per worker.
    pub fn kept_bytes(&self) -> u64 {
        self.kept.load(Relaxed)
    }

    /// Shared memory for a worker of this host that pulls: from now on pulled weights move there.
    pub fn share(&self) -> Option<&Arc<Memory>> {
        let make = || {
            let weights: usize = self.buckets.iter().map(|b| b.spec.len * F32_BYTES).sum();
            // The weights, and those that updates replace while they are read; further copies are private and
            // travel. A bucket takes whole pages.
            let bytes = weights + weights.min(MAX_COPY_BYTES) * 2 + self.buckets.len() * PAGE_ROUNDING_BYTES;
            Memory::new(bytes)
                .inspect_err(
                    |error| tracing::info!(%error, "no shared memory: weights are sent over the connection"),
                )
                .ok()
        };
        self.memory.get_or_init(make).as_ref()
    }

    /// Shared memory, if a worker of this host pulls.
    pub fn shared(&self) -> Option<&Arc<Memory>> {
        self.memory.get()?.as_ref()
    }

    /// Whether the initial weights of every bucket are complete.
    pub fn is_initialised(&self) -> bool {
        let known = self.initialised.load(Relaxed);
        known || {
            let all = self.buckets.iter().all(Bucket::initialised);
            self.initialised.store(all, Relaxed);
            all
        }
    }

    /// Bytes of replaced bucket data that readers still hold.
    pub fn outdated_bytes(&self) -> u64 {
        self.outdated(0).bytes
    }

    /// Updates the count of a bucket's per-worker bytes from `before` to `now`.
    pub(super) fn update_kept_bytes(&self, before: u64, now: u64) {
        if now >= before {
            self.kept.fetch_add(now - before, Relaxed);
        } else {
            self.kept.fetch_sub(before - now, Relaxed);
        }
    }

    /// Records that a reader of an earlier state has released a bucket.
    pub fn note_release(&self) {
        self.replaced.read_on();
    }

    /// Number of state vectors that the optimizer keeps for a bucket of this kind.
    pub fn slots(&self, kind: TensorKind) -> usize {
        if kind == TensorKind::Param { self.job.slots() } else { 0 }
    }

    /// The encoding of pushes of a local bucket.
    pub fn encoding(&self, bucket: usize) -> Encoding {
        self.job.encoding(self.buckets[bucket].spec.kind)
    }

    /// A refusal of a message about a bucket: that of a partition names its table.
    pub fn named(&self, bucket: usize, kind: RefusalKind) -> RefusalKind {
        let Some(rows) = self.buckets.get(bucket).and_then(Bucket::rows) else { return kind };
        let (table, (_, partition)) = (rows.spec().name.clone(), rows.place());
        RefusalKind::OfTable { table, partition, of: Box::new(kind) }
    }

    /// The partitions of tables: the content of the last buckets.
    pub fn partitions(&self) -> impl Iterator<Item = &Arc<Partition>> {
        self.buckets.iter().filter_map(Bucket::rows)
    }

    /// Memory of replaced values that readers still hold, exact if it may exceed `beyond`.
    pub(super) fn outdated(&self, beyond: u64) -> OutdatedMemory {
        let vectors = self.replaced.outdated(beyond);
        self.partitions().map(|p| p.outdated()).fold(vectors, |all, (bytes, read)| OutdatedMemory {
            bytes: all.bytes + bytes,
            read: all.read + read,
        })
    }

    /// The index of a bucket among the shard's own.
    pub fn local(&self, id: BucketId) -> Option<usize> {
        self.buckets.binary_search_by_key(&id, |b| b.id).ok()
    }
}

impl Allocated for ShardConfig {
    /// Buckets allocate when their initial state arrives.
    fn held(&self) -> u64 {
        let of = |d: &BucketData| ((1 + d.slots.len()) * d.weights.len() * F32_BYTES) as u64 + d.kept_bytes();
        let values: u64 =
            self.buckets.iter().map(|b| b.peek(|d| if d.initialised { of(d) } else { 0 })).sum();
        values + self.partitions().map(|p| p.bytes()).sum::<u64>()
    }
}

/// The partition that a bucket of rows holds; `None` for other buckets.
///
/// # Errors
/// The process has no address space for it.
pub(super) fn partition_of(
    layout: &Layout,
    tables: &[Arc<TableSpec>],
    id: BucketId,
) -> Result<Option<Arc<Partition>>, ApplyError> {
    let Some((table, number)) = layout.partition(id) else { return Ok(None) };
    Partition::new((table as u16, tables[table].clone()), number).map(|p| Some(Arc::new(p)))
}

/// Blank buckets. Those of the same kind and length share their data, so that a job costs next to nothing before
/// its weights arrive: each allocates with its initial state.
///
/// # Errors
/// The process has no address space for a table.
pub(super) fn blank(job: &ServerJob, shard: ShardId, shards: u32) -> Result<Vec<Bucket>, ApplyError> {
    let layout = job.layout();
    let tables: Vec<_> = job.tables.iter().cloned().map(Arc::new).collect();
    let places = placement::buckets_of(&layout, shard, shards);
    let mut blanks: BTreeMap<(bool, usize), Arc<BucketData>> = BTreeMap::new(); // two per group
    let mut buckets = Vec::with_capacity(places.len());
    for (id, spec) in places {
        let of = (spec.kind == TensorKind::Param, spec.len);
        let data = blanks.entry(of).or_insert_with(|| Arc::new(BucketData::blank(spec, job))).clone();
        buckets.push(Bucket::with_data(id, spec, data).with_rows(partition_of(&layout, &tables, id)?));
    }
    Ok(buckets)
}
