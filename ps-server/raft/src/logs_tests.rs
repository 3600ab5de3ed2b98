//! A replica's log moves between its own folder and the server's log, and is complete after a crash at any moment.

use super::*;
use crate::{
    disk::Folder,
    records::record_of,
    storage::FolderError,
    types::{self, Committed, LogId, Vote},
    wire,
};
use openraft::EntryPayload;
use paraft_changes::Change;
use paraft_store::faulty::{FaultyDisk, ForgetfulDisk, Survivors};
use paraft_store::files::DataFile;
use std::sync::mpsc;

type Entry = types::Entry;

/// A replica that has voted and holds 40 entries, in a folder of its own: as after a quarantine.
fn put_aside() -> ForgetfulDisk {
    let disk = ForgetfulDisk::default();
    let at = folder(&disk);
    at.write(DataFile::Vote, &wire::encode(&Vote::new_committed(1, 1)).expect("encodes")).expect("in memory");
    let (log, _) = at.open_log(&mut |_: Entry| ()).expect("a new one");
    let entry = |index| {
        let log_id = LogId::new(Committed::new(1), index);
        record_of(&Entry { log_id, payload: EntryPayload::Normal(Change::Check) }).expect("encodes")
    };
    let (tell, done) = mpsc::channel();
    log.append((0..40).map(entry).collect(), Box::new(move |r| _ = tell.send(r)));
    done.recv().expect("an answer").expect("in memory");
    at.write(DataFile::Begun, &[]).expect("in memory");
    drop(log);
    at.export_log().expect("copied");
    at.release_log().expect("left");
    at.logs().close();
    disk
}

fn folder(disk: &(impl Disk + Clone + 'static)) -> Folder {
    Folder::new(Arc::new(disk.clone()), "/data/shard-0")
}

/// Opens it as a starting replica does, and closes it on return.
fn open(disk: &(impl Disk + Clone + 'static)) -> Result<Vec<Entry>, FolderError> {
    let mut entries = Vec::new();
    folder(disk).open_log(&mut |e| entries.push(e))?;
    Ok(entries)
}

fn look(disk: &ForgetfulDisk) -> Vec<Entry> {
    let mut entries = Vec::new();
    folder(disk).inspect(&mut |e| entries.push(e)).expect("whole");
    entries
}

fn ids(entries: &[Entry]) -> Vec<(u64, Vec<u8>)> {
    let header = |e: &Entry| record_of(e).expect("encodes");
    entries
        .iter()
        .map(header)
        .map(|r| (r.index, [&r.header[..], &r.payload.to_bytes()[..]].concat()))
        .collect()
}

/// It is read in place, imported, and found in its new place, even if a crash ends any incarnation at any disk
/// operation.
#[test]
fn a_log_is_taken_in_whatever_moment_a_crash_comes_at() {
    let old = put_aside();
    let expected = ids(&look(&old));
    assert_eq!(expected.len(), 40);
    let healthy = FaultyDisk::new(Arc::new(old.crash(Survivors::Everything)));
    assert_eq!(ids(&open(&healthy).expect("taken in")), expected);
    let changes = healthy.changes();
    assert!((20..400).contains(&changes), "{changes}");
    for at in 0..changes {
        for survivors in [Survivors::Synced, Survivors::Everything, Survivors::Some(at), Survivors::Some(!at)]
        {
            let memory = old.crash(Survivors::Everything);
            let disk = FaultyDisk::new(Arc::new(memory.clone()));
            disk.dead_after(Some(at));
            let _ = open(&disk); // it dies, or ends without its marker
            let after = memory.crash(survivors);
            let context = format!("{at} changes, {survivors:?}");
            assert_eq!(ids(&look(&after)), expected, "{context}, looked at");
            let opened = open(&after).unwrap_or_else(|e| panic!("{context}: {e}"));
            assert_eq!(ids(&opened), expected, "{context}");
            assert_eq!(ids(&look(&after)), expected, "{context}, in its place");
            let left = after.list(Path::new("/data/shard-0/log"));
            assert_eq!(left.unwrap_or_default(), Vec::<String>::new(), "{context}");
            // No incomplete copy is left.
            let log = Logs::new(Arc::new(after.clone()), Path::new("/data")).get().expect("it is whole");
            assert_eq!(log.keys().len(), 1, "{context}");
        }
    }
}

/// A log is imported again from a quarantined folder, and an interrupted copy is not taken for it.
#[test]
fn a_log_is_taken_out_and_in_again() {
    let disk = put_aside();
    let expected = ids(&open(&disk).expect("taken in"));
    let at = folder(&disk);
    for _ in 0..2 {
        at.export_log().expect("copied");
        assert_eq!(ids(&look(&disk)), expected);
        let keys = || at.logs().get().expect("open").keys();
        assert_eq!(keys().len(), 1);
        at.release_log().expect("left");
        assert!(keys().is_empty());
        at.logs().close();
        assert_eq!(ids(&open(&disk).expect("taken in again")), expected);
    }
}
