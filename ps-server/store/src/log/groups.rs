//! What a shared log holds of each group: where its records lie, how far it is purged, whether it is damaged; and reading
//! records back while the writer goes on.
//!
//! The writer notes an item once it is in its file. Who reads looks places up, then reads the files without holding up
//! appends; what would change bytes under it (a segment that becomes a spare) waits for the reads that began before, and
//! happens only where no place points any more.

use super::{
    Record,
    format::{Entry, HEAD_BYTES, Kind, UNLISTED},
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

/// What is wrong with a file.
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

/// Where a record lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// First number of the segment.
    pub segment: u64,
    pub offset: u64,
    /// Of header and payload; at most the bounds of both, so it fits.
    pub bytes: u32,
}

impl Place {
    /// What it takes of its segment.
    pub fn item_bytes(&self) -> u64 {
        HEAD_BYTES as u64 + u64::from(self.bytes)
    }
}

/// Records that a change has let go of.
pub(super) type Gone = Vec<Place>;

#[derive(Clone, Debug, Default)]
pub(super) struct Group {
    /// Somebody has its log open.
    pub open: bool,
    /// The turn of its next item.
    pub turn: u64,
    pub purged: Option<(u64, Bytes)>,
    /// Index of its first record; where it has none, of the next.
    pub first: u64,
    /// Index of its next record; `None`: any.
    pub next: Option<u64>,
    /// Something of it cannot be told any more.
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

    fn let_go(&mut self, gone: BTreeMap<u64, Place>) -> Gone {
        self.bytes -= gone.values().map(|p| u64::from(p.bytes)).sum::<u64>();
        gone.into_values().collect()
    }

    /// A record is written.
    pub fn put(&mut self, index: u64, place: Place) {
        if self.next.is_none() {
            self.first = index;
        }
        self.next = Some(index + 1);
        self.bytes += u64::from(place.bytes);
        self.places.insert(index, place);
    }

    /// A record is written again; gives where it was. `None`, and nothing happens, where it is not there any more.
    pub fn moved(&mut self, index: u64, place: Place) -> Option<Place> {
        if index < self.first || self.next.is_none_or(|next| index >= next) {
            return None;
        }
        let before = self.places.insert(index, place);
        self.bytes = self.bytes + u64::from(place.bytes) - before.map_or(0, |p| u64::from(p.bytes));
        before
    }

    /// The records from `gone` on are given up.
    pub fn truncate(&mut self, gone: u64) -> Gone {
        if gone <= self.first {
            self.next = self.purged.as_ref().map(|(upto, _)| upto + 1);
            self.first = self.next.unwrap_or(0);
        } else if self.next.is_some_and(|next| next > gone) {
            self.next = Some(gone);
        }
        let gone = self.places.split_off(&gone);
        self.let_go(gone)
    }

    /// Those up to and including `upto` are purged.
    pub fn purge(&mut self, upto: u64, tag: Bytes) -> Gone {
        self.purged = Some((upto, tag));
        if self.next.is_none_or(|next| next <= upto + 1) {
            self.next = Some(upto + 1);
        }
        self.first = self.first.max(upto + 1);
        let kept = self.places.split_off(&(upto + 1));
        let gone = std::mem::replace(&mut self.places, kept);
        self.let_go(gone)
    }

    /// Forgets everything before record `index`, which is next.
    pub fn begin_again(&mut self, index: Option<u64>) {
        (self.places, self.bytes) = (BTreeMap::new(), 0);
        (self.first, self.next) = (index.unwrap_or(0), index);
    }

    /// The first record that it should have and has not.
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
    /// Held by reads while they are at the files, and by whoever changes what is written already.
    files: RwLock<()>,
    /// The writer has ended: another may be at the files.
    dead: AtomicBool,
    /// The segment whose end was being cut off when the last process died, while that is not mended.
    being_cut: Option<u64>,
    /// Where groups may have begun of which nothing is known.
    unlisted: Option<Fault>,
}

impl Groups {
    pub fn new(known: BTreeMap<u64, Group>, unlisted: Option<Fault>, being_cut: Option<u64>) -> Arc<Groups> {
        Arc::new(Groups { known: Mutex::new(known), unlisted, being_cut, ..Groups::default() })
    }

    /// Why something of a group may be lost.
    pub fn damage(&self, key: u64) -> Option<Fault> {
        match self.known.lock().get(&key) {
            Some(group) => group.damage.clone(),
            None => self.unlisted.clone(),
        }
    }

    /// All of them. Whoever holds this holds up the writer and readers.
    pub fn known(&self) -> MutexGuard<'_, BTreeMap<u64, Group>> {
        self.known.lock()
    }

    /// What all have come to, for a segment's table.
    pub fn table(&self) -> Vec<Entry> {
        let known = self.known.lock();
        let begun = known.iter().filter(|(_, g)| g.turn > 0 || g.damage.is_some());
        let unlisted = self
            .unlisted
            .as_ref()
            .map(|fault| Group { damage: Some(fault.clone()), ..Group::default() }.entry(UNLISTED));
        begun.map(|(key, g)| g.entry(*key)).chain(unlisted).collect()
    }

    pub fn any_damaged(&self) -> bool {
        self.known.lock().values().any(|g| g.damage.is_some())
    }

    /// Nobody is at the files while the guard lives.
    pub fn alone(&self) -> RwLockWriteGuard<'_, ()> {
        self.files.write()
    }

    /// No read begins any more.
    pub fn die(&self) {
        self.dead.store(true, SeqCst);
    }

    /// Records of a group, and the bytes of their headers and payloads.
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
        let _at_the_files = self.files.read(); // before the look-up: what is found stays
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

    /// Reads all records of a group, in order, some at a time.
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

/// A log that is opened is read in parts of so many bytes.
const READ_BYTES: u64 = 4 << 20;

/// The records that each segment still has to keep.
#[derive(Debug, Default)]
pub(super) struct Live {
    /// By the segment's first number: how many.
    counts: BTreeMap<u64, u64>,
    /// What all of them take.
    pub bytes: u64,
}

impl Live {
    pub fn of(groups: &Groups) -> Live {
        let mut live = Live::default();
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

/// Why a log whose thread ended does nothing more. Only a panic ends it early, such as one in a `done`.
pub(super) fn gone() -> io::Error {
    io::Error::other("the log's writer has ended; open the log anew")
}

/// What the writer stopped with, as an error of its own for everyone who asks.
pub(super) fn stopped(dir: &Path, (kind, first): &(io::ErrorKind, String)) -> io::Error {
    io::Error::new(*kind, format!("the log in {} stopped: {first}", dir.display()))
}
