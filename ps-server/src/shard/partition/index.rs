//! Finds the slot of an id: open addressing with linear probing. An entry is the low half of the id's hash and the slot; the
//! id itself is in the row.

use crate::raft::ApplyError;
use paraft_common::table::{INDEX_ENTRY_BYTES, index_entries};

/// The upper half: the tag; the lower: the slot and one. 0: free.
type Entry = u64;

/// The index of a partition.
#[derive(Debug)]
pub struct Index {
    /// A power of two.
    entries: Vec<Entry>,
}

fn entry(hash: u64, slot: u32) -> Entry {
    hash << 32 | (u64::from(slot) + 1)
}

fn slot_of(entry: Entry) -> u32 {
    (entry as u32) - 1
}

impl Index {
    /// An index without entries.
    pub fn new() -> Self {
        Self { entries: vec![0; index_entries(0) as usize] }
    }

    /// Its memory.
    pub fn bytes(&self) -> u64 {
        self.entries.len() as u64 * INDEX_ENTRY_BYTES
    }

    /// Where an id's search begins. Bits 32 and up: the lower ones are the tag, and the highest chose the partition.
    fn home(&self, hash: u64) -> usize {
        (hash >> 20) as usize & (self.entries.len() - 1)
    }

    /// The first entry of an id's search.
    pub fn first(&self, hash: u64) -> Entry {
        self.entries[self.home(hash)]
    }

    /// The slot of an id, whose search begins at the entry `first`; `is_it` compares the id in a slot.
    pub fn find(&self, hash: u64, first: Entry, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let (mut at, mut entry) = (self.home(hash), first);
        loop {
            if entry == 0 {
                return None;
            }
            if (entry >> 32) as u32 == hash as u32 && is_it(slot_of(entry)) {
                return Some(slot_of(entry));
            }
            at = (at + 1) & (self.entries.len() - 1);
            entry = self.entries[at];
        }
    }

    /// Makes room for so many rows in all; `hash_of` gives the hash of the id in a slot.
    pub fn reserve(&mut self, rows: u64, hash_of: impl Fn(u32) -> u64) -> Result<(), ApplyError> {
        let wanted = index_entries(rows) as usize;
        if wanted <= self.entries.len() {
            return Ok(());
        }
        let mut entries = Vec::new();
        entries
            .try_reserve_exact(wanted)
            .map_err(|e| ApplyError::NoRoom(format!("the index of {rows} rows of a table: {e}")))?;
        entries.resize(wanted, 0);
        let old = std::mem::replace(&mut self.entries, entries);
        old.into_iter().filter(|e| *e != 0).for_each(|e| self.insert(hash_of(slot_of(e)), slot_of(e)));
        Ok(())
    }

    /// Adds an id that is not here; [`Self::reserve`] has made room.
    pub fn insert(&mut self, hash: u64, slot: u32) {
        let (mut at, mask) = (self.home(hash), self.entries.len() - 1);
        while self.entries[at] != 0 {
            at = (at + 1) & mask;
        }
        self.entries[at] = entry(hash, slot);
    }

    /// Removes an id. Entries behind it move up, so that every search still finds them.
    pub fn remove(&mut self, hash: u64, slot: u32, hash_of: impl Fn(u32) -> u64) {
        let mask = self.entries.len() - 1;
        let (mut gap, gone) = (self.home(hash), entry(hash, slot));
        while self.entries[gap] != gone {
            if self.entries[gap] == 0 {
                return;
            }
            gap = (gap + 1) & mask;
        }
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let next = self.entries[at];
            if next == 0 {
                break;
            }
            // It may fill the gap unless its search begins behind the gap.
            let home = self.home(hash_of(slot_of(next)));
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(gap) & mask) {
                self.entries[gap] = next;
                gap = at;
            }
        }
        self.entries[gap] = 0;
    }
}
