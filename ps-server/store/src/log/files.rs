//! The files of a log's folder beside its segments: the lock, the mark of a cut in progress, spares and leftovers.

use super::{
    segment::{Segment, segment_path},
    segments::{CUT_FILE, MAX_SPARES, NEW_FILE},
};
use crate::{
    StoreError,
    disk::{Access, Disk, DiskLock},
    small::{read_small, temporary},
};
use std::{io, path::Path};

/// Held while a log is open here.
pub(super) const LOCK_FILE: &str = "LOCK";

pub(super) fn lock(disk: &dyn Disk, dir: &Path) -> Result<DiskLock, StoreError> {
    disk.lock(&dir.join(LOCK_FILE)).map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => StoreError::Locked { dir: dir.to_path_buf() },
        _ => StoreError::io("lock", dir)(e),
    })
}

/// The segment whose end was being cut when the process died.
pub(super) fn read_cut(disk: &dyn Disk, dir: &Path) -> Result<Option<u64>, StoreError> {
    let path = dir.join(CUT_FILE);
    let Some(bytes) = read_small(disk, &path)? else { return Ok(None) };
    let first = bytes.try_into().map(u64::from_le_bytes);
    first.map(Some).map_err(|_| StoreError::damaged(&path, 0, "it holds no number"))
}

/// Restores the length in the prefix of a segment that was being cut, and ends the cut.
pub(super) fn lengthen(disk: &dyn Disk, dir: &Path, first: u64, segments: &[u64]) -> Result<(), StoreError> {
    if segments.contains(&first) {
        let path = segment_path(dir, first);
        match Segment::open(disk, path, Access::Write, true) {
            Ok(mut segment) if segment.size()? < segment.prefix.reserved => {
                let reserved = segment.prefix.reserved;
                let lengthened = segment.file.set_len(reserved).and_then(|()| segment.file.sync());
                lengthened.map_err(StoreError::io("lengthen", &segment.path))?;
            }
            Ok(_) => {}
            // The damage stays, and the affected groups are already known.
            Err(StoreError::Damaged { .. }) => {}
            Err(e) => return Err(e),
        }
    }
    let mark = dir.join(CUT_FILE);
    disk.remove(&mark).map_err(StoreError::io("remove", &mark))
}

/// The classified names of a folder.
#[derive(Default)]
pub(super) struct Names {
    /// First numbers of segments, ascending.
    pub segments: Vec<u64>,
    pub spares: Vec<String>,
    pub litter: Vec<String>,
}

pub(super) fn names(disk: &dyn Disk, dir: &Path) -> Result<Names, StoreError> {
    let mut names = Names::default();
    let cutting = temporary(Path::new(CUT_FILE));
    for name in disk.list(dir).map_err(StoreError::io("list", dir))? {
        let first = name.strip_suffix(".log").and_then(|n| n.parse().ok());
        match first.filter(|first| segment_path(Path::new(""), *first) == Path::new(&name)) {
            Some(first) => names.segments.push(first),
            None if name.ends_with(".spare") => names.spares.push(name),
            None if name == NEW_FILE || cutting == Path::new(&name) => names.litter.push(name),
            None => {}
        }
    }
    names.segments.sort_unstable();
    names.spares.sort_unstable();
    names.litter.extend(names.spares.split_off(names.spares.len().min(MAX_SPARES)));
    Ok(names)
}
