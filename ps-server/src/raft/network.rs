//! Sends Raft messages to the other servers.
//!
//! Two channels to each peer: bulk (entries, snapshots) and control (votes, heartbeats), so that a heartbeat
//! never waits behind megabytes. Every message names the replica that is meant: one that lost its log has a new
//! name, and does not answer for the old one.

use super::{
    image::RawImage,
    machine::SnapshotData,
    replica::{GroupId, ReplicaId},
    types::{Snapshot, SnapshotMeta, Types, Vote},
    wire::{self, SnapshotAnswer, SnapshotPiece},
};
use crate::raft::wire::WireError;
use bytes::Bytes;
use openraft::{
    BasicNode, OptionalSend, RaftNetworkFactory,
    error::{RPCError, ReplicationClosed, StreamingError, Unreachable},
    network::{RPCOption, v2::RaftNetworkV2},
    raft::{
        AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, VoteRequest,
        VoteResponse,
    },
};
use paraft_proto::{PeerCall, PeerRequest, limits, peers_client::PeersClient};
use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};
use std::{collections::HashMap, future::Future, sync::Arc, time::Duration};
use tonic::transport::{Channel, Endpoint};

/// Pause before an error is given back: openraft's own back-off is skipped when a stream fails at once, and
/// its leader would spin at 100 % of a core while one follower is down.
const ERROR_PAUSE: Duration = Duration::from_millis(50);

/// Connections to the other servers. One for the whole process.
#[derive(Default)]
pub struct Peers {
    channels: Mutex<HashMap<(String, bool), PeersClient<Channel>>>,
}

/// Channels kept open: two for each server of a large fleet, and those that have left.
const MAX_CHANNELS: usize = 1024;

impl Peers {
    fn client(&self, address: &str, bulk: bool) -> Result<PeersClient<Channel>, String> {
        let key = (address.to_string(), bulk);
        let mut channels = self.channels.lock();
        if let Some(c) = channels.get(&key) {
            return Ok(c.clone());
        }
        let channel = endpoint(address)?.connect_lazy();
        let client = PeersClient::new(channel).max_decoding_message_size(limits::MAX_MESSAGE_BYTES);
        if channels.len() >= MAX_CHANNELS {
            channels.clear();
        }
        channels.insert(key, client.clone());
        Ok(client)
    }
}

/// How servers connect to each other.
pub fn endpoint(address: &str) -> Result<Endpoint, String> {
    Ok(Endpoint::from_shared(format!("http://{address}"))
        .map_err(|e| format!("`{address}` is no address: {e}"))?
        .connect_timeout(Duration::from_secs(1))
        .tcp_nodelay(true)
        .initial_stream_window_size(limits::STREAM_WINDOW_BYTES)
        .initial_connection_window_size(limits::CONNECTION_WINDOW_BYTES)
        .max_frame_size(limits::FRAME_BYTES)
        // Without it a black-holed connection would hang until the kernel gives up.
        .http2_keep_alive_interval(Duration::from_millis(500))
        .keep_alive_timeout(Duration::from_secs(1))
        .keep_alive_while_idle(true))
}

/// Makes the connections of one group.
pub struct Network {
    pub peers: Arc<Peers>,
    pub group: GroupId,
    pub me: ReplicaId,
}

impl Network {
    fn connection(&self, target: u64, node: &BasicNode, bulk: bool) -> Connection {
        Connection {
            peers: self.peers.clone(),
            group: self.group,
            me: self.me,
            target,
            address: node.addr.clone(),
            bulk,
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

/// One group's way to one peer.
pub struct Connection {
    peers: Arc<Peers>,
    group: GroupId,
    me: ReplicaId,
    target: u64,
    address: String,
    bulk: bool,
}

/// Why a call to a peer failed; always worth a back-off, so always "unreachable" to openraft.
#[derive(Debug, thiserror::Error)]
enum CallError {
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
    async fn call<Q: Serialize, A: DeserializeOwned>(
        &self,
        kind: PeerCall,
        header: &Q,
        payloads: Vec<Bytes>,
        ttl: Duration,
    ) -> Result<A, CallError> {
        let bulk = self.bulk && !matches!(kind, PeerCall::Vote | PeerCall::PreVote);
        let mut client = self.peers.client(&self.address, bulk).map_err(CallError::Setup)?;
        let request = PeerRequest {
            group: self.group.to_wire(),
            from: self.me.0,
            to: self.target,
            call: kind as i32,
            header: wire::encode(header)?,
            payloads,
        };
        match tokio::time::timeout(ttl, client.call(request)).await {
            Ok(Ok(reply)) => Ok(wire::decode(&reply.into_inner().header)?),
            Ok(Err(status)) => {
                tokio::time::sleep(ERROR_PAUSE).await;
                Err(CallError::Status(status))
            }
            Err(_) => Err(CallError::Timeout(ttl)),
        }
    }
}

fn unreachable(e: CallError) -> RPCError<Types> {
    RPCError::Unreachable(Unreachable::new(&e))
}

impl RaftNetworkV2<Types> for Connection {
    type SnapshotData = SnapshotData;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<Types>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<Types>, RPCError<Types>> {
        let payloads = wire::payloads(&rpc.entries);
        // A megabyte on a slow link takes longer than a heartbeat's time.
        let ttl = option.hard_ttl().max(Duration::from_secs(5));
        self.call(PeerCall::Append, &rpc, payloads, ttl).await.map_err(unreachable)
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        self.call(PeerCall::Vote, &rpc, Vec::new(), option.hard_ttl()).await.map_err(unreachable)
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        self.call(PeerCall::PreVote, &rpc, Vec::new(), option.hard_ttl()).await.map_err(unreachable)
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<Types>, StreamingError<Types>> {
        let send = self.send_snapshot(vote, snapshot, option.hard_ttl().max(Duration::from_secs(5)));
        tokio::select! {
            closed = cancel => Err(StreamingError::Closed(closed)),
            sent = send => sent.map_err(|e| StreamingError::Unreachable(Unreachable::new(&e))),
        }
    }

    async fn transfer_leader(
        &mut self,
        req: TransferLeaderRequest<Types>,
        option: RPCOption,
    ) -> Result<openraft::raft::TransferLeaderResponse<Types>, RPCError<Types>> {
        self.call(PeerCall::TransferLeader, &req, Vec::new(), option.hard_ttl()).await.map_err(unreachable)
    }
}

/// The first piece: what the parts are of.
pub(super) fn snapshot_head(meta: &SnapshotMeta, image: &RawImage) -> Result<Bytes, WireError> {
    let lengths: Vec<u32> = image.parts.iter().map(|p| p.len() as u32).collect();
    wire::encode(&(meta, &image.head[..], lengths))
}

impl Connection {
    /// Piece by piece, each of at most one bucket: no second copy of the state is made. A piece that does not
    /// arrive is tried again; a transfer that was broken off goes on where it stopped.
    async fn send_snapshot(
        &self,
        vote: Vote,
        snapshot: Snapshot,
        ttl: Duration,
    ) -> Result<SnapshotResponse<Types>, CallError> {
        const TRIES: u32 = 5;
        let head = snapshot_head(&snapshot.meta, &snapshot.snapshot)?;
        let image = u64::from(crc32fast::hash(&head)) << 32
            | snapshot.meta.last_log_id.as_ref().map_or(0, |l| l.index & 0xffff_ffff);
        let parts = &snapshot.snapshot.parts;
        let of = 1 + parts.len() as u64;
        let mut index = 0u64;
        let mut failures = 0;
        loop {
            let payload = match index.checked_sub(1) {
                None => head.clone(),
                Some(i) => parts.get(i as usize).cloned().ok_or_else(|| {
                    CallError::Setup(format!("the follower asks for piece {index} of {of}"))
                })?,
            };
            let piece = SnapshotPiece { image, index, of, crc: crc32fast::hash(&payload) };
            match self.call(PeerCall::Snapshot, &(vote, piece), vec![payload], ttl).await {
                Ok(SnapshotAnswer::Done(response)) => return Ok(response),
                Ok(SnapshotAnswer::Next(next)) => {
                    failures = 0;
                    index = next;
                }
                Err(e) if failures + 1 == TRIES => return Err(e),
                Err(_) => failures += 1,
            }
        }
    }
}
