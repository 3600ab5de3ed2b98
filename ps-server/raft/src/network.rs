//! Sends Raft messages to the other servers.
//!
//! Two channels to each peer: bulk (snapshots, and entries that use no lane) and control (votes, heartbeats), so
//! that a heartbeat never waits behind megabytes. Every message names its target replica: a replica that lost its
//! log has a new name, and does not answer for the old one.

use super::{
    dial::{DialResult, dial},
    image::RawImage,
    peers::Peers,
    types::{Snapshot, Types, Vote},
    voter_logs::VoterLogs,
    wire::{self, WireError},
};
use bytes::Bytes;
use futures::{
    Stream, StreamExt,
    future::{BoxFuture, ready},
    stream::{self, BoxStream},
};
use openraft::{
    BasicNode, OptionalSend, RaftNetworkFactory,
    error::{RPCError, ReplicationClosed, StreamingError, Unreachable},
    network::{RPCOption, v2::RaftNetworkV2},
    raft::{
        AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, StreamAppendResult,
        TransferLeaderRequest, VoteRequest, VoteResponse,
    },
};
use paraft_changes::ReplicaId;
use paraft_common::Payload;
use paraft_proto::{PeerCall, PeerRequest, WithBulk, services};
use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};
use std::{collections::HashMap, future::Future, sync::Arc, time::Duration};

/// Pause before an error is returned. openraft backs off from appends that fail one by one; but if our
/// `stream_append` fails before it takes a request, the leader would spin at a whole core while one follower is
/// down (deploy/tests/cli/hazards.rs). Votes and pieces of snapshots are retried at once.
pub(super) const ERROR_DELAY: Duration = Duration::from_millis(50);

/// The current addresses of a group's members. openraft keeps its streams when a member has moved; later messages
/// go to the new address.
#[derive(Clone, Default)]
pub struct Addresses(Arc<Mutex<HashMap<u64, String>>>);

impl Addresses {
    /// Replaces all addresses.
    pub fn replace_all(&self, all: impl Iterator<Item = (u64, String)>) {
        *self.0.lock() = all.collect();
    }

    fn of(&self, id: u64) -> Option<String> {
        self.0.lock().get(&id).cloned()
    }
}

/// The connection factory of one group.
#[derive(Clone)]
pub struct Network {
    pub peers: Arc<Peers>,
    /// The group's number.
    pub group: u32,
    pub me: ReplicaId,
    pub addresses: Addresses,
    pub voter_logs: VoterLogs,
}

impl Network {
    pub(super) fn connection(&self, target: u64, node: &BasicNode, bulk: bool) -> Connection {
        Connection {
            peers: self.peers.clone(),
            group: self.group,
            me: self.me,
            target,
            address: node.addr.clone(),
            addresses: self.addresses.clone(),
            voter_logs: self.voter_logs.clone(),
            bulk,
            silent: false,
        }
    }
}

impl RaftNetworkFactory<Types> for Network {
    type Network = Connection;

    async fn new_client(&mut self, target: u64, node: &BasicNode) -> Connection {
        self.connection(target, node, true)
    }

    async fn new_heartbeat_client(&mut self, target: u64, node: &BasicNode) -> Connection {
        self.connection(target, node, false)
    }
}

/// The connection of one group to one peer.
pub struct Connection {
    pub(super) peers: Arc<Peers>,
    group: u32,
    me: ReplicaId,
    target: u64,
    /// The peer's address when the connection was created.
    address: String,
    addresses: Addresses,
    voter_logs: VoterLogs,
    bulk: bool,
    /// The last lane that was tried got no answer.
    pub(super) silent: bool,
}

/// The answers to a stream of appends.
pub(super) type Answers<'s> = BoxStream<'s, Result<StreamAppendResult<Types>, RPCError<Types>>>;
type AppendStream<'s> = Result<Answers<'s>, RPCError<Types>>;

/// Why a call to a peer failed. Always worth a back-off, so always "unreachable" to openraft.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    #[error("{0}")]
    Setup(String),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("{}", .0.message())]
    Status(tonic::Status),
    #[error("no answer within {0:?}")]
    Timeout(Duration),
}

impl Connection {
    /// A message without its header and payloads.
    pub(super) fn head(&self, kind: PeerCall) -> PeerRequest {
        PeerRequest {
            group: self.group,
            from: self.me.0,
            to: self.target,
            call: kind as i32,
            header: Bytes::new(),
            fleet: self.peers.fleet(),
            payloads: Vec::new(),
        }
    }

    /// The peer's current address.
    pub(super) fn address(&self) -> String {
        let heard = self.peers.last_address(ReplicaId(self.target).server());
        heard.or_else(|| self.addresses.of(self.target)).unwrap_or_else(|| self.address.clone())
    }

    /// Whether a process listens there, by a separate connection that is closed at once.
    pub(super) async fn dial(&self) -> DialResult {
        dial(&self.address()).await
    }

    /// A question that is not openraft's; an error is returned at once.
    pub(super) async fn ask<Q: Serialize, A: DeserializeOwned>(
        &self,
        kind: PeerCall,
        question: &Q,
        ttl: Duration,
    ) -> Result<A, String> {
        self.call(kind, question, Vec::new(), ttl).await.map_err(|e| e.to_string())
    }

    /// A message of openraft's, which may retry at once.
    pub(super) async fn paced<Q: Serialize, A: DeserializeOwned>(
        &self,
        kind: PeerCall,
        header: &Q,
        bulk: Vec<Payload>,
        ttl: Duration,
    ) -> Result<A, CallError> {
        let answer = self.call(kind, header, bulk, ttl).await;
        if let Err(CallError::Status(_)) = &answer {
            tokio::time::sleep(ERROR_DELAY).await;
        }
        answer
    }

    async fn call<Q: Serialize, A: DeserializeOwned>(
        &self,
        kind: PeerCall,
        header: &Q,
        bulk: Vec<Payload>,
        ttl: Duration,
    ) -> Result<A, CallError> {
        let voting = matches!(kind, PeerCall::Vote | PeerCall::PreVote);
        let channel = self.peers.channel(&self.address(), self.bulk && !voting).map_err(CallError::Setup)?;
        let message = PeerRequest { header: wire::encode(header)?, ..self.head(kind) };
        let request = WithBulk { message, bulk };
        match tokio::time::timeout(ttl, services::peer_call(&channel, request)).await {
            Ok(Ok(reply)) => Ok(wire::decode(&reply.header)?),
            Ok(Err(status)) => Err(CallError::Status(status)),
            Err(_) => Err(CallError::Timeout(ttl)),
        }
    }
}

pub(super) fn unreachable(e: CallError) -> RPCError<Types> {
    RPCError::Unreachable(Unreachable::new(&e))
}

impl RaftNetworkV2<Types> for Connection {
    type SnapshotData = RawImage;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<Types>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<Types>, RPCError<Types>> {
        let payloads = wire::payloads(&rpc.entries);
        // A megabyte on a slow link takes longer than a heartbeat's timeout.
        let ttl = option.hard_ttl().max(Duration::from_secs(5));
        self.paced(PeerCall::Append, &rpc, payloads, ttl).await.map_err(unreachable)
    }

    fn stream_append<'s, S>(&'s mut self, mut input: S, _: RPCOption) -> BoxFuture<'s, AppendStream<'s>>
    where
        S: Stream<Item = AppendEntriesRequest<Types>> + OptionalSend + Unpin + 'static,
    {
        Box::pin(async move {
            // Before any dial: openraft backs off before it provides a request.
            let Some(first) = input.next().await else { return Ok(stream::empty().boxed()) };
            if let Some(answer) = self.voter_logs.answer(self.target, &first) {
                return Ok(stream::once(ready(Ok(answer))).boxed());
            }
            self.appends(first, input).await.map_err(unreachable)
        })
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        let answer = self.paced(PeerCall::Vote, &rpc, Vec::new(), option.hard_ttl()).await;
        let answer = answer.map_err(unreachable)?;
        self.voter_logs.voted(self.target, &rpc, &answer);
        Ok(answer)
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        self.paced(PeerCall::PreVote, &rpc, Vec::new(), option.hard_ttl()).await.map_err(unreachable)
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<Types>, StreamingError<Types>> {
        self.voter_logs.sends_snapshot(self.target, vote);
        let send = self.send_snapshot(vote, snapshot, option.hard_ttl().max(Duration::from_secs(5)));
        tokio::select! {
            closed = cancel => Err(StreamingError::Closed(closed)),
            sent = send => match sent {
                Ok(vote) => Ok(SnapshotResponse { vote }),
                Err(e) => Err(StreamingError::Unreachable(Unreachable::new(&e))),
            },
        }
    }

    async fn transfer_leader(
        &mut self,
        req: TransferLeaderRequest<Types>,
        option: RPCOption,
    ) -> Result<openraft::raft::TransferLeaderResponse<Types>, RPCError<Types>> {
        self.paced(PeerCall::TransferLeader, &req, Vec::new(), option.hard_ttl()).await.map_err(unreachable)
    }
}

#[cfg(test)]
#[path = "network_tests.rs"]
mod tests;
