//! Damage is refused with its place; no wrong data is returned; hostile files are harmless.

use crate::{DIR, HEAD, PREFIX, TABLE, append, open, open_in, record, segment};
use bytes::Bytes;
use paraft_store::{
    Disk, LogOptions, Record, SnapshotReader, StoreError, faulty::ForgetfulDisk, read_small, write_small,
};
use proptest::prelude::*;
use std::path::Path;

fn disk_with(files: &[(u64, Vec<u8>)]) -> ForgetfulDisk {
    let disk = ForgetfulDisk::default();
    disk.create_dir_all(Path::new(DIR)).unwrap();
    files.iter().for_each(|(first, bytes)| disk.put(&segment(*first), bytes.clone()));
    disk
}

/// Five records, each acknowledged before the next, the last two in a second segment; closed properly or not.
fn five(closed: bool) -> (Vec<(u64, Vec<u8>)>, Vec<Record>) {
    let disk = ForgetfulDisk::default();
    let (log, _) = open(&disk).unwrap();
    let lengths = [50, 60, 4000, 70, 80];
    let records: Vec<_> = (0..5).zip(lengths).map(|(i, n)| record(i, 1, n)).collect();
    records.iter().for_each(|r| append(&log, vec![r.clone()]).unwrap());
    let unclosed = disk.crash(paraft_store::faulty::Survivors::Everything);
    drop(log);
    let disk = if closed { disk } else { unclosed };
    let firsts = [0, 2, 3];
    (firsts.map(|first| (first, disk.contents(&segment(first)).unwrap())).to_vec(), records)
}

fn used(bytes: &[u8]) -> usize {
    bytes.iter().rposition(|b| *b != 0).unwrap() + 1
}

#[test]
fn flipped_byte_is_refused_or_costs_last_unproven_record() {
    for closed in [true, false] {
        let (files, records) = five(closed);
        let bytes = |r: &Record| HEAD + r.header.len() + r.payload.len();
        let last_record = PREFIX + TABLE + bytes(&records[3]);
        let end = last_record + bytes(&records[4]);
        for (place, (first, bytes)) in files.iter().enumerate() {
            // Every 7th byte of the long payload, every byte elsewhere.
            let step =
                |at: &usize| place != 1 || *at < 200 || at.is_multiple_of(7) || *at + 100 > used(bytes);
            for at in (0..used(bytes)).filter(step) {
                let mut flipped = files.clone();
                flipped[place].1[at] ^= 0x10;
                let context = format!("closed {closed}, segment {first}, byte {at}");
                match open(&disk_with(&flipped)) {
                    Err(StoreError::Damaged { path, offset, .. }) => {
                        assert_eq!(path, segment(*first), "{context}");
                        assert!(offset as usize <= at, "{context}: named {offset}");
                    }
                    Err(e) => panic!("{context}: {e}"),
                    // Later items repeat what a table says.
                    Ok((_, found)) if place > 0 && (PREFIX..PREFIX + TABLE).contains(&at) => {
                        assert_eq!(found.records, records, "{context}");
                    }
                    Ok((_, found)) => {
                        assert_eq!(place, 2, "{context}");
                        let kept = if at >= end { 5 } else { 4 };
                        assert!(at >= if closed { end } else { last_record }, "{context}");
                        assert_eq!(found.records, records[..kept], "{context}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_missing_segment_is_refused_and_named() {
    let (files, _) = five(true);
    for missing in 0..2 {
        let mut left = files.clone();
        left.remove(missing);
        let refused = open(&disk_with(&left)).unwrap_err().to_string();
        assert!(refused.contains(["record 0", "record 2"][missing]), "{refused}");
    }
}

#[test]
fn a_segment_under_another_name_is_refused() {
    let (files, _) = five(true);
    let refused = open(&disk_with(&[files[0].clone(), (2, files[2].1.clone())])).unwrap_err();
    assert!(refused.to_string().contains("its name does not say"), "{refused}");
}

#[test]
fn a_refused_log_is_not_changed() {
    let (mut files, _) = five(false);
    files[0].1[PREFIX + 40] ^= 1;
    let disk = disk_with(&files);
    let litter = Path::new(DIR).join("new.tmp");
    disk.put(&litter, vec![1]);
    open(&disk).unwrap_err();
    for (first, bytes) in files {
        assert_eq!(disk.contents(&segment(first)), Some(bytes));
    }
    assert!(disk.contents(&litter).is_some());
}

#[test]
fn another_format_version_is_told_from_damage() {
    let (mut files, _) = five(true);
    files.truncate(1);
    let prefix = &mut files[0].1;
    prefix[8] = 4;
    let crc = crc32fast::hash(&prefix[..40]);
    prefix[40..44].copy_from_slice(&crc.to_le_bytes());
    let refused = open(&disk_with(&files)).unwrap_err();
    assert!(matches!(refused, StoreError::Version { found: 4, supported: 1, .. }), "{refused}");
}

#[test]
fn a_damaged_purge_point_is_refused() {
    let disk = ForgetfulDisk::default();
    let (log, _) = open(&disk).unwrap();
    append(&log, (0..30).map(|i| record(i, 1, 300)).collect()).unwrap();
    log.purge(15, Bytes::from_static(b"tag")).unwrap();
    drop(log);
    let last = disk.list(Path::new(DIR)).unwrap().into_iter().filter(|n| n.ends_with(".log")).max().unwrap();
    let path = Path::new(DIR).join(last);
    let good = disk.contents(&path).unwrap();
    let tag = good.windows(3).rposition(|w| w == b"tag").unwrap();
    // Properly closed: the mark after it proves that it was durable.
    for at in tag - HEAD..tag + 3 {
        let mut bytes = good.clone();
        bytes[at] ^= 4;
        disk.put(&path, bytes);
        assert!(matches!(open(&disk), Err(StoreError::Damaged { path: p, .. }) if p == path), "byte {at}");
    }
}

/// The proof of damage is searched in chunks of 1 MiB; a head may cross a chunk boundary.
#[test]
fn damage_far_before_its_proof_is_found() {
    for across in [1, 30, 59, 60] {
        let disk = ForgetfulDisk::default();
        let (log, _) = open_in(&disk, Path::new(DIR), LogOptions::default()).unwrap();
        // Two segments, so that the third is long enough for both.
        let mebi = |index| record(index, 1, 1 << 20);
        append(&log, vec![mebi(0), mebi(1)]).unwrap();
        let long = record(2, 1, (1 << 20) - HEAD - "entry 2.1".len() - across);
        append(&log, vec![long]).unwrap();
        append(&log, vec![record(3, 1, 10)]).unwrap();
        let mut files = [0, 1, 2].map(|first| (first, disk.contents(&segment(first)).unwrap()));
        files[2].1[PREFIX + TABLE] ^= 1;
        let refused = open(&disk_with(&files)).unwrap_err();
        assert!(matches!(refused, StoreError::Damaged { offset: 92, .. }), "{across}: {refused}");
    }
}

/// The last segment of an unclosed log: no item after the cut proves that it was durable, but the reserved size
/// does.
#[test]
fn shortened_last_segment_is_refused_at_any_length() {
    let (files, _) = five(false);
    for at in 0..files[2].1.len() {
        let mut cut = files.clone();
        cut[2].1.truncate(at);
        match open(&disk_with(&cut)) {
            Err(StoreError::Damaged { path, offset, .. }) => {
                assert_eq!((path, offset as usize), (segment(3), if at < PREFIX { 0 } else { at }));
            }
            other => panic!("cut at {at}: {other:?}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_bytes_as_a_segment_open_or_are_refused(
        noise in prop::collection::vec(any::<u8>(), 0..300), at in 0usize..600, keep in 0usize..400
    ) {
        let (mut files, records) = five(false);
        files.truncate(1);
        let bytes = &mut files[0].1;
        let at = at.min(bytes.len());
        bytes.splice(at..(at + keep).min(bytes.len()), noise);
        if let Ok((_, found)) = open(&disk_with(&files)) {
            prop_assert_eq!(&found.records, &records[..found.records.len()]);
        }
    }

    #[test]
    fn any_bytes_as_a_small_file_or_a_snapshot_are_refused_or_read(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200), magic in 0..3
    ) {
        match magic {
            1 => bytes.splice(..bytes.len().min(8), *b"PARAFTSM").for_each(drop),
            2 => bytes.splice(..bytes.len().min(8), *b"PARAFTSS").for_each(drop),
            _ => {}
        }
        let (disk, path) = (ForgetfulDisk::default(), Path::new("/file"));
        disk.put(path, bytes.clone());
        if let Ok(read) = read_small(&disk, path) {
            let contents = read.unwrap();
            write_small(&disk, path, &contents).unwrap();
            prop_assert_eq!(disk.contents(path).unwrap(), bytes);
        } else if let Ok(reader) = SnapshotReader::open(&disk, path) {
            prop_assert!(reader.take(1000).count() < 1000);
        }
    }
}
