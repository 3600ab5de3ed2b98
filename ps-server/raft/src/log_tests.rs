//! Tests of the entries that a log keeps in memory, and of those that it reads back from disk.

use super::*;
use crate::{testing::write, types::Committed};
use openraft::EntryPayload;
use paraft_common::Payload;
use paraft_store::RealDisk;

const MIB: usize = 1 << 20;

fn id(index: u64) -> LogId {
    LogId::new(Committed::new(1), index)
}

fn entry(index: u64, payload: Payload) -> Entry {
    Entry { log_id: id(index), payload: EntryPayload::Normal(write(0, payload)) }
}

/// A payload that identifies its index.
fn of(index: u64, bytes: usize) -> Payload {
    let mut payload = vec![index as u8; bytes];
    payload[..8].copy_from_slice(&index.to_le_bytes());
    payload.into()
}

fn indices(entries: &[Entry]) -> Vec<u64> {
    for e in entries {
        let EntryPayload::Normal(change) = &e.payload else { panic!("a proposal") };
        let payload = change.payload().to_bytes();
        assert_eq!(payload[..8], e.log_id.index.to_le_bytes(), "the payload of another entry");
        assert!(payload[8..].iter().all(|b| *b == e.log_id.index as u8));
    }
    entries.iter().map(|e| e.log_id.index).collect()
}

async fn append(log: &ReplicaLog, entries: Vec<Entry>) {
    let Some(disk) = &log.disk else { panic!("a log on disk") };
    let (done, durable) = tokio::sync::oneshot::channel();
    let (inner, last) = (log.inner.clone(), entries.last().map_or(0, |e| e.log_id.index));
    {
        let mut inner = log.inner.lock();
        entries.iter().for_each(|e| inner.insert(e.clone()));
    }
    let note = move |outcome: io::Result<()>| {
        evict(&inner, |inner| inner.durable = last + 1);
        let _ = done.send(outcome);
    };
    disk.append(&entries, note).expect("taken");
    durable.await.expect("told").expect("written");
}

struct OnDisk {
    _dir: tempfile::TempDir,
    folder: Folder,
    log: ReplicaLog,
}

impl OnDisk {
    /// A log with entries of 1 MiB each.
    async fn with(entries: Range<u64>) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = Folder::new(Arc::new(RealDisk), dir.path().join("shard-0"));
        folder
            .write(
                paraft_store::files::DataFile::Vote,
                &super::super::wire::encode(&Vote::new(1, 1)).expect("a vote"),
            )
            .expect("written");
        let log = ReplicaLog::open(&folder).expect("a new log");
        for index in entries {
            append(&log, vec![entry(index, of(index, MIB))]).await;
        }
        Self { _dir: dir, folder, log }
    }
}

/// openraft bounds an append by entries: sixteen of 16 MiB in one call cost leaders their lease.
#[tokio::test]
async fn an_append_is_a_megabyte_or_one_entry() {
    let mut log = ReplicaLog::default();
    let sizes = [400 << 10, 400 << 10, 400 << 10, 3 << 20, 10, 10];
    for (index, size) in (0u64..).zip(sizes) {
        log.inner.lock().insert(entry(index, vec![0; size].into()));
    }
    let mut batches = Vec::new();
    let mut next = 0;
    while next < sizes.len() as u64 {
        let batch = log.limited_get_log_entries(next, sizes.len() as u64).await.expect("in memory");
        assert!(batch.first().is_some_and(|e| e.log_id.index == next), "there is progress");
        batches.push(batch.len());
        next += batch.len() as u64;
    }
    assert_eq!(batches, [2, 1, 1, 2]);
}

/// A log as long as the state would take as much memory as the state.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_that_are_on_disk_and_applied_do_not_stay_in_memory() {
    let OnDisk { _dir, log, .. } = OnDisk::with(1..151).await;
    assert_eq!(log.size().in_memory / MIB as u64, 150, "nothing is applied yet");
    log.applied(60);
    assert_eq!(log.size().in_memory / MIB as u64, 90, "what is not applied stays");
    log.applied(150);
    let LogSize { entries, bytes, in_memory } = log.size();
    assert_eq!((entries, bytes / MIB as u64), (150, 150));
    assert!(in_memory <= RECENT_BYTES as u64 && in_memory > RECENT_BYTES as u64 / 2, "{in_memory}");
    log.keep_recent(1 << 10);
    log.applied(150);
    assert!(log.size().in_memory <= FEW_RECENT_BYTES as u64, "as for a small state");
}

/// Slow applying (during a snapshot) must not fill the memory either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_what_is_not_applied_a_bounded_part_is_in_memory() {
    let OnDisk { _dir, log, .. } = OnDisk::with(1..301).await;
    let in_memory = log.size().in_memory;
    assert!(in_memory <= UNAPPLIED_BYTES as u64 && in_memory > UNAPPLIED_BYTES as u64 / 2, "{in_memory}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_behind_is_given_the_same_entries_from_the_disk() {
    let OnDisk { _dir, mut log, .. } = OnDisk::with(1..101).await;
    log.applied(100);
    assert!(
        log.inner.lock().entries.first_key_value().is_some_and(|(first, _)| *first > 30),
        "the rest is on disk"
    );
    // As replication reads: a megabyte or one entry at a time.
    let mut next = 1;
    while next < 101 {
        let part = log.limited_get_log_entries(next, 101).await.expect("it is there");
        assert_eq!(indices(&part), [next]);
        next += 1;
    }
    // As applying reads.
    let all: Vec<Entry> = log.entries_stream(1..101).await.try_collect().await.expect("they are there");
    assert_eq!(indices(&all), (1..101).collect::<Vec<_>>());
    // Across the boundary, and all at once.
    assert_eq!(
        indices(&log.try_get_log_entries(30..=45).await.expect("there")),
        (30..46).collect::<Vec<_>>()
    );
    assert_eq!(indices(&log.try_get_log_entries(1..).await.expect("there")), (1..101).collect::<Vec<_>>());
    log.purge(id(20)).await.expect("purged");
    assert_eq!(indices(&log.try_get_log_entries(10..24).await.expect("there")), [21, 22, 23]);
    assert!(log.limited_get_log_entries(15, 18).await.expect("gone").is_empty());
    let lacks = log.entries_stream(19..24).await.try_collect::<Vec<_>>().await;
    assert_eq!(indices(&lacks.expect("what is left")), [21, 22, 23]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_is_opened_again_has_only_its_end_in_memory() {
    let OnDisk { _dir, folder, log } = OnDisk::with(1..121).await;
    drop(log); // dropping it ends its writer
    let mut log = ReplicaLog::open(&folder).expect("it is whole");
    let LogSize { entries, bytes, in_memory } = log.size();
    assert_eq!((entries, bytes / MIB as u64), (120, 120));
    assert!(in_memory <= RECENT_BYTES as u64, "{in_memory}");
    let state = log.get_log_state().await.expect("known");
    assert_eq!((state.last_log_id, state.last_purged_log_id), (Some(id(120)), None));
    assert_eq!(indices(&log.try_get_log_entries(1..121).await.expect("there")), (1..121).collect::<Vec<_>>());

    // Uncommitted entries are truncated; their successors replace them and are read back.
    log.truncate_after(Some(id(90))).await.expect("cut");
    assert_eq!(log.get_log_state().await.expect("known").last_log_id, Some(id(90)));
    append(&log, vec![entry(91, of(91, 100))]).await;
    log.purge(id(90)).await.expect("purged");
    assert_eq!(indices(&log.try_get_log_entries(0..200).await.expect("there")), [91]);
    log.purge(id(91)).await.expect("purged");
    let state = log.get_log_state().await.expect("known");
    assert_eq!((state.last_log_id, state.last_purged_log_id), (Some(id(91)), Some(id(91))));
    assert_eq!(log.size(), LogSize::default());
}

/// Readers and the writer at once: an entry that is evicted during a read is on disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn nothing_is_missing_while_entries_leave_the_memory() {
    let OnDisk { _dir, log, .. } = OnDisk::with(1..2).await;
    let mut reader = log.clone();
    let reads = tokio::spawn(async move {
        let mut next = 1;
        while next < 181 {
            let some = reader.entries_stream(next..181).await.try_collect::<Vec<_>>().await.expect("no hole");
            let found = indices(&some);
            assert_eq!(found, (next..next + found.len() as u64).collect::<Vec<_>>());
            next += found.len() as u64;
            tokio::task::yield_now().await;
        }
    });
    for index in 2..181 {
        append(&log, vec![entry(index, of(index, MIB))]).await;
        log.applied(index);
    }
    reads.await.expect("it has read all");
}
