//! The state of each group in a shared log: the places of its records, its purge point, its damage; and reading
//! records while the writer runs.
//!
//! The writer registers an item once it is in its file. A reader looks up places, then reads the files without
//! blocking appends. A change of bytes under readers (a segment that becomes a spare) waits for the reads that
//! started before, and concerns only segments without registered places.

use super::{
    format::{Entry, HEAD_BYTES, Kind, UNLISTED_KEY},
    record::Record,
    segment::{Segment, segment_path},
};
use crate::{Disk, StoreError, disk::Access};
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockWriteGuard};
use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

/// A damaged place in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub path: PathBuf,
    pub offset: u64,
    pub what: String,
}

impl Fault {
    pub fn error(&self) -> StoreError {
        StoreError::damaged(&self.path, self.offset, self.what.clone())
    }
}

/// The place of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// First number of its segment.
    pub segment: u64,
    pub offset: u64,
    /// Bytes of header and payload; the sum of both bounds fits.
    pub bytes: u32,
}

impl Place {
    /// Bytes that the item takes in its segment.
    pub fn item_bytes(&self) -> u64 {
        HEAD_BYTES as u64 + u64::from(self.bytes)
    }
}

/// Places of records that a change gave up.
pub(super) type FreedPlaces = Vec<Place>;

#[derive(Clone, Debug, Default)]
pub(super) struct Group {
    /// A handle of its log is open.
    pub open: bool,
    /// The turn of its next item.
    pub turn: u64,
    pub purged: Option<(u64, Bytes)>,
    /// Index of its first record; if it has none, of the next.
    pub first: u64,
    /// Index of its next record; `None`: any.
    pub next: Option<u64>,
    /// Some of it may be lost.
    pub damage: Option<Fault>,
    pub places: BTreeMap<u64, Place>,
    bytes: u64,
}

impl Group {
    pub fn of(entry: &Entry) -> Group {
        let Entry { turn, purged, first, next, .. } = entry.clone();
        Group { turn, purged, first, next, ..Group::default() }
    }

    fn entry(&self, key: u64) -> Entry {
        let Group { turn, first, next, .. } = *self;
        Entry { key, damaged: self.damage.is_some(), turn, first, next, purged: self.purged.clone() }
    }

    fn free_places(&mut self, gone: BTreeMap<u64, Place>) -> FreedPlaces {
        self.bytes -= gone.values().map(|p| u64::from(p.bytes)).sum::<u64>();
        gone.into_values().collect()
    }

    /// Registers a written record.
    pub fn put(&mut self, index: u64, place: Place) {
        if self.next.is_none() {
            self.first = index;
        }
        self.next = Some(index + 1);
        self.bytes += u64::from(place.bytes);
        self.places.insert(index, place);
    }

    /// Registers the copy of a record; returns its old place. `None`, without effect, if the record is not there
    /// any more.
    pub fn moved(&mut self, index: u64, place: Place) -> Option<Place> {
        if index < self.first || self.next.is_none_or(|next| index >= next) {
            return None;
        }
        let before = self.places.insert(index, place);
        self.bytes = self.bytes + u64::from(place.bytes) - before.map_or(0, |p| u64::from(p.bytes));
        before
    }

    /// Truncates the records from `gone` on.
    pub fn truncate(&mut self, gone: u64) -> FreedPlaces {
        if gone <= self.first {
            self.next = self.purged.as_ref().map(|(upto, _)| upto + 1);
            self.first = self.next.unwrap_or(0);
        } else if self.next.is_some_and(|next| next > gone) {
            self.next = Some(gone);
        }
        let gone = self.places.split_off(&gone);
        self.free_places(gone)
    }

    /// Purges the records up to and including `upto`.
    pub fn purge(&mut self, upto: u64, tag: Bytes) -> FreedPlaces {
        self.purged = Some((upto, tag));
        if self.next.is_none_or(|next| next <= upto + 1) {
            self.next = Some(upto + 1);
        }
        self.first = self.first.max(upto + 1);
        let kept = self.places.split_off(&(upto + 1));
        let gone = std::mem::replace(&mut self.places, kept);
        self.free_places(gone)
    }

    /// Drops everything before record `index`, the next one.
    pub fn begin_again(&mut self, index: Option<u64>) {
        (self.places, self.bytes) = (BTreeMap::new(), 0);
        (self.first, self.next) = (index.unwrap_or(0), index);
    }

    /// The first record that is missing.
    pub fn missing(&self) -> Option<u64> {
        let next = self.next?;
        let mut expected = self.first;
        for index in self.places.keys() {
            if *index != expected {
                break;
            }
            expected += 1;
        }
        (expected < next).then_some(expected)
    }
}

/// Shared by a log's writer and its readers.
#[derive(Debug, Default)]
pub(super) struct Groups {
    known: Mutex<BTreeMap<u64, Group>>,
    /// Read-locked during file reads, write-locked for changes of written data.
    files: RwLock<()>,
    /// The writer has ended: another process may use the files.
    dead: AtomicBool,
    /// The segment whose end was being cut when the last process died, until it is repaired.
    being_cut: Option<u64>,
    /// A place where unknown groups may have started.
    unlisted: Option<Fault>,
}

impl Groups {
    pub fn new(known: BTreeMap<u64, Group>, unlisted: Option<Fault>, being_cut: Option<u64>) -> Arc<Groups> {
        Arc::new(Groups { known: Mutex::new(known), unlisted, being_cut, ..Groups::default() })
    }

    /// The damage that may affect a group.
    pub fn damage(&self, key: u64) -> Option<Fault> {
        match self.known.lock().get(&key) {
            Some(group) => group.damage.clone(),
            None => self.unlisted.clone(),
        }
    }

    /// Records the damage of a group that a read has found; `false`: the error is another one.
    pub fn note_damage(&self, key: u64, error: &StoreError) -> bool {
        let StoreError::Damaged { path, offset, what } = error else { return false };
        if let Some(group) = self.known.lock().get_mut(&key) {
            group.damage = Some(Fault { path: path.clone(), offset: *offset, what: what.clone() });
        }
        true
    }

    /// The state of all groups. The lock blocks the writer and readers.
    pub fn known(&self) -> MutexGuard<'_, BTreeMap<u64, Group>> {
        self.known.lock()
    }

    /// The state of all groups, for a segment's table.
    pub fn table(&self) -> Vec<Entry> {
        let known = self.known.lock();
        let begun = known.iter().filter(|(_, g)| g.turn > 0 || g.damage.is_some());
        let unlisted = self
            .unlisted
            .as_ref()
            .map(|fault| Group { damage: Some(fault.clone()), ..Group::default() }.entry(UNLISTED_KEY));
        begun.map(|(key, g)| g.entry(*key)).chain(unlisted).collect()
    }

    pub fn any_damaged(&self) -> bool {
        self.known.lock().values().any(|g| g.damage.is_some())
    }

    /// Excludes all file reads while the guard lives.
    pub fn alone(&self) -> RwLockWriteGuard<'_, ()> {
        self.files.write()
    }

    /// Prevents further reads.
    pub fn die(&self) {
        self.dead.store(true, SeqCst);
    }

    /// The number of a group's records, and the bytes of their headers and payloads.
    pub fn length(&self, key: u64) -> (u64, u64) {
        self.known.lock().get(&key).map_or((0, 0), |g| (g.places.len() as u64, g.bytes))
    }

    /// See [`super::Log::read`].
    pub fn read(
        &self,
        disk: &dyn Disk,
        dir: &Path,
        key: u64,
        range: Range<u64>,
        most: u64,
    ) -> Result<Vec<Record>, StoreError> {
        let _at_the_files = self.files.read(); // before the look-up, so that the places stay valid
        if self.dead.load(SeqCst) {
            return Err(StoreError::io("read the log in", dir)(gone()));
        }
        let places = self.look_up(key, range, most);
        let (mut records, mut open) = (Vec::with_capacity(places.len()), None::<Segment>);
        for (index, place) in places {
            let segment = match open.take().filter(|s| s.prefix.first == place.segment) {
                Some(same) => same,
                None => {
                    let (path, cut) =
                        (segment_path(dir, place.segment), self.being_cut == Some(place.segment));
                    Segment::open(disk, path, Access::Read, cut)?
                }
            };
            let segment = open.insert(segment);
            let size = segment.size()?;
            let item = segment.item(place.offset, size)?;
            let is_it = |h: &super::format::Head| {
                matches!(h.kind, Kind::Record | Kind::Moved) && (h.group, h.index) == (key, index)
            };
            let item = item.filter(|i| is_it(&i.head));
            let body = item.map(|i| segment.body(&i)).transpose()?.flatten();
            let Some((header, payload)) = body else {
                let what = format!("record {index} is not as it was written");
                return Err(StoreError::damaged(&segment.path, place.offset, what));
            };
            records.push(Record { index, header, payload });
        }
        Ok(records)
    }

    /// Reads all records of a group in order, in parts.
    pub fn read_all(
        &self,
        disk: &dyn Disk,
        dir: &Path,
        key: u64,
        each: &mut dyn FnMut(Record),
    ) -> Result<u64, StoreError> {
        let (mut next, mut count) = (self.known.lock().get(&key).map_or(0, |g| g.first), 0);
        loop {
            let some = self.read(disk, dir, key, next..u64::MAX, READ_BYTES)?;
            let Some(last) = some.last() else { return Ok(count) };
            (next, count) = (last.index + 1, count + some.len() as u64);
            some.into_iter().for_each(&mut *each);
        }
    }

    fn look_up(&self, key: u64, range: Range<u64>, most: u64) -> Vec<(u64, Place)> {
        let known = self.known.lock();
        let Some(group) = known.get(&key) else { return Vec::new() };
        if range.is_empty() || !group.places.contains_key(&range.start) {
            return Vec::new();
        }
        let mut bytes = 0;
        let within = |(_, p): &(&u64, &Place)| {
            let first = bytes == 0;
            bytes += u64::from(p.bytes).max(1);
            first || bytes <= most
        };
        group.places.range(range).take_while(within).map(|(index, p)| (*index, *p)).collect()
    }
}

/// Bytes per part when an opened log is read.
const READ_BYTES: u64 = 4 << 20;

/// The needed records of each segment.
#[derive(Debug, Default)]
pub(super) struct LiveRecords {
    /// Number of records, by the segment's first number.
    counts: BTreeMap<u64, u64>,
    /// Bytes of all of them.
    pub bytes: u64,
}

impl LiveRecords {
    pub fn of(groups: &Groups) -> LiveRecords {
        let mut live = LiveRecords::default();
        groups.known().values().flat_map(|g| g.places.values()).for_each(|p| live.add(*p));
        live
    }

    pub fn add(&mut self, place: Place) {
        *self.counts.entry(place.segment).or_default() += 1;
        self.bytes += place.item_bytes();
    }

    pub fn remove(&mut self, gone: impl IntoIterator<Item = Place>) {
        for place in gone {
            self.bytes -= place.item_bytes();
            if let Some(count) = self.counts.get_mut(&place.segment) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(&place.segment);
                }
            }
        }
    }

    pub fn is_empty(&self, segment: u64) -> bool {
        !self.counts.contains_key(&segment)
    }
}

/// The error of a log whose thread ended early. Only a panic does that, such as one in a `done`.
pub(super) fn gone() -> io::Error {
    io::Error::other("the log's writer has ended; open the log again")
}

/// The error that stopped the writer, as a new error for each caller.
pub(super) fn stopped(dir: &Path, (kind, first): &(io::ErrorKind, String)) -> io::Error {
    io::Error::new(*kind, format!("the log in {} stopped: {first}", dir.display()))
}
