//! The writer's view of a log's folder: append, truncate, purge, and the order of file changes, chosen so
//! that the log opens after a crash at any point.
//!
//! Truncation and purging are items, as records are: written data does not change until a whole segment is removed.

use super::{
    format::{BLOCK_BYTES, HEAD_BYTES, Head, Kind, Prefix, body_crc, encode_table},
    groups::{Groups, LiveRecords, Place},
    record::{LogOptions, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Record},
    segment::{Segment, segment_path},
};
use crate::{
    StoreError,
    disk::{Access, Disk},
    error::named,
    small::write_small,
};
use bytes::Bytes;
use paraft_common::Payload;
use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    path::{Path, PathBuf},
    sync::Arc,
};

/// Maximum of purged segments that are kept for reuse. A log is purged by a few segments at a time.
pub(super) const MAX_SPARES: usize = 4;
/// Name of a new segment during its creation, if no spare is available.
pub(super) const NEW_FILE: &str = "new.tmp";
/// Names the segment whose end is being cut; until that is done it may be shorter than its prefix claims.
pub(super) const CUT_FILE: &str = "cutting";
/// Reserved size of a log's first segment. Every later one has the log's size at that time, up to
/// [`LogOptions::segment_bytes`]: so a small log takes little space, and a large one has few files.
pub(super) const FIRST_BYTES: u64 = 1 << 20;

/// A segment before the active one. All its items are durable.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sealed {
    /// Number of its first item.
    pub first: u64,
    /// Size of the file.
    pub bytes: u64,
}

pub(super) struct Segments {
    pub disk: Arc<dyn Disk>,
    pub dir: PathBuf,
    pub options: LogOptions,
    /// Oldest first.
    pub sealed: VecDeque<Sealed>,
    /// The segment of the next item; `None` in a log without items.
    pub active: Option<Segment>,
    /// Size at which the active segment is full.
    pub room: u64,
    /// Purged segments for reuse. Their new names are durable: otherwise one could reappear after a crash under its
    /// old name with new contents.
    pub spares: Vec<PathBuf>,
    /// The number of the next item.
    pub next: u64,
    /// Every item with a lower number is durable.
    pub synced: u64,
    pub begun: u64,
    pub recycled: u64,
    pub moved: u64,
    /// The state of each group; shared with readers.
    pub groups: Arc<Groups>,
    pub live: LiveRecords,
    /// Records to move out of the oldest segment: group and index.
    pub to_move: VecDeque<(u64, u64)>,
    /// The next number when moving failed with a disk error (no descriptors, say): it is retried after the next
    /// batch.
    pub moving_failed: Option<u64>,
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// The size at which an existing segment is full.
pub(super) fn room_of(segment: &Segment, options: LogOptions) -> Result<u64, StoreError> {
    Ok(segment.size()?.max(FIRST_BYTES).min(options.segment_bytes))
}

/// An item to be written.
pub(super) struct Item<'a> {
    pub kind: Kind,
    pub index: u64,
    pub header: &'a Bytes,
    pub payload: &'a Payload,
}

impl<'a> Item<'a> {
    fn of(record: &'a Record) -> Self {
        Item { kind: Kind::Record, index: record.index, header: &record.header, payload: &record.payload }
    }

    pub fn bytes(&self) -> u64 {
        (HEAD_BYTES + self.header.len() + self.payload.len()) as u64
    }
}

impl Segments {
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn path(&self, first: u64) -> PathBuf {
        segment_path(&self.dir, first)
    }

    pub fn sync_dir(&self) -> io::Result<()> {
        self.disk.sync_dir(&self.dir).map_err(named("sync the folder", &self.dir))
    }

    /// Makes everything written durable.
    pub fn sync(&mut self) -> io::Result<()> {
        if self.synced == self.next {
            return Ok(());
        }
        if let Some(active) = &mut self.active {
            active.file.sync().map_err(named("sync", &active.path))?;
        }
        self.synced = self.next;
        Ok(())
    }

    /// Starts the segment of the next item. It gets its name only after its first bytes are durable, and no item is
    /// written before the name is durable.
    fn begin(&mut self) -> io::Result<()> {
        if let Some(full) = &self.active {
            let (first, bytes) = (full.prefix.first, full.file.size().map_err(named("read", &full.path))?);
            // Even without `options.sync`: a complete sealed segment is the basis for telling damage from a crash.
            self.sync()?;
            self.sealed.push_back(Sealed { first, bytes });
            self.active = None;
        }
        let (from, access) = match self.spares.pop() {
            Some(spare) => (spare, Access::Write),
            None => (self.dir.join(NEW_FILE), Access::Create),
        };
        let mut file = self.disk.open(&from, access).map_err(named("begin a segment in", &from))?;
        // Reusing a spare's blocks is cheaper than reserving new ones.
        let spare = file.size().map_err(named("read", &from))?;
        self.room = self.sealed_bytes().max(FIRST_BYTES).max(spare).min(self.options.segment_bytes);
        // Best effort: without reservation the file grows as it is written, and a full disk shows up then.
        let reserved = file.allocate(self.room).map_or(0, |()| self.room / BLOCK_BYTES * BLOCK_BYTES);
        let table = encode_table(&self.groups.table());
        let prefix = Prefix {
            salt: rand::random(),
            first: self.next,
            reserved,
            table_bytes: table.len() as u32, // bounded by the number of groups and the bytes of a tag
            table_crc: crc32fast::hash(&table),
        };
        let start = prefix.encode();
        file.write_at(0, &mut [IoSlice::new(&start), IoSlice::new(&table)]).map_err(named("write", &from))?;
        file.sync().map_err(named("sync", &from))?;
        let path = self.path(prefix.first);
        self.disk.rename(&from, &path).map_err(named("rename", &from))?;
        self.sync_dir()?;
        self.begun += 1;
        self.recycled += u64::from(access == Access::Write);
        self.active = Some(Segment { path, file, prefix, offset: prefix.start() });
        Ok(())
    }

    pub fn sealed_bytes(&self) -> u64 {
        self.sealed.iter().map(|s| s.bytes).sum()
    }

    /// Cuts everything after the segment's offset; durable on return.
    pub fn cut(&self, segment: &mut Segment, room: u64) -> io::Result<()> {
        let mark = self.dir.join(CUT_FILE);
        if segment.prefix.reserved > 0 {
            write_small(self.disk.as_ref(), &mark, &segment.prefix.first.to_le_bytes())?;
        }
        segment.cut(room)?;
        segment.file.sync().map_err(named("sync", &segment.path))?;
        match segment.prefix.reserved > 0 {
            true => self.disk.remove(&mark).map_err(named("remove", &mark)),
            false => Ok(()),
        }
    }

    /// Writes items of a group, starting with this turn; returns the places of those that fit into the active
    /// segment.
    pub fn write(&mut self, key: u64, turn: u64, items: &[Item]) -> io::Result<Vec<Place>> {
        if self.fitting(items) == 0 {
            self.begin()?;
        }
        let now = &items[..self.fitting(items)];
        let (mut heads, mut places) = (Vec::with_capacity(now.len()), Vec::with_capacity(now.len()));
        let Some(active) = self.active.as_mut() else { return Ok(places) };
        let mut offset = active.offset;
        for (item, nth) in now.iter().zip(0..) {
            let head = Head {
                kind: item.kind,
                header_bytes: item.header.len() as u32, // `check` bounds both
                payload_bytes: item.payload.len() as u32,
                body_crc: body_crc(item.header, item.payload),
                number: self.next + nth,
                synced: self.synced,
                group: key,
                turn: turn + nth,
                index: item.index,
            };
            heads.push(head.encode(active.prefix.salt));
            places.push(Place { segment: active.prefix.first, offset, bytes: head.body_bytes() as u32 });
            offset += item.bytes();
        }
        // Headers and payloads are written without copying.
        let mut parts = Vec::with_capacity(3 * now.len());
        for (head, item) in heads.iter().zip(now) {
            parts.extend([head.as_slice(), item.header].map(IoSlice::new));
            parts.extend(item.payload.pieces().iter().map(|p| IoSlice::new(p)));
        }
        active.file.write_at(active.offset, &mut parts).map_err(named("write", &active.path))?;
        active.offset = offset;
        self.next += now.len() as u64;
        Ok(places)
    }

    /// The number of `items` that fit into the active segment. The first item of a segment always fits.
    fn fitting(&self, items: &[Item]) -> usize {
        let Some(active) = &self.active else { return 0 };
        let (mut end, empty) = (active.offset, self.next == active.prefix.first);
        let fits = |(place, item): &(usize, &Item)| {
            end += item.bytes();
            (empty && *place == 0) || end <= self.room
        };
        items.iter().enumerate().take_while(fits).count()
    }

    /// Whether these records may follow in the log of a group.
    pub fn check(&self, key: u64, records: &[Record]) -> io::Result<()> {
        let mut expected = match self.groups.known().get(&key) {
            None => return Err(invalid(format!("the log of group {key:016x} was removed"))),
            Some(group) => match &group.damage {
                Some(fault) => return Err(fault.error().into()),
                None => group.next,
            },
        };
        for Record { index, header, payload } in records {
            if expected.is_some_and(|e| e != *index) || *index == u64::MAX {
                return Err(invalid(format!("record {index} where {} is next", expected.unwrap_or(0))));
            }
            if header.len() > MAX_HEADER_BYTES || payload.len() > MAX_PAYLOAD_BYTES {
                let (h, p) = (header.len(), payload.len());
                return Err(invalid(format!(
                    "record {index} has {h} bytes of header and {p} of payload; too many"
                )));
            }
            expected = Some(index + 1);
        }
        Ok(())
    }

    pub fn turn(&self, key: u64) -> u64 {
        self.groups.known().get(&key).map_or(0, |g| g.turn)
    }

    /// Writes records that passed [`Self::check`]. Not durable yet.
    pub fn append(&mut self, key: u64, records: &[Record]) -> io::Result<()> {
        let items: Vec<Item> = records.iter().map(Item::of).collect();
        let mut done = 0;
        while done < items.len() {
            let places = self.write(key, self.turn(key), &items[done..])?;
            places.iter().for_each(|p| self.live.add(*p));
            let mut known = self.groups.known();
            let group = known.entry(key).or_default();
            group.turn += places.len() as u64;
            places.iter().zip(&records[done..]).for_each(|(place, r)| group.put(r.index, *place));
            done += places.len();
        }
        Ok(())
    }

    /// Writes an item that is no record and has no payload.
    fn note(&mut self, key: u64, kind: Kind, index: u64, header: &Bytes) -> io::Result<()> {
        let payload = &Payload::EMPTY;
        self.write(key, self.turn(key), &[Item { kind, index, header, payload }]).map(drop)
    }

    /// Drops a group's records after `last`. Not durable yet.
    pub fn truncate_after(&mut self, key: u64, last: Option<u64>) -> io::Result<()> {
        // The first index to drop. Purged records are gone anyway.
        let gone = match self.groups.known().get(&key) {
            Some(g) => {
                let after = g.purged.as_ref().map_or(0, |(upto, _)| upto + 1);
                let gone = last.map_or(0, |l| l.saturating_add(1)).max(after);
                if g.next.is_none_or(|next| gone >= next) {
                    return Ok(());
                }
                gone
            }
            None => return Ok(()),
        };
        self.note(key, Kind::Truncate, gone, &Bytes::new())?;
        if let Some(group) = self.groups.known().get_mut(&key) {
            group.turn += 1;
            self.live.remove(group.truncate(gone));
        }
        Ok(())
    }

    /// Purges a group's records up to and including `upto`. Not durable yet.
    pub fn purge(&mut self, key: u64, upto: u64, tag: Bytes) -> io::Result<()> {
        let purged = |g: &super::groups::Group| g.purged.as_ref().is_some_and(|(p, _)| upto <= *p);
        if self.groups.known().get(&key).is_some_and(purged) {
            return Ok(());
        }
        self.note(key, Kind::Purge, upto, &tag)?;
        if let Some(group) = self.groups.known().get_mut(&key) {
            group.turn += 1;
            self.live.remove(group.purge(upto, tag));
        }
        Ok(())
    }

    /// Removes a group, damaged or not. Not durable yet.
    pub fn remove(&mut self, key: u64) -> io::Result<()> {
        let begun = self.groups.known().get(&key).map(|g| g.turn > 0 || g.damage.is_some());
        if begun == Some(true) {
            self.note(key, Kind::Remove, 0, &Bytes::new())?;
        }
        if let Some(group) = self.groups.known().remove(&key) {
            self.live.remove(group.places.into_values());
        }
        Ok(())
    }

    /// Records that no handle has the group's log open.
    pub fn close_group(&self, key: u64) {
        if let Some(group) = self.groups.known().get_mut(&key) {
            group.open = false;
        }
    }

    /// Writes a mark that everything before it is durable, so that later corruption is known to be damage. An
    /// already damaged log stays unchanged.
    pub fn close(&mut self) -> io::Result<()> {
        self.sync()?;
        if let Some(active) = self.active.as_mut().filter(|_| !self.groups.any_damaged()) {
            // Not synced: without the mark the log opens as after a crash.
            let mark = Head::mark(self.next).encode(active.prefix.salt);
            active.file.write_at(active.offset, &mut [IoSlice::new(&mark)])?;
        }
        Ok(())
    }
}
