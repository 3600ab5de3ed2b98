//! A power failure at every point of a log that several groups share: for each group, acknowledged records are
//! there, and given-up records are not.

use crate::{Cloned, DIR, RecoveredLog, append, group, open_in, record};
use bytes::Bytes;
use paraft_store::{
    Log, LogOptions, Record, SharedLog, StoreError,
    faulty::{FaultyDisk, ForgetfulDisk, Survivors},
};
use std::{collections::BTreeMap, path::Path, sync::Arc};

const GROUPS: usize = 3;

#[derive(Clone, Copy, Debug)]
enum Operation {
    /// For a group: this many records of this many bytes.
    Append(usize, u64, usize),
    Truncate(usize, u64),
    Purge(usize, u64),
    Remove(usize),
    /// The process closes the log properly, and another starts.
    Reopen,
}

use Operation::{Append, Purge, Remove, Reopen, Truncate};

/// With segments of 4 KiB these fill several, truncate within one and over two, and reuse purged ones; the second
/// group's first records keep the oldest segments until they are moved.
const LIFE: [Operation; 36] = [
    Append(0, 1, 100),
    Append(1, 2, 300),
    Append(0, 3, 700),
    Append(0, 2, 1500),
    Append(2, 2, 700),
    Append(0, 1, 5000),
    Truncate(0, 3),
    Append(2, 3, 900),
    Append(0, 2, 700),
    Append(0, 4, 1200),
    Truncate(0, 2),
    Append(0, 6, 900),
    Purge(0, 6),
    Purge(2, 3),
    Append(0, 3, 900),
    Reopen,
    Append(1, 1, 500),
    Append(0, 2, 900),
    Truncate(0, 8),
    Append(0, 5, 900),
    Purge(0, 20),
    Append(2, 3, 900),
    Append(0, 3, 900),
    Remove(2),
    Append(0, 8, 900),
    Purge(0, 30),
    Append(0, 8, 900),
    Purge(0, 38),
    Append(2, 2, 900),
    Append(0, 8, 900),
    Truncate(1, 1),
    Purge(0, 46),
    Append(1, 1, 900),
    Append(0, 8, 900),
    Append(2, 1, 900),
    Append(0, 1, 900),
];

/// What an outside observer knows of a group.
#[derive(Clone, Default, Debug)]
struct ExpectedGroup {
    /// How often it was removed; each time it gets another key.
    lives: u64,
    /// Records that are acknowledged and not given up.
    must: BTreeMap<u64, Record>,
    /// Every version of an index that may be found: written, and not given up with an acknowledgement.
    may: BTreeMap<u64, Vec<Record>>,
    purged: Option<u64>,
    purge_tried: Option<u64>,
    next: u64,
}

fn key(g: usize, known: &[ExpectedGroup; GROUPS]) -> u64 {
    7 + g as u64 + 100 * known[g].lives
}

fn open_all(
    disk: &dyn Cloned,
    options: LogOptions,
    known: &[ExpectedGroup; GROUPS],
) -> Result<(SharedLog, Vec<(Log, RecoveredLog)>), StoreError> {
    let (shared, _) = SharedLog::open(disk.shared(), Path::new(DIR), options)?;
    let logs = (0..GROUPS).map(|g| group(&shared, key(g, known))).collect::<Result<_, _>>()?;
    Ok((shared, logs))
}

/// Runs operations until one fails; returns the number of moved records.
fn live(disk: &FaultyDisk, options: LogOptions, known: &mut [ExpectedGroup; GROUPS]) -> u64 {
    let Ok((mut shared, mut logs)) = open_all(disk, options, known) else { return 0 };
    for (version, act) in LIFE.iter().enumerate() {
        let done = match *act {
            Append(g, count, bytes) => {
                let known = &mut known[g];
                let new: Vec<_> = (0..count).map(|i| record(known.next + i, version as u8, bytes)).collect();
                new.iter().for_each(|r| known.may.entry(r.index).or_default().push(r.clone()));
                append(&logs[g].0, new.clone()).map(|()| {
                    known.next += count;
                    for r in new {
                        known.may.insert(r.index, vec![r.clone()]);
                        known.must.insert(r.index, r);
                    }
                })
            }
            Truncate(g, last) => {
                let known = &mut known[g];
                known.must.split_off(&(last + 1));
                logs[g].0.truncate_after(Some(last)).map(|()| {
                    known.may.split_off(&(last + 1));
                    known.next = last + 1;
                })
            }
            Purge(g, upto) => {
                let known = &mut known[g];
                known.must = known.must.split_off(&(upto + 1));
                known.purge_tried = Some(upto);
                logs[g].0.purge(upto, Bytes::from(upto.to_string())).map(|()| {
                    known.may = known.may.split_off(&(upto + 1));
                    known.purged = Some(upto);
                    known.next = known.next.max(upto + 1);
                })
            }
            Remove(g) => {
                let before = std::mem::take(&mut known[g]);
                known[g].lives = before.lives;
                let removed = shared.remove(key(g, known));
                if removed.is_err() {
                    // It is there or not, and nothing of it is required.
                    known[g] = ExpectedGroup {
                        must: BTreeMap::new(),
                        purge_tried: before.purged,
                        purged: None,
                        ..before
                    };
                    return 0;
                }
                known[g].lives += 1;
                group(&shared, key(g, known)).map(|opened| logs[g] = opened).map_err(Into::into)
            }
            Reopen => {
                drop((shared, logs));
                match open_all(disk, options, known) {
                    Ok(opened) => (shared, logs) = opened,
                    Err(_) => return 0,
                }
                Ok(())
            }
        };
        if done.is_err() {
            return 0;
        }
    }
    shared.stats().moved
}

/// The error in the recovered state of a group, if any.
fn check(found: &RecoveredLog, known: &ExpectedGroup) -> Result<(), String> {
    let purged = found.purged.as_ref().map(|(upto, _)| *upto);
    if purged != known.purged && purged != known.purge_tried {
        return Err(format!("purged {purged:?}, acknowledged {:?}", known.purged));
    }
    if found.purged.as_ref().is_some_and(|(upto, tag)| *tag != upto.to_string()) {
        return Err("wrong tag".into());
    }
    for pair in found.records.windows(2) {
        if pair[0].index + 1 != pair[1].index {
            return Err(format!("record {} after {}", pair[1].index, pair[0].index));
        }
    }
    let read: BTreeMap<u64, &Record> = found.records.iter().map(|r| (r.index, r)).collect();
    if let Some(lost) = known.must.values().find(|r| read.get(&r.index) != Some(r)) {
        return Err(format!("acknowledged record {} is lost", lost.index));
    }
    if let Some(wrong) =
        found.records.iter().find(|r| !known.may.get(&r.index).is_some_and(|m| m.contains(r)))
    {
        return Err(format!("record {} was never written, or was given up: {:?}", wrong.index, wrong.header));
    }
    Ok(())
}

fn check_all(after: &ForgetfulDisk, known: &[ExpectedGroup; GROUPS]) -> Result<(), String> {
    let options = LogOptions { segment_bytes: 4096, sync: true };
    let (_shared, logs) = open_all(after, options, known).map_err(|e| e.to_string())?;
    for (g, ((_, found), known)) in logs.iter().zip(known).enumerate() {
        check(found, known).map_err(|what| format!("group {g}: {what}"))?;
    }
    // New records of the same lengths follow, and torn records must not reappear. Then a power failure for certain.
    let mut expected = Vec::new();
    for ((log, found), known) in logs.iter().zip(known) {
        let purged = found.purged.as_ref().map(|(upto, _)| *upto);
        let next = found.records.last().map(|r| r.index + 1).or(purged.map(|p| p + 1)).unwrap_or(0);
        let bytes = known.may.get(&next).map_or(900, |m| m[0].payload.len());
        let mut records = found.records.clone();
        records.push(record(next, 77, bytes));
        append(log, vec![record(next, 77, bytes)]).map_err(|e| e.to_string())?;
        expected.push(records);
    }
    for survivors in [Survivors::Synced, Survivors::Some(expected.len() as u64)] {
        let (_, logs) =
            open_all(&after.crash(survivors), options, known).map_err(|e| format!("second: {e}"))?;
        if logs.iter().zip(&expected).any(|((_, found), expected)| found.records != *expected) {
            return Err("the second opening differs".into());
        }
    }
    Ok(())
}

/// Crashes at every disk operation, with many outcomes each; returns the errors.
fn crash_everywhere(options: LogOptions) -> Vec<String> {
    let healthy = FaultyDisk::new(Arc::new(ForgetfulDisk::default()));
    let mut all = <[ExpectedGroup; GROUPS]>::default();
    let moved = live(&healthy, options, &mut all);
    assert_eq!((all[0].purged, all[0].next), (Some(46), 57), "the life ends early without faults");
    assert!(moved > 0, "nothing was moved");

    let mut wrong = Vec::new();
    for changes in 0..healthy.changes() {
        let memory = ForgetfulDisk::default();
        let disk = FaultyDisk::new(Arc::new(memory.clone()));
        disk.dead_after(Some(changes));
        let mut known = <[ExpectedGroup; GROUPS]>::default();
        live(&disk, options, &mut known);
        for survivors in
            [Survivors::Synced].into_iter().chain((0..10).map(|i| Survivors::Some(changes * 1000 + i)))
        {
            if let Err(what) = check_all(&memory.crash(survivors), &known) {
                wrong.push(format!("{changes} changes, {survivors:?}: {what}"));
            }
        }
        // Only the process dies: the next one finds the same disk, with nothing more durable than before.
        if let Err(what) = check_all(&memory, &known) {
            wrong.push(format!("{changes} changes, process: {what}"));
        }
    }
    wrong
}
#[test]
fn power_failure_keeps_exactly_acknowledged_records() {
    let wrong = crash_everywhere(LogOptions { segment_bytes: 4096, sync: true });
    assert!(wrong.is_empty(), "{} outcomes are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// A check of the test: without syncs it must find lost records.
#[test]
fn without_syncs_the_same_test_finds_lost_records() {
    let wrong = crash_everywhere(LogOptions { segment_bytes: 4096, sync: false });
    assert!(wrong.iter().any(|w| w.contains("is lost")), "{wrong:?}");
}

/// Without syncs a machine crash loses records, a process crash does not.
#[test]
fn without_syncs_the_death_of_the_process_still_costs_nothing() {
    let wrong = crash_everywhere(LogOptions { segment_bytes: 4096, sync: false });
    let process: Vec<_> = wrong.iter().filter(|w| w.contains("process")).collect();
    assert!(process.is_empty(), "{process:?}");
}

/// The next process reuses segments that a dying process purged, and dies too.
#[test]
fn segment_becoming_spare_never_reappears_with_new_contents() {
    let options = LogOptions { segment_bytes: 4096, sync: true };
    let dir = Path::new(DIR);
    let records: Vec<_> = (0..12).map(|i| record(i, 1, 900)).collect();
    for (first_incarnation, second_incarnation) in (0..8).flat_map(|a| (0..24).map(move |b| (a, b))) {
        let memory = ForgetfulDisk::default();
        let disk = FaultyDisk::new(Arc::new(memory.clone()));
        let (log, _) = open_in(&disk, dir, options).unwrap();
        append(&log, records.clone()).unwrap();
        disk.dead_after(Some(first_incarnation));
        let _ = log.purge(9, Bytes::new());
        drop(log);

        disk.dead_after(Some(second_incarnation));
        let mut expected = records.clone();
        if let Ok((log, _)) = open_in(&disk, dir, options) {
            let new = (12..20).map(|i| record(i, 2, 900));
            expected.extend(new.take_while(|r| append(&log, vec![r.clone()]).is_ok()));
        }
        for survivors in [
            Survivors::Synced,
            Survivors::Everything,
            Survivors::Some(first_incarnation ^ second_incarnation),
        ] {
            let context = format!("{first_incarnation} changes, then {second_incarnation}, {survivors:?}");
            let (_, found) = open_in(&memory.crash(survivors), dir, options).expect(&context);
            let first = found.purged.map_or(0, |(upto, _)| upto as usize + 1);
            assert!(found.records.starts_with(&expected[first..]), "{context}");
        }
    }
}

/// A log without syncs is synced on a proper close; its mark never claims more than is durable.
#[test]
fn an_orderly_end_makes_everything_durable_also_without_syncs() {
    for seed in 0..20 {
        let disk = ForgetfulDisk::default();
        let (log, _) =
            open_in(&disk, Path::new(DIR), LogOptions { segment_bytes: 4096, sync: false }).unwrap();
        let records: Vec<_> = (0..3).map(|i| record(i, 1, 900)).collect();
        append(&log, records.clone()).unwrap();
        drop(log);
        let (_, found) =
            open_in(&disk.crash(Survivors::Some(seed)), Path::new(DIR), LogOptions::default()).unwrap();
        assert_eq!(found.records, records);
    }
}
