//! Ordinary use of a log: append, truncate, purge, open again.

use crate::{DIR, SMALL, append, open, open_in, record};
use bytes::Bytes;
use paraft_store::{
    Access, Disk, LogOptions, RealDisk, Record, StoreError,
    faulty::{FaultyDisk, ForgetfulDisk, Survivors},
};
use std::{
    path::Path,
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

fn records(range: std::ops::Range<u64>, version: u8) -> Vec<Record> {
    range.map(|i| record(i, version, 100 + (i as usize * 37) % 900)).collect()
}

#[test]
fn a_log_on_the_real_disk_comes_back_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("not/there/yet");
    let mut expected = Vec::new();
    let mut purged = None;
    for round in 0..6u8 {
        let (log, found) = open_in(&RealDisk, &dir, SMALL).unwrap();
        assert_eq!(found.records, expected, "round {round}");
        assert_eq!((found.purged, found.torn_bytes), (purged.clone(), 0));
        let next = expected.last().map_or(0, |r: &Record| r.index + 1);
        let new = records(next..next + 40, round);
        for part in new.chunks(3) {
            append(&log, part.to_vec()).unwrap();
        }
        expected.extend(new);
        if round > 1 {
            let last = next + 20;
            log.truncate_after(Some(last)).unwrap();
            expected.retain(|r| r.index <= last);
            let again = records(last + 1..last + 12, 100 + round);
            append(&log, again.clone()).unwrap();
            expected.extend(again);
        }
        if round > 2 {
            let (upto, tag) = (next - 10, Bytes::from(vec![round; 9]));
            log.purge(upto, tag.clone()).unwrap();
            expected.retain(|r| r.index > upto);
            purged = Some((upto, tag));
        }
        let stats = log.shared().stats();
        assert_eq!(stats.queued_bytes, 0);
        assert!(stats.segments > 3 && stats.records >= 40, "{stats:?}");
    }
    let names = RealDisk.list(&dir).unwrap();
    assert!(names.iter().filter(|n| n.ends_with(".spare")).count() <= 4, "{names:?}");
}

#[test]
fn second_log_in_a_folder_is_refused_while_first_is_open() {
    let dir = tempfile::tempdir().unwrap();
    let (log, _) = open_in(&RealDisk, dir.path(), SMALL).unwrap();
    let twice = open_in(&RealDisk, dir.path(), SMALL).unwrap_err();
    assert!(matches!(&twice, StoreError::Locked { dir: d } if d == dir.path()), "{twice}");
    let clone = log.clone();
    drop(log);
    assert!(open_in(&RealDisk, dir.path(), SMALL).is_err());
    drop(clone);
    open_in(&RealDisk, dir.path(), SMALL).unwrap();
}

#[test]
fn truncate_anywhere_then_append_keeps_old_and_new() {
    for purged in [None, Some(4)] {
        for last in (0..30).map(Some).chain([None]) {
            let disk = ForgetfulDisk::default();
            let (log, _) = open(&disk).unwrap();
            append(&log, records(0..30, 1)).unwrap();
            if let Some(upto) = purged {
                log.purge(upto, Bytes::new()).unwrap();
            }
            log.truncate_after(last).unwrap();
            let kept = last.map_or(0, |l| l + 1).max(purged.map_or(0, |p| p + 1));
            // The same lengths as before: truncated records must not reappear after them.
            let new = records(kept..kept + 2, 2);
            append(&log, new.clone()).unwrap();
            drop(log);
            let mut expected = records(0..kept, 1);
            expected.extend(new);
            expected.retain(|r| purged.is_none_or(|p| r.index > p));
            assert_eq!(open(&disk).unwrap().1.records, expected, "after {last:?}, purged {purged:?}");
        }
    }
}

#[test]
fn purge_anywhere_keeps_the_rest_and_allows_appends() {
    for upto in 0..35 {
        let disk = ForgetfulDisk::default();
        let (log, _) = open(&disk).unwrap();
        append(&log, records(0..30, 1)).unwrap();
        log.purge(upto, Bytes::from_static(b"tag")).unwrap();
        log.purge(upto / 2, Bytes::from_static(b"earlier")).unwrap();
        drop(log);
        let (log, found) = open(&disk).unwrap();
        assert_eq!(found.purged, Some((upto, Bytes::from_static(b"tag"))));
        let mut expected = records(0..30, 1);
        expected.retain(|r| r.index > upto);
        assert_eq!(found.records, expected);
        let next = 30.max(upto + 1);
        assert!(append(&log, records(next + 1..next + 2, 2)).is_err());
        append(&log, records(next..next + 9, 2)).unwrap();
        expected.extend(records(next..next + 9, 2));
        drop(log);
        assert_eq!(open(&disk).unwrap().1.records, expected);
    }
}

#[test]
fn reused_segments_never_return_old_records() {
    let disk = ForgetfulDisk::default();
    let (log, _) = open(&disk).unwrap();
    // Records of equal length, so that old ones lie exactly where new ones would follow.
    for index in 0..300 {
        append(&log, vec![record(index, 1, 200)]).unwrap();
        if index % 20 == 19 {
            log.purge(index - 2, Bytes::new()).unwrap();
        }
    }
    let stats = log.shared().stats();
    assert!(stats.recycled > 10, "{stats:?}");
    let (_, found) = open(&disk.crash(Survivors::Everything)).unwrap();
    assert_eq!(found.torn_bytes, 0, "what an earlier use left is not a torn tail");
    drop(log);
    let (_, found) = open(&disk).unwrap();
    assert_eq!(found.records, (298..300).map(|i| record(i, 1, 200)).collect::<Vec<_>>());
    assert!(disk.list(Path::new(DIR)).unwrap().len() <= 4 + 2 + 2);
}

#[test]
fn append_out_of_order_is_refused_without_side_effects() {
    let disk = ForgetfulDisk::default();
    let (log, _) = open(&disk).unwrap();
    append(&log, vec![record(7, 1, 10)]).unwrap(); // a new log starts anywhere
    for wrong in [vec![record(9, 1, 1)], vec![record(7, 1, 1)], vec![record(8, 1, 1), record(8, 1, 1)]] {
        assert_eq!(append(&log, wrong).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    }
    let long = Record { index: 8, header: Bytes::new(), payload: vec![0; (16 << 20) + 1].into() };
    assert_eq!(append(&log, vec![long]).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    append(&log, Vec::new()).unwrap();
    append(&log, vec![record(8, 1, 10_000)]).unwrap(); // longer than a segment
    append(&log, vec![record(9, 1, 0)]).unwrap();
    drop(log);
    assert_eq!(open(&disk).unwrap().1.records, [record(7, 1, 10), record(8, 1, 10_000), record(9, 1, 0)]);
}

#[test]
fn appends_queued_during_a_sync_share_the_next_one() {
    let slow = FaultyDisk::new(Arc::new(ForgetfulDisk::default()));
    let (log, _) = open_in(&slow, Path::new(DIR), LogOptions::default()).unwrap();
    append(&log, vec![record(0, 1, 10)]).unwrap();
    // The writer is held inside the first `done`, so all others are queued by then.
    let (hold, held) = mpsc::channel::<()>();
    slow.slow_syncs(Duration::from_millis(1));
    log.append(vec![record(1, 1, 10)], Box::new(move |_| held.recv().unwrap()));
    let order = Arc::new(Mutex::new(Vec::new()));
    let (send, all) = mpsc::channel();
    for index in 2..102 {
        let (order, send) = (order.clone(), send.clone());
        let done = move |outcome: std::io::Result<()>| {
            outcome.unwrap();
            order.lock().unwrap().push(index);
            send.send(()).unwrap();
        };
        log.append(vec![record(index, 1, 10)], Box::new(done));
    }
    hold.send(()).unwrap();
    (2..102).for_each(|_| all.recv().unwrap());
    assert_eq!(*order.lock().unwrap(), (2..102).collect::<Vec<_>>());
    assert!(log.shared().stats().batches <= 4, "{:?}", log.shared().stats());
    assert_eq!(log.shared().stats().records, 102);
}

#[test]
fn the_last_handle_may_go_inside_a_done() {
    let disk = ForgetfulDisk::default();
    let (log, _) = open(&disk).unwrap();
    let (send, outcome) = mpsc::channel();
    let handle = log.clone();
    let (go, gone) = mpsc::channel::<()>();
    let done = move |_| {
        gone.recv().unwrap();
        let waited = handle.truncate_after(None);
        drop(handle);
        send.send(waited).unwrap();
    };
    log.append(vec![record(0, 1, 10)], Box::new(done));
    drop(log);
    go.send(()).unwrap();
    assert_eq!(outcome.recv().unwrap().unwrap_err().kind(), std::io::ErrorKind::Deadlock);
    // The thread ends by itself and releases the folder.
    let found = (0..5000).find_map(|_| {
        std::thread::sleep(Duration::from_millis(1));
        open(&disk).ok()
    });
    assert_eq!(found.unwrap().1.records, [record(0, 1, 10)]);
}

#[test]
fn files_of_others_in_the_folder_are_left_alone() {
    let disk = ForgetfulDisk::default();
    drop(open(&disk).unwrap());
    let others = ["notes.log", "1.log", "vote", "vote.tmp"].map(|name| Path::new(DIR).join(name));
    others.iter().for_each(|path| disk.put(path, b"x".to_vec()));
    let (log, _) = open(&disk).unwrap();
    append(&log, records(0..20, 1)).unwrap();
    log.purge(19, Bytes::new()).unwrap();
    for path in others {
        assert!(disk.open(&path, Access::Read).is_ok(), "{}", path.display());
    }
}

#[test]
fn a_small_log_takes_little_space_and_a_long_one_few_files() {
    let disk = ForgetfulDisk::default();
    let (log, _) = open_in(&disk, Path::new(DIR), LogOptions::default()).unwrap();
    append(&log, records(0..20, 1)).unwrap();
    let sizes = || {
        let names = disk.list(Path::new(DIR)).unwrap().into_iter().filter(|n| n.ends_with(".log"));
        let mut names: Vec<_> = names.collect();
        names.sort();
        names.iter().map(|n| disk.contents(&Path::new(DIR).join(n)).unwrap().len() >> 10).collect::<Vec<_>>()
    };
    assert_eq!(sizes(), [1024]);
    // 9 MiB in pieces of 64 KiB: each segment as long as the log before it.
    (20..164).for_each(|i| append(&log, vec![record(i, 1, 64 << 10)]).unwrap());
    assert_eq!(sizes(), [1024, 1024, 2048, 4096, 8192]);
    // A reopened log continues in its last segment.
    drop(log);
    let (log, _) = open_in(&disk, Path::new(DIR), LogOptions::default()).unwrap();
    append(&log, vec![record(164, 1, 64 << 10)]).unwrap();
    assert_eq!(sizes(), [1024, 1024, 2048, 4096, 8192]);
}
