//! What is fixed of a shard once its job is known: the job and the buckets.

use super::{
    bucket::{Bucket, BucketData},
    replaced::Replaced,
};
use crate::room::Reserved;
use paraft_common::{BucketId, BucketSpec, Encoding, TensorKind, codec::F32_BYTES, config::ServerJob};
use paraft_lanes::shared::Memory;
use std::{
    collections::BTreeMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

/// Of weights as they were, twice, at most.
const COPIES: usize = 128 << 20;
/// What a bucket's three copies may take beyond its weights.
const PAGES: usize = 3 * 4096;

/// What is fixed once the job is known.
#[derive(Debug)]
pub struct Configured {
    /// The job.
    pub job: ServerJob,
    /// The shard's buckets, by rising id.
    pub buckets: Vec<Bucket>,
    /// Of all buckets, allocated or not: weights and optimizer slots.
    fixed: u64,
    /// What is kept of workers, as it is now.
    kept: AtomicU64,
    /// Data of buckets as they were, which somebody still reads.
    pub(super) replaced: Replaced,
    /// The room in this server's memory that it has.
    aside: Reserved,
    /// Where weights are that workers of this host pull, once one has; `None` within: there is no such memory.
    memory: OnceLock<Option<Arc<Memory>>>,
    /// The initial weights of every bucket were found to be in: they stay.
    initialised: AtomicBool,
}

impl Configured {
    pub(super) fn new(job: ServerJob, buckets: Vec<Bucket>, aside: Reserved) -> Arc<Self> {
        let mut conf = Self {
            job,
            buckets,
            fixed: 0,
            kept: AtomicU64::new(0),
            replaced: Replaced::default(),
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

    /// Of all buckets: weights, optimizer slots, and what is kept of workers.
    pub fn bytes(&self) -> u64 {
        self.fixed + self.kept_bytes()
    }

    /// What is kept of workers.
    pub fn kept_bytes(&self) -> u64 {
        self.kept.load(Relaxed)
    }

    /// What is allocated of it: buckets take their memory when their initial state comes.
    pub fn held(&self) -> u64 {
        let of = |d: &BucketData| ((1 + d.slots.len()) * d.weights.len() * F32_BYTES) as u64 + d.kept_bytes();
        self.buckets.iter().map(|b| b.peek(|d| if d.initialised { of(d) } else { 0 })).sum()
    }

    /// A worker of this host pulls: from now on weights are brought, as they are pulled, where it can read them.
    pub fn share(&self) -> Option<&Arc<Memory>> {
        let make = || {
            let weights: usize = self.buckets.iter().map(|b| b.spec.len * F32_BYTES).sum();
            // The weights, and those that updates replace while somebody reads them: beyond that copies are made elsewhere,
            // and travel. A bucket takes whole pages.
            let bytes = weights + weights.min(COPIES) * 2 + self.buckets.len() * PAGES;
            Memory::new(bytes)
                .inspect_err(|error| tracing::info!(%error, "no shared memory: weights travel"))
                .ok()
        };
        self.memory.get_or_init(make).as_ref()
    }

    /// Where weights are that workers of this host pull, if any does.
    pub fn shared(&self) -> Option<&Arc<Memory>> {
        self.memory.get()?.as_ref()
    }

    /// Whether the initial weights of every bucket are in.
    pub fn is_initialised(&self) -> bool {
        let known = self.initialised.load(Relaxed);
        known || {
            let all = self.buckets.iter().all(Bucket::initialised);
            self.initialised.store(all, Relaxed);
            all
        }
    }

    /// Data of buckets as they were, which somebody still reads.
    pub fn outdated_bytes(&self) -> u64 {
        self.replaced.outdated(0).bytes
    }

    /// What is kept of workers in a bucket went from `before` to `now` bytes.
    pub(super) fn keeps(&self, before: u64, now: u64) {
        if now >= before {
            self.kept.fetch_add(now - before, Relaxed);
        } else {
            self.kept.fetch_sub(before - now, Relaxed);
        }
    }

    /// Somebody who reads an earlier state of the buckets has done with one of them.
    pub(super) fn let_go(&self) {
        self.replaced.read_on();
    }

    /// State vectors that the optimizer keeps for a bucket of this kind.
    pub fn slots(&self, kind: TensorKind) -> usize {
        if kind == TensorKind::Param { self.job.slots() } else { 0 }
    }

    /// How pushes of a local bucket carry their values.
    pub fn encoding(&self, bucket: usize) -> Encoding {
        self.job.encoding(self.buckets[bucket].spec.kind)
    }

    /// The position of a bucket among the shard's own.
    pub fn local(&self, id: BucketId) -> Option<usize> {
        self.buckets.binary_search_by_key(&id, |b| b.id).ok()
    }
}

/// Buckets before anything has come. Those of the same kind and length share their data, so that a job costs next to
/// nothing before its weights are here: each takes its own with its initial state.
pub(super) fn blank(places: Vec<(BucketId, BucketSpec)>, job: &ServerJob) -> Vec<Bucket> {
    let mut blanks: BTreeMap<(bool, usize), Arc<BucketData>> = BTreeMap::new(); // two at most of a group, and of statistics
    let mut buckets = Vec::with_capacity(places.len());
    for (id, spec) in places {
        let of = (spec.kind == TensorKind::Param, spec.len);
        let data = blanks.entry(of).or_insert_with(|| Arc::new(BucketData::blank(spec, job))).clone();
        buckets.push(Bucket::with_data(id, spec, data));
    }
    buckets
}
