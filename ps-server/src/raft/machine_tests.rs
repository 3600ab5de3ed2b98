//! How much memory a snapshot and its readers take while the state changes.

use super::{super::disk::Folder, *};
use crate::raft::types::Entry;
use crate::shard::{Command, Contribution, InitPart, Proposal, Shard};
use bytes::Bytes;
use openraft::type_config::alias::CommittedLeaderIdOf;
use paraft_common::{
    BucketId, Encoding, Mode, Payload, Seq, SessionId, ShardId, Step, Version, WorkerId, config::ServerJob,
};
use paraft_store::RealDisk;
use parking_lot::Mutex;

const BUCKETS: u32 = 8;
const LEN: usize = 16;

/// A shard of eight buckets with weights, and a member.
fn shard() -> Arc<Shard> {
    let job = ServerJob::new("memory", Mode::Asp, BUCKETS as usize * LEN, LEN);
    let job = ServerJob { grace_ms: 0, ..job }.to_toml().expect("a job");
    let shard = Arc::new(Shard::new(ShardId(0), 1));
    shard.apply(&Command::Configure { job }.into());
    for bucket in (0..BUCKETS).map(BucketId) {
        let payload = vec![0; LEN * 4].into();
        shard.apply(&Proposal { command: Command::Init { bucket, part: InitPart::FRESH }, payload });
    }
    shard.apply(&Command::Join { worker: WorkerId(0) }.into());
    shard
}

fn entry(index: u64, bucket: u32, step: u64) -> (Entry, Option<Responder>) {
    let (worker, session, seq) = (WorkerId(0), SessionId(1), Seq(index));
    let contributions =
        vec![Contribution { worker, session, seq, step: Step(step), pulled: Version(0), samples: 1 }];
    let (bucket, encoding) = (BucketId(bucket), Encoding::F32);
    let command = Command::Update { bucket, contributions, encoding, factor: 1.0, closes: false };
    let change = Change::Shard(Proposal { command, payload: 1f32.to_le_bytes().repeat(LEN).into() });
    let log_id = LogId::new(CommittedLeaderIdOf::<Types>::new(1), index);
    (Entry { log_id, payload: EntryPayload::Normal(change) }, None)
}

async fn machine(state: Arc<Shard>) -> Machine {
    let open = Machine::open(state, ReplicaLog::default(), None, Arc::default(), Checks::default()).await;
    Machine { outdated_bytes: (LEN * 4) as u64, ..open.expect("nothing to read") }
}

async fn apply(machine: &mut Machine, entries: Vec<(Entry, Option<Responder>)>) {
    let entries = futures::stream::iter(entries.into_iter().map(Ok));
    machine.apply(entries).await.expect("applied");
}

/// One bucket may be copied here, and this is the second.
#[tokio::test(start_paused = true)]
async fn updates_wait_while_a_reader_that_gets_on_holds_what_they_have_replaced() {
    let state = shard();
    let mut machine = machine(state.clone()).await;
    let image = Replicated::image(&*state);
    apply(&mut machine, vec![entry(1, 0, 1)]).await;
    apply(&mut machine, vec![entry(2, 1, 1)]).await;
    assert_eq!(state.outdated(0).bytes, 2 * (LEN * 4) as u64, "two buckets are there twice");
    let began = Instant::now();
    let reader = tokio::spawn(async move {
        for part in image.parts {
            tokio::time::sleep(READERS_PATIENCE / 2).await;
            drop(part);
        }
    });
    apply(&mut machine, vec![entry(3, 2, 1)]).await;
    // Of a clock that only the test moves.
    let waited = began.elapsed();
    assert!(
        waited >= READERS_PATIENCE / 2 && waited < READERS_PATIENCE,
        "until the first was let go: {waited:?}"
    );
    assert_eq!(state.version(), 3);
    reader.await.expect("it ends");
    let began = Instant::now();
    apply(&mut machine, vec![entry(4, 3, 1), entry(5, 4, 1)]).await;
    assert_eq!((began.elapsed(), state.outdated(0).bytes), (Duration::ZERO, 0), "nobody reads any more");
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_hangs_is_waited_for_once_and_not_for_ever() {
    let state = shard();
    let mut machine = machine(state.clone()).await;
    let image = Replicated::image(&*state);
    let began = Instant::now();
    for bucket in 0..5 {
        apply(&mut machine, vec![entry(1 + u64::from(bucket), bucket, 1)]).await;
    }
    let waited = began.elapsed();
    assert!(waited >= READERS_PATIENCE && waited < 2 * READERS_PATIENCE, "{waited:?}");
    assert_eq!(state.version(), 5);
    drop(image);
    // The next is waited for again.
    apply(&mut machine, vec![entry(6, 0, 2)]).await;
    let _image = Replicated::image(&*state);
    let began = Instant::now();
    for bucket in 1..5 {
        apply(&mut machine, vec![entry(6 + u64::from(bucket), bucket, 2)]).await;
    }
    assert!(began.elapsed() >= READERS_PATIENCE);
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

/// Parts of an image, and the places of those that were let go, in the order in which they were.
fn counted(image: &RawImage) -> (Vec<Payload>, Arc<Mutex<Vec<usize>>>) {
    let gone = Arc::<Mutex<Vec<usize>>>::default();
    let part =
        |(i, p): (usize, &Payload)| Bytes::from_owner(Part(gone.clone(), i, p.to_bytes().to_vec())).into();
    (image.parts.iter().enumerate().map(part).collect(), gone)
}

/// With twelve bytes for each of a thousand million values, a second copy would not fit anywhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_state_is_never_in_memory_twice_on_its_way_to_and_from_the_disk() {
    let (state, dir) = (shard(), tempfile::tempdir().expect("a folder"));
    let file = Arc::new(Folder::new(Arc::new(RealDisk), dir.path().join("shard-0")).snapshot());
    // In the middle of a step: the last three buckets are done, so the fifth changes next.
    let mut machine = machine(state.clone()).await;
    apply(&mut machine, vec![entry(1, 7, 1), entry(2, 6, 1), entry(3, 5, 1)]).await;
    let (image, order) = (Replicated::image(&*state), state.order());
    assert_eq!(order, [4, 3, 2, 1, 0, 7, 6, 5]);
    let (parts, gone) = counted(&image);
    let last = Some(LogId::new(CommittedLeaderIdOf::<Types>::new(3), 40));
    let meta = SnapshotMeta { last_log_id: last, ..SnapshotMeta::default() };
    file.write(meta.clone(), image.head.clone(), parts, order).await.expect("written");
    assert_eq!(*gone.lock(), [4, 3, 2, 1, 0, 7, 6, 5], "each as it is written, first what changes next");

    let back = Shard::new(ShardId(0), 1);
    let (parts, gone) = counted(&image);
    let mut taken = 0;
    let mut parts = parts.into_iter().map(|p| {
        assert_eq!(gone.lock().len(), taken, "the part before is still held");
        taken += 1;
        Ok(p)
    });
    back.install_parts(&image.head, &mut parts).expect("its own image");
    assert_eq!(Replicated::image(&back), image);

    // And from the file, as a replica that starts reads it.
    let back = Arc::new(Shard::new(ShardId(0), 1));
    let log = ReplicaLog::default();
    let mut machine = Machine::open(back.clone(), log, Some(file), Arc::default(), Checks::default())
        .await
        .expect("a whole snapshot");
    assert_eq!(Replicated::image(&*back), image);
    assert_eq!(machine.applied_state().await.expect("known").0, last);
    assert_eq!(machine.state_bytes().load(Relaxed), image.bytes());
    let current = machine.get_current_snapshot().await.expect("known").expect("there is one");
    assert_eq!(current.meta.last_log_id, last, "openraft has nothing to install");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_with_a_damaged_part_is_not_installed_and_its_file_is_named() {
    let (state, dir) = (shard(), tempfile::tempdir().expect("a folder"));
    let path = dir.path().join("shard-0");
    let file = Arc::new(Folder::new(Arc::new(RealDisk), &path).snapshot());
    let image = Replicated::image(&*state);
    file.write(SnapshotMeta::default(), image.head, image.parts, Vec::new()).await.expect("written");
    let mut bytes = std::fs::read(path.join("snapshot")).expect("there");
    let last = bytes.len() - 60;
    bytes[last] ^= 1;
    std::fs::write(path.join("snapshot"), bytes).expect("damaged");
    let back = Shard::new(ShardId(0), 1);
    let refused = file.restore(&back).expect_err("damaged");
    assert!(
        refused.to_string().contains("shard-0/snapshot") && refused.to_string().contains("checksum"),
        "{refused}"
    );
    assert!(back.configured().is_none(), "nothing has changed");
}
