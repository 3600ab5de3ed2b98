//! Log segments, snapshot files, small files.

use crate::{
    input::Input,
    log_files::{bound, mend},
};
use bytes::Bytes;
use paraft_common::Payload;
use paraft_store::{
    Disk, Log, LogOptions, Record, SnapshotReader, SnapshotWriter, StoreError, faulty::ForgetfulDisk,
    read_small, write_small,
};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
};

const DIR: &str = "/log";

/// A folder of up to three segments, with or without a purge point and a mark that one of them is being cut. Bits: mend
/// the segments, purge point, being cut.
pub fn log(data: &[u8]) {
    let mut input = Input(data);
    let how = input.byte();
    let disk = ForgetfulDisk::default();
    let dir = Path::new(DIR);
    disk.create_dir_all(dir).expect("in memory");
    if how & 2 > 0 {
        let purged = input.part();
        write_small(&disk, &dir.join("purged"), purged).expect("in memory");
    }
    if how & 4 > 0 {
        let first = u64::from(input.word()).to_le_bytes();
        write_small(&disk, &dir.join("cutting"), &first).expect("in memory");
    }
    let mut files: Vec<(PathBuf, Vec<u8>)> = Vec::new();
    for _ in 0..3 {
        if input.is_empty() {
            break;
        }
        let first = input.word();
        let mut bytes = input.part().to_vec();
        if how & 1 > 0 {
            mend(&mut bytes);
        }
        bound(&mut bytes);
        let path = dir.join(format!("{first:016}.log"));
        disk.put(&path, bytes.clone());
        files.retain(|(p, _)| *p != path);
        files.push((path, bytes));
    }
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let mut seen = Vec::new();
    let looked = Log::look(shared.clone(), dir, &mut |r| seen.push(r));
    let unchanged = || files.iter().all(|(path, bytes)| disk.contents(path).as_ref() == Some(bytes));
    assert!(unchanged(), "looking changes nothing");

    // No segment is written in full: the disk is memory.
    let options = LogOptions { segment_bytes: 4096, sync: true };
    let mut records = Vec::new();
    let opened = Log::open(shared.clone(), dir, options, &mut |r| records.push(r));
    let (log, found) = match (opened, looked) {
        (Ok((log, found)), Ok(looked)) => {
            assert_eq!(
                (&records, &found.purged, found.torn_bytes),
                (&seen, &looked.purged, looked.torn_bytes)
            );
            (log, found)
        }
        (Err(_), Err(_)) => {
            assert!(unchanged(), "a refused log is not changed");
            return;
        }
        (opened, looked) => panic!("opened: {:?}, looked at: {:?}", opened.map(|o| o.1), looked),
    };
    // It goes on behind what was found.
    let all = |log: &Log, records: &[Record]| {
        let first = records.first().map_or(0, |r| r.index);
        assert_eq!(log.read(first..u64::MAX, u64::MAX).expect("it was read before"), records);
    };
    all(&log, &records);
    let after = records.last().map(|r| r.index).or(found.purged.as_ref().map(|(upto, _)| *upto));
    let index = after.map_or(7, |last| last + 1);
    if index == u64::MAX {
        return;
    }
    let record = Record { index, header: Bytes::from_static(b"next"), payload: Payload::from(vec![1, 2, 3]) };
    let (tell, done) = mpsc::channel();
    log.append(vec![record.clone()], Box::new(move |r| _ = tell.send(r)));
    done.recv().expect("an answer").expect("a good log goes on");
    records.push(record);
    all(&log, &records);
    drop(log);
    let mut again = Vec::new();
    let (_, found_again) =
        Log::open(shared, dir, options, &mut |r| again.push(r)).expect("a good log opens again");
    assert_eq!((again, found_again.purged, found_again.torn_bytes), (records, found.purged, 0));
}

const PATH: &str = "/file";
const SNAPSHOT: usize = 16;
const CHUNK: usize = 20;

/// A snapshot file. The first byte says whether to mend it.
pub fn snapshot_file(data: &[u8]) {
    let mut input = Input(data);
    let mends = input.byte() & 1 > 0;
    let mut bytes = input.rest().to_vec();
    if mends {
        mend_snapshot(&mut bytes);
    }
    let (disk, path) = (ForgetfulDisk::default(), Path::new(PATH));
    disk.put(path, bytes.clone());
    let Ok(reader) = SnapshotReader::open(&disk, path) else { return };
    let (chunks, sum) = (reader.chunks(), reader.bytes());
    let Ok(read): Result<Vec<Bytes>, StoreError> = reader.collect() else { return };
    assert_eq!((read.len() as u64, read.iter().map(|c| c.len() as u64).sum()), (chunks, sum));
    // There is one way to write it.
    let mut writer = SnapshotWriter::create(Arc::new(disk.clone()), Path::new("/again")).expect("in memory");
    read.into_iter().for_each(|c| writer.push(&c.into()).expect("in memory"));
    writer.finish().expect("in memory");
    assert_eq!(disk.contents(Path::new("/again")), Some(bytes));
}

fn mend_snapshot(bytes: &mut [u8]) {
    let len = bytes.len();
    if len < SNAPSHOT + CHUNK + 8 {
        return;
    }
    bytes[..8].copy_from_slice(b"PARAFTSS");
    bytes[8..12].copy_from_slice(&1u32.to_le_bytes());
    let crc = crc32fast::hash(&bytes[..12]);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    let (end, mut at, mut number, mut sum) = (len - CHUNK - 8, SNAPSHOT, 0u64, 0u64);
    while at + CHUNK <= end {
        let claimed = bytes[at + 4..].first_chunk().map_or(0, |b| u32::from_le_bytes(*b)) as usize;
        let length = claimed.min(end - at - CHUNK);
        chunk(&mut bytes[at..at + CHUNK + length], 1, number);
        at += CHUNK + length;
        number += 1;
        sum += length as u64;
    }
    bytes[end + CHUNK..].copy_from_slice(&sum.to_le_bytes());
    chunk(&mut bytes[end..], 2, number);
}

fn chunk(bytes: &mut [u8], kind: u32, number: u64) {
    let length = (bytes.len() - CHUNK) as u32;
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[4..8].copy_from_slice(&length.to_le_bytes());
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    let mut crc = crc32fast::Hasher::new();
    crc.update(&bytes[..16]);
    crc.update(&bytes[CHUNK..]);
    let crc = crc.finalize();
    bytes[16..20].copy_from_slice(&crc.to_le_bytes());
}

/// A small file. The first byte says whether to mend it.
pub fn small_file(data: &[u8]) {
    let mut input = Input(data);
    let mends = input.byte() & 1 > 0;
    let mut bytes = input.rest().to_vec();
    if mends && bytes.len() >= 20 {
        let length = (bytes.len() - 20) as u32;
        bytes[..8].copy_from_slice(b"PARAFTSM");
        bytes[12..16].copy_from_slice(&length.to_le_bytes());
        let crc = crc32fast::hash(&[&bytes[8..16], &bytes[20..]].concat());
        bytes[16..20].copy_from_slice(&crc.to_le_bytes());
    }
    let (disk, path) = (ForgetfulDisk::default(), Path::new(PATH));
    disk.put(path, bytes.clone());
    if let Ok(contents) = read_small(&disk, path) {
        write_small(&disk, path, &contents.expect("it is there")).expect("in memory");
        assert_eq!(disk.contents(path), Some(bytes), "there is one way to write it");
    }
}
