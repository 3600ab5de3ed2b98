//! Sends Raft messages to the other servers.
//!
//! Two channels to each peer: bulk (entries, snapshots) and control (votes, heartbeats), so that a heartbeat
//! never waits behind megabytes. Every message names the sender's *incarnation*, a random number of its
//! process: the log is in memory, so a server that was restarted has forgotten its vote and must not be taken
//! for the one it was.

use super::{
    machine::SnapshotData,
    types::{Snapshot, Types, Vote},
    wire::{self, SnapshotPiece},
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
use paraft_common::{ServerId, ShardId, codec::put_f32_le};
use paraft_proto::{PeerCall, PeerRequest, limits, peers_client::PeersClient};
use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};
use std::{
    collections::HashMap,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tonic::transport::{Channel, Endpoint};

/// Pause before an error is given back: openraft's own back-off is skipped when a stream fails at once, and
/// its leader would spin at 100 % of a core while one follower is down.
const ERROR_PAUSE: Duration = Duration::from_millis(50);

/// The servers of the fleet and the connections to them. One for the whole process.
pub struct Peers {
    me: ServerId,
    incarnation: u64,
    addresses: Vec<String>,
    channels: Mutex<HashMap<(u64, bool), PeersClient<Channel>>>,
    seen: Mutex<HashMap<u64, u64>>,
    /// The log says once that this process is refused as a stranger.
    told: AtomicBool,
}

/// Why a peer is not talked to.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stranger {
    /// A known id, but another process.
    #[error(
        "server s{0} was restarted and has lost its memory: it cannot take part in this job again (the others go on while they are a majority)"
    )]
    Restarted(u64),
    /// No server of the list.
    #[error("s{0} is not in this server's list; do all servers have the same --servers?")]
    Unlisted(u64),
}

impl Peers {
    /// `addresses[i]` is server i's.
    pub fn new(me: ServerId, incarnation: u64, addresses: Vec<String>) -> Self {
        Self {
            me,
            incarnation,
            addresses,
            channels: Mutex::default(),
            seen: Mutex::default(),
            told: AtomicBool::new(false),
        }
    }

    /// This process's number.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Where a server listens.
    pub fn address(&self, server: ServerId) -> Option<&str> {
        self.addresses.get(server.0 as usize).map(String::as_str)
    }

    /// Checks that a peer is the process it was when it was first heard of.
    pub fn recognise(&self, server: u64, incarnation: u64) -> Result<(), Stranger> {
        // Also what bounds `seen`.
        if self.address(ServerId(server)).is_none() {
            return Err(Stranger::Unlisted(server));
        }
        match *self.seen.lock().entry(server).or_insert(incarnation) {
            first if first == incarnation => Ok(()),
            _ => Err(Stranger::Restarted(server)),
        }
    }

    fn client(&self, server: u64, bulk: bool) -> Result<PeersClient<Channel>, String> {
        if let Some(c) = self.channels.lock().get(&(server, bulk)) {
            return Ok(c.clone());
        }
        let address = self.address(ServerId(server)).ok_or_else(|| format!("no server s{server}"))?;
        let channel = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|e| format!("`{address}` is no address: {e}"))?
            .connect_timeout(Duration::from_secs(1))
            .tcp_nodelay(true)
            .initial_stream_window_size(limits::STREAM_WINDOW_BYTES)
            .initial_connection_window_size(limits::CONNECTION_WINDOW_BYTES)
            .max_frame_size(limits::FRAME_BYTES)
            // Without it a black-holed connection would hang until the kernel gives up.
            .http2_keep_alive_interval(Duration::from_millis(500))
            .keep_alive_timeout(Duration::from_secs(1))
            .keep_alive_while_idle(true)
            .connect_lazy();
        let client = PeersClient::new(channel).max_decoding_message_size(limits::MAX_MESSAGE_BYTES);
        self.channels.lock().insert((server, bulk), client.clone());
        Ok(client)
    }
}

/// Makes the connections of one group.
pub struct Network {
    pub peers: Arc<Peers>,
    pub shard: ShardId,
}

impl RaftNetworkFactory<Types> for Network {
    type Network = Connection;

    async fn new_client(&mut self, target: u64, _: &BasicNode) -> Connection {
        Connection { peers: self.peers.clone(), shard: self.shard, target, bulk: true }
    }

    async fn new_heartbeat_client(&mut self, target: u64, _: &BasicNode) -> Connection {
        Connection { peers: self.peers.clone(), shard: self.shard, target, bulk: false }
    }
}

/// One group's way to one peer.
pub struct Connection {
    peers: Arc<Peers>,
    shard: ShardId,
    target: u64,
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
    #[error(transparent)]
    Stranger(#[from] Stranger),
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
        let mut client = self.peers.client(self.target, bulk).map_err(CallError::Setup)?;
        let request = PeerRequest {
            shard: self.shard.0,
            from: self.peers.me.0,
            incarnation: self.peers.incarnation,
            call: kind as i32,
            header: wire::encode(header)?,
            payloads,
        };
        let reply = tokio::time::timeout(ttl, client.call(request)).await;
        let reply = match reply {
            Ok(Ok(r)) => r.into_inner(),
            Ok(Err(status)) => {
                if status.code() == tonic::Code::FailedPrecondition && !self.peers.told.swap(true, Relaxed) {
                    tracing::error!(peer = self.target, "{}", status.message());
                }
                tokio::time::sleep(ERROR_PAUSE).await;
                return Err(CallError::Status(status));
            }
            Err(_) => return Err(CallError::Timeout(ttl)),
        };
        self.peers.recognise(self.target, reply.incarnation)?;
        Ok(wire::decode(&reply.header)?)
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

impl Connection {
    /// Piece by piece, each of at most one bucket: no second copy of the state is made.
    async fn send_snapshot(
        &self,
        vote: Vote,
        snapshot: Snapshot,
        ttl: Duration,
    ) -> Result<SnapshotResponse<Types>, CallError> {
        let transfer = snapshot.meta.last_log_id.as_ref().map_or(0, |l| l.index);
        let of = 1 + snapshot.snapshot.vectors().count() as u64;
        let head = wire::encode(&(&snapshot.meta, snapshot.snapshot.header()))?;
        let mut index = 0;
        let mut reply: Option<SnapshotResponse<Types>> = None;
        let mut payload = head;
        let mut vectors = snapshot.snapshot.vectors();
        loop {
            let piece = SnapshotPiece { transfer, index, of };
            let answer: Option<SnapshotResponse<Types>> =
                self.call(PeerCall::Snapshot, &(vote, piece), vec![payload], ttl).await?;
            reply = answer.or(reply);
            index += 1;
            match vectors.next() {
                None => break,
                Some(v) => {
                    let mut le = Vec::with_capacity(v.len() * 4);
                    put_f32_le(v, &mut le);
                    payload = le.into();
                }
            }
        }
        reply.ok_or_else(|| CallError::Setup("the snapshot was not answered".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restarted_server_and_one_that_is_not_listed_are_strangers() {
        let peers = Peers::new(ServerId(0), 7, vec!["a:1".into(), "b:1".into()]);
        assert_eq!(peers.recognise(1, 55), Ok(()));
        assert_eq!(peers.recognise(1, 55), Ok(()));
        assert_eq!(peers.recognise(1, 56), Err(Stranger::Restarted(1)));
        assert_eq!(peers.recognise(1, 55), Ok(()), "the first one is still who it was");
        assert_eq!(peers.recognise(2, 1), Err(Stranger::Unlisted(2)));
        assert_eq!(peers.recognise(u64::MAX, 1), Err(Stranger::Unlisted(u64::MAX)));
    }
}
