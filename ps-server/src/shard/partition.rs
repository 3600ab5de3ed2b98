//! A partition of a sparse table: the rows of some ids. It is the content of a bucket; the bucket has the version.
//!
//! Rows lie in *slots*, in the order in which their first pushes came; an index finds the slot of an id. Both are functions
//! of the log alone, so slots are equal on all replicas, and snapshots and digests go by slots.
//!
//! ```text
//!  id ──hash──▶ index: | tag, slot | ... |      slot: | id | updates | last touched | weights | optimizer's state |
//! ```
//!
//! A pull of an unknown id computes the row's initial values and stores nothing. Which ids become rows, and which rows are
//! removed, follows from what the log holds: no clock and no randomness. The last row moves into the slot of an expired one.

mod history;
mod image;
mod index;
mod update;

pub use image::{RowsImage, RowsTile};

use history::{History, Piece};

use crate::raft::ApplyError;
use image::SavedRows;
use index::Index;
use paraft_common::{
    Payload,
    codec::put_f32_le,
    need::Bytes as ByteCount,
    table::{ROW_HEAD_WORDS, TableSpec, hash_id},
};
use paraft_host::Pages;
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};
use std::sync::{
    Arc, Weak,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// Ids whose index entries and rows are fetched together: so many memory accesses are in flight at a time.
const BATCH: usize = 16;

/// One partition.
#[derive(Debug)]
pub struct Partition {
    /// The table's number in the job.
    table: u16,
    spec: Arc<TableSpec>,
    number: u32,
    store: RwLock<Store>,
    /// Tiles of images that were released: their reader makes progress.
    released: Arc<AtomicU64>,
}

/// The replicated part of a partition except the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowsHeader {
    /// Slots in use.
    pub rows: u64,
    /// Where a full partition looks for a row to evict.
    pub hand: u32,
    /// Rows made so far.
    pub created: u64,
    /// Rows evicted so far.
    pub evicted: u64,
    /// Gradients of new ids that a full partition has dropped.
    pub refused: u64,
    /// Gradients dropped so far of ids that were not named often enough.
    pub too_rare: u64,
    /// Rows expired so far.
    pub expired: u64,
    /// Rows made so far of ids whose rows were removed before, as far as that is known.
    pub revived: u64,
    /// The slot at which the next update looks for expired rows.
    pub sweep: u32,
    /// Parts of a checkpoint that were added.
    pub parts: u32,
}

/// Bytes of the counts at the front of a piece of a checkpoint.
const COUNTS_BYTES: usize = 9 * 8;

impl RowsHeader {
    /// The counts, for a checkpoint.
    fn words(self) -> [u64; 9] {
        let Self { rows, hand, created, evicted, refused, too_rare, expired, revived, sweep, parts: _ } =
            self;
        [rows, hand.into(), created, evicted, refused, too_rare, expired, revived, sweep.into()]
    }

    /// Reads the counts of a checkpoint.
    fn of_words(words: [u64; 9], parts: u32) -> Self {
        let [rows, hand, created, evicted, refused, too_rare, expired, revived, sweep] = words;
        let (hand, sweep) = (hand as u32, sweep as u32);
        Self { rows, hand, created, evicted, refused, too_rare, expired, revived, sweep, parts }
    }
}

#[derive(Debug)]
struct Store {
    header: RowsHeader,
    /// The rows, by slot. Pages take memory once they are written.
    words: Pages,
    index: Index,
    /// Copied by the first change while an image has it.
    history: Arc<History>,
    /// Images that are being read.
    images: Vec<Weak<SavedRows>>,
}

impl Store {
    /// The images that have readers.
    fn read_images(&mut self) -> Vec<Arc<SavedRows>> {
        self.images.retain(|saved| saved.strong_count() > 0);
        self.images.iter().filter_map(Weak::upgrade).collect()
    }

    fn row(words: &[f32], len: usize, slot: u32) -> &[f32] {
        &words[slot as usize * len..][..len]
    }
}

/// The id in a row's head.
fn id_of(row: &[f32]) -> u64 {
    u64::from(row[0].to_bits()) | u64::from(row[1].to_bits()) << 32
}

fn count(row: &[f32], place: usize) -> u32 {
    row[place].to_bits()
}

impl Partition {
    /// An empty partition.
    ///
    /// # Errors
    /// The process may not have so large an address space.
    pub fn new((table, spec): (u16, Arc<TableSpec>), number: u32) -> Result<Self, ApplyError> {
        let words = usize::try_from(spec.partition_rows()).ok();
        let words = words.and_then(|rows| rows.checked_mul(spec.row_words()));
        let no_room = |why: String| {
            let bytes = ByteCount(spec.partition_rows().saturating_mul(spec.row_bytes()));
            ApplyError::NoRoom(format!("partition {number} of table `{}` needs {bytes}: {why}", spec.name))
        };
        let words = words.ok_or_else(|| no_room("more than an address space".into()))?;
        let words = Pages::huge(words).map_err(|e| no_room(e.to_string()))?;
        let history = Arc::new(History::new(&spec)?);
        let (header, index) = (RowsHeader::default(), Index::new());
        let store = Store { header, words, index, history, images: Vec::new() };
        Ok(Self { table, spec, number, store: RwLock::new(store), released: Arc::default() })
    }

    /// Words of a row.
    fn row_len(&self) -> usize {
        self.spec.row_words()
    }

    /// The words of a row's weights.
    fn weights<'a>(&self, row: &'a [f32]) -> &'a [f32] {
        &row[ROW_HEAD_WORDS..][..self.spec.dtype.words(self.spec.dim)]
    }

    /// The table.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// The table's number in the job, and the partition's in the table.
    pub fn place(&self) -> (u16, u32) {
        (self.table, self.number)
    }

    /// Counts, and the number of rows.
    pub fn header(&self) -> RowsHeader {
        self.store.read().header
    }

    /// Memory of rows and index at present.
    pub fn bytes(&self) -> u64 {
        let store = self.store.read();
        store.header.rows * self.spec.row_bytes() + store.index.bytes() + store.history.memory()
    }

    /// Memory of replaced rows that readers of images need, and tiles that they have released.
    pub fn outdated(&self) -> (u64, u64) {
        let images = self.store.read().images.iter().filter_map(Weak::upgrade).collect::<Vec<_>>();
        (images.iter().map(|saved| saved.bytes()).sum(), self.released.load(Relaxed))
    }

    /// The weights of these rows, one after another, f32, little-endian.
    pub fn pull(&self, ids: &[u64]) -> Vec<u8> {
        let (dim, len) = (self.spec.dim, self.row_len());
        let mut values = vec![0f32; ids.len() * dim];
        let store = self.store.read();
        for (ids, values) in ids.chunks(BATCH).zip(values.chunks_mut(BATCH * dim)) {
            let found = self.find(&store, ids);
            for ((id, slot), values) in ids.iter().zip(found).zip(values.chunks_exact_mut(dim)) {
                match slot {
                    Some(slot) => {
                        self.spec.dtype.get(self.weights(Store::row(&store.words, len, slot)), values);
                    }
                    None => self.spec.initial(*id, values),
                }
            }
        }
        let mut bytes = Vec::with_capacity(values.len() * 4);
        put_f32_le(&values, &mut bytes);
        bytes
    }

    /// These rows, whole, of those that there are: words, little-endian.
    pub fn whole(&self, ids: &[u64]) -> Vec<u8> {
        let (len, store, mut bytes) = (self.row_len(), self.store.read(), Vec::new());
        for ids in ids.chunks(BATCH) {
            let found = self.find(&store, ids);
            for slot in found.into_iter().take(ids.len()).flatten() {
                put_f32_le(Store::row(&store.words, len, slot), &mut bytes);
            }
        }
        bytes
    }

    /// The slots of up to [`BATCH`] ids.
    fn find(&self, store: &Store, ids: &[u64]) -> [Option<u32>; BATCH] {
        let len = self.row_len();
        let mut found = [None; BATCH];
        let hashes =
            std::array::from_fn::<u64, BATCH, _>(|i| hash_id(ids.get(i).copied().unwrap_or_default()));
        let entries = hashes.map(|hash| store.index.first(hash)); // all fetched before any is used
        for ((id, found), (hash, entry)) in ids.iter().zip(&mut found).zip(hashes.into_iter().zip(entries)) {
            let is_it = |slot: u32| id_of(Store::row(&store.words, len, slot)) == *id;
            *found = store.index.find(hash, entry, is_it);
        }
        found
    }

    /// Adds rows of a checkpoint, as tiles have them; returns whether this is the next part. A row that does not fit any
    /// more is handled as a new id of a full partition.
    ///
    /// # Errors
    /// The bytes are no whole rows of this partition; or there is no memory for the index.
    pub(super) fn add(&self, part: u32, rows: &Payload) -> Result<bool, String> {
        let len = self.row_len();
        let mut guard = self.store.write();
        let store = &mut *guard;
        if part != store.header.parts {
            return Ok(false); // another worker has brought it
        }
        let bytes = rows.to_bytes();
        self.check_rows(&bytes)?;
        let images = store.read_images();
        for row in bytes.chunks_exact(len * 4) {
            let (words, _) = row.as_chunks::<4>();
            let word = |i: usize| u64::from(u32::from_le_bytes(words[i]));
            let (id, touched) = (word(0) | word(1) << 32, word(3));
            self.put(&images, store, (id, None), row, touched).map_err(|e| e.to_string())?;
        }
        store.header.parts += 1;
        Ok(true)
    }

    /// Adds what a checkpoint knows of ids that are no rows, after its rows; returns whether this is the next part.
    ///
    /// # Errors
    /// It belongs to other rows, or does not fit the table.
    pub(super) fn add_history(&self, part: u32, bytes: &Payload) -> Result<bool, String> {
        let bytes = bytes.to_bytes();
        let (counts, piece) = self.check_history(&bytes)?;
        let mut store = self.store.write();
        if part != store.header.parts {
            return Ok(false); // another worker has brought it
        }
        if counts.rows != store.header.rows {
            return Err(format!("it belongs to {} rows, and here are {}", counts.rows, store.header.rows));
        }
        Arc::make_mut(&mut store.history).add(&self.spec, &piece)?;
        store.header = RowsHeader { parts: part + 1, ..counts };
        Ok(true)
    }

    /// Reads a piece of what a checkpoint knows of ids that are no rows.
    ///
    /// # Errors
    /// It does not fit the table.
    pub fn check_history<'a>(&self, bytes: &'a [u8]) -> Result<(RowsHeader, Piece<'a>), String> {
        let (counts, piece) = bytes.split_at_checked(COUNTS_BYTES).ok_or("it is cut off")?;
        let words: [u64; 9] = std::array::from_fn(|i| u64::from_le_bytes(counts.as_chunks().0[i]));
        let [_, hand, .., sweep] = words;
        if hand.max(sweep) > self.spec.partition_rows() {
            return Err("it is of a larger partition".into());
        }
        let piece = Piece::parse(&self.spec, piece).map_err(|why| format!("it {why}"))?;
        Ok((RowsHeader::of_words(words, 0), piece))
    }

    /// Whether bytes are whole rows of this partition, with ids that it has and finite values.
    ///
    /// # Errors
    /// They are not.
    pub fn check_rows(&self, bytes: &[u8]) -> Result<(), String> {
        let len = self.row_len() * 4;
        if !bytes.len().is_multiple_of(len) {
            return Err(format!("{} bytes are no whole number of rows of {len} bytes", bytes.len()));
        }
        for row in bytes.chunks_exact(len) {
            let (words, _) = row.as_chunks::<4>();
            let id = u64::from(u32::from_le_bytes(words[0])) | u64::from(u32::from_le_bytes(words[1])) << 32;
            let of = self.spec.partition_of(id);
            if of != self.number {
                return Err(format!("id {id} belongs to partition {of}, not to {}", self.number));
            }
            let row: Vec<f32> = words.iter().map(|word| f32::from_le_bytes(*word)).collect();
            let (weights, mut values) = (self.weights(&row), vec![0.0; self.spec.dim]);
            self.spec.dtype.get(weights, &mut values);
            let state = &row[ROW_HEAD_WORDS + weights.len()..];
            if values.iter().chain(state).any(|v| !v.is_finite()) {
                return Err(format!("row {id} has a NaN or an infinity"));
            }
        }
        Ok(())
    }

    /// Builds a partition from an image's header and parts.
    ///
    /// # Errors
    /// A tile does not fit, or there is no memory.
    pub(super) fn load(
        spec: (u16, Arc<TableSpec>),
        number: u32,
        header: RowsHeader,
        mut tile: impl FnMut() -> Result<Payload, ApplyError>,
    ) -> Result<Self, ApplyError> {
        let this = Self::new(spec, number)?;
        let damaged = |what: &str| {
            let name = &this.spec.name;
            ApplyError::Damaged(format!("partition {number} of table `{name}` in the snapshot: {what}"))
        };
        if header.rows > this.spec.partition_rows() {
            return Err(damaged("it has more rows than the table allows"));
        }
        let len = this.row_len();
        let mut guard = this.store.write();
        let store = &mut *guard;
        store.index.reserve(header.rows, |_| 0)?;
        let mut slot = 0u64;
        while slot < header.rows {
            let bytes = tile()?;
            let rows = tile_rows(len).min(header.rows - slot) as usize;
            if bytes.len() != rows * len * 4 {
                return Err(damaged("a tile has another length than its rows"));
            }
            let words = &mut store.words[slot as usize * len..][..rows * len];
            let words: &mut [u32] = bytemuck::cast_slice_mut(words);
            let mut at = 0;
            let copied = bytes.reader().words(rows * len, |run: &[[u8; 4]]| {
                words[at..].iter_mut().zip(run).for_each(|(word, bytes)| *word = u32::from_le_bytes(*bytes));
                at += run.len();
            });
            copied.map_err(|e| damaged(&e.to_string()))?;
            for slot in slot..slot + rows as u64 {
                let id = id_of(Store::row(&store.words, len, slot as u32));
                if this.spec.partition_of(id) != number {
                    return Err(damaged("a row belongs to another partition"));
                }
                store.index.insert(hash_id(id), slot as u32);
            }
            slot += rows as u64;
        }
        store.header = header;
        store.history = Arc::new(History::load(&this.spec, &tile()?)?);
        drop(guard);
        Ok(this)
    }
}

/// Rows of a tile: the part of an image that is read at a time, at most 256 KiB.
fn tile_rows(row_len: usize) -> u64 {
    ((256 << 10) / (4 * row_len)).max(1) as u64
}

#[cfg(test)]
#[path = "partition_tests.rs"]
mod tests;
