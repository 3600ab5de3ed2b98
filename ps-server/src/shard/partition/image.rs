//! A partition at one moment, read tile by tile while updates continue. The first update of a row after that moment keeps
//! the row as it was, unless the reader has passed it. So an image costs a bit for each row, and copies of the rows that
//! change before they are read.

use super::{COUNTS_BYTES, History, Partition, RowsHeader, tile_rows};
use crate::raft::{ApplyError, LazyPart};
use bytes::Bytes;
use paraft_common::codec::put_f32_le;
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// Rows of one image that have changed since.
#[derive(Debug)]
pub(super) struct SavedRows {
    rows: u32,
    inner: Mutex<Saved>,
}

#[derive(Debug)]
struct Saved {
    /// A bit for each slot: it is kept, or the reader has passed it.
    done: Vec<u64>,
    kept: BTreeMap<u32, Box<[f32]>>,
    bytes: u64,
}

impl SavedRows {
    fn new(rows: u32) -> Self {
        let done = vec![0; (rows as usize).div_ceil(64)];
        Self { rows, inner: Mutex::new(Saved { done, kept: BTreeMap::new(), bytes: 0 }) }
    }

    /// Keeps a row that is about to change.
    pub fn save(&self, slot: u32, row: &[f32]) {
        if slot >= self.rows {
            return;
        }
        let mut inner = self.inner.lock();
        let (word, bit) = (slot as usize / 64, 1 << (slot % 64));
        if inner.done[word] & bit == 0 {
            inner.done[word] |= bit;
            inner.bytes += size_of_val(row) as u64;
            inner.kept.insert(slot, row.into());
        }
    }

    /// The reader needs these slots no longer.
    fn pass(&self, slots: Range<u32>) {
        let mut inner = self.inner.lock();
        for slot in slots {
            inner.done[slot as usize / 64] |= 1 << (slot % 64);
            if let Some(row) = inner.kept.remove(&slot) {
                inner.bytes -= size_of_val(&*row) as u64;
            }
        }
    }

    /// Bytes of the kept rows.
    pub fn bytes(&self) -> u64 {
        self.inner.lock().bytes
    }
}

/// A partition at one moment.
#[derive(Clone, Debug)]
pub struct RowsImage {
    partition: Arc<Partition>,
    header: RowsHeader,
    history: Arc<History>,
    saved: Arc<SavedRows>,
    /// Counts the clones.
    clones: Arc<()>,
    /// The partition was built for this image, and one shard may take it.
    is_new: Option<Arc<AtomicBool>>,
}

/// Some consecutive rows of an image.
#[derive(Debug)]
pub struct RowsTile {
    partition: Arc<Partition>,
    saved: Arc<SavedRows>,
    slots: Range<u32>,
    /// No other clone of the image reads them: once this is dropped, updates no longer keep them.
    is_last: bool,
}

impl RowsImage {
    /// The partition now.
    pub fn of(partition: &Arc<Partition>) -> Self {
        let mut store = partition.store.write();
        let saved = Arc::new(SavedRows::new(store.header.rows as u32));
        store.images.push(Arc::downgrade(&saved));
        let (header, history) = (store.header, store.history.clone());
        Self { partition: partition.clone(), header, history, saved, clones: Arc::default(), is_new: None }
    }

    /// A partition that was built from a snapshot.
    pub(crate) fn of_new(partition: Partition) -> Self {
        Self { is_new: Some(Arc::default()), ..Self::of(&Arc::new(partition)) }
    }

    /// The counts.
    pub fn header(&self) -> RowsHeader {
        self.header
    }

    /// The table's number, the partition's number in it, and the counts.
    pub fn named_header(&self) -> (u16, u32, RowsHeader) {
        (self.partition.table, self.partition.number, self.header)
    }

    /// The parts of a snapshot: the tiles, and what the partition knows of ids that are no rows.
    pub fn into_parts(self) -> impl Iterator<Item = Arc<dyn LazyPart>> + Send {
        let history: Arc<dyn LazyPart> = self.history.clone();
        let tiles = self.into_tiles().map(|tile| -> Arc<dyn LazyPart> { Arc::new(tile) });
        tiles.chain([history])
    }

    /// What a checkpoint has behind the rows: for each piece the partition's number and the length of the rest, in four bytes
    /// each, then the counts, and what the partition knows of ids that are no rows.
    pub fn history(&self) -> impl Iterator<Item = HistoryPiece> + Send + use<> {
        let (history, header, number) = (self.history.clone(), self.header, self.partition.number);
        self.history.places().enumerate().map(move |(i, (removed, counters))| HistoryPiece {
            history: history.clone(),
            header,
            number,
            is_first: i == 0,
            removed,
            counters,
        })
    }

    /// The ids whose rows were removed after `version` and are none now; `None` if some of them may be forgotten.
    pub fn removed_since(&self, version: u64) -> Option<Vec<u64>> {
        self.history.removed_since(version)
    }

    /// The tiles, in order.
    pub fn into_tiles(self) -> impl Iterator<Item = RowsTile> + Send {
        let rows = tile_rows(self.partition.row_len());
        let (all, is_last) = (self.header.rows, Arc::strong_count(&self.clones) == 1);
        (0..all.div_ceil(rows)).map(move |i| RowsTile {
            partition: self.partition.clone(),
            saved: self.saved.clone(),
            slots: (i * rows) as u32..((i + 1) * rows).min(all) as u32,
            is_last,
        })
    }

    /// A partition with this content for a shard: the one that was built for the image, for the first caller, or else a
    /// copy.
    ///
    /// # Errors
    /// There is no memory for a copy.
    pub(crate) fn partition(&self) -> Result<Arc<Partition>, ApplyError> {
        if self.is_new.as_ref().is_some_and(|taken| !taken.swap(true, Relaxed)) {
            return Ok(self.partition.clone());
        }
        let mut parts = self.clone().into_parts();
        let part = || Ok(parts.next().map(|part| part.read()).unwrap_or_default().into());
        let of = &self.partition;
        Partition::load((of.table, of.spec.clone()), of.number, self.header, part).map(Arc::new)
    }
}

impl PartialEq for RowsImage {
    fn eq(&self, other: &Self) -> bool {
        let bytes = |image: &Self| image.clone().into_parts().map(|part| part.read());
        self.header == other.header && bytes(self).eq(bytes(other))
    }
}

impl LazyPart for RowsTile {
    fn bytes(&self) -> usize {
        self.slots.len() * self.partition.row_len() * 4
    }

    /// The rows as they were: whole rows, one after another, little-endian words.
    fn read(&self) -> Bytes {
        let len = self.partition.row_len();
        let store = self.partition.store.read();
        let inner = self.saved.inner.lock();
        let words = &store.words[self.slots.start as usize * len..self.slots.end as usize * len];
        let mut bytes = Vec::with_capacity(self.bytes());
        let mut kept = inner.kept.range(self.slots.clone()).peekable();
        for (slot, row) in self.slots.clone().zip(words.chunks_exact(len)) {
            let kept = kept.next_if(|(of, _)| **of == slot).map(|(_, row)| &**row);
            put_f32_le(kept.unwrap_or(row), &mut bytes);
        }
        bytes.into()
    }
}

/// Some of what [`RowsImage::history`] gives.
#[derive(Debug)]
pub struct HistoryPiece {
    history: Arc<History>,
    header: RowsHeader,
    number: u32,
    is_first: bool,
    removed: Range<usize>,
    counters: Range<usize>,
}

impl LazyPart for HistoryPiece {
    fn bytes(&self) -> usize {
        8 + COUNTS_BYTES + self.history.written(&self.removed, &self.counters, self.is_first)
    }

    fn read(&self) -> Bytes {
        let mut bytes = Vec::with_capacity(self.bytes());
        bytes.extend(self.number.to_le_bytes());
        bytes.extend((self.bytes() as u32 - 8).to_le_bytes());
        self.header.words().into_iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        self.history.write(&self.removed, &self.counters, self.is_first, &mut bytes);
        bytes.into()
    }
}

impl Drop for RowsTile {
    fn drop(&mut self) {
        if self.is_last {
            self.saved.pass(self.slots.clone());
        }
        self.partition.released.fetch_add(1, Relaxed);
    }
}
