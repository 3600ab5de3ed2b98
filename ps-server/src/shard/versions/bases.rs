//! Versions that readers have: the next one is sent to them as the difference.
//!
//! A reader names what it has by its step. If the replica has forgotten it, or never had it, whole values are sent: nothing
//! depends on what is here.

use super::Shard;
use bytes::Bytes;
use paraft_common::{BucketId, Encoding, Step};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

/// A version that no reader has named for so long is forgotten.
pub const BASE_TIME: Duration = Duration::from_secs(60);
/// Versions that a replica remembers in a type: readers that take each one have the last, slower ones the one before.
const MAX_BASES: usize = 2;

/// What a replica remembers.
#[derive(Debug, Default)]
pub(super) struct Bases(Mutex<VecDeque<Arc<Base>>>);

/// The values of a version, as they were sent.
#[derive(Debug)]
pub struct Base {
    /// Its step.
    pub step: Step,
    dtype: Encoding,
    /// The buckets that were sent.
    pub buckets: BTreeMap<BucketId, Bytes>,
    used: Mutex<Instant>,
}

impl Shard {
    /// What the replica remembers of a version that a reader has.
    pub fn base(&self, step: Step, dtype: Encoding) -> Option<Arc<Base>> {
        let bases = self.versions.bases.0.lock();
        let base = bases.iter().find(|base| base.step == step && base.dtype == dtype)?;
        *base.used.lock() = Instant::now();
        Some(base.clone())
    }

    /// Remembers what was sent of a version, in place of the oldest one. Nothing happens if it is known, or if there is no memory.
    ///
    /// The caller forgets it in time, see [`Shard::forget_base`].
    pub fn remember(
        &self,
        step: Step,
        dtype: Encoding,
        buckets: BTreeMap<BucketId, Bytes>,
    ) -> Option<Arc<Base>> {
        let mut bases = self.versions.bases.0.lock();
        let same = bases.iter().position(|base| base.step == step && base.dtype == dtype);
        let mut all = match same {
            Some(at) if buckets.keys().all(|id| bases[at].buckets.contains_key(id)) => return None,
            Some(at) => bases.remove(at).map(|base| base.buckets.clone()).unwrap_or_default(),
            None => BTreeMap::new(),
        };
        all.extend(buckets);
        while bases.iter().filter(|base| base.dtype == dtype).count() >= MAX_BASES {
            let oldest = bases.iter().position(|base| base.dtype == dtype)?;
            bases.remove(oldest);
        }
        self.room.take(all.values().map(|values| values.len() as u64).sum()).ok()?;
        let base = Arc::new(Base { step, dtype, buckets: all, used: Mutex::new(Instant::now()) });
        bases.push_back(base.clone());
        Some(base)
    }

    /// Forgets a version if no reader has named it for [`BASE_TIME`]. Returns how long it has to stay, if it stays.
    pub fn forget_base(&self, base: &Arc<Base>) -> Option<Duration> {
        let mut bases = self.versions.bases.0.lock();
        let at = bases.iter().position(|known| Arc::ptr_eq(known, base))?;
        let left = BASE_TIME.saturating_sub(base.used.lock().elapsed());
        if left.is_zero() {
            bases.remove(at);
            return None;
        }
        Some(left)
    }
}
