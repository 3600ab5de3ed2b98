//! Replicas whose storage fails, and comes back; and such whose files are damaged.

use super::*;
use crate::{
    raft::{Change, ReplicaId},
    shard::{Command, Proposal},
};
use paraft_common::WorkerId;
use paraft_store::{RealDisk, faulty::FaultyDisk};
use std::time::Instant;

const S0: ShardId = ShardId(0);
/// "Input/output error", "Too many open files", "No space left on device", "Permission denied", "Read-only file system".
const PASSING: [i32; 5] = [5, 24, 28, 13, 30];

fn replicas(disk: &FaultyDisk, data: &std::path::Path) -> Arc<Replicas> {
    let options = ReplicasOptions {
        server: ServerId(0),
        data: data.into(),
        disk: Arc::new(disk.clone()),
        election: Duration::from_millis(50),
        parity: None,
    };
    Arc::new(Replicas::new(options, Arc::default()))
}

async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "gave up waiting for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The only replica of its group, which leads and has `joins` entries of workers.
async fn serving(replicas: &Replicas, joins: u32) -> ReplicaId {
    replicas.host(S0, 1, Durability::QuorumDisk, 7).await.expect("hosted");
    let replica = replicas.get(S0).expect("hosted");
    let me = replica.group.me();
    replica.group.found(&BTreeMap::from([(me, "nowhere:1".to_string())])).await.expect("founded");
    replica.group.leadership().wait_for(|l| l.leads).await.expect("it leads");
    for worker in 0..joins {
        push(replicas, worker).await.expect("committed");
    }
    me
}

async fn push(replicas: &Replicas, worker: u32) -> Result<(), String> {
    let replica = replicas.get(S0).ok_or("not here")?;
    let join = Proposal::from(Command::Join { worker: WorkerId(worker) });
    let done = replica.group.propose(Change::Shard(join)).await.map_err(|e| e.to_string())?;
    done.await.map(drop).map_err(|e| e.to_string())
}

/// The log index that is applied: the founding, the leader's first entry, and a join each.
fn applied(replicas: &Replicas) -> u64 {
    replicas.get(S0).map_or(0, |r| r.group.applied_index())
}

fn folders(data: &std::path::Path) -> Vec<String> {
    let all = std::fs::read_dir(data).expect("the data folder").flatten();
    let mut names: Vec<_> = all.filter_map(|f| f.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_passes_stops_a_replica_where_it_is_and_it_comes_back_by_itself() {
    for number in PASSING {
        let (dir, disk) = (tempfile::tempdir().expect("a folder"), FaultyDisk::new(Arc::new(RealDisk)));
        let replicas = replicas(&disk, dir.path());
        let me = serving(&replicas, 3).await;
        tokio::spawn(replicas.clone().supervise());
        disk.fail_changes(Some(number));
        push(&replicas, 3).await.expect_err("nothing can be written");
        let name = paraft_store::said(&std::io::Error::from_raw_os_error(number));
        let name = name.split(':').next().expect("a name").to_string();
        let stopped = until("it to stop", || replicas.stopped().pop()).await;
        assert_eq!((stopped.1.node, stopped.1.origin), (Some(me), Some(7)));
        assert!(stopped.1.why.contains(&name), "{name} is not in: {}", stopped.1.why);
        // Tried again meanwhile; nothing is renamed, nothing is hosted in its place.
        let refused = replicas.host(S0, 1, Durability::QuorumDisk, 7).await.expect_err("its place is taken");
        assert!(refused.contains("waits here"), "{refused}");
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(folders(dir.path()), ["shard-0"], "{number}");
        disk.fail_changes(None);
        until("it to serve again", || replicas.get(S0).filter(|r| r.group.leadership().borrow().leads)).await;
        assert_eq!(replicas.get(S0).expect("hosted").group.me(), me, "under its name");
        until("its state", || (applied(&replicas) >= 4).then_some(())).await;
        push(&replicas, 4).await.expect("it goes on");
        replicas.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_without_descriptors_puts_nothing_aside() {
    for number in PASSING {
        let (dir, disk) = (tempfile::tempdir().expect("a folder"), FaultyDisk::new(Arc::new(RealDisk)));
        let first = replicas(&disk, dir.path());
        let me = serving(&first, 3).await;
        first.shutdown().await;
        drop(first);
        disk.fail_reads(Some(number));
        let again = replicas(&disk, dir.path());
        again.reopen().await.expect("listed");
        assert_eq!(again.all().len(), 0);
        assert_eq!(again.stopped().len(), 1, "it waits");
        assert_eq!(folders(dir.path()), ["shard-0"]);
        disk.fail_reads(None);
        tokio::spawn(again.clone().supervise());
        until("it to be back", || again.get(S0)).await;
        assert_eq!(again.get(S0).expect("hosted").group.me(), me);
        until("its state", || (applied(&again) >= 4).then_some(())).await;
        again.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_is_put_aside_under_numbers_that_are_never_used_twice() {
    let (dir, disk) = (tempfile::tempdir().expect("a folder"), FaultyDisk::new(Arc::new(RealDisk)));
    for life in 1..=3 {
        let replicas = replicas(&disk, dir.path());
        serving(&replicas, life).await;
        replicas.shutdown().await;
        drop(replicas);
        std::fs::write(dir.path().join("shard-0/vote"), b"no vote").expect("damaged");
        let again = self::replicas(&disk, dir.path());
        until("the log to be free", || {
            let lock = paraft_store::Disk::lock(&RealDisk, &dir.path().join("shard-0/log/LOCK"));
            lock.ok()
        })
        .await;
        again.reopen().await.expect("listed");
        assert!(again.all().is_empty() && again.stopped().is_empty());
        let names: Vec<String> = (1..=life).map(|n| format!("shard-0.aside-{n}")).collect();
        assert_eq!(folders(dir.path()), names);
        let asides = until("them to be read", || again.asides()).await;
        assert!(asides.iter().all(|a| a.origin == Some(7) && a.last.is_err()), "{asides:?}");
        // Each still holds what it held.
        for name in &names {
            assert!(dir.path().join(name).join("log").is_dir());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_without_its_card_is_damage_and_not_a_folder_that_was_never_begun() {
    let (dir, disk) = (tempfile::tempdir().expect("a folder"), FaultyDisk::new(Arc::new(RealDisk)));
    let first = replicas(&disk, dir.path());
    serving(&first, 2).await;
    first.shutdown().await;
    drop(first);
    std::fs::remove_file(dir.path().join("shard-0/replica")).expect("removed");
    let again = replicas(&disk, dir.path());
    again.reopen().await.expect("listed");
    assert_eq!(folders(dir.path()), ["shard-0.aside-1"]);
    assert!(dir.path().join("shard-0.aside-1/log").is_dir(), "what it held is there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_lies_aside_is_restored_by_a_person_and_deleted_by_nobody_else() {
    let (dir, disk) = (tempfile::tempdir().expect("a folder"), FaultyDisk::new(Arc::new(RealDisk)));
    let real: Arc<dyn Disk> = Arc::new(RealDisk);
    let first = replicas(&disk, dir.path());
    let me = serving(&first, 3).await;
    // Another founding is to be hosted in its place: it goes aside, whole.
    first.host(S0, 1, Durability::QuorumDisk, 8).await.expect("hosted");
    let asides = until("it to be read", || first.asides().filter(|a| !a.is_empty())).await;
    assert_eq!(
        (asides[0].name.as_str(), asides[0].origin, asides[0].node),
        ("shard-0.aside-1", Some(7), Some(me))
    );
    assert!(asides[0].last.as_ref().is_ok_and(|last| *last >= 3), "{asides:?}");
    first.shutdown().await;
    drop(first);
    until("the log to be free", || Disk::lock(&RealDisk, &dir.path().join("shard-0/log/LOCK")).ok()).await;
    aside::restore(&real, dir.path(), "shard-0.aside-1").expect("restored");
    assert_eq!(folders(dir.path()), ["shard-0", "shard-0.aside-2"], "the other one went aside for it");
    let again = replicas(&disk, dir.path());
    again.reopen().await.expect("listed");
    assert_eq!(again.get(S0).expect("hosted").group.me(), me);
    until("its state", || (applied(&again) >= 4).then_some(())).await;
    again.shutdown().await;
    for bad in ["shard-0", "identity", "../shard-0.aside-2", "shard-0.aside-9"] {
        aside::delete(dir.path(), bad).expect_err(bad);
    }
    aside::delete(dir.path(), "shard-0.aside-2").expect("a person's word");
    assert_eq!(folders(dir.path()), ["shard-0"]);
}
