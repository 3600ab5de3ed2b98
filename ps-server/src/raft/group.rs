//! One replica of one group: what the rest of the server knows of Raft.

use super::{
    disk::Folder,
    image::RawImage,
    log::ReplicaLog,
    machine::{Applied, Change, Machine, Replicated, SNAPSHOT_BYTES, SNAPSHOT_ENTRIES},
    network::{Network, Peers},
    parity::{Digest, Parity},
    replica::{GroupId, ReplicaId},
    types::{LogId, Raft, Snapshot, SnapshotMeta, Types, Vote},
    wire::{self, SnapshotAnswer, SnapshotPiece, WireError},
};
use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use openraft::{
    BasicNode, ChangeMembers, Config, ReadPolicy, ServerState, SnapshotPolicy,
    async_runtime::WatchReceiver,
    impls::ProgressResponder,
    raft::{AppendEntriesRequest, TransferLeaderRequest, VoteRequest},
};
use paraft_common::ServerId;
use paraft_proto::{PeerCall, PeerRequest};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    future::Future,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::{Mutex, Notify, watch};

/// Who leads a group, as this replica knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leadership {
    /// The Raft term.
    pub term: u64,
    /// The leader's server, if one is known.
    pub leader: Option<ServerId>,
    /// It is this replica.
    pub leads: bool,
    /// leader, follower, candidate or learner.
    pub role: Role,
}

/// A replica's part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Role {
    Leader,
    Follower,
    Candidate,
    #[default]
    Learner,
    /// Its storage failed, or it was told to stop.
    Stopped,
}

impl Role {
    /// The word in status and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Role::Leader => "leader",
            Role::Follower => "follower",
            Role::Candidate => "candidate",
            Role::Learner => "learner",
            Role::Stopped => "stopped",
        }
    }
}

/// A proposal whose outcome is unknown or that was not taken. It may still be applied: only the replicated
/// record of who pushed what can tell.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ProposeError(String);

impl ProposeError {
    /// From anything that says why.
    pub fn new(why: impl fmt::Display) -> Self {
        Self(why.to_string())
    }
}

fn uncommitted(e: &dyn fmt::Display) -> ProposeError {
    ProposeError(format!("the proposal was not committed: {e}"))
}

/// How to start a replica.
pub struct GroupOptions {
    /// Which group.
    pub group: GroupId,
    /// This replica.
    pub me: ReplicaId,
    /// Where its log lives; `None`: in memory only.
    pub folder: Option<Folder>,
    /// A follower that hears nothing for between once and twice this long stands for election.
    pub election: Duration,
    /// While this replica leads and there is something new, it has the replicas hash their states this often (or
    /// less often, so that hashing stays below a twentieth of the time); `None`: never.
    pub parity: Option<Duration>,
}

/// Who votes and who learns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Membership {
    /// Every member and its address.
    pub members: BTreeMap<ReplicaId, String>,
    /// Those that vote.
    pub voters: BTreeSet<ReplicaId>,
    /// A change is under way: two sets of voters must agree, or it is not yet committed.
    pub changing: bool,
}

/// A handle to one replica. Cheap to clone.
#[derive(Clone)]
pub struct Group {
    raft: Raft,
    me: ReplicaId,
    id: GroupId,
    leadership: watch::Receiver<Leadership>,
    incoming: Arc<Mutex<Option<Incoming>>>,
    parity: Parity,
    /// Why it was stopped from outside.
    failed: Arc<OnceLock<String>>,
    handed_over: Arc<Mutex<Option<Instant>>>,
}

/// A joint membership that stands for so long twice is finished by whoever leads.
const FINISH_PAUSE: Duration = Duration::from_millis(250);

/// Longer than a transfer takes, or an election where it fails.
const HAND_OVER_PAUSE: Duration = Duration::from_millis(600);

/// A snapshot on its way in.
struct Incoming {
    image: u64,
    meta: SnapshotMeta,
    head: Vec<u8>,
    lengths: Vec<u32>,
    parts: Vec<Bytes>,
}

/// What a shard's owner needs of its group, and all that it knows of Raft.
pub trait Replication: Send + Sync + 'static {
    /// Proposes; see [`Group::propose`].
    fn propose(&self, change: Change) -> BoxFuture<'_, Result<Waits, ProposeError>>;
    /// Returns when this replica leads and has applied everything that was committed before the call.
    fn barrier(&self) -> BoxFuture<'static, Result<(), ProposeError>>;
    /// Follows who leads; closes when the replica shuts down.
    fn leadership(&self) -> watch::Receiver<Leadership>;
    /// The leader's address, if one is known and it is not this replica.
    fn leader_address(&self) -> Option<String>;
}

/// A proposal's outcome, once it is known.
pub type Waits = BoxFuture<'static, Result<Applied, ProposeError>>;

impl Replication for Group {
    fn propose(&self, change: Change) -> BoxFuture<'_, Result<Waits, ProposeError>> {
        async move { Ok(Group::propose(self, change).await?.boxed()) }.boxed()
    }

    fn barrier(&self) -> BoxFuture<'static, Result<(), ProposeError>> {
        let group = self.clone();
        async move { Group::barrier(&group).await }.boxed()
    }

    fn leadership(&self) -> watch::Receiver<Leadership> {
        Group::leadership(self)
    }

    fn leader_address(&self) -> Option<String> {
        Group::leader_address(self)
    }
}

impl Group {
    /// Starts the replica, from what its folder holds.
    pub async fn start(
        options: GroupOptions,
        state: Arc<dyn Replicated>,
        peers: Arc<Peers>,
    ) -> Result<Self, String> {
        let election = options.election.as_millis() as u64;
        let config = Config {
            cluster_name: options.group.to_string(),
            heartbeat_interval: (election / 3).max(10),
            election_timeout_min: election,
            election_timeout_max: election * 2,
            snapshot_policy: SnapshotPolicy::Never, // by bytes, not by entries: see Machine
            max_in_snapshot_log_to_keep: 16,
            purge_batch_size: 1,
            enable_pre_vote: Some(true),
            // A leader that comes back must be elected again. What it had acknowledged may have been on the disks of
            // its followers only, when it died before its own fsync: leading on in its old term, it would give the
            // indices of those entries away a second time, and they would be lost (seen by `paraft verify ledger`).
            enable_leader_restore: Some(false),
            // A follower is served a snapshot rather than more than this many entries; the log holds fewer.
            replication_lag_threshold: 1 << 20,
            ..Config::default()
        };
        let config = Arc::new(config.validate().map_err(|e| e.to_string())?);
        let wants_snapshot = Arc::new(Notify::new());
        let (log, file) = match &options.folder {
            None => (ReplicaLog::default(), None),
            Some(folder) => (ReplicaLog::open(folder)?, Some(Arc::new(folder.snapshot()))),
        };
        let parity = Parity::default();
        let machine = Machine::new(state, file, wants_snapshot.clone(), parity.clone());
        let held = Held { log: log.clone(), state_bytes: machine.state_bytes() };
        let network = Network { peers, group: options.group, me: options.me };
        let raft = Raft::new(options.me.0, config, network, log, machine).await.map_err(|e| e.to_string())?;
        let leadership = watch_leadership(&raft, options.group);
        tokio::spawn(cut_logs(raft.clone(), held, wants_snapshot, leadership.clone()));
        let group = Self {
            raft,
            me: options.me,
            id: options.group,
            leadership,
            incoming: Arc::default(),
            parity,
            failed: Arc::default(),
            handed_over: Arc::default(),
        };
        tokio::spawn(group.clone().finish_changes());
        if let Some(every) = options.parity {
            tokio::spawn(group.clone().check_parity(every));
        }
        Ok(group)
    }

    /// Founds the group: once, on one of its members, when none has a log.
    pub async fn found(&self, members: &BTreeMap<ReplicaId, String>) -> Result<(), String> {
        let members: BTreeMap<u64, BasicNode> =
            members.iter().map(|(r, a)| (r.0, BasicNode::new(a.clone()))).collect();
        self.raft.initialize(members).await.map_err(|e| e.to_string())
    }

    /// This replica.
    pub fn me(&self) -> ReplicaId {
        self.me
    }

    /// Follows who leads; closes when the replica shuts down.
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

    /// The effective membership.
    pub fn membership(&self) -> Membership {
        let metrics = self.raft.server_metrics();
        let m = metrics.borrow_watched();
        let now = &m.membership_config;
        Membership {
            members: now.nodes().map(|(id, n)| (ReplicaId(*id), n.addr.clone())).collect(),
            voters: now.voter_ids().map(ReplicaId).collect(),
            changing: now.get_joint_config().len() > 1
                || now.log_id() != m.committed_membership_config.log_id(),
        }
    }

    /// Why the replica stopped, if it did.
    pub fn trouble(&self) -> Option<String> {
        if let Some(why) = self.failed.get() {
            return Some(why.clone());
        }
        let metrics = self.raft.metrics();
        let m = metrics.borrow_watched();
        m.running_state.as_ref().err().map(|e| e.to_string())
    }

    /// Makes a replica learn, without a vote; returns when the change is committed, not when it has caught up.
    pub async fn add_learner(&self, replica: ReplicaId, address: &str) -> Result<(), String> {
        self.is_a_member()?;
        let node = BasicNode::new(address);
        self.raft.add_learner(replica.0, node, false).await.map(drop).map_err(|e| e.to_string())
    }

    /// Changes who votes, through joint consensus; those that no longer do leave the group. Learners stay. A leader that
    /// is to leave hands the leadership over instead, and the next one makes the change when it is asked: the group then
    /// has a leader all the time, where one that removes itself leaves an election behind.
    pub async fn set_voters(&self, voters: &BTreeSet<ReplicaId>) -> Result<(), String> {
        self.is_a_member()?;
        if !voters.contains(&self.me)
            && let Some(to) = self.furthest(voters)
        {
            return self.hand_over(to).await;
        }
        let voters: BTreeSet<u64> = voters.iter().map(|r| r.0).collect();
        self.raft.change_membership(voters, false).await.map(drop).map_err(|e| e.to_string())
    }

    /// A change of voters goes by way of a joint membership, which must be followed by another entry. A leader that loses
    /// its lease between the two leaves the group there: nothing is lost, and nobody else can be changed. So who leads
    /// finishes what it finds half done.
    async fn finish_changes(self) {
        let mut leadership = self.leadership.clone();
        let mut seen = None;
        loop {
            tokio::select! {
                () = tokio::time::sleep(FINISH_PAUSE) => {}
                ended = leadership.wait_for(|l| l.role == Role::Stopped) => return drop(ended),
            }
            let (at, voters) = {
                let metrics = self.raft.server_metrics();
                let m = metrics.borrow_watched();
                let now = &m.membership_config;
                let joint = now.get_joint_config();
                let half = joint.len() > 1 && now.log_id() == m.committed_membership_config.log_id();
                (*now.log_id(), joint.last().filter(|_| half).cloned())
            };
            let Some(voters) = voters.filter(|_| leadership.borrow().leads) else {
                seen = None;
                continue;
            };
            // Twice the same: nobody is about to finish it.
            if seen.replace(at) == Some(at) {
                tracing::info!(group = %self.id, ?voters, "finishing a change of voters that was broken off");
                if let Err(e) = self.raft.change_membership(voters, false).await {
                    tracing::debug!(group = %self.id, error = %e, "not yet");
                }
            }
        }
    }

    /// A leader that has been removed leads on for a moment. The library's state is not made for changes by it.
    fn is_a_member(&self) -> Result<(), String> {
        match self.membership().members.contains_key(&self.me) {
            true => Ok(()),
            false => Err("this replica has left the group; the next leader changes its membership".into()),
        }
    }

    /// That one of `voters` which votes already and has most of the log. `None`: none votes yet, so that none could be
    /// elected (a single replica that is replaced, say); then the leader has to remove itself.
    fn furthest(&self, voters: &BTreeSet<ReplicaId>) -> Option<ReplicaId> {
        let now = self.membership().voters;
        let metrics = self.raft.metrics();
        let m = metrics.borrow_watched();
        let has = |r: &&ReplicaId| {
            let log = m.replication.as_ref().and_then(|all| all.get(&r.0).cloned().flatten());
            log.map(|l| l.index)
        };
        voters.intersection(&now).max_by_key(has).copied()
    }

    /// Hands the leadership over; at most once a while, since a leader takes no proposals meanwhile.
    async fn hand_over(&self, to: ReplicaId) -> Result<(), String> {
        {
            let mut last = self.handed_over.lock().await;
            if last.is_some_and(|t| t.elapsed() < HAND_OVER_PAUSE) {
                return Ok(());
            }
            *last = Some(Instant::now());
        }
        tracing::info!(group = %self.id, %to, "handing the leadership over before leaving");
        self.transfer(to).await
    }

    /// Makes `voters` the only members: as [`Self::set_voters`], and those that only learn leave the group too.
    pub async fn set_members(&self, voters: &BTreeSet<ReplicaId>) -> Result<(), String> {
        if self.membership().voters != *voters {
            self.set_voters(voters).await?;
        }
        if !voters.contains(&self.me) {
            return Ok(()); // it has voted itself out; the rest is for its successor
        }
        let learners: BTreeSet<u64> =
            self.membership().members.keys().filter(|n| !voters.contains(n)).map(|n| n.0).collect();
        if learners.is_empty() {
            return Ok(());
        }
        let leave = ChangeMembers::RemoveNodes(learners);
        self.raft.change_membership(leave, false).await.map(drop).map_err(|e| e.to_string())
    }

    /// Hands the leadership to another voter.
    pub async fn transfer(&self, to: ReplicaId) -> Result<(), String> {
        self.raft.trigger().transfer_leader(to.0).await.map_err(|e| e.to_string())
    }

    /// Proposes; calls are applied in the order they were made. The inner future gives the outcome once the
    /// entry is applied here, which is after a majority holds it (on disk, where the log is on disk).
    pub async fn propose(
        &self,
        change: Change,
    ) -> Result<impl Future<Output = Result<Applied, ProposeError>> + Send + 'static, ProposeError> {
        let (responder, done) = ProgressResponder::complete_only();
        self.raft.client_write_ff(change, Some(responder)).await.map_err(|e| uncommitted(&e))?;
        Ok(async move {
            match done.await {
                Ok(Ok(response)) => Ok(response.data),
                Ok(Err(e)) => Err(uncommitted(&e)),
                Err(_) => Err(ProposeError("the replica shut down".into())),
            }
        })
    }

    /// Returns when this replica leads and has applied everything that was committed before the call.
    pub async fn barrier(&self) -> Result<(), ProposeError> {
        let waits = self.raft.ensure_linearizable(ReadPolicy::ReadIndex);
        match tokio::time::timeout(Duration::from_secs(2), waits).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(e)) => Err(ProposeError(format!("leadership was not confirmed: {e}"))),
            Err(_) => Err(ProposeError("leadership was not confirmed in 2 s".into())),
        }
    }

    /// The log index that is applied, and a copy of the state at that index.
    pub async fn image(&self) -> Result<(u64, RawImage), ProposeError> {
        // The copy is made at once, between two entries; the future only carries it out.
        fn read(m: &mut Machine) -> futures::future::BoxFuture<'_, (u64, RawImage)> {
            Box::pin(std::future::ready(m.image()))
        }
        self.raft.with_state_machine(read).await.map_err(|e| ProposeError(e.to_string()))
    }

    /// The log index that is applied.
    pub fn applied_index(&self) -> u64 {
        self.raft.data_metrics().borrow_watched().last_applied.as_ref().map_or(0, |l| l.index)
    }

    /// The digests of the latest checks, by rising index.
    pub fn digests(&self) -> Vec<Digest> {
        self.parity.digests()
    }

    async fn check_parity(self, every: Duration) {
        let mut leadership = self.leadership.clone();
        loop {
            let pause = tokio::time::sleep(self.parity.pause(every));
            tokio::select! {
                () = pause => {}
                ended = leadership.wait_for(|l| l.role == Role::Stopped) => return drop(ended),
            }
            // An idle group is not woken up.
            if leadership.borrow().leads && self.applied_index() > self.parity.last() {
                let _ = self.raft.client_write_ff(Change::Check, None).await; // the next one will do
            }
        }
    }

    /// Stops the replica because it must not go on; [`Self::trouble`] says `why` from then on.
    pub async fn fail(&self, why: String) {
        tracing::error!(group = %self.id, replica = %self.me, "this replica is stopped: {why}");
        let _ = self.failed.set(why);
        self.shutdown().await;
    }

    /// Stops the replica.
    pub async fn shutdown(&self) {
        let _ = self.raft.shutdown().await;
    }

    /// Answers a peer's call with the bytes of the reply.
    pub async fn answer(&self, request: PeerRequest) -> Result<Bytes, WireError> {
        if request.to != self.me.0 {
            return Err(WireError::new(format!(
                "{} is not here any more ({} is): it has lost its log",
                ReplicaId(request.to),
                self.me
            )));
        }
        match request.call() {
            PeerCall::Append => {
                let mut rpc: AppendEntriesRequest<Types> = wire::decode(&request.header)?;
                wire::attach(&mut rpc, request.payloads)?;
                reply(self.raft.append_entries(rpc).await)
            }
            PeerCall::Vote => {
                let rpc: VoteRequest<Types> = wire::decode(&request.header)?;
                reply(self.raft.vote(rpc).await)
            }
            PeerCall::PreVote => {
                let rpc: VoteRequest<Types> = wire::decode(&request.header)?;
                reply(self.raft.pre_vote(rpc).await)
            }
            PeerCall::TransferLeader => {
                let rpc: TransferLeaderRequest<Types> = wire::decode(&request.header)?;
                reply(self.raft.handle_transfer_leader(rpc).await)
            }
            PeerCall::Snapshot => self.snapshot_piece(request).await,
            PeerCall::Unspecified => Err(WireError::new("a call of no kind")),
        }
    }

    async fn snapshot_piece(&self, request: PeerRequest) -> Result<Bytes, WireError> {
        let (vote, piece): (Vote, SnapshotPiece) = wire::decode(&request.header)?;
        let payload = request.payloads.into_iter().next().unwrap_or_default();
        if crc32fast::hash(&payload) != piece.crc {
            return Err(WireError::new(format!(
                "piece {} of a snapshot of {} is damaged",
                piece.index, self.id
            )));
        }
        let mut slot = self.incoming.lock().await;
        let known = slot.as_ref().is_some_and(|i| i.image == piece.image);
        if !known {
            if piece.index > 0 {
                return wire::encode(&SnapshotAnswer::Next(0));
            }
            let (meta, head, lengths): (SnapshotMeta, Vec<u8>, Vec<u32>) = wire::decode(&payload)?;
            if lengths.len() as u64 + 1 != piece.of {
                return Err(WireError::new("a snapshot's header does not fit its number of pieces"));
            }
            *slot = Some(Incoming { image: piece.image, meta, head, lengths, parts: Vec::new() });
        }
        let Some(incoming) = slot.as_mut() else { return Err(WireError::new("no snapshot is under way")) };
        if piece.index == incoming.parts.len() as u64 + 1 {
            if incoming.lengths.get(incoming.parts.len()).is_none_or(|l| *l as usize != payload.len()) {
                return Err(WireError::new("a snapshot's piece has another length than its header says"));
            }
            incoming.parts.push(payload);
        }
        // Anything else is a repetition or a gap: the answer says where to go on.
        if incoming.parts.len() < incoming.lengths.len() {
            return wire::encode(&SnapshotAnswer::Next(incoming.parts.len() as u64 + 1));
        }
        let Some(done) = slot.take() else { return Err(WireError::new("no snapshot is under way")) };
        let image = RawImage { head: done.head.into(), parts: done.parts };
        let snapshot = Snapshot { meta: done.meta, snapshot: Arc::new(image) };
        reply(self.raft.install_full_snapshot(vote, snapshot).await.map(SnapshotAnswer::Done))
    }
}

fn reply<T: serde::Serialize, E: fmt::Display>(result: Result<T, E>) -> Result<Bytes, WireError> {
    wire::encode(&result.map_err(WireError::new)?)
}

fn watch_leadership(raft: &Raft, group: GroupId) -> watch::Receiver<Leadership> {
    let mut metrics = raft.server_metrics();
    let (tx, rx) = watch::channel(Leadership::default());
    let raft = raft.clone();
    tokio::spawn(async move {
        loop {
            let now = {
                let m = metrics.borrow_watched();
                let role = match m.state {
                    ServerState::Leader => Role::Leader,
                    ServerState::Candidate => Role::Candidate,
                    ServerState::Learner => Role::Learner,
                    ServerState::Follower => Role::Follower,
                    ServerState::Shutdown => Role::Stopped,
                };
                Leadership {
                    term: m.vote.leader_id().term,
                    leader: m.current_leader.map(|l| ReplicaId(l).server()),
                    leads: role == Role::Leader && m.current_leader == Some(m.id),
                    role,
                }
            };
            tx.send_if_modified(|old| std::mem::replace(old, now) != now);
            if now.role == Role::Stopped || metrics.changed().await.is_err() {
                if let Err(e) = &raft.metrics().borrow_watched().running_state {
                    tracing::error!(%group, error = %e, "this replica has stopped");
                }
                let _ = tx.send(Leadership { role: Role::Stopped, ..Leadership::default() });
                return;
            }
        }
    });
    rx
}

/// What a replica holds in memory.
struct Held {
    log: ReplicaLog,
    state_bytes: Arc<AtomicU64>,
}

/// A log that somebody still needs is kept while it is shorter than this, in cuts: as many bytes as the state has, or
/// 32 MiB, is one. A follower that gets a snapshot needs what came meanwhile; without it, under load, the snapshot would
/// always be too old, and the follower never done.
const KEPT_CUTS: u64 = 3;
/// Nobody is waited for who is so few entries behind.
const NEARLY: u64 = 64;

impl Held {
    /// Whether the log is to be kept a while longer.
    fn is_needed(&self, raft: &Raft) -> bool {
        let (entries, bytes) = self.log.held();
        let cut = self.state_bytes.load(Relaxed).max(SNAPSHOT_BYTES);
        if bytes >= KEPT_CUTS * cut || entries >= KEPT_CUTS * 4 * SNAPSHOT_ENTRIES {
            return false;
        }
        let metrics = raft.metrics();
        let m = metrics.borrow_watched();
        let applied = m.last_applied.as_ref().map_or(0, |l| l.index);
        let behind = |matched: &Option<LogId>| matched.as_ref().map_or(0, |l| l.index) + NEARLY < applied;
        m.replication.as_ref().is_some_and(|all| all.values().any(behind))
    }
}

/// Cuts a snapshot whenever the state machine asks for one, so that the log's memory stays bounded.
async fn cut_logs(raft: Raft, held: Held, wants: Arc<Notify>, mut alive: watch::Receiver<Leadership>) {
    loop {
        tokio::select! {
            () = wants.notified() => {
                while held.is_needed(&raft) && alive.borrow().role != Role::Stopped {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                if let Err(e) = raft.trigger().snapshot().await {
                    tracing::warn!(error = %e, "no snapshot");
                    return;
                }
            }
            changed = alive.changed() => if changed.is_err() { return },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::{Command, Proposal, Shard};
    use openraft::raft::VoteResponse;
    use paraft_common::{ShardId, WorkerId};

    /// A replica alone, which leads.
    async fn alone() -> (Group, ReplicaId) {
        let shard = Arc::new(Shard::new(ShardId(0), 1));
        let me = ReplicaId::new_life(ServerId(0));
        let options = GroupOptions {
            group: GroupId::Shard(ShardId(0)),
            me,
            folder: None,
            election: Duration::from_millis(100),
            parity: None,
        };
        let group = Group::start(options, shard, Arc::default()).await.expect("a replica alone starts");
        group.found(&BTreeMap::from([(me, "127.0.0.1:1".into())])).await.expect("it is new");
        group.leadership().wait_for(|l| l.leads).await.expect("it leads");
        (group, me)
    }

    /// Whether the replica votes for `candidate` in `term`; an error where it does not answer to its name.
    async fn asked(
        group: &Group,
        name: ReplicaId,
        term: u64,
        candidate: ReplicaId,
    ) -> Result<bool, WireError> {
        let ask = VoteRequest::<Types>::new(Vote::new(term, candidate.0), None);
        let request = PeerRequest {
            group: 0,
            from: candidate.0,
            to: name.0,
            call: PeerCall::Vote as i32,
            header: wire::encode(&ask).expect("encodes"),
            payloads: Vec::new(),
        };
        let reply = group.answer(request).await?;
        Ok(wire::decode::<VoteResponse<Types>>(&reply)?.vote_granted)
    }

    async fn votes(group: &Group, term: u64, candidate: ReplicaId) -> bool {
        asked(group, group.me, term, candidate).await.expect("an answer")
    }

    /// Starts a replica; the tasks of one that was shut down may hold its log for a moment yet.
    async fn start_when_free(options: GroupOptions) -> Group {
        let began = Instant::now();
        loop {
            let options = GroupOptions { folder: options.folder.clone(), ..options };
            match Group::start(options, Arc::new(Shard::new(ShardId(0), 1)), Arc::default()).await {
                Err(e) if e.contains("in use") && began.elapsed() < Duration::from_secs(60) => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                started => return started.expect("a replica starts"),
            }
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_replica_without_its_log_does_not_vote_under_the_name_of_the_one_that_had_it() {
        let (group, me) = alone().await;
        let (before, candidate) = (ReplicaId(me.0 ^ 1), ReplicaId::new_life(ServerId(1)));
        assert_eq!(before.server(), me.server());
        let error = asked(&group, before, 100, candidate).await.expect_err("that one is dead");
        assert!(error.to_string().contains("has lost its log"), "{error}");
        assert!(asked(&group, me, 100, candidate).await.is_ok());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_replica_that_is_started_again_does_not_vote_twice_in_a_term() {
        let dir = tempfile::tempdir().expect("a folder");
        let me = ReplicaId::new_life(ServerId(0));
        let [a, b] = [1, 2].map(|s| ReplicaId::new_life(ServerId(s)));
        // Until the log of the life before is let go, which its threads do when they end.
        let start = || async {
            let folder = Folder::new(Arc::new(paraft_store::RealDisk), dir.path().join("replica"));
            let options = GroupOptions {
                group: GroupId::Shard(ShardId(0)),
                me,
                folder: Some(folder),
                election: Duration::from_secs(10),
                parity: None,
            };
            start_when_free(options).await
        };
        let group = start().await;
        assert!(votes(&group, 7, a).await, "the first who asks");
        group.shutdown().await;
        drop(group);
        let group = start().await;
        assert!(!votes(&group, 7, b).await, "it has voted in this term");
        assert!(!votes(&group, 6, b).await, "that term is over");
        assert!(votes(&group, 8, b).await, "another term");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_learner_that_nobody_waits_for_leaves_the_group() {
        let (group, me) = alone().await;
        let learner = ReplicaId::new_life(ServerId(1));
        group.add_learner(learner, "127.0.0.1:1").await.expect("nobody needs to answer for that");
        assert!(group.membership().members.contains_key(&learner));
        let voters = BTreeSet::from([me]);
        group.set_voters(&voters).await.expect("it leads");
        assert!(group.membership().members.contains_key(&learner), "the control group's learners stay");
        group.set_members(&voters).await.expect("it leads");
        assert_eq!(group.membership().members.keys().copied().collect::<BTreeSet<_>>(), voters);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_log_is_cut_after_so_many_entries_and_its_memory_is_bounded() {
        let (group, _) = alone().await;
        for _ in 0..5000u32 {
            let p = Proposal::from(Command::Join { worker: WorkerId(0) }); // refused: there is no job
            group.propose(Change::Shard(p)).await.expect("taken").await.expect("committed");
        }
        let mut metrics = group.raft.metrics();
        let cut = async {
            loop {
                let (snapshot, purged) = {
                    let m = metrics.borrow_watched();
                    (m.snapshot.as_ref().map(|l| l.index), m.purged.as_ref().map(|l| l.index))
                };
                if snapshot.is_some_and(|s| s > 4000) && purged.is_some_and(|p| p > 4000) {
                    return;
                }
                metrics.changed().await.expect("the replica lives");
            }
        };
        tokio::time::timeout(Duration::from_secs(60), cut)
            .await
            .expect("a snapshot, and the log before it gone");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_leader_that_comes_back_from_disk_is_elected_again_before_it_leads() {
        let dir = tempfile::tempdir().expect("a folder");
        let me = ReplicaId::new_life(ServerId(0));
        let start = || async {
            let options = GroupOptions {
                group: GroupId::Shard(ShardId(0)),
                me,
                folder: Some(Folder::new(Arc::new(paraft_store::RealDisk), dir.path().join("shard-0"))),
                election: Duration::from_millis(100),
                parity: None,
            };
            start_when_free(options).await
        };
        let group = start().await;
        group.found(&BTreeMap::from([(me, "127.0.0.1:1".into())])).await.expect("it is new");
        let before = group.leadership().wait_for(|l| l.leads).await.expect("it leads").term;
        group.shutdown().await;
        drop(group);
        let group = start().await;
        let after = group.leadership().wait_for(|l| l.leads).await.expect("it leads again").term;
        assert!(
            after > before,
            "term {after} after {before}: entries of the old term could have two contents"
        );
    }

    /// A vote without the log that it was given with is a vote of somebody who has forgotten what it promised.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_replica_whose_log_was_lost_does_not_start() {
        let dir = tempfile::tempdir().expect("a folder");
        let me = ReplicaId::new_life(ServerId(0));
        let options = || GroupOptions {
            group: GroupId::Shard(ShardId(0)),
            me,
            folder: Some(Folder::new(Arc::new(paraft_store::RealDisk), dir.path().join("shard-0"))),
            election: Duration::from_millis(100),
            parity: None,
        };
        let group = start_when_free(options()).await;
        group.found(&BTreeMap::from([(me, "127.0.0.1:1".into())])).await.expect("it is new");
        group.leadership().wait_for(|l| l.leads).await.expect("it leads");
        group.shutdown().await;
        drop(group);
        start_when_free(options()).await.shutdown().await; // as it was: it starts
        let log = dir.path().join("shard-0/log");
        for file in std::fs::read_dir(&log).expect("its log").flatten() {
            if file.path().extension().is_some_and(|e| e == "log") {
                std::fs::remove_file(file.path()).expect("a segment is lost");
            }
        }
        let began = Instant::now();
        let refused = loop {
            match Group::start(options(), Arc::new(Shard::new(ShardId(0), 1)), Arc::default()).await {
                Ok(_) => panic!("it starts, and would vote"),
                Err(e) if e.contains("in use") && began.elapsed() < Duration::from_secs(60) => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Err(e) => break e,
            }
        };
        assert!(refused.contains("a lost log must not vote"), "{refused}");
    }
}
