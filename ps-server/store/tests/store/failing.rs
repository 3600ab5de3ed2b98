//! A full or failing disk: nothing is half acknowledged, the log stops, and opens cleanly later.

use crate::{append, open, record};
use bytes::Bytes;
use paraft_store::{
    Record,
    faulty::{FaultyDisk, ForgetfulDisk, Survivors},
};
use std::{
    io::ErrorKind,
    sync::{Arc, mpsc},
};

#[test]
fn full_disk_at_any_byte_loses_nothing_acknowledged() {
    let records: Vec<Record> = (0..5).map(|i| record(i, 1, 30)).collect();
    let mut fulls = 0;
    for room in 0..700 {
        let memory = ForgetfulDisk::default();
        let disk = FaultyDisk::new(Arc::new(memory.clone()));
        let (log, _) = open(&disk).unwrap();
        disk.full_after(Some(room));
        let outcomes: Vec<_> = records.iter().map(|r| append(&log, vec![r.clone()])).collect();
        let acknowledged = outcomes.iter().take_while(|o| o.is_ok()).count();
        if acknowledged < records.len() {
            fulls += 1;
            // Poisoned: later calls fail too, even after there is room again.
            disk.full_after(None);
            let later = append(&log, vec![record(acknowledged as u64, 2, 1)]).unwrap_err();
            assert_eq!(later.kind(), ErrorKind::StorageFull);
            assert!(later.to_string().contains("stopped") && later.to_string().contains("full"), "{later}");
            assert!(log.truncate_after(None).is_err() && log.purge(0, Bytes::new()).is_err());
            assert!(outcomes[acknowledged..].iter().all(Result::is_err), "room {room}: {outcomes:?}");
        }
        disk.full_after(Some(0)); // it opens on a full disk
        drop(log);
        let (log, found) = open(&disk).unwrap_or_else(|e| panic!("room {room}: {e}"));
        assert!(found.records.len() >= acknowledged, "room {room}");
        assert_eq!(found.records, records[..found.records.len()], "room {room}");
        disk.full_after(None);
        append(&log, vec![record(found.records.len() as u64, 3, 30)]).unwrap();
        drop(log);
        assert_eq!(open(&disk).unwrap().1.records.len(), found.records.len() + 1, "room {room}");
    }
    assert!((100..700).contains(&fulls), "{fulls} of 700 were full: the test tests nothing");
}

#[test]
fn a_failed_sync_is_not_believed_after_a_restart() {
    let disk = ForgetfulDisk::default();
    let (log, _) = open(&disk).unwrap();
    append(&log, vec![record(0, 1, 900)]).unwrap();
    disk.fail_syncs(1);
    append(&log, vec![record(1, 1, 900), record(2, 1, 900)]).unwrap_err();
    append(&log, vec![record(1, 2, 900)]).unwrap_err();
    drop(log);
    // The new process sees the records in the page cache. What it reports must survive the next failure.
    let (log, found) = open(&disk).unwrap();
    let after = disk.crash(Survivors::Synced);
    assert_eq!(open(&after).unwrap().1.records, found.records);
    assert_eq!(found.records.len(), 3);
    drop(log);
}

#[test]
fn a_done_that_panics_ends_the_log_and_everyone_else_is_told() {
    let disk = ForgetfulDisk::default();
    let (log, _) = open(&disk).unwrap();
    // The writer is held inside the first `done`, so that the next two share a batch.
    let (hold, held) = mpsc::channel::<()>();
    log.append(vec![record(0, 1, 10)], Box::new(move |_| held.recv().unwrap()));
    log.append(vec![record(1, 1, 10)], Box::new(|_| panic!("on purpose")));
    let (send, outcome) = mpsc::channel();
    log.append(vec![record(2, 1, 10)], Box::new(move |done| send.send(done).unwrap()));
    hold.send(()).unwrap();
    for why in [outcome.recv().unwrap(), append(&log, vec![record(3, 1, 10)]), log.truncate_after(None)] {
        let why = why.unwrap_err().to_string();
        assert!(why.contains("open the log again"), "{why}");
    }
    drop(log);
    assert_eq!(open(&disk).unwrap().1.records, [record(0, 1, 10), record(1, 1, 10), record(2, 1, 10)]);
}
