//! Log segments, snapshot files, small files.

use crate::{
    input::Input,
    log_files::{bound, mend},
};
use bytes::Bytes;
use paraft_common::Payload;
use paraft_store::{
    Disk, Log, LogOptions, Record, SharedLog, SnapshotReader, SnapshotWriter, StoreError,
    faulty::ForgetfulDisk, read_small, write_small,
};
use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
};

const DIR: &str = "/log";
/// Groups whose records may be there.
const KEYS: [u64; 2] = [0, 1];

/// A folder of up to three segments, with or without a purge point and a mark that one of them is being cut. Bits: mend
/// the segments, -, being cut.
pub fn log(data: &[u8]) {
    let mut input = Input(data);
    let how = input.byte();
    let disk = ForgetfulDisk::default();
    let dir = Path::new(DIR);
    disk.create_dir_all(dir).expect("in memory");
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
    let looked = KEYS.map(|key| look(&disk, dir, key));
    let unchanged = || files.iter().all(|(path, bytes)| disk.contents(path).as_ref() == Some(bytes));
    assert!(unchanged(), "looking changes nothing");
    opened(&disk, looked);
}

/// A group's records, and up to where it is purged.
type Found = (Vec<Record>, Option<(u64, Bytes)>);

fn look(disk: &ForgetfulDisk, dir: &Path, key: u64) -> Result<Found, StoreError> {
    let mut records = Vec::new();
    let found = Log::inspect(disk, dir, key, &mut |r| records.push(r))?;
    Ok((records, found.purged))
}

fn group(log: &SharedLog, key: u64) -> Result<(Log, Found), StoreError> {
    let mut records = Vec::new();
    let (log, found) = log.group(key, &mut |r| records.push(r))?;
    let first = records.first().map_or(0, |r| r.index);
    assert_eq!(log.read(first..u64::MAX, u64::MAX).expect("it was read before"), records);
    Ok((log, (records, found.purged)))
}

fn shared(disk: &ForgetfulDisk, dir: &Path) -> Result<SharedLog, StoreError> {
    // No segment is written in full: the disk is memory.
    let options = LogOptions { segment_bytes: 4096, sync: true };
    SharedLog::open(Arc::new(disk.clone()), dir, options).map(|(log, _)| log)
}

/// Each group is found as it was when it was looked at, goes on behind that, and comes back so.
fn opened(disk: &ForgetfulDisk, looked: [Result<Found, StoreError>; 2]) {
    let dir = Path::new(DIR);
    let log = match shared(disk, dir) {
        Ok(log) => log,
        Err(e) => {
            assert!(looked.iter().all(Result::is_err), "{e}, but looked at: {looked:?}");
            return;
        }
    };
    let mut expected = Vec::new();
    for (key, looked) in KEYS.into_iter().zip(looked) {
        let (group, mut found) = match (group(&log, key), looked) {
            (Ok((group, found)), Ok(looked)) => {
                assert_eq!(found, looked);
                (group, found)
            }
            (Err(_), Err(_)) => {
                expected.push(None);
                continue;
            }
            (opened, looked) => panic!("opened: {:?}, looked at: {looked:?}", opened.map(|o| o.1)),
        };
        let after = found.0.last().map(|r| r.index).or(found.1.as_ref().map(|(upto, _)| *upto));
        let index = after.map_or(7, |last| last + 1);
        if index < u64::MAX {
            let record =
                Record { index, header: Bytes::from_static(b"next"), payload: Payload::from(vec![1, 2, 3]) };
            let (tell, done) = mpsc::channel();
            group.append(vec![record.clone()], Box::new(move |r| _ = tell.send(r)));
            // An emptied log whose last record it was may go on elsewhere.
            match done.recv().expect("an answer") {
                Ok(()) => found.0.push(record),
                Err(e) => assert_eq!(e.kind(), ErrorKind::InvalidInput, "a good log goes on: {e}"),
            }
        }
        expected.push(Some(found));
    }
    drop(log);
    let log = shared(disk, dir).expect("it opens again");
    for (key, expected) in KEYS.into_iter().zip(expected) {
        assert_eq!(group(&log, key).ok().map(|g| g.1), expected, "group {key}");
    }
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
