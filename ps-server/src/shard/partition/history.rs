//! What a partition knows of ids that are no rows: how often updates named the ids that may become rows later, and which
//! rows were removed, and when. A function of the log, like the rows; a snapshot has it behind them.

use crate::raft::{ApplyError, LazyPart};
use bytes::Bytes;
use paraft_common::{
    Payload,
    table::{COUNTS, TableSpec, hash_id, index_entries},
};
use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
};

/// Ids that are no rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    counts: Option<Counts>,
    removed: Removed,
    /// The last edits of people: their tokens, and how many rows each changed.
    edits: VecDeque<(u64, u64)>,
}

/// Edits that a partition knows.
const EDITS: usize = 64;

/// How often ids were named: a count-min sketch (Cormode and Muthukrishnan 2005), in which only the smallest counters of an id
/// grow (Estan and Varghese 2002). It counts an id too often when others share all its counters, and never too seldom, but
/// that all counters are halved after every ten times their number of counts, as in TinyLFU (Einziger and others 2017):
/// counts fade, and the sketch never fills up.
#[derive(Clone, Debug, PartialEq)]
struct Counts {
    /// One table after another.
    counters: Vec<u8>,
    /// Counts since they were halved.
    since: u64,
}

/// Counters of a partition of so many rows.
fn counters_of(rows: u64) -> u64 {
    index_entries(rows).saturating_mul(COUNTS)
}

impl Counts {
    fn new(rows: u64) -> Result<Self, ApplyError> {
        let len = counters_of(rows) as usize;
        let mut counters = Vec::new();
        counters
            .try_reserve_exact(len)
            .map_err(|e| ApplyError::NoRoom(format!("the counts of ids of a table: {e}")))?;
        counters.resize(len, 0);
        Ok(Self { counters, since: 0 })
    }

    /// Counts an id; returns how often it was counted.
    fn add(&mut self, id: u64) -> u8 {
        let width = self.counters.len() / COUNTS as usize;
        // Two halves of one hash give a place in each table (Kirsch and Mitzenmacher 2006).
        let (a, b) = (hash_id(id), hash_id(!id) | 1);
        let place = |i: u64| i as usize * width + (a.wrapping_add(b.wrapping_mul(i)) as usize & (width - 1));
        let places = [place(0), place(1), place(2), place(3)];
        let count =
            places.map(|at| self.counters[at]).into_iter().min().unwrap_or_default().saturating_add(1);
        places.into_iter().for_each(|at| self.counters[at] = self.counters[at].max(count));
        self.since += 1;
        if self.since > 10 * width as u64 {
            self.counters.iter_mut().for_each(|count| *count /= 2);
            self.since = 0;
        }
        count
    }
}

/// The rows that were removed last.
#[derive(Clone, Debug, Default, PartialEq)]
struct Removed {
    /// Ids and the versions at which they were removed, in order.
    ring: VecDeque<(u64, u64)>,
    /// The number of the ring's first entry, counted from the partition's beginning.
    first: u64,
    /// The entry of each id that is removed still.
    latest: HashMap<u64, u64>,
    /// The version up to which removals may be forgotten.
    forgotten: u64,
}

impl Removed {
    fn push(&mut self, (id, version): (u64, u64), most: usize) {
        self.latest.insert(id, self.first + self.ring.len() as u64);
        self.ring.push_back((id, version));
        if self.ring.len() > most
            && let Some((id, version)) = self.ring.pop_front()
        {
            if self.latest.get(&id) == Some(&self.first) {
                self.latest.remove(&id);
                self.forgotten = version;
            }
            self.first += 1;
        }
    }

    fn entries(&self) -> impl Iterator<Item = (u64, u64, bool)> + '_ {
        let at = (self.first..).zip(&self.ring);
        at.map(|(at, (id, version))| (*id, *version, self.latest.get(id) == Some(&at)))
    }
}

impl History {
    /// Of an empty partition.
    ///
    /// # Errors
    /// There is no memory for the counts.
    pub fn new(spec: &TableSpec) -> Result<Self, ApplyError> {
        let counts = (spec.min_count > 1).then(|| Counts::new(spec.partition_rows())).transpose()?;
        Ok(Self { counts, removed: Removed::default(), edits: VecDeque::new() })
    }

    /// Counts an id that is no row; whether it becomes one now.
    pub fn admits(&mut self, spec: &TableSpec, id: u64) -> bool {
        self.counts.as_mut().is_none_or(|counts| u32::from(counts.add(id)) >= spec.min_count)
    }

    /// Notes that a row was removed.
    pub fn remove(&mut self, spec: &TableSpec, id: u64, version: u64) {
        self.removed.push((id, version), spec.removed_ids());
    }

    /// Whether the row of an id was removed, as far as that is known.
    pub fn was_removed(&self, id: u64) -> bool {
        self.removed.latest.contains_key(&id)
    }

    /// Notes that a removed id is a row again.
    pub fn revive(&mut self, id: u64) {
        self.removed.latest.remove(&id);
    }

    /// The ids whose rows were removed after `version` and are none now; `None` if some of them may be forgotten.
    pub fn removed_since(&self, version: u64) -> Option<Vec<u64>> {
        let known = version >= self.removed.forgotten;
        let ids = self.removed.entries().filter(|(_, at, still)| *still && *at > version);
        known.then(|| ids.map(|(id, ..)| id).collect())
    }

    /// How many rows an edit changed, if it was applied before.
    pub fn edited(&self, token: u64) -> Option<u64> {
        self.edits.iter().find(|(of, _)| *of == token).map(|(_, rows)| *rows)
    }

    /// Notes an edit.
    pub fn edit(&mut self, token: u64, rows: u64) {
        self.edits.push_back((token, rows));
        if self.edits.len() > EDITS {
            self.edits.pop_front();
        }
    }

    /// Memory.
    pub fn memory(&self) -> u64 {
        let counts = self.counts.as_ref().map_or(0, |counts| counts.counters.len());
        (counts + self.removed.ring.len() * 16 + self.removed.latest.len() * 24) as u64
    }

    /// Reads what [`LazyPart::read`] has written.
    ///
    /// # Errors
    /// It does not fit the table, or there is no memory.
    pub fn load(spec: &TableSpec, bytes: &Payload) -> Result<Self, ApplyError> {
        let mut this = Self::new(spec)?;
        let damaged =
            |why| ApplyError::Damaged(format!("what table `{}` knows of other ids {why}", spec.name));
        let bytes = bytes.to_bytes();
        let piece = Piece::parse(spec, &bytes).map_err(damaged)?;
        if piece.counters.len() != this.counters() {
            return Err(damaged("has other counts".into()));
        }
        this.add(spec, &piece).map_err(damaged)?;
        Ok(this)
    }

    /// Adds a piece to those before it.
    ///
    /// # Errors
    /// It has more than there may be.
    pub fn add(&mut self, spec: &TableSpec, piece: &Piece<'_>) -> Result<(), String> {
        let removed = &mut self.removed;
        if removed.ring.len() + piece.removed.len() > spec.removed_ids()
            || self.edits.len() + piece.edits.len() > EDITS
        {
            return Err("has more removed ids or edits than it may".into());
        }
        if removed.ring.is_empty() {
            removed.first = piece.first;
        }
        removed.forgotten = piece.forgotten;
        self.edits.extend(piece.edits.iter().map(pair));
        for entry in piece.removed {
            let (id, version) = pair(entry);
            if version & 1 == 1 {
                removed.latest.insert(id, removed.first + removed.ring.len() as u64);
            }
            removed.ring.push_back((id, version >> 1));
        }
        if let Some(counts) = &mut self.counts {
            counts.since = piece.since;
            counts.counters[piece.at..][..piece.counters.len()].copy_from_slice(piece.counters);
        }
        Ok(())
    }

    /// Number of counters.
    fn counters(&self) -> usize {
        self.counts.as_ref().map_or(0, |counts| counts.counters.len())
    }

    /// What the pieces of a checkpoint hold, each at most half a mebibyte of it: places in the list of removed ids, and places
    /// of counters. The first has the edits too.
    pub fn places(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + use<> {
        let (removed, counters) = (self.removed.ring.len(), self.counters());
        let of = |all: usize, most: usize| (0..all).step_by(most).map(move |at| at..(at + most).min(all));
        let removed = of(removed, PIECE / 16).map(|some| (some, 0..0));
        let counters = of(counters, PIECE).map(|some| (0..0, some));
        let mut pieces = removed.chain(counters).peekable();
        let only = pieces.peek().is_none().then_some((0..0, 0..0));
        pieces.chain(only)
    }

    /// Bytes that [`Self::write`] writes.
    pub fn written(&self, removed: &Range<usize>, counters: &Range<usize>, with_edits: bool) -> usize {
        let edits = if with_edits { self.edits.len() } else { 0 };
        HEAD * 8 + (edits + removed.len()) * 16 + counters.len()
    }

    /// Writes some of it, as [`Piece::parse`] reads it.
    pub fn write(
        &self,
        removed: &Range<usize>,
        counters: &Range<usize>,
        with_edits: bool,
        bytes: &mut Vec<u8>,
    ) {
        let edits = if with_edits { &self.edits } else { &VecDeque::new() };
        let since = self.counts.as_ref().map_or(0, |counts| counts.since);
        let first = self.removed.first + removed.start as u64;
        let (entries, at) = (removed.len() as u64, counters.start as u64);
        let head = [first, self.removed.forgotten, since, edits.len() as u64, entries, at];
        let edits = edits.iter().flat_map(|(token, rows)| [*token, *rows]);
        let entries = self.removed.entries().skip(removed.start).take(removed.len());
        let entries = entries.flat_map(|(id, version, still)| [id, version << 1 | u64::from(still)]);
        head.into_iter().chain(edits).chain(entries).for_each(|word| bytes.extend(word.to_le_bytes()));
        self.counts.iter().for_each(|counts| bytes.extend(&counts.counters[counters.clone()]));
    }
}

/// Bytes of removed ids or counts in a piece of a checkpoint.
const PIECE: usize = 512 << 10;
/// Words in front of the rest of a piece.
const HEAD: usize = 6;

/// Two words.
fn pair(bytes: &[u8; 16]) -> (u64, u64) {
    let word = |i: usize| u64::from_le_bytes(bytes.as_chunks().0[i]);
    (word(0), word(1))
}

/// Some of a [`History`], read from bytes: six words, the edits, the removed ids, counters.
#[derive(Debug)]
pub struct Piece<'a> {
    first: u64,
    forgotten: u64,
    since: u64,
    edits: &'a [[u8; 16]],
    removed: &'a [[u8; 16]],
    /// The place of the first of these counters.
    at: usize,
    counters: &'a [u8],
}

impl<'a> Piece<'a> {
    /// Reads what [`History::write`] has written.
    ///
    /// # Errors
    /// It does not fit the table.
    pub fn parse(spec: &TableSpec, bytes: &'a [u8]) -> Result<Self, String> {
        let cut = || "is cut off".to_string();
        let (head, rest) = bytes.split_at_checked(HEAD * 8).ok_or_else(cut)?;
        let word = |i: usize| u64::from_le_bytes(head.as_chunks().0[i]);
        let [first, forgotten, since, edits, removed, at] = std::array::from_fn(word);
        if removed > spec.removed_ids() as u64 || edits > EDITS as u64 {
            return Err("has more removed ids or edits than it may".into());
        }
        let (edits, rest) = rest.split_at_checked(edits as usize * 16).ok_or_else(cut)?;
        let (removed, counters) = rest.split_at_checked(removed as usize * 16).ok_or_else(cut)?;
        let all = if spec.min_count > 1 { counters_of(spec.partition_rows()) } else { 0 };
        if at.saturating_add(counters.len() as u64) > all {
            return Err("has other counts".into());
        }
        let (edits, removed, at) = (edits.as_chunks().0, removed.as_chunks().0, at as usize);
        Ok(Self { first, forgotten, since, edits, removed, at, counters })
    }
}

/// A part of a snapshot, behind the rows.
impl LazyPart for History {
    fn bytes(&self) -> usize {
        self.written(&(0..self.removed.ring.len()), &(0..self.counters()), true)
    }

    fn read(&self) -> Bytes {
        let mut bytes = Vec::with_capacity(self.bytes());
        self.write(&(0..self.removed.ring.len()), &(0..self.counters()), true, &mut bytes);
        bytes.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spec(min_count: u32) -> TableSpec {
        TableSpec { partitions: 1, min_count, ..TableSpec::new("t", 1, 64) }
    }

    proptest! {
        /// Cormode and Muthukrishnan 2005, theorem 1: no count is below the true one.
        #[test]
        fn id_is_admitted_at_the_latest_when_it_was_named_often_enough(
            ids in prop::collection::vec(0..40u64, 0..900),
            min_count in 2..6u32,
        ) {
            let spec = spec(min_count);
            let mut history = History::new(&spec).expect("memory");
            let mut named: HashMap<u64, u32> = HashMap::new();
            for id in ids {
                let count = named.entry(id).or_default();
                *count = count.saturating_add(1);
                prop_assert!(history.admits(&spec, id) || *count < min_count, "{} was named {} times", id, count);
            }
        }
    }

    #[test]
    fn counts_fade() {
        let spec = spec(3);
        let mut history = History::new(&spec).expect("memory");
        assert!(!history.admits(&spec, 7) && !history.admits(&spec, 7));
        let width = index_entries(64);
        (0..10 * width).for_each(|_| _ = history.admits(&spec, 8));
        let seven = history.counts.as_mut().expect("it counts").add(7);
        assert_eq!(seven, 2, "half of two, and one");
    }

    #[test]
    fn removed_ids_are_forgotten_in_order_and_that_is_known() {
        let spec = spec(1);
        let most = spec.removed_ids() as u64;
        let mut history = History::new(&spec).expect("memory");
        (0..most).for_each(|id| history.remove(&spec, id, id + 1));
        history.revive(0);
        assert!(!history.was_removed(0) && history.was_removed(1));
        history.remove(&spec, 0, most + 1); // forgets its older entry only
        assert_eq!(history.removed_since(0), Some((1..most).chain([0]).collect()));
        history.edit(9, 3);
        history.remove(&spec, most, most + 2);
        assert_eq!(history.removed_since(1), None, "id 1, removed at version 2, is forgotten");
        assert_eq!(history.removed_since(2).map(|ids| ids.len() as u64), Some(most));
        let again = History::load(&spec, &history.read().into()).expect("whole");
        assert_eq!(again, history);
    }

    #[test]
    fn damaged_history_is_refused() {
        for min_count in [1, 2] {
            let spec = spec(min_count);
            let mut history = History::new(&spec).expect("memory");
            history.remove(&spec, 5, 1);
            let bytes = history.read();
            History::load(&spec, &bytes.clone().into()).expect("whole");
            for len in [0, 8, bytes.len() - 1] {
                History::load(&spec, &bytes.slice(..len).into()).expect_err("cut");
            }
            let mut many = bytes.to_vec();
            many[32..40].fill(0xff);
            History::load(&spec, &Payload::from(many)).expect_err("more than it may have");
        }
    }
}
