//! Where the records of a log lie, and reading them back while its writer goes on.
//!
//! The writer notes a record once it is in its file. Who reads looks places up, then reads the files without holding up
//! appends; what would change bytes under it (a truncation, a segment that becomes a spare) first takes the places away,
//! then waits for the reads that began before.

use super::{
    Record,
    segment::{Segment, segment_path},
    segments::item_bytes,
};
use crate::{Disk, StoreError, disk::Access};
use parking_lot::{Mutex, RwLock, RwLockWriteGuard};
use std::{collections::VecDeque, ops::Range, path::Path};

/// Shared by a log's writer and its readers.
#[derive(Debug, Default)]
pub(super) struct Places {
    known: Mutex<Known>,
    /// Held by reads while they are at the files, and by whoever changes what is written already.
    files: RwLock<()>,
}

#[derive(Debug, Default)]
struct Known {
    /// The index of the first place.
    first: u64,
    places: VecDeque<Place>,
    bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    /// First index of the segment.
    segment: u64,
    offset: u64,
    /// Of header and payload; at most the bounds of both, so it fits.
    bytes: u32,
}

impl Places {
    /// `records` lie in `segment` one after the other, from `offset` on.
    pub fn add(&self, segment: u64, mut offset: u64, records: &[Record]) {
        let mut known = self.known.lock();
        if known.places.is_empty() {
            known.first = records.first().map_or(0, |r| r.index);
        }
        for r in records {
            known.places.push_back(Place { segment, offset, bytes: r.bytes() as u32 });
            known.bytes += r.bytes();
            offset += item_bytes(r);
        }
    }

    /// Forgets the records from index `gone` on; nobody is at the files while the guard lives.
    pub fn truncate(&self, gone: u64) -> RwLockWriteGuard<'_, ()> {
        {
            let known = &mut *self.known.lock();
            let keep = gone.saturating_sub(known.first).min(known.places.len() as u64) as usize;
            known.bytes -= known.places.drain(keep..).map(|p| u64::from(p.bytes)).sum::<u64>();
        }
        self.alone()
    }

    /// Forgets the records up to and including `upto`.
    pub fn purge(&self, upto: u64) {
        let known = &mut *self.known.lock();
        let gone = (upto + 1).saturating_sub(known.first).min(known.places.len() as u64) as usize;
        known.bytes -= known.places.drain(..gone).map(|p| u64::from(p.bytes)).sum::<u64>();
        known.first += gone as u64;
    }

    /// Nobody is at the files while the guard lives.
    pub fn alone(&self) -> RwLockWriteGuard<'_, ()> {
        self.files.write()
    }

    /// Records, and the bytes of their headers and payloads.
    pub fn length(&self) -> (u64, u64) {
        let known = self.known.lock();
        (known.places.len() as u64, known.bytes)
    }

    /// See [`super::Log::read`].
    pub fn read(
        &self,
        disk: &dyn Disk,
        dir: &Path,
        range: Range<u64>,
        most: u64,
    ) -> Result<Vec<Record>, StoreError> {
        let _at_the_files = self.files.read(); // before the look-up: what is found stays
        let places = self.look_up(range.clone(), most);
        let (mut records, mut open) = (Vec::with_capacity(places.len()), None::<Segment>);
        for (index, place) in (range.start..).zip(places) {
            let segment = match open.take().filter(|s| s.prefix.first == place.segment) {
                Some(same) => same,
                None => Segment::open(disk, segment_path(dir, place.segment), Access::Read, false)?,
            };
            let segment = open.insert(segment);
            segment.offset = place.offset;
            let size = segment.size()?;
            let Some((_, Some(record))) = segment.read(index, size)? else {
                let what = format!("record {index} is not as it was written");
                return Err(StoreError::damaged(&segment.path, place.offset, what));
            };
            records.push(record);
        }
        Ok(records)
    }

    fn look_up(&self, range: Range<u64>, most: u64) -> Vec<Place> {
        let known = self.known.lock();
        let Some(from) = range.start.checked_sub(known.first) else { return Vec::new() };
        let count = range.end.saturating_sub(range.start);
        let mut bytes = 0;
        let within = |p: &&Place| {
            let first = bytes == 0;
            bytes += u64::from(p.bytes).max(1);
            first || bytes <= most
        };
        let from = usize::try_from(from).unwrap_or(usize::MAX);
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        known.places.iter().skip(from).take(count).take_while(within).copied().collect()
    }
}
