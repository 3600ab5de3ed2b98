//! Records are read back while the log is written.

use crate::{DIR, SMALL, append, open, open_in, record, segment};
use bytes::Bytes;
use paraft_store::{RealDisk, Record, faulty::ForgetfulDisk};
use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    thread,
};

fn bytes(records: &[Record]) -> u64 {
    records.iter().map(|r| (r.header.len() + r.payload.len()) as u64).sum()
}

#[test]
fn what_is_read_back_is_what_the_log_holds_now() {
    let disk = ForgetfulDisk::default();
    let (log, _) = open(&disk).unwrap();
    assert_eq!(log.read(0..10, u64::MAX).unwrap(), []);
    let mut held: Vec<Record> = (0..40).map(|i| record(i, 1, 300 + 20 * i as usize)).collect();
    for part in held.chunks(3) {
        append(&log, part.to_vec()).unwrap();
    }
    assert!(log.shared().stats().segments > 5, "it goes over several files");
    assert_eq!(log.read(0..40, u64::MAX).unwrap(), held);
    assert_eq!(log.read(7..9, u64::MAX).unwrap(), held[7..9]);
    assert_eq!(log.read(38..90, u64::MAX).unwrap(), held[38..], "what is not written is not found");
    assert_eq!(log.read(40..90, u64::MAX).unwrap(), []);
    // As many as fit, and at least one.
    assert_eq!(log.read(5..40, bytes(&held[5..9])).unwrap(), held[5..9]);
    assert_eq!(log.read(5..40, bytes(&held[5..9]) - 1).unwrap(), held[5..8]);
    assert_eq!(log.read(5..40, 0).unwrap(), held[5..6]);
    assert_eq!(log.length(), (40, bytes(&held)));

    log.truncate_after(Some(30)).unwrap();
    held.truncate(31);
    held.extend((31..35).map(|i| record(i, 2, 500)));
    append(&log, held[31..].to_vec()).unwrap();
    log.purge(11, Bytes::new()).unwrap();
    assert_eq!(log.read(12..99, u64::MAX).unwrap(), held[12..]);
    assert_eq!(
        log.read(11..99, u64::MAX).unwrap(),
        [],
        "one that is purged is gone, and nothing is put in its place"
    );
    assert_eq!(log.length(), (23, bytes(&held[12..])));

    log.purge(60, Bytes::new()).unwrap();
    append(&log, vec![record(61, 1, 10)]).unwrap();
    assert_eq!(log.read(61..62, 0).unwrap(), [record(61, 1, 10)]);
    assert_eq!(log.length().0, 1);
}

#[test]
fn a_record_that_was_changed_on_the_disk_is_refused_by_name() {
    let disk = ForgetfulDisk::default();
    let (log, _) = open(&disk).unwrap();
    append(&log, (0..3).map(|i| record(i, 1, 200)).collect()).unwrap();
    let mut file = disk.contents(&segment(0)).unwrap();
    let middle = file.windows(9).position(|w| w == b"entry 1.1").unwrap();
    file[middle + 100] ^= 1;
    disk.put(&segment(0), file);
    assert_eq!(log.read(0..1, 0).unwrap(), [record(0, 1, 200)]);
    let refused = log.read(0..3, u64::MAX).unwrap_err().to_string();
    assert!(refused.contains("record 1 is not as it was written"), "{refused}");
    assert!(refused.contains(DIR), "{refused}");
}

/// Segments are purged, and reused as spares, while others read them.
#[test]
fn readers_never_see_a_segment_that_is_written_over() {
    let dir = tempfile::tempdir().unwrap();
    let (log, _) = open_in(&RealDisk, dir.path(), SMALL).unwrap();
    let of = |index: u64| record(index, 1, 200 + (index as usize * 97) % 900);
    let (last, purged, over) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    append(&log, vec![of(0)]).unwrap();
    thread::scope(|s| {
        let readers: Vec<_> = (0..3)
            .map(|_| {
                s.spawn(|| {
                    let mut found = 0;
                    while !over.load(SeqCst) {
                        // The oldest records, which are purged next.
                        let (from, written) = (purged.load(SeqCst), last.load(SeqCst));
                        let read = log.read(from..from + 6, u64::MAX).expect("no damage");
                        assert!(
                            read.len() as u64 >= (written + 1 - from).min(1) || purged.load(SeqCst) > from
                        );
                        for (r, index) in read.iter().zip(from..) {
                            assert_eq!(*r, of(index));
                            found += 1;
                        }
                    }
                    found
                })
            })
            .collect();
        for index in 1..1500 {
            append(&log, vec![of(index)]).unwrap();
            last.store(index, SeqCst);
            if index % 7 == 0 && index > 40 {
                purged.store(index - 20, SeqCst);
                log.purge(index - 21, Bytes::new()).unwrap();
            }
        }
        over.store(true, SeqCst);
        for r in readers {
            assert!(r.join().unwrap() > 0);
        }
    });
    assert!(log.shared().stats().recycled > 100, "spares were written over: {:?}", log.shared().stats());
    assert_eq!(log.read(1490..1500, u64::MAX).unwrap().len(), 10);
}
