//! A small state for the tests of this module: parts of bytes, each written as a whole.

use super::{ApplyError, GroupName, OutdatedMemory, RawImage, Replicated, wire};
use bytes::Bytes;
use paraft_changes::{
    Applied, Change,
    shard::{Command, InitPart, Proposal},
};
use paraft_common::{BucketId, Payload};
use parking_lot::Mutex;
use std::sync::{
    Arc, Weak,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

/// A write of this content to the part.
pub fn write(part: u32, payload: impl Into<Payload>) -> Change {
    let command = Command::Init { bucket: BucketId(part), part: InitPart::FRESH };
    Change::Shard(Proposal { command, payload: payload.into() })
}

/// A new group name.
pub fn group() -> GroupName {
    GroupName { number: 0, text: "the group".into(), watched: false }
}

/// The state.
#[derive(Default)]
pub struct Parts {
    inner: Mutex<Inner>,
    /// Released parts of images.
    read: Arc<AtomicU64>,
    /// There is no room for any image.
    pub full: AtomicBool,
}

#[derive(Default)]
struct Inner {
    writes: u64,
    /// Each part with the number of its last write.
    parts: Vec<(u64, Arc<Vec<u8>>)>,
    replaced: Vec<Weak<Vec<u8>>>,
}

/// A part in an image.
struct PartReader(Arc<Vec<u8>>, Arc<AtomicU64>);

impl AsRef<[u8]> for PartReader {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for PartReader {
    fn drop(&mut self) {
        self.1.fetch_add(1, Relaxed);
    }
}

impl Parts {
    /// This many parts of this many zeros.
    pub fn of(parts: usize, bytes: usize) -> Arc<Self> {
        let state = Self::default();
        state.inner.lock().parts = (0..parts).map(|_| (0, Arc::new(vec![0; bytes]))).collect();
        Arc::new(state)
    }

    /// Number of applied writes.
    pub fn writes(&self) -> u64 {
        self.inner.lock().writes
    }
}

impl Replicated for Parts {
    type Change = Change;
    type Outcome = Applied;

    fn apply(&self, change: &Change) -> Result<Applied, ApplyError> {
        let Change::Shard(Proposal { command: Command::Init { bucket, .. }, payload }) = change else {
            return Err("it is no write".into());
        };
        let mut inner = self.inner.lock();
        inner.writes += 1;
        let part = bucket.0 as usize;
        if inner.parts.len() <= part {
            inner.parts.resize_with(part + 1, Default::default);
        }
        let bytes = Arc::new(payload.to_bytes().to_vec());
        let now = (inner.writes, bytes);
        let (_, old) = std::mem::replace(&mut inner.parts[part], now);
        inner.replaced.push(Arc::downgrade(&old));
        Ok(Applied::None)
    }

    fn touched(&self, change: &Change) -> u64 {
        change.payload().len() as u64
    }

    fn share(&self) -> u32 {
        0
    }

    fn in_term(&self, _: u64) {}

    fn image(&self) -> RawImage {
        let inner = self.inner.lock();
        let writes: Vec<u64> = inner.parts.iter().map(|(n, _)| *n).collect();
        let read = |(_, part): &(u64, Arc<Vec<u8>>)| {
            Payload::from(Bytes::from_owner(PartReader(part.clone(), self.read.clone()))).into()
        };
        RawImage {
            head: wire::encode(&(inner.writes, writes)).expect("it encodes"),
            parts: inner.parts.iter().map(read).collect(),
        }
    }

    fn install_parts(
        &self,
        head: &[u8],
        parts: &mut dyn Iterator<Item = Result<Payload, String>>,
    ) -> Result<(), ApplyError> {
        self.room_for(head)?;
        let (writes, of): (u64, Vec<u64>) = wire::decode(head).map_err(|e| e.to_string())?;
        let copied = parts.map(|p| p.map(|p| Arc::new(p.to_bytes().to_vec())));
        let copied: Vec<_> = copied.collect::<Result<_, _>>()?;
        if copied.len() != of.len() {
            return Err("an image with another number of parts than its head says".into());
        }
        let mut inner = self.inner.lock();
        (inner.writes, inner.parts) = (writes, of.into_iter().zip(copied).collect());
        Ok(())
    }

    fn room_for(&self, _: &[u8]) -> Result<(), ApplyError> {
        match self.full.load(Relaxed) {
            true => Err(ApplyError::NoRoom("needs 96 GiB, 4 free".into())),
            false => Ok(()),
        }
    }

    fn bytes(&self) -> u64 {
        self.inner.lock().parts.iter().map(|(_, p)| p.len() as u64).sum()
    }

    /// The longest-unwritten parts first; among equals, the last first.
    fn order(&self) -> Vec<u32> {
        let inner = self.inner.lock();
        let mut order: Vec<u32> = (0..inner.parts.len() as u32).rev().collect();
        order.sort_by_key(|part| inner.parts[*part as usize].0);
        order
    }

    fn outdated(&self, _: u64) -> OutdatedMemory {
        let mut inner = self.inner.lock();
        inner.replaced.retain(|part| part.strong_count() > 0);
        let bytes = inner.replaced.iter().filter_map(Weak::upgrade).map(|p| p.len() as u64).sum();
        OutdatedMemory { bytes, read: self.read.load(Relaxed) }
    }
}
