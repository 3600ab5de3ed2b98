//! Small files and snapshots: complete or refused.

use paraft_common::Payload;
use paraft_store::{
    Disk, PairContents, PairFile, RealDisk, SnapshotReader, SnapshotWriter, StoreError,
    faulty::{FaultyDisk, ForgetfulDisk, Survivors},
    read_pair, read_small, write_small,
};
use std::{path::Path, sync::Arc};

const VOTE: &str = "/server/vote";
const SNAPSHOT: &str = "/server/snapshot";

fn disk() -> ForgetfulDisk {
    let disk = ForgetfulDisk::default();
    disk.create_dir_all(Path::new("/server")).unwrap();
    disk
}

#[test]
fn small_file_is_old_or_new_after_any_crash() {
    for changes in 0..20 {
        let memory = disk();
        write_small(&memory, Path::new(VOTE), b"old").unwrap();
        let dying = FaultyDisk::new(Arc::new(memory.clone()));
        dying.dead_after(Some(changes));
        let written = write_small(&dying, Path::new(VOTE), b"the new one");
        assert_eq!(written.is_ok(), dying.changes() == 5 && changes >= 5, "{changes}: {written:?}");
        let coins = (0..20).map(Survivors::Some);
        for survivors in [Survivors::Synced, Survivors::Everything].into_iter().chain(coins) {
            let found = read_small(&memory.crash(survivors), Path::new(VOTE)).unwrap().unwrap();
            let old = written.is_err() && found == b"old";
            assert!(old || found == b"the new one", "{changes} changes, {survivors:?}: {found:?}");
        }
    }
}

#[test]
fn damaged_small_file_is_refused_and_missing_is_none() {
    let disk = disk();
    assert_eq!(read_small(&disk, Path::new(VOTE)).unwrap(), None);
    write_small(&disk, Path::new(VOTE), b"term 7").unwrap();
    let good = disk.contents(Path::new(VOTE)).unwrap();
    for at in 0..good.len() {
        let mut flipped = good.clone();
        flipped[at] ^= 0x40;
        for bytes in [flipped, good[..at].to_vec()] {
            disk.put(Path::new(VOTE), bytes);
            let refused = read_small(&disk, Path::new(VOTE)).unwrap_err();
            assert!(refused.to_string().contains(VOTE), "{refused}");
        }
    }
    assert!(write_small(&disk, Path::new(VOTE), &vec![0; (1 << 20) + 1]).is_err());
}

/// What the next process reads of a dead process's files persists, whatever fails then.
#[test]
fn what_was_read_once_is_durable() {
    for changes in 0..20 {
        let memory = disk();
        write_small(&memory, Path::new(VOTE), b"old").unwrap();
        let dying = FaultyDisk::new(Arc::new(memory.clone()));
        dying.dead_after(Some(changes));
        let _ = write_small(&dying, Path::new(VOTE), b"new");
        let vote = read_small(&memory, Path::new(VOTE)).unwrap();
        assert_eq!(read_small(&memory.crash(Survivors::Synced), Path::new(VOTE)).unwrap(), vote);

        let memory = disk();
        let dying = FaultyDisk::new(Arc::new(memory.clone()));
        dying.dead_after(Some(changes));
        let _ = snapshot(Arc::new(dying), Path::new(SNAPSHOT));
        let found = read(&memory).ok();
        assert_eq!(read(&memory.crash(Survivors::Synced)).ok(), found);
    }
}

fn chunks() -> Vec<Vec<u8>> {
    (0u8..5).map(|i| vec![i + 1; 40 * usize::from(i)]).collect()
}

fn snapshot(disk: Arc<dyn Disk>, path: &Path) -> std::io::Result<u64> {
    let mut writer = SnapshotWriter::create(disk, path)?;
    chunks().iter().try_for_each(|c| writer.push(&c.clone().into()))?;
    writer.finish()
}

fn read(disk: &dyn Disk) -> Result<Vec<Vec<u8>>, StoreError> {
    SnapshotReader::open(disk, Path::new(SNAPSHOT))?.map(|c| c.map(Into::into)).collect()
}

#[test]
fn a_snapshot_comes_back_chunk_by_chunk_on_the_real_disk() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    let size = snapshot(Arc::new(RealDisk), &path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), size);
    let reader = SnapshotReader::open(&RealDisk, &path).unwrap();
    assert_eq!((reader.chunks(), reader.bytes()), (5, 400));
    let found: Vec<Vec<u8>> = reader.map(|c| c.unwrap().into()).collect();
    assert_eq!(found, chunks());
    assert_eq!(RealDisk.list(dir.path()).unwrap(), ["snapshot"]);
}

#[test]
fn a_snapshot_cut_at_any_byte_is_refused_before_its_first_chunk() {
    let disk = disk();
    snapshot(Arc::new(disk.clone()), Path::new(SNAPSHOT)).unwrap();
    let good = disk.contents(Path::new(SNAPSHOT)).unwrap();
    for cut in 0..good.len() {
        disk.put(Path::new(SNAPSHOT), good[..cut].to_vec());
        let refused = SnapshotReader::open(&disk, Path::new(SNAPSHOT)).unwrap_err();
        assert!(matches!(&refused, StoreError::CutShort { .. }), "cut at {cut}: {refused}");
        assert!(refused.to_string().contains("cut short"));
    }
}

#[test]
fn a_snapshot_with_a_flipped_byte_ends_in_an_error() {
    let disk = disk();
    snapshot(Arc::new(disk.clone()), Path::new(SNAPSHOT)).unwrap();
    let good = disk.contents(Path::new(SNAPSHOT)).unwrap();
    for at in 0..good.len() {
        let mut flipped = good.clone();
        flipped[at] ^= 1;
        disk.put(Path::new(SNAPSHOT), flipped);
        assert!(read(&disk).is_err(), "byte {at}");
    }
    // Removes a whole chunk.
    let second = 16 + 20 + 20 + 40;
    disk.put(Path::new(SNAPSHOT), [&good[..16 + 20], &good[second..]].concat());
    assert!(matches!(read(&disk), Err(StoreError::Damaged { offset: 36, .. })));
}

#[test]
fn snapshot_is_old_or_new_after_any_crash() {
    let memory = disk();
    let mut writer = SnapshotWriter::create(Arc::new(memory.clone()), Path::new(SNAPSHOT)).unwrap();
    writer.push(&b"half".to_vec().into()).unwrap();
    assert!(writer.push(&vec![0; (16 << 20) + 1].into()).is_err());
    drop(writer);
    assert!(memory.list(Path::new("/server")).unwrap().is_empty());

    for changes in 0..20 {
        let memory = disk();
        let disk = FaultyDisk::new(Arc::new(memory.clone()));
        disk.dead_after(Some(changes));
        let written = snapshot(Arc::new(disk.clone()), Path::new(SNAPSHOT));
        for survivors in
            [Survivors::Synced, Survivors::Everything].into_iter().chain((0..20).map(Survivors::Some))
        {
            let after = memory.crash(survivors);
            match read(&after) {
                Ok(found) => assert_eq!(found, chunks()),
                Err(StoreError::Io { .. }) => assert!(written.is_err(), "{changes} changes, {survivors:?}"),
                Err(e) => panic!("{changes} changes, {survivors:?}: {e}"),
            }
        }
    }
}

#[test]
fn reserved_chunks_are_filled_in_any_order() {
    let (disk, path) = (Arc::new(disk()), Path::new(SNAPSHOT));
    let chunk = |i: u8, bytes: usize| Payload::from(vec![i; bytes]);
    let begin = || {
        let mut writer = SnapshotWriter::create(disk.clone(), path).unwrap();
        writer.push(&chunk(9, 5)).unwrap();
        assert_eq!(writer.reserve([10, 0, 30]).unwrap(), 1);
        writer
    };
    let mut writer = begin();
    writer.push(&chunk(8, 7)).unwrap();
    for (number, bytes) in [(3, 30), (1, 10), (2, 0)] {
        writer.fill(number, &chunk(number as u8, bytes)).unwrap();
    }
    assert!(writer.fill(1, &chunk(1, 10)).is_err(), "once each");
    writer.finish().unwrap();
    let read: Vec<_> = SnapshotReader::open(&*disk, path).unwrap().map(Result::unwrap).collect();
    let expected = [(9, 5), (1, 10), (2, 0), (3, 30), (8, 7)].map(|(i, bytes)| chunk(i, bytes).to_bytes());
    assert_eq!(read, expected);

    let mut writer = begin();
    assert!(writer.fill(1, &chunk(1, 11)).is_err(), "of the length that was reserved");
    writer.fill(1, &chunk(1, 10)).unwrap();
    let missing = writer.finish().unwrap_err().to_string();
    assert!(missing.contains("chunk 2 was reserved and not written"), "{missing}");
    assert_eq!(SnapshotReader::open(&*disk, path).unwrap().chunks(), 5, "the one before stays");
}

fn vote(disk: &dyn Disk) -> PairContents {
    read_pair(disk, Path::new(VOTE)).unwrap().unwrap()
}

#[test]
fn overwritten_file_has_what_was_acknowledged_after_any_crash() {
    // The first contents replace the file, the others overwrite it. They have two sectors: a crash may leave half of a
    // copy.
    let contents = [0, 1, 2, 3, 4].map(|i| vec![i; 800]);
    for changes in 0..30 {
        let memory = disk();
        write_small(&memory, Path::new(VOTE), &contents[0]).unwrap();
        assert_eq!(vote(&memory), PairContents { bytes: contents[0].clone(), agree: true });
        let dying = FaultyDisk::new(Arc::new(memory.clone()));
        dying.dead_after(Some(changes));
        let mut acknowledged = 0;
        if let Ok(mut file) = PairFile::create(&dying, Path::new(VOTE), &contents[1]) {
            acknowledged = 1 + contents[2..].iter().take_while(|c| file.write(c).is_ok()).count();
        }
        let after = |survivors| {
            let found = vote(&memory.crash(survivors)).bytes;
            let number = contents.iter().position(|c| *c == found).expect("never a mixture");
            assert!(number >= acknowledged, "{changes} changes, {survivors:?}: {number} of {acknowledged}");
            found
        };
        (0..20).map(Survivors::Some).for_each(|coins| _ = after(coins));
        // The next process may rely on what it finds, unless the copies differ.
        let found = vote(&memory);
        assert!(!found.agree || after(Survivors::Synced) == found.bytes, "{changes} changes");
    }
}

#[test]
fn copy_that_is_damaged_later_is_replaced_by_the_other() {
    let disk = disk();
    let mut file = PairFile::create(&disk, Path::new(VOTE), b"term 6").unwrap();
    file.write(b"term 7").unwrap();
    assert_eq!(vote(&disk), PairContents { bytes: b"term 7".to_vec(), agree: false });
    file.complete().unwrap();
    assert_eq!(vote(&disk), PairContents { bytes: b"term 7".to_vec(), agree: true });
    let good = disk.contents(Path::new(VOTE)).unwrap();
    let flip = |at: &[usize]| {
        let mut flipped = good.clone();
        at.iter().for_each(|at| flipped[*at] ^= 0x40);
        disk.put(Path::new(VOTE), flipped);
        read_pair(&disk, Path::new(VOTE))
    };
    for at in 0..34 {
        for copy in [0, 4096] {
            let found = flip(&[copy + at]).unwrap().unwrap();
            assert_eq!(found, PairContents { bytes: b"term 7".to_vec(), agree: false }, "{at} of {copy}");
        }
        let refused = flip(&[at, 4096 + at]).unwrap_err();
        assert!(refused.is_damage() && refused.to_string().contains(VOTE), "{at}: {refused}");
    }
    disk.put(Path::new(VOTE), good[..8191].to_vec());
    assert!(read_pair(&disk, Path::new(VOTE)).unwrap_err().is_damage(), "it is cut");
    assert!(PairFile::create(&disk, Path::new(VOTE), &[0; 4069]).is_err(), "too long");
}
