//! One replica of one shard: what the rest of the server knows of Raft.

use super::{
    log::MemoryLog,
    machine::Machine,
    network::{Network, Peers},
    types::{Raft, Snapshot, SnapshotMeta, Types, Vote},
    wire::{self, SnapshotPiece, WireError},
};
use crate::shard::{
    Outcome, Proposal, Shard,
    image::{Image, ImageHeader},
};
use bytes::Bytes;
use openraft::{
    BasicNode, Config, ReadPolicy, ServerState, SnapshotPolicy,
    async_runtime::WatchReceiver,
    impls::ProgressResponder,
    raft::{AppendEntriesRequest, SnapshotResponse, TransferLeaderRequest, VoteRequest},
};
use paraft_common::{ServerId, ShardId};
use paraft_proto::{PeerCall, PeerRequest};
use std::{collections::BTreeMap, future::Future, sync::Arc, time::Duration};
use tokio::sync::{Mutex, Notify, watch};

/// Who leads a shard, as this replica knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leadership {
    /// The Raft term.
    pub term: u64,
    /// The leader, if one is known.
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
}

impl Role {
    /// The word in status and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Role::Leader => "leader",
            Role::Follower => "follower",
            Role::Candidate => "candidate",
            Role::Learner => "learner",
        }
    }
}

/// A proposal whose outcome is unknown or that was not taken. It may still be applied: only the replicated
/// record of who pushed what can tell.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ProposeError(String);

/// How to start a replica.
pub struct GroupOptions {
    /// Which shard.
    pub shard: ShardId,
    /// Of how many.
    pub shards: u32,
    /// This server.
    pub me: ServerId,
    /// The servers that replicate the shard; the first is the preferred leader and founds the group.
    pub replicas: Vec<ServerId>,
    /// A follower that hears nothing for between once and twice this long stands for election.
    pub election: Duration,
}

/// A handle to one replica. Cheap to clone.
#[derive(Clone)]
pub struct Group {
    raft: Raft,
    shards: u32,
    peers: Arc<Peers>,
    leadership: watch::Receiver<Leadership>,
    incoming: Arc<Mutex<Option<Incoming>>>,
}

/// A snapshot on its way in.
struct Incoming {
    transfer: u64,
    meta: SnapshotMeta,
    header: ImageHeader,
    vectors: Vec<Bytes>,
}

impl Group {
    /// Starts the replica; the group's founder also founds it.
    pub async fn start(options: GroupOptions, shard: Arc<Shard>, peers: Arc<Peers>) -> Result<Self, String> {
        let election = options.election.as_millis() as u64;
        let config = Config {
            cluster_name: format!("shard-{}", options.shard.0),
            heartbeat_interval: (election / 3).max(10),
            election_timeout_min: election,
            election_timeout_max: election * 2,
            snapshot_policy: SnapshotPolicy::Never, // by bytes, not by entries: see Machine
            max_in_snapshot_log_to_keep: 16,
            purge_batch_size: 1,
            enable_pre_vote: Some(true),
            ..Config::default()
        };
        let config = Arc::new(config.validate().map_err(|e| e.to_string())?);
        let wants_snapshot = Arc::new(Notify::new());
        let machine = Machine::new(shard, wants_snapshot.clone());
        let network = Network { peers: peers.clone(), shard: options.shard };
        let raft = Raft::new(options.me.0, config, network, MemoryLog::default(), machine)
            .await
            .map_err(|e| e.to_string())?;
        if options.replicas.first() == Some(&options.me) {
            let members: BTreeMap<u64, BasicNode> =
                options.replicas.iter().map(|s| (s.0, BasicNode::default())).collect();
            raft.initialize(members).await.map_err(|e| e.to_string())?;
        }
        let leadership = watch_leadership(&raft);
        tokio::spawn(cut_logs(raft.clone(), wants_snapshot, leadership.clone()));
        Ok(Self { raft, shards: options.shards, peers, leadership, incoming: Arc::default() })
    }

    /// How many shards the job has.
    pub fn shards(&self) -> u32 {
        self.shards
    }

    /// Follows who leads; closes when the replica shuts down.
    pub fn leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.clone()
    }

    /// The leader's address, if one is known and it is not this server.
    pub fn leader_address(&self) -> Option<String> {
        let now = *self.leadership.borrow();
        let leader = now.leader.filter(|_| !now.leads)?;
        self.peers.address(leader).map(str::to_string)
    }

    /// Proposes; calls are applied in the order they were made. The inner future gives the outcome once the
    /// entry is applied here, which is after a majority holds it.
    pub async fn propose(
        &self,
        proposal: Proposal,
    ) -> Result<impl Future<Output = Result<Outcome, ProposeError>> + Send + 'static, ProposeError> {
        let lost = |e: &dyn std::fmt::Display| ProposeError(format!("the proposal was not committed: {e}"));
        let (responder, done) = ProgressResponder::complete_only();
        self.raft.client_write_ff(proposal, Some(responder)).await.map_err(|e| lost(&e))?;
        Ok(async move {
            match done.await {
                Ok(Ok(response)) => Ok(response.data),
                Ok(Err(e)) => Err(ProposeError(format!("the proposal was not committed: {e}"))),
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
    pub async fn image(&self) -> Result<(u64, Image), ProposeError> {
        // The copy is made at once, between two entries; the future only carries it out.
        fn read(m: &mut Machine) -> futures::future::BoxFuture<'_, (u64, Image)> {
            Box::pin(std::future::ready(m.image()))
        }
        self.raft.with_state_machine(read).await.map_err(|e| ProposeError(e.to_string()))
    }

    /// The log index that is applied.
    pub fn applied_index(&self) -> u64 {
        self.raft.metrics().borrow_watched().last_applied.as_ref().map_or(0, |l| l.index)
    }

    /// Stops the replica.
    pub async fn shutdown(&self) {
        let _ = self.raft.shutdown().await;
    }

    /// Answers a peer's call with the bytes of the reply.
    pub async fn answer(&self, request: PeerRequest) -> Result<Bytes, WireError> {
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
                let done = self.raft.handle_transfer_leader(rpc).await;
                reply(done)
            }
            PeerCall::Snapshot => self.snapshot_piece(request).await,
            PeerCall::Unspecified => Err(WireError::new("a call of no kind")),
        }
    }

    async fn snapshot_piece(&self, request: PeerRequest) -> Result<Bytes, WireError> {
        let (vote, piece): (Vote, SnapshotPiece) = wire::decode(&request.header)?;
        let payload = request.payloads.into_iter().next().unwrap_or_default();
        let mut slot = self.incoming.lock().await;
        if piece.index == 0 {
            let (meta, header): (SnapshotMeta, ImageHeader) = wire::decode(&payload)?;
            *slot = Some(Incoming { transfer: piece.transfer, meta, header, vectors: Vec::new() });
        } else {
            let incoming = slot
                .as_mut()
                .filter(|i| i.transfer == piece.transfer && i.vectors.len() as u64 + 1 == piece.index);
            let incoming = incoming.ok_or_else(|| WireError::new("a snapshot's piece is out of order"))?;
            incoming.vectors.push(payload);
        }
        if piece.index + 1 < piece.of {
            return wire::encode(&None::<SnapshotResponse<Types>>);
        }
        let done = slot.take().ok_or_else(|| WireError::new("no snapshot is under way"))?;
        let image = Image::assemble(done.header, &done.vectors).map_err(WireError::new)?;
        let snapshot = Snapshot { meta: done.meta, snapshot: Arc::new(image) };
        reply(self.raft.install_full_snapshot(vote, snapshot).await.map(Some))
    }
}

fn reply<T: serde::Serialize, E: std::fmt::Display>(result: Result<T, E>) -> Result<Bytes, WireError> {
    wire::encode(&result.map_err(WireError::new)?)
}

fn watch_leadership(raft: &Raft) -> watch::Receiver<Leadership> {
    let mut metrics = raft.server_metrics();
    let (tx, rx) = watch::channel(Leadership::default());
    tokio::spawn(async move {
        loop {
            let now = {
                let m = metrics.borrow_watched();
                let role = match m.state {
                    ServerState::Leader => Role::Leader,
                    ServerState::Candidate => Role::Candidate,
                    ServerState::Learner => Role::Learner,
                    ServerState::Shutdown => return,
                    ServerState::Follower => Role::Follower,
                };
                Leadership {
                    term: m.vote.leader_id().term,
                    leader: m.current_leader.map(ServerId),
                    leads: role == Role::Leader && m.current_leader == Some(m.id),
                    role,
                }
            };
            tx.send_if_modified(|old| std::mem::replace(old, now) != now);
            if metrics.changed().await.is_err() {
                return;
            }
        }
    });
    rx
}

/// Cuts a snapshot whenever the state machine asks for one, so that the log's memory stays bounded.
async fn cut_logs(raft: Raft, wants: Arc<Notify>, mut alive: watch::Receiver<Leadership>) {
    loop {
        tokio::select! {
            () = wants.notified() => {
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
    use crate::shard::Command;
    use paraft_common::WorkerId;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_log_is_cut_after_so_many_entries_and_its_memory_is_bounded() {
        let shard = Arc::new(Shard::new(ShardId(0), 1));
        let peers = Arc::new(Peers::new(ServerId(0), 1, vec!["127.0.0.1:1".into()]));
        let options = GroupOptions {
            shard: ShardId(0),
            shards: 1,
            me: ServerId(0),
            replicas: vec![ServerId(0)],
            election: Duration::from_millis(100),
        };
        let group = Group::start(options, shard, peers).await.expect("a replica alone starts");
        group.leadership().wait_for(|l| l.leads).await.expect("it leads");
        for _ in 0..5000u32 {
            let p = Proposal::from(Command::Join { worker: WorkerId(0) }); // refused: there is no job
            group.propose(p).await.expect("taken").await.expect("committed");
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
}
