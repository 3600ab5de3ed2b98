//! The control group's replica on a failing disk.

use super::*;
use crate::{
    control::state::Command,
    raft::{Folder, GroupName, Logs, ReplicaId},
    replicated::{Change, GroupId},
};
use paraft_common::{Durability, ServerId};
use paraft_store::{RealDisk, faulty::FaultyDisk};
use std::{collections::BTreeMap, path::Path};

/// "Input/output error", "Too many open files", "No space left on device", "Read-only file system", "Disk quota exceeded".
const TEMPORARY_ERRORS: [i32; 5] = [5, 24, 28, 30, 122];

const ME: ReplicaId = ReplicaId(1);

struct Server {
    disk: FaultyDisk,
    agreed: Arc<Agreed>,
    control: Arc<ControlReplica>,
    /// A group that shares the log and whose own files never fail.
    other: Group,
    _data: tempfile::TempDir,
}

fn options(logs: &Logs, group: GroupName, data: &Path, name: &str) -> GroupOptions {
    GroupOptions {
        group,
        me: ME,
        folder: Some(Folder::within(logs, data.join(name))),
        election: Duration::from_millis(50),
        check_every: None,
    }
}

impl Server {
    async fn start() -> Self {
        let (data, disk) = (tempfile::tempdir().expect("a folder"), FaultyDisk::new(Arc::new(RealDisk)));
        let (agreed, peers) = (Arc::<Agreed>::default(), Arc::new(Peers::new(paraft_tls::Access::Insecure)));
        let logs = Logs::new(Arc::new(disk.clone()), data.path());
        let other = GroupName { number: 7, text: "another group".into(), watched: false };
        let other = options(&logs, other, data.path(), "other");
        let other = Group::start(other, Arc::new(Hosted(Arc::<Agreed>::default())), peers.clone()).await;
        let other = other.expect("the other group");
        other.found(&BTreeMap::from([(ME, "nowhere:1".to_string())])).await.expect("founded");
        let control = options(&logs, GroupId::Control.into(), data.path(), "control");
        let control = ControlReplica::start(control, agreed.clone(), peers).await.expect("started");
        let control = Arc::new(control);
        tokio::spawn(control.clone().supervise());
        Self { disk, agreed, control, other, _data: data }
    }

    fn fail(&self, number: Option<i32>, file: &'static str) {
        let temporary = format!("{file}.tmp");
        self.disk.fail_changes_of(number, move |path| {
            let within = path.parent().is_some_and(|above| above.ends_with("control"));
            within && path.file_name().is_some_and(|name| name == file || *name == *temporary)
        });
    }

    async fn agree(&self, fleet: u64) -> Result<(), String> {
        let shape = super::super::state::Shape { shards: 1, replicas: 1, durability: Durability::QuorumDisk };
        let found = Change::Control(Command::Found { fleet, shape, servers: BTreeMap::new() });
        let done = self.control.get().propose(found).await.map_err(|e| e.to_string())?;
        done.await.map(drop).map_err(|e| e.to_string())
    }

    async fn other_writes(&self) {
        let change = Change::Control(Command::Forget { server: ServerId(9) });
        let done = self.other.propose(change).await.expect("taken");
        done.await.expect("the log that both share goes on");
    }
}

async fn until(what: &str, mut look: impl FnMut() -> bool) {
    let began = Instant::now();
    while !look() {
        assert!(began.elapsed() < Duration::from_secs(30), "gave up waiting for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_replica_failing_vote_comes_back_by_itself() {
    for number in TEMPORARY_ERRORS {
        let server = Server::start().await;
        server.fail(Some(number), "vote");
        // Founding it starts an election, which writes a vote.
        let me = BTreeMap::from([(ME, "nowhere:1".to_string())]);
        let _ = server.control.get().found(&me).await;
        until("it to stop", || server.control.stopped().is_some()).await;
        // It is opened again, and fails at the vote again; never at the log, which it has released.
        let mut starts = server.control.starts();
        let before = *starts.borrow_and_update();
        let again = starts.wait_for(|n| *n > before);
        tokio::time::timeout(Duration::from_secs(30), again).await.expect("opened again").expect("it lives");
        server.other_writes().await;
        server.fail(None, "vote");
        until("it to lead", || server.control.get().leadership().borrow().leads).await;
        server.agree(5).await.expect("it agrees");
        until("what is agreed", || server.agreed.read(|s| s.fleet) == 5).await;
        server.control.shutdown().await;
        server.other.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_replica_failing_snapshot_comes_back_by_itself() {
    let server = Server::start().await;
    let me = BTreeMap::from([(ME, "nowhere:1".to_string())]);
    server.control.get().found(&me).await.expect("founded");
    until("it to lead", || server.control.get().leadership().borrow().leads).await;
    server.agree(5).await.expect("it agrees");
    server.fail(Some(28), "snapshot");
    // More entries than a log holds before its snapshot is written.
    let group = server.control.get();
    for _ in 0..4200 {
        let change = Change::Control(Command::Forget { server: ServerId(9) });
        if group.propose(change).await.is_err() {
            break;
        }
    }
    until("it to stop", || server.control.stopped().is_some()).await;
    assert_eq!(server.agreed.read(|s| s.fleet), 5, "what was agreed stays known meanwhile");
    server.other_writes().await;
    server.fail(None, "snapshot");
    until("it to lead", || {
        server.control.stopped().is_none() && server.control.get().leadership().borrow().leads
    })
    .await;
    server.agree(6).await.expect("it agrees");
    assert_eq!(server.agreed.read(|s| s.fleet), 5, "the first founding counts");
    server.control.shutdown().await;
    server.other.shutdown().await;
}
