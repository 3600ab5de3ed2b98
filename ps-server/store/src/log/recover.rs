//! Opening a log: which files are it, what is whole, what was torn.

use super::{
    LogOptions, Record, Recovered,
    places::Places,
    segment::{Segment, segment_path},
    segments::{CUT_FILE, FIRST_BYTES, MAX_SPARES, NEW_FILE, PURGE_FILE, Segments, room_of},
};
use crate::{
    StoreError,
    disk::{Access, Disk, DiskLock},
    small::{read_small, temporary},
};
use bytes::{Buf, Bytes};
use std::{io, path::Path, sync::Arc};

const LOCK_FILE: &str = "LOCK";
/// Smaller segments would be mostly files.
const MIN_SEGMENT_BYTES: u64 = 4 << 10;

fn read_purge_point(disk: &dyn Disk, dir: &Path) -> Result<Option<(u64, Bytes)>, StoreError> {
    let path = dir.join(PURGE_FILE);
    let Some(bytes) = read_small(disk, &path)? else { return Ok(None) };
    let mut bytes = Bytes::from(bytes);
    match bytes.try_get_u64_le() {
        Ok(upto) if upto < u64::MAX => Ok(Some((upto, bytes))),
        _ => Err(StoreError::damaged(&path, 0, "it holds no index")),
    }
}

/// The segment whose end was being cut off when the process died.
fn read_cut(disk: &dyn Disk, dir: &Path) -> Result<Option<u64>, StoreError> {
    let path = dir.join(CUT_FILE);
    let Some(bytes) = read_small(disk, &path)? else { return Ok(None) };
    let first = bytes.try_into().map(u64::from_le_bytes);
    first.map(Some).map_err(|_| StoreError::damaged(&path, 0, "it holds no index"))
}

/// Gives a segment that was being cut the length that it says.
fn lengthen(log: &Segments, first: u64) -> Result<(), StoreError> {
    if log.sealed.contains(&first) {
        let path = segment_path(&log.dir, first);
        let mut segment = Segment::open(log.disk.as_ref(), path, Access::Write, true)?;
        if segment.size()? < segment.prefix.reserved {
            let reserved = segment.prefix.reserved;
            let lengthened = segment.file.set_len(reserved).and_then(|()| segment.file.sync());
            lengthened.map_err(StoreError::io("lengthen", &segment.path))?;
        }
    }
    let mark = log.dir.join(CUT_FILE);
    log.disk.remove(&mark).map_err(StoreError::io("remove", &mark))
}

/// What the folder lists, sorted out.
#[derive(Default)]
struct Names {
    /// First indices of segments, rising.
    segments: Vec<u64>,
    spares: Vec<String>,
    litter: Vec<String>,
}

fn names(disk: &dyn Disk, dir: &Path) -> Result<Names, StoreError> {
    let mut names = Names::default();
    let temps = [PURGE_FILE, CUT_FILE].map(|name| temporary(Path::new(name)));
    for name in disk.list(dir).map_err(StoreError::io("list", dir))? {
        let first = name.strip_suffix(".log").and_then(|n| n.parse().ok());
        match first.filter(|first| segment_path(Path::new(""), *first) == Path::new(&name)) {
            Some(first) => names.segments.push(first),
            None if name.ends_with(".spare") => names.spares.push(name),
            None if name == NEW_FILE || temps.iter().any(|t| Path::new(&name) == t) => {
                names.litter.push(name)
            }
            None => {}
        }
    }
    names.segments.sort_unstable();
    names.spares.sort_unstable();
    names.litter.extend(names.spares.split_off(names.spares.len().min(MAX_SPARES)));
    Ok(names)
}

/// What [`open`] would find, without changing anything but the lock's file. Refuses a log that is open.
pub(super) fn look(
    disk: Arc<dyn Disk>,
    dir: &Path,
    each: &mut dyn FnMut(Record),
) -> Result<Recovered, StoreError> {
    let lock = lock(disk.as_ref(), dir)?;
    let being_cut = read_cut(disk.as_ref(), dir)?;
    let (mut log, mut recovered, _) = unread(disk, dir, LogOptions::default())?;
    read(&mut log, &mut recovered, Access::Read, being_cut, each)?;
    drop(lock);
    Ok(recovered)
}

fn lock(disk: &dyn Disk, dir: &Path) -> Result<DiskLock, StoreError> {
    disk.lock(&dir.join(LOCK_FILE)).map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => StoreError::Locked { dir: dir.to_path_buf() },
        _ => StoreError::io("lock", dir)(e),
    })
}

/// The log as its folder lists it, and files that belong to nothing.
fn unread(
    disk: Arc<dyn Disk>,
    dir: &Path,
    options: LogOptions,
) -> Result<(Segments, Recovered, Vec<String>), StoreError> {
    let purged = read_purge_point(disk.as_ref(), dir)?;
    let names = names(disk.as_ref(), dir)?;
    let log = Segments {
        disk,
        dir: dir.to_path_buf(),
        options,
        sealed: names.segments.into(),
        active: None,
        room: FIRST_BYTES,
        spares: names.spares.iter().map(|name| dir.join(name)).collect(),
        purged: purged.as_ref().map(|(upto, _)| *upto),
        next: None,
        synced: 0,
        begun: 0,
        recycled: 0,
        places: Arc::new(Places::default()),
    };
    Ok((log, Recovered { purged, ..Recovered::default() }, names.litter))
}

pub(super) fn open(
    disk: Arc<dyn Disk>,
    dir: &Path,
    options: LogOptions,
    each: &mut dyn FnMut(Record),
) -> Result<(Segments, DiskLock, Recovered), StoreError> {
    let options = LogOptions { segment_bytes: options.segment_bytes.max(MIN_SEGMENT_BYTES), ..options };
    disk.create_dir_all(dir).map_err(StoreError::io("create", dir))?;
    let lock = lock(disk.as_ref(), dir)?;
    let (mut log, mut recovered, litter) = unread(disk.clone(), dir, options)?;
    let being_cut = read_cut(disk.as_ref(), dir)?;
    let tail = read(&mut log, &mut recovered, Access::Write, being_cut, each)?;

    // Only now is the log known to be good; before, nothing was changed.
    for name in litter {
        let path = dir.join(name);
        log.disk.remove(&path).map_err(StoreError::io("remove", &path))?;
    }
    if let Some(first) = being_cut {
        lengthen(&log, first)?;
    }
    // Nor may anything be built on names that a dying process left and that a power failure would take back:
    // that of a segment, or of the purge point before segments go.
    disk.sync_dir(dir).map_err(StoreError::io("sync the folder", dir))?;
    match tail {
        Some(tail) if recovered.records > 0 => mend(&mut log, tail, recovered.torn_bytes > 0)?,
        // No records: the next append begins a segment.
        Some(_) if log.purged.is_none() => log.discard().map_err(StoreError::io("tidy", dir))?,
        _ => {}
    }
    log.retire().map_err(StoreError::io("tidy", dir))?;
    Ok((log, lock, recovered))
}

/// The last segment, read to the end of its last whole record.
struct Tail {
    segment: Segment,
    /// Where the first record begins that nothing proves to be durable.
    unproven: Option<u64>,
}

/// Reads what is in the log and gives each record away; changes nothing.
/// The last segment is opened for `last`.
fn read(
    log: &mut Segments,
    recovered: &mut Recovered,
    last: Access,
    being_cut: Option<u64>,
    each: &mut dyn FnMut(Record),
) -> Result<Option<Tail>, StoreError> {
    let after_purge = log.purged.map(|p| p + 1);
    // Whole segments before the purge point are left over from a purge that a crash cut short.
    let leftover = |(_, following): &(&u64, &u64)| after_purge.is_some_and(|a| **following <= a);
    let leftovers = log.sealed.iter().zip(log.sealed.iter().skip(1)).take_while(leftover).count();
    let firsts: Vec<u64> = log.sealed.iter().skip(leftovers).copied().collect();

    let (mut next, mut tail) = (None, None);
    for (place, first) in firsts.iter().enumerate() {
        let following = firsts.get(place + 1);
        let access = if following.is_some() { Access::Read } else { last };
        let mut segment = Segment::open(
            log.disk.as_ref(),
            segment_path(&log.dir, *first),
            access,
            being_cut == Some(*first),
        )?;
        let prefix = segment.prefix;
        if prefix.first != *first {
            let what = format!("it begins with record {}, which its name does not say", prefix.first);
            return Err(StoreError::damaged(&segment.path, 0, what));
        }
        let joins = match next {
            Some(next) => next == *first,
            None => prefix.starts_log || after_purge.is_some_and(|a| *first <= a),
        };
        if !joins {
            let from = next.or(after_purge).unwrap_or(0);
            let what = format!("the segment with record {from}, which comes before it, is missing");
            return Err(StoreError::damaged(&segment.path, 0, what));
        }

        let (size, mut expected, mut synced, mut starts) = (segment.size()?, *first, *first, Vec::new());
        loop {
            let start = segment.offset;
            let Some((head, record)) = segment.read(expected, size)? else { break };
            synced = synced.max(head.synced);
            if let Some(record) = record {
                starts.push(start);
                expected += 1;
                if after_purge.is_none_or(|a| record.index >= a) {
                    log.places.add(*first, start, std::slice::from_ref(&record));
                    recovered.records += 1;
                    each(record);
                }
            }
        }
        let durable = match following {
            Some(following) => *following,
            None => {
                let beyond = segment.beyond()?;
                recovered.torn_bytes = beyond.end.saturating_sub(segment.offset);
                beyond.synced
            }
        };
        if expected < durable {
            let what = format!("record {expected} is not whole; records up to {} were durable", durable - 1);
            return Err(StoreError::damaged(&segment.path, segment.offset, what));
        }
        if following.is_none() {
            tail = Some(Tail { unproven: starts.get((synced - *first) as usize).copied(), segment });
        }
        next = Some(expected);
    }
    log.next = if recovered.records == 0 { after_purge } else { next };
    Ok(tail)
}

/// Makes what was read the durable contents, and gets ready to append.
fn mend(log: &mut Segments, tail: Tail, torn: bool) -> Result<(), StoreError> {
    let Tail { mut segment, unproven } = tail;
    log.room = room_of(&segment, log.options)?;
    if torn {
        log.cut(&mut segment, log.room).map_err(StoreError::io("cut", &segment.path))?;
    }
    // The last process may have died of a failed sync. After one, pages count as clean that never reached the
    // disk, and another sync would leave them: so what nothing proves is written again.
    if let Some(from) = unproven {
        segment.rewrite(from)?;
    }
    segment.file.sync().map_err(StoreError::io("sync", &segment.path))?;
    log.sealed.pop_back();
    log.active = Some(segment);
    log.synced = log.next.unwrap_or(0);
    Ok(())
}
