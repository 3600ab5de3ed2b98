//! What an update changes: rows that it names, ids that become rows by it, and rows that go.

use super::{BATCH, Partition, Store, count, id_of, image::SavedRows};
use crate::raft::ApplyError;
use paraft_common::table::{
    Expire, ID_BYTES, ROW_HEAD_WORDS, RowRate, RowType, Rows, WhenFull, hash_id, rounding_key,
};
use std::sync::Arc;

/// Slots among which a full partition finds the row to evict.
const EVICTION_WINDOW: u32 = 8;
/// The most slots at which one update looks for expired rows.
const SWEEP: u64 = 4096;

impl Partition {
    /// Applies one update: `version` is the bucket's version that contains it, and each gradient is multiplied by `scale`.
    ///
    /// # Errors
    /// There is no memory for the index.
    pub fn update(&self, rows: &Rows, version: u64, scale: f32, rate: RowRate) -> Result<(), ApplyError> {
        let len = self.row_len();
        let mut guard = self.store.write();
        let store = &mut *guard;
        let images = store.read_images();
        let touched = f32::from_bits(version as u32);
        let (mut ids, mut values) = (rows.ids(), rows.values());
        let mut batch = Vec::with_capacity(BATCH);
        let mut wide = Vec::new(); // a row whose weights are narrow
        loop {
            batch.clear();
            batch.extend(ids.by_ref().take(BATCH));
            if batch.is_empty() {
                break;
            }
            let found = self.find(store, &batch);
            for ((id, slot), grad) in batch.iter().zip(found).zip(values.by_ref()) {
                // An earlier row of this batch may have evicted it.
                let slot = slot.filter(|slot| id_of(Store::row(&store.words, len, *slot)) == *id);
                let slot = match slot {
                    Some(slot) => {
                        self.save(&images, store, slot);
                        slot
                    }
                    None if self.spec.min_count > 1
                        && !Arc::make_mut(&mut store.history).admits(&self.spec, *id) =>
                    {
                        store.header.too_rare += 1;
                        continue;
                    }
                    None => match self.insert(&images, store, (*id, version))? {
                        Some(slot) => slot,
                        None => continue,
                    },
                };
                let row = &mut store.words[slot as usize * len..][..len];
                let updates = count(row, 2).saturating_add(1);
                (row[2], row[3]) = (f32::from_bits(updates), touched);
                let (t, row) = (u64::from(updates), &mut row[ROW_HEAD_WORDS..]);
                if self.spec.dtype == RowType::F32 {
                    self.spec.optimizer.update(rate, t, scale, row, grad);
                    continue;
                }
                let (weights, state) = row.split_at_mut(self.spec.dtype.words(self.spec.dim));
                wide.clear();
                wide.resize(self.spec.dim, 0.0);
                self.spec.dtype.get(weights, &mut wide);
                wide.extend_from_slice(state);
                self.spec.optimizer.update(rate, t, scale, &mut wide, grad);
                let (new, after) = wide.split_at(self.spec.dim);
                self.spec.dtype.put(rounding_key(*id, updates), new, weights);
                state.copy_from_slice(after);
            }
        }
        if let Some(expire) = self.spec.expire {
            self.expire(&images, store, expire, version);
        }
        Ok(())
    }

    /// Makes a row with its initial values at a version; `None` if the partition is full and refuses.
    pub(super) fn insert(
        &self,
        images: &[Arc<SavedRows>],
        store: &mut Store,
        (id, version): (u64, u64),
    ) -> Result<Option<u32>, ApplyError> {
        let len = self.row_len();
        let slot = if store.header.rows < self.spec.partition_rows() {
            store
                .index
                .reserve(store.header.rows + 1, |slot| hash_id(id_of(Store::row(&store.words, len, slot))))?;
            store.header.rows += 1;
            // An image may have a row in this slot that has expired since.
            (store.header.rows - 1) as u32
        } else if self.spec.full == WhenFull::Evict {
            self.evict(images, store, version)
        } else {
            store.header.refused += 1;
            return Ok(None);
        };
        let row = &mut store.words[slot as usize * len..][..len];
        row.fill(0.0);
        (row[0], row[1]) = (f32::from_bits(id as u32), f32::from_bits((id >> 32) as u32));
        let weights = &mut row[ROW_HEAD_WORDS..][..self.spec.dtype.words(self.spec.dim)];
        if self.spec.dtype == RowType::F32 {
            self.spec.initial(id, weights);
        } else {
            let mut values = vec![0.0; self.spec.dim];
            self.spec.initial(id, &mut values);
            // They are of the narrow form: no chance decides.
            self.spec.dtype.put(0, &values, weights);
        }
        store.index.insert(hash_id(id), slot);
        store.header.created += 1;
        if store.history.was_removed(id) {
            Arc::make_mut(&mut store.history).revive(id);
            store.header.revived += 1;
        }
        Ok(Some(slot))
    }

    /// Frees a slot: that of the row that was touched longest ago among the next few.
    fn evict(&self, images: &[Arc<SavedRows>], store: &mut Store, version: u64) -> u32 {
        let (len, rows) = (self.row_len(), store.header.rows as u32);
        let window = (0..EVICTION_WINDOW.min(rows)).map(|i| (store.header.hand + i) % rows);
        let age = |slot: &u32| count(Store::row(&store.words, len, *slot), 3);
        let slot = window.min_by_key(age).unwrap_or_default();
        store.header.hand = (store.header.hand + EVICTION_WINDOW) % rows;
        store.header.evicted += 1;
        self.save(images, store, slot);
        self.forget(store, slot, version);
        slot
    }

    /// Takes the id of a slot out of the index, and notes that.
    fn forget(&self, store: &mut Store, slot: u32, version: u64) {
        let len = self.row_len();
        let gone = id_of(Store::row(&store.words, len, slot));
        let hash_of = |slot: u32| hash_id(id_of(Store::row(&store.words, len, slot)));
        store.index.remove(hash_id(gone), slot, hash_of);
        Arc::make_mut(&mut store.history).remove(&self.spec, gone, version);
    }

    /// Removes expired rows among the next slots of a circle; a round takes a quarter of the time after which rows expire,
    /// if that is not too many slots.
    fn expire(&self, images: &[Arc<SavedRows>], store: &mut Store, expire: Expire, version: u64) {
        let at_least = expire.keep_at_least.div_ceil(u64::from(self.spec.partitions));
        let slots = (store.header.rows * 4).div_ceil(u64::from(expire.after)).clamp(1, SWEEP);
        for _ in 0..slots.min(store.header.rows) {
            if store.header.rows <= at_least {
                return;
            }
            let slot = if u64::from(store.header.sweep) < store.header.rows { store.header.sweep } else { 0 };
            store.header.sweep = slot + 1;
            if !self.is_expired(store, slot, expire, version) {
                continue;
            }
            self.remove(images, store, slot, version);
            store.header.expired += 1;
            store.header.sweep = slot; // where the last row is now
        }
    }

    fn is_expired(&self, store: &Store, slot: u32, expire: Expire, version: u64) -> bool {
        let row = Store::row(&store.words, self.row_len(), slot);
        if (version as u32).wrapping_sub(count(row, 3)) < expire.after {
            return false;
        }
        let Some(below) = expire.norm_below else { return true };
        let mut values = vec![0.0; self.spec.dim];
        self.spec.dtype.get(self.weights(row), &mut values);
        let squares: f64 = values.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
        squares.sqrt() < f64::from(below)
    }

    /// Removes a row; the last one moves into its slot.
    fn remove(&self, images: &[Arc<SavedRows>], store: &mut Store, slot: u32, version: u64) {
        let (len, last) = (self.row_len(), store.header.rows as u32 - 1);
        self.save(images, store, slot);
        self.save(images, store, last);
        self.forget(store, slot, version);
        if slot != last {
            let id = id_of(Store::row(&store.words, len, last));
            let hash_of = |slot: u32| hash_id(id_of(Store::row(&store.words, len, slot)));
            store.index.remove(hash_id(id), last, hash_of);
            let from = last as usize * len;
            store.words.copy_within(from..from + len, slot as usize * len);
            store.index.insert(hash_id(id), slot);
        }
        store.header.rows -= 1;
    }

    /// Whether an edit fits: whole rows of this partition to write, or ids.
    ///
    /// # Errors
    /// It does not.
    pub fn check_edit(&self, put: bool, bytes: &[u8]) -> Result<(), String> {
        match put {
            true => self.check_rows(bytes),
            false if bytes.len().is_multiple_of(ID_BYTES) => Ok(()),
            false => Err(format!("{} bytes are no whole number of ids of {ID_BYTES} bytes", bytes.len())),
        }
    }

    /// Writes rows as tiles have them, in place of those of the same ids, or removes the rows of ids, once for each token.
    /// Returns how many were written, or removed: a full partition may have no room, an id no row. [`Self::check_edit`] has
    /// checked the bytes.
    ///
    /// # Errors
    /// There is no memory for the index.
    pub fn edit(&self, token: u64, put: bool, bytes: &[u8], version: u64) -> Result<u64, ApplyError> {
        let mut guard = self.store.write();
        let store = &mut *guard;
        if let Some(rows) = store.history.edited(token) {
            return Ok(rows);
        }
        let images = store.read_images();
        let mut changed = 0;
        let size = if put { self.row_len() * 4 } else { ID_BYTES };
        for row in bytes.chunks_exact(size) {
            let id = row.first_chunk().map_or(0, |id| u64::from_le_bytes(*id));
            let [found, ..] = self.find(store, &[id]);
            changed += match put {
                true => u64::from(self.put(&images, store, (id, found), row, version)?),
                false => {
                    u64::from(found.inspect(|slot| self.remove(&images, store, *slot, version)).is_some())
                }
            };
        }
        if !put {
            store.header.evicted += changed;
        }
        Arc::make_mut(&mut store.history).edit(token, changed);
        Ok(changed)
    }

    /// Writes a row; `false`: it has no room.
    pub(super) fn put(
        &self,
        images: &[Arc<SavedRows>],
        store: &mut Store,
        (id, found): (u64, Option<u32>),
        row: &[u8],
        version: u64,
    ) -> Result<bool, ApplyError> {
        let slot = match found {
            Some(slot) => {
                self.save(images, store, slot);
                slot
            }
            None => match self.insert(images, store, (id, version))? {
                Some(slot) => slot,
                None => return Ok(false),
            },
        };
        let len = self.row_len();
        let into = &mut store.words[slot as usize * len..][..len];
        let words = row.as_chunks::<4>().0.iter().map(|word| f32::from_bits(u32::from_le_bytes(*word)));
        into.iter_mut().zip(words).for_each(|(v, word)| *v = word);
        into[3] = f32::from_bits(version as u32);
        Ok(true)
    }

    /// Keeps a row as it is for the images that have not passed it.
    fn save(&self, images: &[Arc<SavedRows>], store: &Store, slot: u32) {
        if !images.is_empty() {
            let row = Store::row(&store.words, self.row_len(), slot);
            images.iter().for_each(|saved| saved.save(slot, row));
        }
    }
}
