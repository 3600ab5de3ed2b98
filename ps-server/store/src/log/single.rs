//! The log of one replica by itself, as releases before the shared log wrote it: a folder of segments, named by the index of
//! their first record, with the purge point beside them. It is only read.

use super::{
    Record, Recovered,
    files::{lock, names, read_cut},
    format::{Kind, Layout},
    segment::{Segment, segment_path},
};
use crate::{
    StoreError,
    disk::{Access, Disk},
    small::read_small,
};
use bytes::{Buf, Bytes};
use std::path::Path;

const PURGE_FILE: &str = "purged";

fn read_purge_point(disk: &dyn Disk, dir: &Path) -> Result<Option<(u64, Bytes)>, StoreError> {
    let path = dir.join(PURGE_FILE);
    let Some(bytes) = read_small(disk, &path)? else { return Ok(None) };
    let mut bytes = Bytes::from(bytes);
    match bytes.try_get_u64_le() {
        Ok(upto) if upto < u64::MAX => Ok(Some((upto, bytes))),
        _ => Err(StoreError::damaged(&path, 0, "it holds no index")),
    }
}

/// Reads and checks everything, and gives each record after the purge point away; a torn tail is left out. Changes nothing
/// but the lock's file.
pub(super) fn look(
    disk: &dyn Disk,
    dir: &Path,
    each: &mut dyn FnMut(Record),
) -> Result<Recovered, StoreError> {
    let _lock = lock(disk, dir)?;
    let being_cut = read_cut(disk, dir)?;
    let firsts = names(disk, dir)?.segments;
    let mut recovered = Recovered { purged: read_purge_point(disk, dir)?, ..Recovered::default() };
    let after_purge = recovered.purged.as_ref().map(|(upto, _)| upto + 1);
    // Whole segments before the purge point are left over from a purge that a crash cut short.
    let leftover = |(_, following): &(&u64, &u64)| after_purge.is_some_and(|a| **following <= a);
    let leftovers = firsts.iter().zip(firsts.iter().skip(1)).take_while(leftover).count();
    let firsts = &firsts[leftovers..];

    let mut next = None;
    for (place, first) in firsts.iter().enumerate() {
        let path = segment_path(dir, *first);
        let mut segment = Segment::open(disk, path, Layout::Single, Access::Read, being_cut == Some(*first))?;
        let prefix = segment.prefix;
        let damaged = |offset, what: String| StoreError::damaged(&segment_path(dir, *first), offset, what);
        if prefix.first != *first {
            let what = format!("it begins with record {}, which its name does not say", prefix.first);
            return Err(damaged(0, what));
        }
        let joins = match next {
            Some(next) => next == *first,
            None => prefix.starts_log || after_purge.is_some_and(|a| *first <= a),
        };
        if !joins {
            let from = next.or(after_purge).unwrap_or(0);
            let what = format!("the segment with record {from}, which comes before it, is missing");
            return Err(damaged(0, what));
        }

        let (size, mut expected) = (segment.size()?, *first);
        while let Some(item) = segment.item(segment.offset, size)?.filter(|i| i.head.number == expected) {
            if item.head.kind == Kind::Record {
                let Some((header, payload)) = segment.body(&item)? else { break };
                if after_purge.is_none_or(|a| item.head.index >= a) {
                    recovered.records += 1;
                    each(Record { index: item.head.index, header, payload });
                }
                expected += 1;
            }
            segment.offset = item.end(Layout::Single);
        }
        let durable = match firsts.get(place + 1) {
            Some(following) => *following,
            None => segment.beyond(segment.offset)?.iter().map(|i| i.head.synced).max().unwrap_or(0),
        };
        if expected < durable {
            let what = format!("record {expected} is not whole; records up to {} were durable", durable - 1);
            return Err(damaged(segment.offset, what));
        }
        next = Some(expected);
    }
    Ok(recovered)
}
