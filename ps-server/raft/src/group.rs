//! One replica of one group: the interface of Raft for the rest of the server.

use super::{
    belief::Evidence,
    checks::{Checks, Digest},
    compaction::{CompactionInputs, compact},
    disk::Folder,
    group_name::GroupName,
    image::RawImage,
    incoming::Incoming,
    leadership::{Leadership, Role, watch_leadership},
    log::{LogSize, ReplicaLog},
    machine::{Machine, Raft},
    network::{Addresses, Connection, Network},
    peers::Peers,
    replicated::GroupState,
    sleep_state::Sleep,
    snapshot::SnapshotFile,
    storage::{FolderError, blocking},
    ticks::{Ticks, heartbeat_ms},
    voter_logs::VoterLogs,
};
use openraft::{
    BasicNode, Config, ReadPolicy, SnapshotPolicy, async_runtime::WatchReceiver, errors::ClientWriteError,
    impls::ProgressResponder,
};
use paraft_changes::{Applied, Change, ReplicaId};
use paraft_proto::PeerCall;
use serde::{Serialize, de::DeserializeOwned};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    future::Future,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::{Mutex, Notify, watch};

/// A proposal that was refused, or whose outcome is unknown. It may still be applied: only the replicated record of
/// the pushes can tell.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ProposeError(String);

impl ProposeError {
    /// Creates it from a reason.
    pub fn new(why: impl fmt::Display) -> Self {
        Self(why.to_string())
    }
}

fn uncommitted(e: &dyn fmt::Display) -> ProposeError {
    ProposeError(format!("the proposal was not committed: {e}"))
}

/// Options of a replica.
#[derive(Clone)]
pub struct GroupOptions {
    /// The group.
    pub group: GroupName,
    /// This replica.
    pub me: ReplicaId,
    /// The folder of its log; `None`: in memory only.
    pub folder: Option<Folder>,
    /// A follower starts an election after three to four times this long without a message. It does not wait if the
    /// leader's process has ended.
    pub election: Duration,
    /// The interval of checks while this replica leads and has new entries (longer if hashing would take more than
    /// a twentieth of the time); `None`: no checks.
    pub check_every: Option<Duration>,
}

/// A handle to one replica. Cheap to clone.
#[derive(Clone)]
pub struct Group {
    pub(super) raft: Raft,
    pub(super) me: ReplicaId,
    pub(super) name: GroupName,
    pub(super) election: Duration,
    pub(super) state: Arc<GroupState>,
    pub(super) leadership: watch::Receiver<Leadership>,
    log: ReplicaLog,
    file: Option<Arc<SnapshotFile>>,
    installed: Arc<AtomicU64>,
    pub(super) incoming: Arc<Mutex<Option<Incoming>>>,
    /// A received snapshot is being installed.
    pub(super) installing: Arc<AtomicBool>,
    /// Notified when a snapshot begins to arrive.
    pub(super) begun: Arc<Notify>,
    pub(super) checks: Checks,
    pub(super) sleep: Arc<Sleep>,
    pub(super) ticks: Arc<Ticks>,
    pub(super) evidence: Arc<Evidence>,
    pub(super) network: Network,
    /// Why the server stopped it.
    failed: Arc<OnceLock<String>>,
    /// Whether it may start elections.
    pub(super) stands: Arc<AtomicBool>,
    pub(super) handed_over: Arc<Mutex<Option<Instant>>>,
    /// Replicas that the control plane names as members; its own log may not know them yet.
    trusted: Arc<parking_lot::RwLock<BTreeSet<ReplicaId>>>,
}

impl Group {
    /// Starts the replica from its folder.
    pub async fn start(
        options: GroupOptions,
        state: Arc<GroupState>,
        peers: Arc<Peers>,
    ) -> Result<Self, FolderError> {
        let election = options.election.as_millis() as u64;
        let config = Config {
            cluster_name: options.group.to_string(),
            heartbeat_interval: heartbeat_ms(options.election),
            election_timeout_min: election,
            election_timeout_max: election * 2,
            snapshot_policy: SnapshotPolicy::Never, // by bytes, not by entries: see Machine
            max_in_snapshot_log_to_keep: 16,
            purge_batch_size: 1,
            enable_pre_vote: Some(true),
            // A restarted leader must be elected again. If it died before its own fsync, acknowledged entries may
            // exist only on its followers' disks. Leading on in its old term, it would reuse their indices, and
            // they would be lost (seen by `paraft verify ledger`).
            enable_leader_restore: Some(false),
            // A follower further behind than this gets a snapshot; the log holds fewer entries.
            replication_lag_threshold: 1 << 20,
            ..Config::default()
        };
        let config = Arc::new(config.validate().map_err(FolderError::passing)?);
        let wants_snapshot = Arc::new(Notify::new());
        let (log, file) = match &options.folder {
            None => (ReplicaLog::default(), None),
            Some(folder) => {
                let at = folder.clone();
                let opened = tokio::task::spawn_blocking(move || ReplicaLog::open(&at)).await;
                (opened.map_err(FolderError::passing)??, Some(Arc::new(folder.snapshot())))
            }
        };
        let checks = Checks::default();
        let machine =
            Machine::open(state.clone(), log.clone(), file.clone(), wants_snapshot.clone(), checks.clone())
                .await?;
        let installed = machine.installed();
        let sleep = Arc::new(Sleep { compact: wants_snapshot.clone(), ..Sleep::default() });
        let held =
            CompactionInputs { log: log.clone(), state_bytes: machine.state_bytes(), sleep: sleep.clone() };
        let addresses = Addresses::default();
        let network = Network {
            peers,
            group: options.group.number,
            me: options.me,
            addresses: addresses.clone(),
            voter_logs: VoterLogs::default(),
        };
        let held_log = log.clone();
        let raft = Raft::new(options.me.0, config, network.clone(), log, machine).await;
        let raft = raft.map_err(FolderError::passing)?;
        let leadership = watch_leadership(&raft, options.group.clone());
        tokio::spawn(compact(raft.clone(), held, wants_snapshot, leadership.clone()));
        let group = Self {
            raft,
            me: options.me,
            name: options.group,
            election: options.election,
            state,
            leadership,
            log: held_log,
            file,
            installed,
            incoming: Arc::default(),
            installing: Arc::default(),
            begun: Arc::default(),
            checks,
            sleep,
            ticks: Arc::default(),
            evidence: Arc::default(),
            network,
            failed: Arc::default(),
            stands: Arc::new(AtomicBool::new(true)),
            handed_over: Arc::default(),
            trusted: Arc::default(),
        };
        tokio::spawn(group.clone().keep_time());
        tokio::spawn(group.clone().look_after(addresses));
        tokio::spawn(group.clone().watch_leader());
        if let Some(every) = options.check_every {
            tokio::spawn(group.clone().check_consistency(every));
        }
        Ok(group)
    }

    /// Founds the group on one of its first members. If another has founded it with the same members, this one
    /// writes the same first entry, and nothing is lost: a majority decides on the leader.
    pub async fn found(&self, members: &BTreeMap<ReplicaId, String>) -> Result<(), String> {
        let members: BTreeMap<u64, BasicNode> =
            members.iter().map(|(r, a)| (r.0, BasicNode::new(a.clone()))).collect();
        self.raft.initialize(members).await.map_err(|e| e.to_string())
    }

    /// This replica.
    pub fn me(&self) -> ReplicaId {
        self.me
    }

    /// Accepts messages of these replicas too. The control plane knows them as members, while the own log may be
    /// old or empty.
    pub fn trust(&self, replicas: BTreeSet<ReplicaId>) {
        if *self.trusted.read() != replicas {
            *self.trusted.write() = replicas;
        }
    }

    /// Whether a replica is a member of this group, to this replica's knowledge.
    pub fn is_known_member(&self, replica: ReplicaId) -> bool {
        self.membership().members.contains_key(&replica) || self.trusted.read().contains(&replica)
    }

    /// Watches the leadership; closes when the replica shuts down.
    pub fn leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.clone()
    }

    /// The leader's address, if one is known and it is not this replica.
    pub fn leader_address(&self) -> Option<String> {
        let metrics = self.raft.server_metrics();
        let m = metrics.borrow_watched();
        let leader = m.current_leader.filter(|l| *l != self.me.0)?;
        m.membership_config.get_node(&leader).map(|n| n.addr.clone())
    }

    /// The size of the log.
    pub fn log_size(&self) -> LogSize {
        self.log.size()
    }

    /// Returns a function for the log's bytes in memory, which also works after this replica has ended.
    pub fn log_in_memory(&self) -> impl Fn() -> u64 + Send + Sync + 'static {
        self.log.in_memory()
    }

    /// Number of other replicas' snapshots that this process has installed.
    pub fn snapshots_installed(&self) -> u64 {
        self.installed.load(Relaxed)
    }

    /// Why the replica stopped, if it did.
    pub fn trouble(&self) -> Option<String> {
        if let Some(why) = self.failed.get() {
            return Some(why.clone());
        }
        let metrics = self.raft.metrics();
        let m = metrics.borrow_watched();
        let stopped = m.running_state.as_ref().err().map(|e| e.to_string());
        // A task that panicked leaves no reason.
        let ended = self.leadership.borrow().role == Role::Stopped;
        stopped.or_else(|| ended.then(|| "its task has ended; the server's log may say why".into()))
    }

    /// Whether the server stopped it because it must not continue.
    pub fn was_failed(&self) -> bool {
        self.failed.get().is_some()
    }

    /// Proposes a change; changes are applied in the order of the calls. The inner future returns the outcome once
    /// the entry is applied here, after a majority holds it (on disk, if the log is on disk).
    pub async fn propose(
        &self,
        change: Change,
    ) -> Result<impl Future<Output = Result<Applied, ProposeError>> + Send + 'static, ProposeError> {
        self.ensure_awake().await?;
        let (responder, done) = ProgressResponder::complete_only();
        self.raft.client_write_ff(change, Some(responder)).await.map_err(|e| uncommitted(&e))?;
        Ok(async move {
            match done.await {
                Ok(Ok(response)) => Ok(response.data),
                // Raft's error names the leader; clients get the leader from the servers instead.
                Ok(Err(ClientWriteError::ForwardToLeader(_) | ClientWriteError::LogEntryDiscarded(_))) => {
                    Err(uncommitted(&"this server does not lead its group any more"))
                }
                Ok(Err(e)) => Err(uncommitted(&e)),
                Err(_) => Err(ProposeError("the replica shut down".into())),
            }
        })
    }

    /// Returns when this replica leads and has applied everything that was committed before the call.
    pub async fn barrier(&self) -> Result<(), ProposeError> {
        self.wake();
        let waits = self.raft.ensure_linearizable(ReadPolicy::ReadIndex);
        match tokio::time::timeout(Duration::from_secs(2), waits).await {
            Ok(Ok(_)) => Ok(()),
            // Raft's error has the whole membership in it.
            Ok(Err(e)) => {
                tracing::debug!(group = %self.name, error = %e, "leadership was not confirmed");
                Err(ProposeError("another replica leads, or no majority answers".into()))
            }
            Err(_) => Err(ProposeError("no majority has answered in 2 s".into())),
        }
    }

    /// Number of the other members, including learners.
    pub fn others(&self) -> usize {
        let metrics = self.raft.server_metrics();
        let m = metrics.borrow_watched();
        m.membership_config.nodes().count().saturating_sub(1)
    }

    /// The applied log index, and a copy of the state at it.
    pub async fn image(&self) -> Result<(u64, RawImage), ProposeError> {
        // The copy is made at once, between two entries; the future only returns it.
        fn read(m: &mut Machine) -> futures::future::BoxFuture<'_, (u64, RawImage)> {
            Box::pin(std::future::ready(m.image()))
        }
        self.raft.with_state_machine(read).await.map_err(|e| ProposeError(e.to_string()))
    }

    /// Entries of the log that are not applied: not on a majority yet, or this replica is behind.
    pub fn unapplied(&self) -> u64 {
        let metrics = self.raft.data_metrics();
        let m = metrics.borrow_watched();
        let last = m.last_log.as_ref().map_or(0, |l| l.index);
        last.saturating_sub(m.last_applied.as_ref().map_or(0, |l| l.index))
    }

    /// The applied log index.
    pub fn applied_index(&self) -> u64 {
        self.raft.data_metrics().borrow_watched().last_applied.as_ref().map_or(0, |l| l.index)
    }

    /// The digests of the latest checks, ascending by index.
    pub fn digests(&self) -> Vec<Digest> {
        self.checks.digests()
    }

    /// The connection to another member, for messages that are not openraft's.
    pub(super) fn connection(&self, member: u64, bulk: bool) -> Option<Connection> {
        let metrics = self.raft.server_metrics();
        let m = metrics.borrow_watched();
        Some(self.network.connection(member, m.membership_config.get_node(&member)?, bulk))
    }

    /// Asks another member a question that is not openraft's; `None`: no answer.
    pub(super) async fn ask<Q: Serialize, A: DeserializeOwned>(
        &self,
        member: u64,
        call: PeerCall,
        question: &Q,
        ttl: Duration,
    ) -> Option<A> {
        let answer = self.connection(member, false)?.ask(call, question, ttl).await;
        answer
            .inspect_err(
                |e| tracing::debug!(group = %self.name, member, error = %e, "a member does not answer"),
            )
            .ok()
    }

    /// Stops a replica that must not continue; [`Self::trouble`] returns `why` from then on.
    pub async fn fail(&self, why: String) {
        tracing::error!(group = %self.name, replica = %self.me, "this replica is stopped: {why}");
        let _ = self.failed.set(why);
        self.shutdown().await;
    }

    /// Stops the replica. After that its files are free: it can be started again even while handles exist.
    pub async fn shutdown(&self) {
        let _ = self.raft.shutdown().await;
        self.log.close();
        let log = self.log.clone();
        if let Some(file) = self.file.clone()
            && let Err(e) = blocking(move || {
                log.settle();
                file.close();
                Ok(())
            })
            .await
        {
            tracing::warn!(group = %self.name, error = %e, "the replica's vote and snapshot may still be written");
        }
    }
}

#[cfg(test)]
#[path = "group_tests.rs"]
mod tests;
