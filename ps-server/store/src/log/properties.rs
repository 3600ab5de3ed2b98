//! Properties of a log that several groups share: for any interleaving of operations, any crash and any damage.

#![allow(clippy::unwrap_used)]

use super::{
    Log, LogOptions, Record, SharedLog,
    files::names,
    format::{HEAD_BYTES, Kind},
    segment::{Segment, segment_path},
};
use crate::{
    Access, Disk, StoreError,
    faulty::{FaultyDisk, ForgetfulDisk, Survivors},
};
use bytes::Bytes;
use proptest::prelude::*;
use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    path::Path,
    sync::{Arc, mpsc},
};

const DIR: &str = "/server/log";
const GROUPS: usize = 4;
const OPTIONS: LogOptions = LogOptions { segment_bytes: 4096, sync: true };

#[derive(Clone, Copy, Debug)]
enum Operation {
    /// This many records of this many bytes.
    Append(u64, usize),
    /// Keeps this many of the current records.
    Truncate(u64),
    /// Keeps this many of the current records.
    Purge(u64),
    Remove,
    Reopen,
}

fn what() -> impl Strategy<Value = Operation> {
    prop_oneof![
        8 => (1..4u64, 0..900usize).prop_map(|(count, bytes)| Operation::Append(count, bytes)),
        1 => (0..6u64).prop_map(Operation::Truncate),
        3 => (0..6u64).prop_map(Operation::Purge),
        1 => Just(Operation::Remove),
        1 => Just(Operation::Reopen),
    ]
}

/// Operations of some groups, in this order. The first has the most, and the last is seldom purged.
fn life() -> impl Strategy<Value = Vec<(usize, Operation)>> {
    let group = prop_oneof![4 => Just(0), 1 => Just(1), 1 => Just(2), 1 => Just(3)];
    prop::collection::vec((group, what()), 1..70)
}

/// The acceptable states of a group after recovery. There is only one, unless the last change was not acknowledged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct State {
    /// How often it was removed; each time it gets another key.
    lives: u64,
    purged: Option<u64>,
    next: u64,
    records: BTreeMap<u64, Record>,
}

impl State {
    fn first(&self) -> u64 {
        self.records.keys().next().copied().unwrap_or(self.next)
    }
}

fn key(g: usize, lives: u64) -> u64 {
    100 - g as u64 + 1000 * lives
}

fn record(index: u64, version: usize, bytes: usize) -> Record {
    let payload: Vec<u8> = (0..bytes).map(|i| (i * 7 + version + index as usize) as u8).collect();
    Record { index, header: format!("entry {index}.{version}").into(), payload: payload.into() }
}

fn open<D: Disk + Clone + 'static>(disk: &D) -> Result<SharedLog, StoreError> {
    SharedLog::open(Arc::new(disk.clone()), Path::new(DIR), OPTIONS).map(|(log, _)| log)
}

/// The recovered state of a group.
fn state(log: &SharedLog, g: usize, lives: u64) -> Result<(Log, State), StoreError> {
    let mut records = BTreeMap::new();
    let (log, found) = log.group(key(g, lives), &mut |r| _ = records.insert(r.index, r))?;
    let purged = found.purged.map(|(upto, tag)| {
        assert_eq!(tag, upto.to_string());
        upto
    });
    let next = records.keys().next_back().map(|i| i + 1).or(purged.map(|p| p + 1)).unwrap_or(0);
    Ok((log, State { lives, purged, next, records }))
}

fn append(log: &Log, records: Vec<Record>) -> io::Result<()> {
    let (send, outcome) = mpsc::channel();
    log.append(records, Box::new(move |done| send.send(done).unwrap()));
    outcome.recv().unwrap()
}

/// Runs operations until one fails. Returns the acceptable states of each group, the state before that operation
/// first.
fn live(disk: &FaultyDisk, life: &[(usize, Operation)]) -> Vec<Vec<State>> {
    let mut may = vec![vec![State::default()]; GROUPS];
    let Ok(mut log) = open(disk) else { return may };
    let mut logs: Vec<Log> = match (0..GROUPS).map(|g| state(&log, g, 0).map(|(log, _)| log)).collect() {
        Ok(logs) => logs,
        Err(_) => return may,
    };
    for (version, (g, what)) in life.iter().enumerate() {
        let now = may[*g].last().unwrap().clone();
        let mut after = now.clone();
        let done = match *what {
            Operation::Append(count, bytes) => {
                let new: Vec<_> = (now.next..now.next + count).map(|i| record(i, version, bytes)).collect();
                after.next += count;
                // Part of it may be written.
                for r in &new {
                    after.records.insert(r.index, r.clone());
                    let part = State { next: r.index + 1, ..after.clone() };
                    may[*g].push(part);
                }
                append(&logs[*g], new)
            }
            Operation::Truncate(keep) => {
                let gone = (now.first() + keep).min(now.next);
                let Some(last) = gone.checked_sub(1) else { continue };
                after.records.split_off(&gone);
                after.next = gone;
                may[*g].push(after.clone());
                logs[*g].truncate_after(Some(last))
            }
            Operation::Purge(keep) => {
                let Some(upto) = now.next.saturating_sub(keep).checked_sub(1) else { continue };
                if now.purged.is_some_and(|purged| upto <= purged) {
                    continue;
                }
                after.records = after.records.split_off(&(upto + 1));
                after.purged = Some(upto);
                after.next = after.next.max(upto + 1);
                may[*g].push(after.clone());
                logs[*g].purge(upto, Bytes::from(upto.to_string()))
            }
            Operation::Remove => {
                after = State { lives: now.lives + 1, ..State::default() };
                may[*g].push(State { lives: now.lives, ..State::default() });
                let removed = log.remove(key(*g, now.lives));
                removed.and_then(|()| {
                    logs[*g] = state(&log, *g, after.lives).map_err(io::Error::other)?.0;
                    Ok(())
                })
            }
            Operation::Reopen => {
                logs.clear();
                drop(log);
                let Ok(opened) = open(disk) else { return may };
                log = opened;
                for g in 0..GROUPS {
                    let Ok((opened, found)) = state(&log, g, may[g][0].lives) else { return may };
                    assert_eq!(&found, may[g].last().unwrap());
                    logs.push(opened);
                }
                Ok(())
            }
        };
        if done.is_err() {
            return may;
        }
        may[*g] = vec![after];
    }
    may
}

fn check(disk: &ForgetfulDisk, may: &[Vec<State>]) -> Result<(), TestCaseError> {
    let log = open(disk).unwrap();
    for (g, may) in may.iter().enumerate() {
        let (_log, found) =
            state(&log, g, may[0].lives).map_err(|e| TestCaseError::fail(format!("group {g}: {e}")))?;
        prop_assert!(may.contains(&found), "group {}: {:?} where one of these may be: {:?}", g, found, may);
    }
    Ok(())
}

/// An item in a log file.
#[derive(Clone, Debug)]
struct Item {
    kind: Kind,
    key: u64,
    segment: u64,
    head: Range<u64>,
    body: Range<u64>,
}

fn items(disk: &ForgetfulDisk) -> Vec<Item> {
    let mut found = Vec::new();
    for first in names(disk, Path::new(DIR)).unwrap().segments {
        let path = segment_path(Path::new(DIR), first);
        let segment = Segment::open(disk, path, Access::Read, false).unwrap();
        for item in segment.beyond(segment.offset).unwrap() {
            let body = item.at + HEAD_BYTES as u64;
            let (kind, key) = (item.head.kind, item.head.group);
            let (head, body) = (item.at..body, body..item.end());
            found.push(Item { kind, key, segment: first, head, body });
        }
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(250))]

    /// For any operations of several groups and any power failure, each group is recovered as it was acknowledged,
    /// or as it is after the operation in progress.
    #[test]
    fn after_any_crash_each_group_is_what_was_acknowledged(
        life in life(), changes in 0u64..1200, seeds in prop::array::uniform4(any::<u64>())
    ) {
        let memory = ForgetfulDisk::default();
        let disk = FaultyDisk::new(Arc::new(memory.clone()));
        disk.dead_after(Some(changes));
        let may = live(&disk, &life);
        check(&memory.crash(Survivors::Synced), &may)?;
        for seed in seeds {
            check(&memory.crash(Survivors::Some(seed)), &may)?;
        }
        check(&memory, &may)?;
        // Again after the repair, without any other operation.
        check(&memory.crash(Survivors::Synced), &may)?;
    }

    /// One flipped byte in a properly closed log: the affected groups are refused, the others are complete.
    #[test]
    fn damage_does_not_spread(life in life(), at in any::<prop::sample::Index>(), flip in 1u8..) {
        let disk = ForgetfulDisk::default();
        let may = live(&FaultyDisk::new(Arc::new(disk.clone())), &life);
        let items = items(&disk);
        prop_assume!(!items.is_empty());
        let last = items.last().unwrap().segment;
        let Item { kind, key: group, segment, head, body } = at.get(&items).clone();
        let all = head.start..body.end;
        let offset = all.start + at.index((all.end - all.start) as usize) as u64;
        let path = segment_path(Path::new(DIR), segment);
        let mut bytes = disk.contents(&path).unwrap();
        bytes[offset as usize] ^= flip;
        disk.put(&path, bytes.clone());

        let log = open(&disk).unwrap();
        let mut damaged = Vec::new();
        for (g, may) in may.iter().enumerate() {
            match state(&log, g, may[0].lives) {
                Ok((_, found)) => prop_assert_eq!(&found, &may[0], "group {}", g),
                Err(StoreError::Damaged { path: of, offset: named, what }) => {
                    damaged.push(key(g, may[0].lives));
                    prop_assert_eq!(&of, &path);
                    prop_assert!(named <= offset, "named {} where {} was changed; {}", named, offset, what);
                }
                Err(e) => prop_assert!(false, "group {}: {}", g, e),
            }
        }
        let later = |key: u64| items.iter().any(|i| (i.segment, i.key) == (segment, key) && i.head.start > head.start && i.kind != Kind::Mark);
        for key in damaged {
            // Its body, later items and the next segment's table all identify its group.
            prop_assert_ne!(kind, Kind::Mark);
            let spreads = head.contains(&offset) && segment == last && !later(key);
            prop_assert!(key == group || spreads, "group {} is damaged by what is of group {}", key, group);
        }
        drop(log);
        // Damage stays, whatever else is done.
        let log = open(&disk).unwrap();
        let opened: Vec<_> = (0..GROUPS).map(|g| state(&log, g, may[g][0].lives)).collect();
        for (log, now) in opened.iter().flatten() {
            append(log, vec![record(now.next, 99, 3000), record(now.next + 1, 99, 3000)]).unwrap();
        }
        let was: Vec<_> = opened.iter().map(Result::is_ok).collect();
        prop_assert!(was.iter().all(|was| *was) || disk.contents(&path).unwrap().starts_with(&bytes[..bytes.len().min(offset as usize + 1)]));
        drop((log, opened));
        let log = open(&disk).unwrap();
        for (g, was) in was.into_iter().enumerate() {
            prop_assert_eq!(state(&log, g, may[g][0].lives).is_ok(), was, "group {}", g);
        }
    }
}

/// Renames reach the disk in any order, except those known to be durable earlier: of several removed segments none
/// is found while a later one is gone.
#[test]
fn removed_segments_leave_no_gap_after_a_crash() {
    // The second group has given up its records in those segments, except one that is moved out of the first.
    let many = (0..12).flat_map(|_| [(0, Operation::Append(3, 850)), (1, Operation::Append(1, 20))]);
    let end = [(1, Operation::Truncate(1)), (0, Operation::Purge(0)), (0, Operation::Append(3, 850))];
    let life: Vec<_> = many.chain(end).collect();
    let mut died = 0;
    for changes in 0..200 {
        let memory = ForgetfulDisk::default();
        let disk = FaultyDisk::new(Arc::new(memory.clone()));
        disk.dead_after(Some(changes));
        let may = live(&disk, &life);
        died += u32::from(may.iter().any(|may| may.len() > 1));
        for seed in 0..24 {
            check(&memory.crash(Survivors::Some(seed)), &may).expect("it opens as it was acknowledged");
        }
    }
    assert!(died > 40, "{died} deaths");
}

/// A group that is never purged does not keep the segments of one that is.
#[test]
fn a_group_that_is_seldom_purged_does_not_keep_old_segments() {
    let disk = ForgetfulDisk::default();
    let log = open(&disk).unwrap();
    let ((idle, _), (busy, _)) = (state(&log, 0, 0).unwrap(), state(&log, 1, 0).unwrap());
    let kept: Vec<_> = (0..3).map(|i| record(i, 0, 300)).collect();
    append(&idle, kept.clone()).unwrap();
    for index in 0..400 {
        append(&busy, vec![record(index, 1, 900)]).unwrap();
        if index % 10 == 9 {
            busy.purge(index - 2, Bytes::new()).unwrap();
        }
    }
    let segments = names(&disk, Path::new(DIR)).unwrap().segments.len();
    assert!(segments <= 8, "{segments} segments for six records");
    let stats = log.stats();
    assert!((3..=60).contains(&stats.moved), "{stats:?}");
    assert_eq!(idle.read(0..9, u64::MAX).unwrap(), kept);
    drop((log, idle, busy));
    let log = open(&disk).unwrap();
    assert_eq!(state(&log, 0, 0).unwrap().1.records.into_values().collect::<Vec<_>>(), kept);
}

/// Queued operations of all groups share one sync.
#[test]
fn groups_that_write_at_the_same_time_share_their_syncs() {
    let disk = ForgetfulDisk::default();
    let log = open(&disk).unwrap();
    let logs: Vec<Log> = (0..GROUPS).map(|g| state(&log, g, 0).unwrap().0).collect();
    // The writer is held inside the first `done`, so all others are queued by then.
    let (hold, held) = mpsc::channel::<()>();
    logs[0].append(vec![record(0, 1, 10)], Box::new(move |_| held.recv().unwrap()));
    let (send, all) = mpsc::channel();
    for log in &logs[1..] {
        for index in 0..20 {
            let send = send.clone();
            log.append(vec![record(index, 1, 10)], Box::new(move |done| send.send(done).unwrap()));
        }
    }
    hold.send(()).unwrap();
    (0..60).for_each(|_| all.recv().unwrap().unwrap());
    assert!(log.stats().batches <= 3, "{:?}", log.stats());
}

/// A copy is complete if its source was, and damaged if its source was.
#[test]
fn a_group_is_kept_elsewhere_and_taken_in_again() {
    let disk = ForgetfulDisk::default();
    let log = open(&disk).unwrap();
    let ((one, _), (other, _)) = (state(&log, 0, 0).unwrap(), state(&log, 1, 0).unwrap());
    for index in 0..30 {
        append(&one, vec![record(index, 1, 300)]).unwrap();
        append(&other, vec![record(index, 2, 300)]).unwrap();
    }
    one.purge(9, Bytes::from_static(b"9")).unwrap();
    let look = |dir: &str, key| {
        let mut records = Vec::new();
        let found = Log::inspect(&disk, Path::new(dir), key, &mut |r| records.push(r))?;
        Ok::<_, StoreError>((found.purged.map(|p| p.0), records))
    };
    let expected: Vec<_> = (10..30).map(|i| record(i, 1, 300)).collect();
    for _ in 0..2 {
        log.keep(key(0, 0), Path::new("/aside")).unwrap();
        assert_eq!(look("/aside", key(0, 0)).unwrap(), (Some(9), expected.clone()));
    }
    drop(one);
    log.remove(key(0, 0)).unwrap();
    assert!(!log.has(key(0, 0)) && log.has(key(1, 0)));
    log.import(key(0, 1), Path::new("/aside"), key(0, 0)).unwrap();
    let (one, found) = state(&log, 0, 1).unwrap();
    assert_eq!((found.purged, found.records.into_values().collect::<Vec<_>>()), (Some(9), expected.clone()));
    drop((one, other, log));

    let item = items(&disk).into_iter().rfind(|i| i.kind == Kind::Record && i.key == key(0, 1)).unwrap();
    let Item { segment, body, .. } = item;
    let path = segment_path(Path::new(DIR), segment);
    let mut bytes = disk.contents(&path).unwrap();
    bytes[body.start as usize] ^= 1;
    disk.put(&path, bytes);
    let log = open(&disk).unwrap();
    let refused = state(&log, 0, 1).unwrap_err().to_string();
    assert!(refused.contains("record 29"), "{refused}");
    log.keep(key(0, 1), Path::new("/aside")).unwrap();
    log.remove(key(0, 1)).unwrap();
    let refused = look("/aside", key(0, 1)).unwrap_err();
    assert!(refused.to_string().contains("/aside/") && refused.is_damage(), "{refused}");
    assert_eq!(state(&log, 1, 0).unwrap().1.records.len(), 30);
    let failed = log.import(key(0, 2), Path::new("/aside"), key(0, 1)).unwrap_err();
    assert!(failed.is_damage(), "{failed}");
}
