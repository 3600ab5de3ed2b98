//! Replicas whose storage fails and recovers, and replicas with damaged files.

use super::*;
use crate::{
    raft::{Peers, ReplicaId},
    replicated::Change,
    shard::{Command, Proposal, begin::JOB_FORM},
};
use paraft_common::{Mode, SessionId, WorkerId, config::ServerJob};
use paraft_host::memory::{Memory, Pool};
use paraft_store::{Disk, RealDisk, faulty::FaultyDisk};
use std::time::Instant;

const S0: JobShard = JobShard::from_number(0);
/// "Input/output error", "Too many open files", "No space left on device", "Permission denied", "Read-only file system".
const TEMPORARY_ERRORS: [i32; 5] = [5, 24, 28, 13, 30];

fn replicas(disk: &FaultyDisk, data: &std::path::Path) -> Arc<Replicas> {
    replicas_within(Room::of_host(), disk, data)
}

fn replicas_within(room: Arc<Room>, disk: &FaultyDisk, data: &std::path::Path) -> Arc<Replicas> {
    let options = ReplicasOptions {
        server: ServerId(0),
        data: data.into(),
        logs: Logs::new(Arc::new(disk.clone()), data),
        election: Duration::from_millis(50),
        check_every: None,
    };
    Arc::new(Replicas::new(options, Arc::new(Peers::new(paraft_tls::Access::Insecure))).within(room))
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
    let join =
        Proposal::from(Command::Join { worker: WorkerId(worker), session: SessionId(u64::from(worker) + 1) });
    let done = replica.group.propose(Change::Shard(join)).await.map_err(|e| e.to_string())?;
    done.await.map(drop).map_err(|e| e.to_string())
}

/// The applied log index: the founding, the leader's first entry, and one for each join.
fn applied(replicas: &Replicas) -> u64 {
    replicas.get(S0).map_or(0, |r| r.group.applied_index())
}

fn folders(data: &std::path::Path) -> Vec<String> {
    let all = std::fs::read_dir(data).expect("the data folder").flatten();
    let names = all.filter_map(|f| f.file_name().into_string().ok());
    let mut names: Vec<_> = names.filter(|n| n.starts_with("shard-")).collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn temporary_error_stops_replica_until_it_recovers_alone() {
    for number in TEMPORARY_ERRORS {
        let (dir, disk) = (tempfile::tempdir().expect("a folder"), FaultyDisk::new(Arc::new(RealDisk)));
        let replicas = replicas(&disk, dir.path());
        let me = serving(&replicas, 3).await;
        tokio::spawn(replicas.clone().supervise());
        disk.fail_changes(Some(number));
        push(&replicas, 3).await.expect_err("nothing can be written");
        let name = paraft_store::said(&std::io::Error::from_raw_os_error(number));
        let name = name.split(':').next().expect("a name").to_string();
        let stopped = until("it to stop", || replicas.stopped().pop()).await;
        assert_eq!((stopped.1.node, stopped.1.founding), (Some(me), Some(7)));
        assert!(stopped.1.why.contains(&name), "{name} is not in: {}", stopped.1.why);
        // Meanwhile it is tried again: nothing is renamed, and no replica is hosted in its place.
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
    for number in TEMPORARY_ERRORS {
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
            let lock = Disk::lock(&RealDisk, &dir.path().join("log/LOCK"));
            lock.ok()
        })
        .await;
        again.reopen().await.expect("listed");
        assert!(again.all().is_empty() && again.stopped().is_empty());
        let names: Vec<String> = (1..=life).map(|n| format!("shard-0.aside-{n}")).collect();
        assert_eq!(folders(dir.path()), names);
        let asides = until("them to be read", || again.asides()).await;
        assert!(
            asides.iter().all(|a| a.founding == Some(7) && a.last.is_ok()),
            "the logs are whole: {asides:?}"
        );
        // Each still holds its state.
        for name in &names {
            assert!(dir.path().join(name).join("log").is_dir());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn folder_without_metadata_is_damaged_not_new() {
    let (dir, disk) = (tempfile::tempdir().expect("a folder"), FaultyDisk::new(Arc::new(RealDisk)));
    let first = replicas(&disk, dir.path());
    serving(&first, 2).await;
    first.shutdown().await;
    drop(first);
    std::fs::remove_file(dir.path().join("shard-0/replica")).expect("removed");
    until("the log to be free", || Disk::lock(&RealDisk, &dir.path().join("log/LOCK")).ok()).await;
    let again = replicas(&disk, dir.path());
    again.reopen().await.expect("listed");
    assert_eq!(folders(dir.path()), ["shard-0.aside-1"]);
    assert!(dir.path().join("shard-0.aside-1/log").is_dir(), "what it held is there");
}

/// Two replicas share a log. One's damaged records are quarantined with it, and the other continues unharmed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_of_one_replicas_records_is_that_replicas_alone() {
    let (dir, disk) = (tempfile::tempdir().expect("a folder"), FaultyDisk::new(Arc::new(RealDisk)));
    let first = replicas(&disk, dir.path());
    for shard in [0, 1].map(JobShard::from_number) {
        with_job(&first, shard, Durability::QuorumDisk).await.expect("hosted");
    }
    first.shutdown().await;
    drop(first);
    until("the log to be free", || Disk::lock(&RealDisk, &dir.path().join("log/LOCK")).ok()).await;
    let path = dir.path().join("log/0000000000000000.log");
    let mut bytes = std::fs::read(&path).expect("a segment");
    // The first item belongs to the first replica; the last of its records is changed after its header.
    let items: Vec<usize> =
        (0..bytes.len() - 60).filter(|at| bytes[*at..].starts_with(&[0xF5, b'P', 0xF7, 1])).collect();
    let key = |at: usize| bytes[at + 32..at + 40].to_vec();
    let last = *items.iter().rfind(|at| key(**at) == key(items[0])).expect("its last");
    bytes[last + 60] ^= 1;
    std::fs::write(&path, bytes).expect("damaged");
    let again = replicas(&disk, dir.path());
    again.reopen().await.expect("listed");
    assert_eq!((here(&again), again.stopped().len()), (vec![1], 0));
    assert_eq!(folders(dir.path()), ["shard-0.aside-1", "shard-1"]);
    let asides = until("it to be read", || again.asides().filter(|a| !a.is_empty())).await;
    let why = asides[0].last.as_ref().expect_err("it is damaged");
    assert!(why.contains("shard-0.aside-1/log/0000000000000000.log is damaged at byte"), "{why}");
    until("its job", || again.get(JobShard::from_number(1)).filter(|r| r.shard.configured().is_some())).await;
    // Nothing of it is left in the log, and a new replica takes its place.
    with_job(&again, S0, Durability::QuorumDisk).await.expect("hosted anew");
    again.shutdown().await;
    drop(again);
    until("the log to be free", || Disk::lock(&RealDisk, &dir.path().join("log/LOCK")).ok()).await;
    let again = replicas(&disk, dir.path());
    again.reopen().await.expect("listed");
    assert_eq!(here(&again), [0, 1]);
    again.shutdown().await;
}

/// A replica without its vote must not vote; its log has everything that was acknowledged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn folder_without_vote_is_restored_and_votes_in_no_old_term() {
    let (dir, disk) = (tempfile::tempdir().expect("a folder"), FaultyDisk::new(Arc::new(RealDisk)));
    let real: Arc<dyn Disk> = Arc::new(RealDisk);
    let first = replicas(&disk, dir.path());
    let me = serving(&first, 3).await;
    let before = first.get(S0).expect("hosted").group.leadership().borrow().term;
    first.shutdown().await;
    drop(first);
    until("the log to be free", || Disk::lock(&RealDisk, &dir.path().join("log/LOCK")).ok()).await;
    std::fs::remove_file(dir.path().join("shard-0/vote")).expect("removed");
    let again = replicas(&disk, dir.path());
    again.reopen().await.expect("listed");
    assert_eq!(folders(dir.path()), ["shard-0.aside-1"], "it does not vote by itself");
    let asides = until("it to be read", || again.asides().filter(|a| !a.is_empty())).await;
    assert!(
        asides[0].last.as_ref().is_ok_and(|last| *last >= 3),
        "what it holds may be the last copy: {asides:?}"
    );
    again.shutdown().await;
    drop(again);
    quarantine::restore(&real, dir.path(), "shard-0.aside-1").expect("restored");
    let again = replicas(&disk, dir.path());
    again.reopen().await.expect("listed");
    assert_eq!(again.get(S0).expect("hosted").group.me(), me);
    until("its state", || (applied(&again) >= 4).then_some(())).await;
    let after = until("it to lead", || {
        let now = *again.get(S0)?.group.leadership().borrow();
        now.leads.then_some(now.term)
    });
    assert!(after.await > before + (1 << 19));
    push(&again, 4).await.expect("it goes on");
    again.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quarantined_folder_is_restored_and_deleted_only_by_a_person() {
    let (dir, disk) = (tempfile::tempdir().expect("a folder"), FaultyDisk::new(Arc::new(RealDisk)));
    let real: Arc<dyn Disk> = Arc::new(RealDisk);
    let first = replicas(&disk, dir.path());
    let me = serving(&first, 3).await;
    // Another founding takes its place: the whole folder is quarantined.
    first.host(S0, 1, Durability::QuorumDisk, 8).await.expect("hosted");
    let asides = until("it to be read", || first.asides().filter(|a| !a.is_empty())).await;
    assert_eq!(
        (asides[0].name.as_str(), asides[0].founding, asides[0].node),
        ("shard-0.aside-1", Some(7), Some(me))
    );
    assert!(asides[0].last.as_ref().is_ok_and(|last| *last >= 3), "{asides:?}");
    first.shutdown().await;
    drop(first);
    until("the log to be free", || Disk::lock(&RealDisk, &dir.path().join("log/LOCK")).ok()).await;
    quarantine::restore(&real, dir.path(), "shard-0.aside-1").expect("restored");
    assert_eq!(folders(dir.path()), ["shard-0", "shard-0.aside-2"], "the other one went aside for it");
    let again = replicas(&disk, dir.path());
    again.reopen().await.expect("listed");
    assert_eq!(again.get(S0).expect("hosted").group.me(), me);
    until("its state", || (applied(&again) >= 4).then_some(())).await;
    again.shutdown().await;
    for bad in ["shard-0", "identity", "../shard-0.aside-2", "shard-0.aside-9"] {
        quarantine::delete(&real, dir.path(), bad).expect_err(bad);
    }
    quarantine::delete(&real, dir.path(), "shard-0.aside-2").expect("a person's word");
    assert_eq!(folders(dir.path()), ["shard-0"]);
}

/// A host with this many MiB free, of 3200; 100 of them stay in reserve.
fn host(free: &Arc<AtomicU64>) -> Arc<Room> {
    let free = free.clone();
    Room::with(move || {
        let (id, what) = ("h".into(), "the host".into());
        Memory { pools: vec![Pool { id, what, free: free.load(Relaxed) << 20, limit: 3200 << 20 }] }
    })
}

/// Shards of a job that needs about 32 MiB of log for each.
const SHARDS: u32 = 3;

async fn with_job(replicas: &Replicas, shard: JobShard, durability: Durability) -> Result<(), String> {
    replicas.host(shard, SHARDS, durability, 7).await?;
    let replica = replicas.get(shard).ok_or("not here")?;
    replica.group.found(&BTreeMap::from([(replica.group.me(), "nowhere:1".to_string())])).await?;
    replica.group.leadership().wait_for(|l| l.leads).await.map_err(|e| e.to_string())?;
    let job = ServerJob { durability, ..ServerJob::new("room", Mode::Asp, 30, 4) };
    let admit = Command::Admit { form: JOB_FORM, job: job.to_toml().map_err(|e| e.to_string())? };
    let change = Change::Shard(admit.into());
    let done = replica.group.propose(change).await.map_err(|e| e.to_string())?;
    done.await.map(drop).map_err(|e| e.to_string())
}

fn here(replicas: &Replicas) -> Vec<u32> {
    replicas.all().into_iter().map(|(s, _)| s.number()).collect()
}

/// Of three replicas on disk, two fit after a restart: the first two, each time. The third waits, unread,
/// until there is room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_start_in_shard_order_until_room_ends_rest_wait() {
    let (dir, disk) = (tempfile::tempdir().expect("a folder"), FaultyDisk::new(Arc::new(RealDisk)));
    let first = replicas(&disk, dir.path());
    for shard in (0..SHARDS).rev().map(JobShard::from_number) {
        with_job(&first, shard, Durability::QuorumDisk).await.expect("there is room");
    }
    tokio::spawn(first.clone().supervise());
    let written = |s: u32| dir.path().join(format!("shard-{s}/need")).exists();
    until("what they need to be written", || (0..SHARDS).all(written).then_some(())).await;
    first.shutdown().await;
    let need = first.get(S0).and_then(|r| r.shard.need()).expect("it has a job").total();
    drop(first);
    for _ in 0..2 {
        until("the log to be free", || Disk::lock(&RealDisk, &dir.path().join("log/LOCK")).ok()).await;
        let free = Arc::new(AtomicU64::new(100 + ((need * 5 / 2) >> 20)));
        let again = replicas_within(host(&free), &disk, dir.path());
        again.reopen().await.expect("listed");
        assert_eq!(here(&again), [0, 1]);
        let (shard, waits) = again.stopped().pop().expect("one waits");
        assert_eq!((shard, waits.empty), (JobShard::from_number(2), false));
        for word in ["shard 2 needs 32", "free of 3.1 GiB (the host)", "promised to its other replicas"] {
            assert!(waits.why.contains(word), "`{word}` is not in: {}", waits.why);
        }
        tokio::spawn(again.clone().supervise());
        until("their jobs", || again.all().iter().all(|(_, r)| r.shard.configured().is_some()).then_some(()))
            .await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(here(&again), [0, 1], "and they stay");
        free.store(3000, Relaxed);
        until("the third", || again.get(JobShard::from_number(2)).filter(|r| r.shard.configured().is_some()))
            .await;
        assert!(again.stopped().is_empty());
        again.shutdown().await;
    }
}

/// Their need is not recorded: they are opened, and still none takes memory that is promised to another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_opened_in_vain_waits_without_being_opened_again() {
    let (dir, disk) = (tempfile::tempdir().expect("a folder"), FaultyDisk::new(Arc::new(RealDisk)));
    let first = replicas(&disk, dir.path());
    with_job(&first, S0, Durability::QuorumDisk).await.expect("there is room");
    first.shutdown().await;
    drop(first);
    until("the log to be free", || Disk::lock(&RealDisk, &dir.path().join("log/LOCK")).ok()).await;
    let free = Arc::new(AtomicU64::new(110));
    let again = replicas_within(host(&free), &disk, dir.path());
    again.reopen().await.expect("listed");
    tokio::spawn(again.clone().supervise());
    let stopped = until("it to find no room", || again.stopped().pop()).await.1;
    assert!(stopped.why.starts_with("shard 0 needs 32"), "{}", stopped.why);
    // From here on, every open finds it damaged.
    let (log, elsewhere) = (dir.path().join("log"), dir.path().join("elsewhere"));
    std::fs::rename(&log, &elsewhere).expect("moved");
    until("another try", || again.stopped().pop().filter(|(_, w)| w.pause > stopped.pause * 2)).await;
    assert!(again.stopped()[0].1.why.starts_with("shard 0 needs 32"), "{:?}", again.stopped());
    std::fs::rename(&elsewhere, &log).expect("moved back");
    free.store(3000, Relaxed);
    until("it", || again.get(S0).filter(|r| r.shard.configured().is_some())).await;
    again.shutdown().await;
}

/// A replica with its log in memory that cannot begin its job leaves its place empty, and no other starts
/// there in vain.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_replica_without_room_waits_until_there_is_room() {
    let (dir, disk) = (tempfile::tempdir().expect("a folder"), FaultyDisk::new(Arc::new(RealDisk)));
    let free = Arc::new(AtomicU64::new(110));
    let replicas = replicas_within(host(&free), &disk, dir.path());
    tokio::spawn(replicas.clone().supervise());
    with_job(&replicas, S0, Durability::QuorumMemory).await.expect_err("no room for its log");
    let (_, waits) = until("it to wait", || replicas.stopped().pop()).await;
    assert!(waits.empty && waits.why.contains("shard 0 needs 32"), "{waits:?}");
    until("its end", || replicas.get(S0).is_none().then_some(())).await;
    for _ in 0..20 {
        replicas.host(S0, SHARDS, Durability::QuorumMemory, 7).await.expect("nothing is to be done");
        assert!(replicas.get(S0).is_none(), "it was hosted again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    free.store(3000, Relaxed);
    until("its place to be free", || replicas.stopped().is_empty().then_some(())).await;
    replicas.host(S0, SHARDS, Durability::QuorumMemory, 7).await.expect("hosted");
    assert_eq!(replicas.room().promised_to(|_| true) >> 20, 32, "and what it will need is its own");
    // Nothing is known of another founding.
    free.store(100, Relaxed);
    replicas.host(S0, SHARDS, Durability::QuorumMemory, 8).await.expect("hosted");
    until("the promise to end", || (replicas.room().promised_to(|_| true) == 0).then_some(())).await;
    replicas.shutdown().await;
}
