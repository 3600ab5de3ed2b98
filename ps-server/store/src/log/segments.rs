//! The folder of a log as its writer changes it: append, truncate, purge, and the order in which files change so
//! that a crash at any point leaves a log that opens.

use super::{
    LogOptions, Record,
    format::{BLOCK_BYTES, HEAD_BYTES, Head, Kind, Prefix, body_crc},
    places::Places,
    segment::{Segment, segment_path},
};
use crate::{
    StoreError,
    disk::{Access, Disk},
    error::named,
    small::write_small,
};
use paraft_common::Payload;
use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    path::{Path, PathBuf},
    sync::Arc,
};

/// So many purged segments are kept to be written over. A replica's log is purged by a few segments at a time.
pub(super) const MAX_SPARES: usize = 4;
/// A new segment that has no spare to write over is made under this name.
pub(super) const NEW_FILE: &str = "new.tmp";
pub(super) const PURGE_FILE: &str = "purged";
/// Names the segment whose end is being cut off: until that is done it may be shorter than it says.
pub(super) const CUT_FILE: &str = "cutting";
/// What is reserved for a log's first segment. Every later one is as long as the log is then, up to
/// [`LogOptions::segment_bytes`]: a small log takes little, a long one few files.
pub(super) const FIRST_BYTES: u64 = 1 << 20;

pub(super) struct Segments {
    pub disk: Arc<dyn Disk>,
    pub dir: PathBuf,
    pub options: LogOptions,
    /// First indices of the segments before the active one, oldest first. All their records are durable.
    pub sealed: VecDeque<u64>,
    /// Where the next record goes; none in a log without records.
    pub active: Option<Segment>,
    /// The active segment is full at so many bytes.
    pub room: u64,
    /// Purged segments that may be written over. Their names are durable: else one could come back after a
    /// crash under its old name with new contents.
    pub spares: Vec<PathBuf>,
    pub purged: Option<u64>,
    /// The index of the next record; `None`: any.
    pub next: Option<u64>,
    /// Every record below is durable.
    pub synced: u64,
    pub begun: u64,
    pub recycled: u64,
    /// Where the records are, for who reads them back.
    pub places: Arc<Places>,
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// Whether these records may follow; then `next` is the index behind them.
pub(super) fn check(next: &mut Option<u64>, records: &[Record]) -> io::Result<()> {
    let mut expected = *next;
    for Record { index, header, payload } in records {
        if expected.is_some_and(|e| e != *index) || *index == u64::MAX {
            return Err(invalid(format!("record {index} where {} is next", expected.unwrap_or(0))));
        }
        if header.len() > super::MAX_HEADER_BYTES || payload.len() > super::MAX_PAYLOAD_BYTES {
            let (h, p) = (header.len(), payload.len());
            return Err(invalid(format!(
                "record {index} has {h} bytes of header and {p} of payload; too many"
            )));
        }
        expected = Some(index + 1);
    }
    *next = expected;
    Ok(())
}

/// When a segment is full that was begun earlier.
pub(super) fn room_of(segment: &Segment, options: LogOptions) -> Result<u64, StoreError> {
    Ok(segment.size()?.max(FIRST_BYTES).min(options.segment_bytes))
}

pub(super) fn item_bytes(record: &Record) -> u64 {
    HEAD_BYTES as u64 + record.bytes()
}

fn head(record: &Record, synced: u64) -> Head {
    Head {
        kind: Kind::Record,
        header_bytes: record.header.len() as u32, // `check` bounds both
        payload_bytes: record.payload.len() as u32,
        body_crc: body_crc(&record.header, &record.payload),
        index: record.index,
        synced,
    }
}

impl Segments {
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn next(&self) -> Option<u64> {
        self.next
    }

    /// How many segments were begun, and how many of those over a spare.
    pub fn begun(&self) -> (u64, u64) {
        (self.begun, self.recycled)
    }

    fn path(&self, first: u64) -> PathBuf {
        segment_path(&self.dir, first)
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.disk.sync_dir(&self.dir).map_err(named("sync the folder", &self.dir))
    }

    /// Makes everything written durable.
    fn sync(&mut self) -> io::Result<()> {
        if let Some(active) = &mut self.active {
            active.file.sync().map_err(named("sync", &active.path))?;
        }
        self.synced = self.next.unwrap_or(0);
        Ok(())
    }

    /// Begins the segment of record `first`. It has its name only when its own first bytes are durable, and no
    /// record is written before its name is.
    fn begin(&mut self, first: u64) -> io::Result<()> {
        if let Some(full) = &self.active {
            let first = full.prefix.first;
            // Even without `options.sync`: that a sealed segment is whole is what tells damage from a crash.
            self.sync()?;
            self.sealed.push_back(first);
            self.active = None;
        }
        let starts_log = self.sealed.is_empty() && self.purged.is_none();
        let (from, access) = match self.spares.pop() {
            Some(spare) => (spare, Access::Write),
            None => (self.dir.join(NEW_FILE), Access::Create),
        };
        let mut file = self.disk.open(&from, access).map_err(named("begin a segment in", &from))?;
        // What a spare has already is cheaper than what another would have to reserve.
        let spare = file.size().map_err(named("read", &from))?;
        self.room = self.length().max(FIRST_BYTES).max(spare).min(self.options.segment_bytes);
        // Best effort: where it is not possible the file grows as it is written, and a full disk shows then.
        let reserved = file.allocate(self.room).map_or(0, |()| self.room / BLOCK_BYTES * BLOCK_BYTES);
        let prefix = Prefix { salt: rand::random(), first, starts_log, reserved };
        let bytes = prefix.encode();
        file.write_at(0, &mut [IoSlice::new(&bytes)]).map_err(named("write", &from))?;
        file.sync().map_err(named("sync", &from))?;
        let path = self.path(first);
        self.disk.rename(&from, &path).map_err(named("rename", &from))?;
        self.sync_dir()?;
        self.begun += 1;
        self.recycled += u64::from(access == Access::Write);
        self.next = Some(first);
        self.active = Some(Segment { path, file, prefix, offset: bytes.len() as u64 });
        Ok(())
    }

    /// Bytes of the sealed segments. One that cannot be read now will say so when it is needed.
    fn length(&self) -> u64 {
        let size = |first: &u64| self.disk.open(&self.path(*first), Access::Read)?.size();
        self.sealed.iter().filter_map(|first| size(first).ok()).sum()
    }

    /// Cuts what is behind the segment's offset; durable when it returns.
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

    /// How many of `records` still go into `active`. The first record of a segment always does.
    fn fitting(&self, active: &Segment, records: &[Record]) -> usize {
        let (mut end, empty) = (active.offset, self.next == Some(active.prefix.first));
        let fits = |(place, record): &(usize, &Record)| {
            end += item_bytes(record);
            (empty && *place == 0) || end <= self.room
        };
        records.iter().enumerate().take_while(fits).count()
    }

    /// Writes records that [`check`] let pass, and makes them durable if the options say so.
    pub fn append(&mut self, records: &[Record]) -> io::Result<()> {
        let mut rest = records;
        while let Some(first) = rest.first() {
            let count = self.active.as_ref().map_or(0, |active| self.fitting(active, rest));
            let (now, later) = rest.split_at(count);
            let Some(active) = self.active.as_mut().filter(|_| count > 0) else {
                self.begin(first.index)?;
                continue;
            };
            let heads: Vec<_> = now.iter().map(|r| head(r, self.synced).encode(active.prefix.salt)).collect();
            // Headers and payloads are written from where they lie.
            let mut parts = Vec::with_capacity(3 * now.len());
            for (head, record) in heads.iter().zip(now) {
                parts.extend([head.as_slice(), &record.header].map(IoSlice::new));
                parts.extend(record.payload.pieces().iter().map(|p| IoSlice::new(p)));
            }
            active.file.write_at(active.offset, &mut parts).map_err(named("write", &active.path))?;
            self.places.add(active.prefix.first, active.offset, now);
            active.offset += now.iter().map(item_bytes).sum::<u64>();
            self.next = now.last().map(|r| r.index + 1);
            rest = later;
        }
        if self.options.sync && !records.is_empty() {
            self.sync()?;
        }
        Ok(())
    }

    /// Removes a segment for good. Its name may come back after a crash until the folder is synced.
    fn remove(&self, first: u64) -> io::Result<()> {
        let path = self.path(first);
        self.disk.remove(&path).map_err(named("remove", &path))
    }

    /// Removes the segments of a log that turned out to have no records.
    pub fn discard(&mut self) -> io::Result<()> {
        while let Some(first) = self.sealed.pop_back() {
            self.remove(first)?; // durable before the next record is: `begin` syncs the folder
        }
        Ok(())
    }

    pub fn truncate_after(&mut self, last: Option<u64>) -> io::Result<()> {
        // The first index that goes. What is purged is gone anyway.
        let gone = last.map_or(0, |l| l.saturating_add(1)).max(self.purged.map_or(0, |p| p + 1));
        let Some(active) = &self.active else { return Ok(()) };
        if self.next.is_none_or(|next| gone >= next) {
            return Ok(());
        }
        let places = self.places.clone();
        let _alone = places.truncate(gone);
        // Newest first, each durable before the next: after a crash the log is shorter, but has no hole.
        let mut newest = Some(active.prefix.first);
        while let Some(first) = newest.filter(|first| *first >= gone) {
            self.active = None;
            self.remove(first)?;
            self.sync_dir()?;
            newest = self.sealed.pop_back();
        }
        let Some(first) = newest else {
            self.next = self.purged.map(|p| p + 1);
            self.synced = self.next.unwrap_or(0);
            return Ok(());
        };
        let mut segment = match self.active.take() {
            Some(mut active) => {
                active.offset = super::format::PREFIX_BYTES as u64;
                active
            }
            None => {
                let older = Segment::open(self.disk.as_ref(), self.path(first), Access::Write, false)?;
                self.room = room_of(&older, self.options)?;
                older
            }
        };
        segment.skip_to_end_of(gone - 1)?;
        self.cut(&mut segment, self.room)?;
        self.active = Some(segment);
        self.next = Some(gone);
        self.synced = gone; // the sync above took what was before it along
        Ok(())
    }

    pub fn purge(&mut self, upto: u64, tag: &[u8]) -> io::Result<()> {
        if self.purged.is_some_and(|p| upto <= p) {
            return Ok(());
        }
        let mut point = upto.to_le_bytes().to_vec();
        point.extend(tag);
        // Before any record goes: a log that begins later than its purge point says is refused.
        write_small(self.disk.as_ref(), &self.dir.join(PURGE_FILE), &point)?;
        self.purged = Some(upto);
        self.places.purge(upto);
        if self.next.is_none_or(|next| next <= upto + 1) {
            self.sealed.extend(self.active.take().map(|a| a.prefix.first));
            self.next = Some(upto + 1);
            self.synced = upto + 1;
        }
        self.retire()
    }

    /// Takes segments whose records are all purged out of the log: spares of some, the others removed.
    pub fn retire(&mut self) -> io::Result<()> {
        let Some(purged) = self.purged else { return Ok(()) };
        let places = self.places.clone();
        let _alone = places.alone();
        let mut spares = Vec::new();
        while let Some(first) = self.sealed.front().copied() {
            let active = self.active.as_ref().map(|a| a.prefix.first);
            let after = self.sealed.get(1).copied().or(active).or(self.next);
            if after.is_none_or(|after| after > purged + 1) {
                break;
            }
            let path = self.path(first);
            let size = self.disk.open(&path, Access::Read).and_then(|f| f.size());
            let size = size.map_err(named("retire", &path))?;
            let room = self.spares.len() + spares.len() < MAX_SPARES;
            // One long record must not make a long file for ever.
            if room && size <= 2 * self.options.segment_bytes {
                let spare = path.with_extension("spare");
                self.disk.rename(&path, &spare).map_err(named("rename", &path))?;
                spares.push(spare);
            } else {
                self.remove(first)?;
            }
            self.sealed.pop_front();
        }
        self.sync_dir()?;
        self.spares.extend(spares.into_iter().filter(|s| !self.spares.contains(s)).collect::<Vec<_>>());
        Ok(())
    }

    /// Leaves a mark that everything before it is durable, so that what is bad later is known to be damage.
    pub fn close(&mut self) -> io::Result<()> {
        let Some(index) = self.next else { return Ok(()) };
        if self.synced < index {
            self.sync()?;
        }
        if let Some(active) = &mut self.active {
            let empty = body_crc(&[], &Payload::EMPTY);
            let head = Head {
                kind: Kind::Mark,
                header_bytes: 0,
                payload_bytes: 0,
                body_crc: empty,
                index,
                synced: index,
            };
            // Not synced: without it the log opens as after a crash.
            let mark = head.encode(active.prefix.salt);
            active.file.write_at(active.offset, &mut [IoSlice::new(&mark)])?;
        }
        Ok(())
    }
}
