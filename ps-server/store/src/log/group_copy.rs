//! Copies one group into a folder of its own: as a log with only this group or, if the group is damaged, as the
//! segments themselves. And imports such a log.

use super::{
    files::names,
    record::{LogOptions, Record},
    segment::segment_path,
    shared_log::{Log, SharedLog},
};
use crate::{
    StoreError,
    disk::{Access, Disk},
};
use std::{
    io::{self, IoSlice},
    path::Path,
    sync::mpsc,
};

/// Bytes that are copied at a time.
const PART_BYTES: u64 = 4 << 20;

impl Log {
    /// Removes a log's files from `dir`; no process may have it open.
    pub fn clear(disk: &dyn Disk, dir: &Path) -> Result<(), StoreError> {
        let there = match disk.list(dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            listed => listed.map_err(StoreError::io("list", dir))?,
        };
        for name in there {
            let path = dir.join(name);
            disk.remove(&path).map_err(StoreError::io("remove", &path))?;
        }
        disk.sync_dir(dir).map_err(StoreError::io("sync the folder", dir))
    }
}

impl SharedLog {
    /// Copies a group into the folder `to`, which [`Log::inspect`] reads: if the group is damaged, as the segments
    /// that may contain it. Replaces what was in the folder; the copy is durable on return. The group must not be
    /// written meanwhile. Waits for the disk.
    pub fn keep(&self, key: u64, to: &Path) -> Result<(), StoreError> {
        let damaged = self.inner.groups.known().get(&key).is_some_and(|g| g.damage.is_some());
        let copied = match damaged {
            true => copy_segments(self, key, to),
            false => copy_records(self, key, to),
        };
        match copied {
            // The damage was found only now.
            Err(e) if !damaged && self.inner.groups.note_damage(key, &e) => copy_segments(self, key, to),
            copied => copied,
        }
    }

    /// Imports the log of group `there` in `dir` ([`Log::inspect`]) as a new group `key`. It is durable on return;
    /// `dir` is not changed. Waits for the disk.
    pub fn import(&self, key: u64, dir: &Path, there: u64) -> Result<(), StoreError> {
        let into = self.begin(key)?;
        copy_log(&*self.inner.disk, dir, there, into).map_err(|e| match e {
            ImportError::Reading(e) => e,
            ImportError::Writing(e) => self.at("write to the log in")(e),
        })
    }
}

/// Writes a separate log to `to`, which is durable on return. Replaces what was there.
fn copy_records(log: &SharedLog, key: u64, to: &Path) -> Result<(), StoreError> {
    let (disk, groups) = (&log.inner.disk, &log.inner.groups);
    Log::clear(disk.as_ref(), to)?;
    let (own, _) = SharedLog::open(disk.clone(), to, LogOptions::default())?;
    let (into, _) = own.group(key, &mut |_| ())?;
    let written = StoreError::io("copy the log to", to);
    let purged = groups.known().get(&key).and_then(|g| g.purged.clone());
    let mut copy = Copy { into, part: Vec::new(), bytes: 0, failed: None };
    // A log without records accepts any index after its purge point.
    copy.failed = purged.and_then(|(upto, tag)| copy.into.purge(upto, tag).err());
    groups.read_all(disk.as_ref(), &log.inner.dir, key, &mut |r| copy.push(r))?;
    copy.finish().map_err(written)?;
    own.close();
    disk.sync_dir(to).map_err(StoreError::io("sync the folder", to))
}

/// Why an import failed.
enum ImportError {
    Reading(StoreError),
    Writing(io::Error),
}

/// Copies the log in `dir` into the empty log of a group; durable on return. It is read twice, because the purge
/// point must be written first.
fn copy_log(disk: &dyn Disk, dir: &Path, key: u64, into: Log) -> Result<(), ImportError> {
    let found = Log::inspect(disk, dir, key, &mut |_| ()).map_err(ImportError::Reading)?;
    let mut copy = Copy { into, part: Vec::new(), bytes: 0, failed: None };
    copy.failed = found.purged.and_then(|(upto, tag)| copy.into.purge(upto, tag).err());
    Log::inspect(disk, dir, key, &mut |r| copy.push(r)).map_err(ImportError::Reading)?;
    copy.finish().map_err(ImportError::Writing)
}

/// Records that are being copied into a log, in parts.
struct Copy {
    into: Log,
    part: Vec<Record>,
    bytes: u64,
    failed: Option<io::Error>,
}

impl Copy {
    fn push(&mut self, record: Record) {
        self.bytes += record.bytes();
        self.part.push(record);
        if self.bytes >= PART_BYTES {
            self.write();
        }
    }

    fn write(&mut self) {
        let (tell, outcome) = mpsc::channel();
        let part = std::mem::take(&mut self.part);
        self.bytes = 0;
        if self.failed.is_none() {
            self.into.append(part, Box::new(move |done| _ = tell.send(done)));
            self.failed = outcome.recv().unwrap_or_else(|_| Err(super::groups::gone())).err();
        }
    }

    /// Makes the copy durable.
    fn finish(mut self) -> io::Result<()> {
        self.write();
        self.failed.map_or(Ok(()), Err)
    }
}

/// Copies the segments that may contain the group unchanged; durable on return. Replaces what was there.
fn copy_segments(log: &SharedLog, key: u64, to: &Path) -> Result<(), StoreError> {
    let (disk, dir, groups) = (&log.inner.disk, &log.inner.dir, &log.inner.groups);
    Log::clear(disk.as_ref(), to)?;
    disk.create_dir_all(to).map_err(StoreError::io("create", to))?;
    let of_fault =
        |path: &Path| path.file_stem().and_then(|n| n.to_str()).and_then(|n| n.parse::<u64>().ok());
    let first = groups.known().get(&key).map_or(0, |g| {
        let places = g.places.values().map(|p| p.segment);
        places.chain(g.damage.as_ref().and_then(|f| of_fault(&f.path))).min().unwrap_or(0)
    });
    for segment in names(disk.as_ref(), dir)?.segments.into_iter().filter(|s| *s >= first) {
        copy_file(disk.as_ref(), &segment_path(dir, segment), &segment_path(to, segment))?;
    }
    disk.sync_dir(to).map_err(StoreError::io("sync the folder", to))
}

fn copy_file(disk: &dyn Disk, from: &Path, to: &Path) -> Result<(), StoreError> {
    let source = disk.open(from, Access::Read).map_err(StoreError::io("open", from))?;
    let size = source.size().map_err(StoreError::io("read", from))?;
    let mut file = disk.open(to, Access::Create).map_err(StoreError::io("create", to))?;
    let (mut at, mut part) = (0, Vec::new());
    while at < size {
        part.resize(PART_BYTES.min(size - at) as usize, 0);
        source.read_at(at, &mut part).map_err(StoreError::io("read", from))?;
        file.write_at(at, &mut [IoSlice::new(&part)]).map_err(StoreError::io("write", to))?;
        at += part.len() as u64;
    }
    file.sync().map_err(StoreError::io("sync", to))
}
