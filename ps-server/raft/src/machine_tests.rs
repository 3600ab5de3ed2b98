//! Memory of a snapshot and its readers while the state changes.

use super::{super::disk::Folder, *};
use crate::{
    Replicated,
    testing::{Parts, write},
    types::{Committed, Entry},
};
use bytes::Bytes;
use paraft_common::Payload;
use paraft_store::RealDisk;
use parking_lot::Mutex;

const PARTS: usize = 8;
/// Bytes of a part.
const LEN: usize = 64;

fn entry(index: u64, part: u32) -> (Entry, Option<Responder>) {
    let log_id = LogId::new(Committed::new(1), index);
    (Entry { log_id, payload: EntryPayload::Normal(write(part, vec![index as u8; LEN])) }, None)
}

async fn machine(state: Arc<Parts>) -> Machine {
    let open = Machine::open(state, ReplicaLog::default(), None, Arc::default(), Checks::default()).await;
    Machine { outdated_bytes: LEN as u64, ..open.expect("nothing to read") }
}

async fn apply(machine: &mut Machine, entries: Vec<(Entry, Option<Responder>)>) {
    let entries = futures::stream::iter(entries.into_iter().map(Ok));
    machine.apply(entries).await.expect("applied");
}

/// The limit allows one copied part; this is the second.
#[tokio::test(start_paused = true)]
async fn updates_wait_for_readers_that_make_progress() {
    let state = Parts::of(PARTS, LEN);
    let mut machine = machine(state.clone()).await;
    let image = state.image();
    apply(&mut machine, vec![entry(1, 0)]).await;
    apply(&mut machine, vec![entry(2, 1)]).await;
    assert_eq!(state.outdated(0).bytes, 2 * LEN as u64, "two parts are there twice");
    let began = Instant::now();
    let reader = tokio::spawn(async move {
        for part in image.parts {
            tokio::time::sleep(READERS_TIMEOUT / 2).await;
            drop(part);
        }
    });
    apply(&mut machine, vec![entry(3, 2)]).await;
    // The test alone advances this clock.
    let waited = began.elapsed();
    assert!(
        waited >= READERS_TIMEOUT / 2 && waited < READERS_TIMEOUT,
        "until the first was let go: {waited:?}"
    );
    assert_eq!(state.writes(), 3);
    reader.await.expect("it ends");
    let began = Instant::now();
    apply(&mut machine, vec![entry(4, 3), entry(5, 4)]).await;
    assert_eq!((began.elapsed(), state.outdated(0).bytes), (Duration::ZERO, 0), "nobody reads any more");
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_hangs_is_waited_for_once_and_not_for_ever() {
    let state = Parts::of(PARTS, LEN);
    let mut machine = machine(state.clone()).await;
    let image = state.image();
    let began = Instant::now();
    for part in 0..5 {
        apply(&mut machine, vec![entry(1 + u64::from(part), part)]).await;
    }
    let waited = began.elapsed();
    assert!(waited >= READERS_TIMEOUT && waited < 2 * READERS_TIMEOUT, "{waited:?}");
    assert_eq!(state.writes(), 5);
    drop(image);
    // The next reader is waited for again.
    apply(&mut machine, vec![entry(6, 0)]).await;
    let _image = state.image();
    let began = Instant::now();
    for part in 1..5 {
        apply(&mut machine, vec![entry(6 + u64::from(part), part)]).await;
    }
    assert!(began.elapsed() >= READERS_TIMEOUT);
}

/// Counts itself while it lives.
struct Part(Arc<Mutex<Vec<usize>>>, usize, Vec<u8>);

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.2
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.0.lock().push(self.1);
    }
}

/// Parts of an image, and the indices of the released ones, in order of release.
fn counted(image: &RawImage) -> (Vec<crate::ImagePart>, Arc<Mutex<Vec<usize>>>) {
    let gone = Arc::<Mutex<Vec<usize>>>::default();
    let bytes = |p: &crate::ImagePart| p.read().to_bytes().to_vec();
    let part = |(i, p): (usize, &crate::ImagePart)| {
        Payload::from(Bytes::from_owner(Part(gone.clone(), i, bytes(p)))).into()
    };
    (image.parts.iter().enumerate().map(part).collect(), gone)
}

/// A second copy of the state would not fit: it has twelve bytes for each of 10^9 values.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn state_is_never_in_memory_twice_during_snapshot_io() {
    let (state, dir) = (Parts::of(PARTS, LEN), tempfile::tempdir().expect("a folder"));
    let file = Arc::new(Folder::new(Arc::new(RealDisk), dir.path().join("shard-0")).snapshot());
    // In the middle of a step: the last three parts are written, so the fifth is next.
    let mut machine = machine(state.clone()).await;
    apply(&mut machine, vec![entry(1, 7), entry(2, 6), entry(3, 5)]).await;
    let (image, order) = (state.image(), state.order());
    assert_eq!(order, [4, 3, 2, 1, 0, 7, 6, 5]);
    let (parts, gone) = counted(&image);
    let last = Some(LogId::new(Committed::new(3), 40));
    let meta = SnapshotMeta { last_log_id: last, ..SnapshotMeta::default() };
    file.write(meta.clone(), image.head.clone(), parts, order).await.expect("written");
    assert_eq!(*gone.lock(), [4, 3, 2, 1, 0, 7, 6, 5], "each as it is written, first what changes next");

    let back = Parts::default();
    let (parts, gone) = counted(&image);
    let mut taken = 0;
    let mut parts = parts.into_iter().map(|p| {
        assert_eq!(gone.lock().len(), taken, "the part before is still held");
        taken += 1;
        Ok(p.read())
    });
    back.install_parts(&image.head, &mut parts).expect("its own image");
    assert_eq!(back.image(), image);

    // And from the file, as a starting replica reads it.
    let back = Arc::new(Parts::default());
    let log = ReplicaLog::default();
    let mut machine = Machine::open(back.clone(), log, Some(file), Arc::default(), Checks::default())
        .await
        .expect("a whole snapshot");
    assert_eq!(back.image(), image);
    assert_eq!(machine.applied_state().await.expect("known").0, last);
    assert_eq!(machine.state_bytes().load(Relaxed), image.bytes());
    let current = machine.get_current_snapshot().await.expect("known").expect("there is one");
    assert_eq!(current.meta.last_log_id, last, "openraft has nothing to install");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_with_damaged_part_is_refused_naming_its_file() {
    let (state, dir) = (Parts::of(PARTS, LEN), tempfile::tempdir().expect("a folder"));
    let path = dir.path().join("shard-0");
    let file = Arc::new(Folder::new(Arc::new(RealDisk), &path).snapshot());
    let image = state.image();
    file.write(SnapshotMeta::default(), image.head, image.parts, Vec::new()).await.expect("written");
    let mut bytes = std::fs::read(path.join("snapshot")).expect("there");
    let last = bytes.len() - 60;
    bytes[last] ^= 1;
    std::fs::write(path.join("snapshot"), bytes).expect("damaged");
    let back = Parts::default();
    let refused = file.restore(&back).expect_err("damaged");
    assert!(
        refused.to_string().contains("shard-0/snapshot") && refused.to_string().contains("checksum"),
        "{refused}"
    );
    assert!(back.writes() == 0, "nothing has changed");
}

#[test]
fn log_on_disk_is_cut_when_a_snapshot_adds_little() {
    const MIB: u64 = 1 << 20;
    for (state, log) in [(0, 32), (1, 32), (16, 128), (100, 256), (256, 256), (3000, 3000)] {
        assert_eq!(enough_bytes(state * MIB, true, false), log * MIB, "a state of {state} MiB");
    }
    assert_eq!(enough_bytes(16 * MIB, false, false), 32 * MIB, "in memory it costs memory");
}
