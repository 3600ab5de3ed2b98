//! A crash cuts the tail: the log opens with a prefix that contains everything acknowledged.

use crate::{DIR, HEAD, PREFIX, SMALL, TABLE, append, open, open_in, record, segment};
use bytes::Bytes;
use paraft_store::{
    Disk, LogOptions, Record,
    faulty::{ForgetfulDisk, Survivors},
};
use std::path::Path;

/// A log of six records in one segment, not closed: the segment's bytes, the records, and the end of each.
fn six(batches: &[usize]) -> (Vec<u8>, Vec<Record>, Vec<usize>) {
    let disk = ForgetfulDisk::default();
    let (log, _) = open(&disk).unwrap();
    let records: Vec<_> = (0..6).map(|i| record(i, 1, 20 + 13 * i as usize)).collect();
    let mut rest = records.as_slice();
    for batch in batches {
        append(&log, rest[..*batch].to_vec()).unwrap();
        rest = &rest[*batch..];
    }
    let mut at = PREFIX;
    let ends = records.iter().map(|r| {
        at += HEAD + r.header.len() + r.payload.len();
        at
    });
    (disk.contents(&segment(0)).unwrap(), records.clone(), ends.collect())
}

/// The same segment on a file system without reservation.
fn unreserved(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[12..16].fill(0);
    let crc = crc32fast::hash(&bytes[..40]);
    bytes[40..PREFIX].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn disk_with(bytes: Vec<u8>) -> ForgetfulDisk {
    let disk = ForgetfulDisk::default();
    disk.create_dir_all(Path::new(DIR)).unwrap();
    disk.put(&segment(0), bytes);
    disk
}

#[test]
fn log_cut_at_any_byte_opens_with_records_before() {
    let (bytes, records, ends) = six(&[6]);
    for cut in PREFIX..bytes.len() {
        let whole = ends.iter().filter(|end| **end <= cut).count();
        let zeros = [bytes[..cut].to_vec(), vec![0; bytes.len() - cut]].concat();
        let noise = [bytes[..cut].to_vec(), vec![0xF5; bytes.len() - cut]].concat();
        // Without reservation a crash can leave a short file.
        let short = unreserved(&bytes)[..cut].to_vec();
        for (tail, found) in [("missing", short), ("zeros", zeros), ("noise", noise)] {
            let disk = disk_with(found);
            let (log, found) = open(&disk).unwrap_or_else(|e| panic!("cut at {cut}, {tail}: {e}"));
            // The noise 0xF5 may be the original byte.
            let expected = if tail == "noise" { found.records.len().max(whole) } else { whole };
            assert_eq!(found.records, records[..expected], "cut at {cut}, {tail}");
            // Torn bytes may be counted or not (the head may be gone), but valid ones never.
            let begun = cut.saturating_sub(ends[..whole].last().copied().unwrap_or(PREFIX));
            let limit = if tail == "missing" { begun } else { bytes.len() };
            assert!(found.torn_bytes as usize <= limit, "cut at {cut}, {tail}: {}", found.torn_bytes);

            let mut expected = found.records;
            let next = expected.len() as u64;
            let new: Vec<_> = (next..next + 2).map(|i| record(i, 2, 20 + 13 * i as usize)).collect();
            append(&log, new.clone()).unwrap();
            expected.extend(new);
            drop(log);
            assert_eq!(open(&disk).unwrap().1.records, expected, "cut at {cut}, {tail}, then appended");
        }
    }
}

#[test]
fn record_missing_in_last_batch_is_torn_with_its_successors() {
    let (bytes, records, ends) = six(&[2, 4]);
    for lost in 2..6 {
        let mut found = bytes.clone();
        found[ends[lost - 1]..ends[lost]].fill(0);
        let disk = disk_with(found);
        let (log, found) = open(&disk).unwrap();
        assert_eq!(found.records, records[..lost]);
        let torn = if lost < 5 { ends[5] - ends[lost - 1] } else { 0 };
        assert_eq!(found.torn_bytes as usize, torn);
        // As long as the lost one, so that the next record would line up with its old successor.
        append(&log, vec![record(lost as u64, 2, 20 + 13 * lost)]).unwrap();
        drop(log);
        let (_, again) = open(&disk).unwrap();
        assert_eq!(again.records.len(), lost + 1);
        assert_eq!(again.records[lost], record(lost as u64, 2, 20 + 13 * lost));
    }
}

#[test]
fn a_record_missing_before_the_last_batch_is_damage() {
    let (bytes, _, ends) = six(&[2, 4]);
    for lost in 0..2 {
        let start = if lost == 0 { PREFIX } else { ends[lost - 1] };
        let mut found = bytes.clone();
        found[start..ends[lost]].fill(0);
        let refused = open(&disk_with(found)).unwrap_err().to_string();
        assert!(
            refused.contains(&format!("{} is damaged at byte {start}", segment(0).display())),
            "{refused}"
        );
    }
}

#[test]
fn a_segment_that_was_begun_and_got_no_record_is_gone_on_with() {
    let disk = ForgetfulDisk::default();
    let (log, _) = open(&disk).unwrap();
    let mut records = vec![record(0, 1, 3000), record(1, 1, 3000)];
    append(&log, records.clone()).unwrap();
    drop(log);
    let mut begun = disk.contents(&segment(1)).unwrap();
    begun[PREFIX + TABLE..].fill(0);
    disk.put(&segment(1), begun);
    records.truncate(1);
    // Closed again, so that the segment holds only a mark; then a record that fits into no segment.
    drop(open(&disk).unwrap());
    let (log, _) = open(&disk).unwrap();
    records.push(record(1, 2, 5000));
    append(&log, vec![records[1].clone()]).unwrap();
    log.purge(0, Bytes::new()).unwrap();
    drop(log);
    assert_eq!(open(&disk).unwrap().1.records, records[1..]);
}

#[test]
fn a_log_whose_only_record_was_torn_may_begin_elsewhere() {
    let disk = disk_with(unreserved(&six(&[6]).0)[..PREFIX + 10].to_vec());
    let (log, found) = open(&disk).unwrap();
    assert!(found.records.is_empty());
    append(&log, vec![record(5, 1, 10)]).unwrap();
    let after = disk.crash(Survivors::Synced);
    assert_eq!(open(&after).unwrap().1.records, [record(5, 1, 10)]);
}

/// A later build may use shorter segments. A longer segment records its size, and without those bytes it would be
/// refused as cut short.
#[test]
fn longer_old_segment_keeps_its_length_after_tail_cut() {
    let disk = ForgetfulDisk::default();
    let long = LogOptions { segment_bytes: 64 << 10, ..SMALL };
    let (log, _) = open_in(&disk, Path::new(DIR), long).unwrap();
    let records: Vec<_> = (0..3).map(|i| record(i, 1, 50)).collect();
    append(&log, records.clone()).unwrap();
    let torn = disk.crash(Survivors::Everything);
    drop(log);
    let mut bytes = torn.contents(&segment(0)).unwrap();
    let end = bytes.iter().rposition(|b| *b != 0).unwrap();
    bytes[end] ^= 1;
    torn.put(&segment(0), bytes);
    let (log, found) = open(&torn).unwrap();
    assert_eq!((found.records.len(), found.torn_bytes > 0), (2, true));
    append(&log, vec![record(2, 2, 50)]).unwrap();
    log.truncate_after(Some(0)).unwrap();
    drop(log);
    let (_, found) = open(&torn).expect("nothing was cut short by anyone else");
    assert_eq!(found.records, records[..1]);
}
