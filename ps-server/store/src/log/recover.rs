//! Opening a log: its files, and which parts are valid or torn. `scan` says which groups damage affects.

use super::{
    files::{lengthen, lock, names, read_cut},
    format::{Head, Kind, PREFIX_BYTES},
    groups::{Fault, Group, Groups, LiveRecords, Place},
    record::{LogOptions, Record, Recovered},
    scan::Scan,
    segment::{FoundItem, Segment, segment_path},
    segments::{FIRST_BYTES, Sealed, Segments, room_of},
};
use crate::{
    StoreError,
    disk::{Access, Disk, DiskLock},
};
use std::{
    collections::{BTreeMap, VecDeque},
    io::IoSlice,
    path::Path,
    sync::Arc,
};

/// Smaller segments would make too many files.
const MIN_SEGMENT_BYTES: u64 = 4 << 10;
/// If the last segment is unreadable, its number of items is unknown: the next one is numbered beyond.
const UNKNOWN_ITEMS: u64 = 1 << 32;

/// The last segment, read to the end of its last valid item.
struct Tail {
    segment: Segment,
    /// The start of the first item without proof of durability.
    unproven: Option<u64>,
    torn_bytes: u64,
    /// An earlier part is damaged.
    damaged: bool,
}

/// The result of reading a log.
struct LogContents {
    sealed: VecDeque<Sealed>,
    groups: BTreeMap<u64, Group>,
    unlisted: Option<Fault>,
    tail: Option<Tail>,
    next: u64,
}

/// Reads the log without changing it. The last segment is opened for `last`.
fn read(
    disk: &dyn Disk,
    dir: &Path,
    firsts: &[u64],
    last: Access,
    being_cut: Option<u64>,
) -> Result<LogContents, StoreError> {
    let mut scan = Scan::default();
    let (mut sealed, mut expected, mut tail) = (VecDeque::new(), None::<u64>, None);
    for (place, first) in firsts.iter().enumerate() {
        let following = firsts.get(place + 1).copied();
        let (path, access) =
            (segment_path(dir, *first), if following.is_some() { Access::Read } else { last });
        let opened = Segment::open(disk, path.clone(), access, being_cut == Some(*first));
        let opened = opened.and_then(|segment| match segment.prefix.first {
            named if named == *first => Ok(segment),
            named => {
                let what = format!("it begins with item {named}, which its name does not say");
                Err(StoreError::damaged(&path, 0, what))
            }
        });
        let bytes = || disk.open(&path, Access::Read).and_then(|f| f.size());
        let bytes = bytes().map_err(StoreError::io("read", &path))?;
        sealed.push_back(Sealed { first: *first, bytes });
        let mut segment = match opened {
            Ok(segment) => segment,
            Err(StoreError::Damaged { path, offset, what }) => {
                scan.lost(Fault { path, offset, what });
                expected = following.is_none().then(|| first.saturating_add(UNKNOWN_ITEMS));
                continue;
            }
            Err(e) => return Err(e),
        };
        if let Some(before) = expected.filter(|before| before != first) {
            let what = format!("the segment with item {before}, which comes before it, is missing");
            scan.lost(Fault { path: path.clone(), offset: 0, what });
        }
        scan.oldest.get_or_insert(Fault { path, offset: 0, what: String::new() });
        let (next, unproven, torn_bytes) = walk(&mut scan, &mut segment, following)?;
        expected = Some(next);
        if following.is_none() {
            tail = Some(Tail { segment, unproven, torn_bytes, damaged: scan.damaged });
        }
    }
    let (groups, unlisted) = scan.finish();
    Ok(LogContents { sealed, groups, unlisted, tail, next: expected.unwrap_or(0) })
}

/// Reads the items of a segment up to `following`, the first number of the next one, or while they are valid.
/// Returns the number after the last item; for the last segment also the start of the items without proof of
/// durability, and the bytes of a torn tail.
fn walk(
    scan: &mut Scan,
    segment: &mut Segment,
    following: Option<u64>,
) -> Result<(u64, Option<u64>, u64), StoreError> {
    let (size, path) = (segment.size()?, segment.path.clone());
    let fault = |offset, what: String| Fault { path: path.clone(), offset, what };
    match segment.table()? {
        Some(entries) => scan.table(entries, &path),
        None => scan.lost(fault(PREFIX_BYTES as u64, "its table fails its checksum".into())),
    }
    let (mut next, mut synced) = (segment.prefix.first, segment.prefix.first);
    let mut starts: Vec<(u64, u64)> = Vec::new();
    let mut torn_bytes = 0;
    // Computed once, when an item is invalid.
    let mut beyond: Option<Vec<FoundItem>> = None;
    while following.is_none_or(|following| next < following) {
        let at = segment.offset;
        let fits = |i: &FoundItem| match i.head.kind {
            Kind::Mark => i.head.number == next,
            _ => i.head.number == next && following.is_none_or(|f| next < f),
        };
        let item = segment.item(at, size)?.filter(fits);
        // In a segment known to be complete, a record's body is checked when it is read.
        let is_read = |i: &FoundItem| {
            let is_record = matches!(i.head.kind, Kind::Record | Kind::Moved);
            i.head.kind != Kind::Mark && (following.is_none() || !is_record)
        };
        let body = item.filter(is_read).map(|i| segment.body(&i)).transpose()?;
        let bad_body = matches!(body, Some(None));
        if item.is_none() || bad_body {
            let beyond = match &mut beyond {
                Some(found) => found,
                none => none.insert(segment.beyond(at)?),
            };
            let behind = || beyond.iter().filter(|i| i.at > at && i.head.number >= next);
            let durable = behind().map(|i| i.head.synced).max().unwrap_or(0);
            // The item at `at` proves nothing about itself.
            if following.is_none() && durable <= next {
                let ends = beyond.iter().filter(|i| i.at >= at).map(|i| i.end().min(size));
                torn_bytes = ends.max().unwrap_or(at) - at;
                break;
            }
            if item.is_none() {
                let until = following.unwrap_or(durable);
                let found = behind().find(|i| following.is_none_or(|f| i.head.number < f));
                let number = found.map_or(until, |i| i.head.number);
                // Otherwise the place can only have held a mark.
                if number > next {
                    let last = until - 1;
                    let what =
                        format!("record {next} of the log is not whole; records up to {last} were durable");
                    scan.lost(fault(at, what));
                }
                next = number;
                let Some(found) = found else { break };
                segment.offset = found.at;
                continue;
            }
        }
        let Some(item) = item else { break };
        synced = synced.max(item.head.synced);
        segment.offset = item.end();
        if item.head.kind == Kind::Mark {
            continue;
        }
        starts.push((next, at));
        next += 1;
        let bytes = item.head.body_bytes() as u32; // at most the bounds of both
        let place = Place { segment: segment.prefix.first, offset: at, bytes };
        let tag = body.flatten().filter(|_| item.head.kind == Kind::Purge).map(|(header, _)| header);
        scan.item(&item, place, tag.unwrap_or_default(), &path);
        if bad_body {
            scan.bad_body(&item, &path);
        }
    }
    let unproven = starts.iter().find(|(number, _)| *number >= synced).map(|(_, at)| *at);
    Ok((next, unproven, torn_bytes))
}

/// The segment that was being cut. If its mark is damaged, a too short segment is reported as such.
fn cut_under_way(disk: &dyn Disk, dir: &Path) -> Result<Option<u64>, StoreError> {
    match read_cut(disk, dir) {
        Err(StoreError::Damaged { .. }) => Ok(None),
        cut => cut,
    }
}

/// Reads a group as [`open`] would, changing only the lock file. Refuses an open log.
pub(super) fn inspect(
    disk: &dyn Disk,
    dir: &Path,
    key: u64,
    each: &mut dyn FnMut(Record),
) -> Result<Recovered, StoreError> {
    let _lock = lock(disk, dir)?;
    let being_cut = cut_under_way(disk, dir)?;
    let firsts = names(disk, dir)?.segments;
    let found = read(disk, dir, &firsts, Access::Read, being_cut)?;
    let groups = Groups::new(found.groups, found.unlisted, being_cut);
    let purged = groups.known().get(&key).and_then(|g| g.purged.clone());
    match groups.damage(key) {
        Some(fault) => Err(fault.error()),
        None => Ok(Recovered { records: groups.read_all(disk, dir, key, each)?, purged }),
    }
}

/// Opens the log. Returns the bytes of a torn tail, which is cut.
pub(super) fn open(
    disk: Arc<dyn Disk>,
    dir: &Path,
    options: LogOptions,
) -> Result<(Segments, DiskLock, u64), StoreError> {
    let options = LogOptions { segment_bytes: options.segment_bytes.max(MIN_SEGMENT_BYTES), ..options };
    disk.create_dir_all(dir).map_err(StoreError::io("create", dir))?;
    let lock = lock(disk.as_ref(), dir)?;
    let being_cut = cut_under_way(disk.as_ref(), dir)?;
    let names = names(disk.as_ref(), dir)?;
    let LogContents { sealed, groups, unlisted, tail, next } =
        read(disk.as_ref(), dir, &names.segments, Access::Write, being_cut)?;
    let groups = Groups::new(groups, unlisted, None);
    let mut log = Segments {
        spares: names.spares.iter().map(|name| dir.join(name)).collect(),
        live: LiveRecords::of(&groups),
        disk: disk.clone(),
        dir: dir.to_path_buf(),
        options,
        sealed,
        active: None,
        room: FIRST_BYTES,
        next,
        synced: next,
        begun: 0,
        recycled: 0,
        moved: 0,
        groups,
        to_move: VecDeque::new(),
        moving_failed: None,
    };
    // A log with damage is not changed, except for a torn tail.
    if !log.groups.any_damaged() {
        for name in names.litter {
            let path = dir.join(name);
            disk.remove(&path).map_err(StoreError::io("remove", &path))?;
        }
    }
    if let Some(first) = being_cut {
        lengthen(disk.as_ref(), dir, first, &names.segments)?;
    }
    // New files must not depend on names that a dead process left and a power failure would revert.
    disk.sync_dir(dir).map_err(StoreError::io("sync the folder", dir))?;
    let torn_bytes = tail.as_ref().map_or(0, |t| t.torn_bytes);
    if let Some(tail) = tail {
        mend(&mut log, tail, next)?;
    }
    log.retire().map_err(StoreError::io("tidy", dir))?;
    Ok((log, lock, torn_bytes))
}

/// Makes the recovered content durable, and prepares for appends.
fn mend(log: &mut Segments, tail: Tail, next: u64) -> Result<(), StoreError> {
    let Tail { mut segment, unproven, torn_bytes, damaged } = tail;
    log.room = room_of(&segment, log.options)?;
    if torn_bytes > 0 {
        if damaged {
            // The cut part may be the only proof that damaged items were durable. A mark replaces it.
            let mark = Head::mark(next).encode(segment.prefix.salt);
            let written = segment.file.write_at(segment.offset, &mut [IoSlice::new(&mark)]);
            written.and_then(|()| segment.file.sync()).map_err(StoreError::io("write", &segment.path))?;
            segment.offset += mark.len() as u64;
        }
        log.cut(&mut segment, log.room).map_err(StoreError::io("cut", &segment.path))?;
    }
    // The last process may have died of a failed sync. After one, unwritten pages count as clean, and another sync
    // would skip them: so everything without proof of durability is rewritten.
    if let Some(from) = unproven {
        segment.rewrite(from)?;
    }
    segment.file.sync().map_err(StoreError::io("sync", &segment.path))?;
    log.sealed.pop_back();
    log.active = Some(segment);
    Ok(())
}
