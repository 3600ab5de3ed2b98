//! Sends Raft messages to the other servers.
//!
//! Two channels to each peer: bulk (snapshots, and entries that use no lane) and control (votes, heartbeats), so
//! that a heartbeat never waits behind megabytes. Every message names its target replica: a replica that lost its
//! log has a new name, and does not answer for the old one.

use super::{
    image::RawImage,
    replica::ReplicaId,
    replicated::LogChange,
    types::{Snapshot, SnapshotData, SnapshotMeta, Types, Vote},
    wire::{self, SnapshotAnswer, SnapshotPiece},
};
use crate::raft::wire::WireError;
use bytes::Bytes;
use futures::{
    Stream, StreamExt,
    future::BoxFuture,
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
use paraft_common::{Payload, ServerId};
use paraft_proto::{PeerCall, PeerRequest, WithBulk, limits, services};
use paraft_tls::Access;
use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};
use std::{
    collections::HashMap,
    future::Future,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::broadcast;
use tonic::transport::{Channel, Endpoint};

/// Pause before an error is returned. openraft backs off from appends that fail one by one; but if our
/// `stream_append` fails before it takes a request, the leader would spin at a whole core while one follower is
/// down (deploy/tests/cli/hazards.rs). Votes and pieces of snapshots are retried at once.
pub(super) const ERROR_DELAY: Duration = Duration::from_millis(50);

/// The connections to the other servers, one set per process.
pub struct Peers {
    access: Access,
    channels: Mutex<HashMap<(String, bool), Channel>>,
    /// Addresses that support gRPC and no lanes, and since when that is known.
    http_alone: Mutex<HashMap<String, Instant>>,
    /// The last known address of each server. A group's membership may hold old addresses: if all members have
    /// moved at once, no leader can update it.
    heard_at: Mutex<HashMap<ServerId, String>>,
    fleet: AtomicU64,
    began: Instant,
    /// Servers whose connection to this one has closed.
    closings: broadcast::Sender<ServerId>,
}

#[cfg(test)]
impl Default for Peers {
    fn default() -> Self {
        Self::new(Access::Insecure)
    }
}

impl Peers {
    /// No connections yet. `access`: how to reach the servers.
    pub fn new(access: Access) -> Self {
        let closings = broadcast::channel(CLOSINGS_CAPACITY).0;
        Self {
            access,
            channels: Mutex::default(),
            http_alone: Mutex::default(),
            heard_at: Mutex::default(),
            fleet: AtomicU64::default(),
            began: Instant::now(),
            closings,
        }
    }
}

/// Connections that may close at once. If a group misses one, it still checks its leader.
const CLOSINGS_CAPACITY: usize = 64;

/// A dial without a result in this time proves nothing. Longer than a busy or distant host takes.
const DIAL_TIMEOUT: Duration = Duration::from_millis(500);

/// What a dial shows of the process at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DialResult {
    /// The host is up, and no process listens.
    Refused,
    /// A process listens.
    Taken,
    /// Neither: no answer, or no route.
    Unknown,
}

async fn dial(address: &str) -> DialResult {
    let Ok(places) = tokio::net::lookup_host(address).await else { return DialResult::Unknown };
    let mut said = DialResult::Unknown;
    for place in places {
        match tokio::net::TcpStream::connect(place).await {
            Ok(_) => return DialResult::Taken,
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => said = DialResult::Refused,
            Err(_) => return DialResult::Unknown,
        }
    }
    said
}

/// Maximum of open channels: two for each server of a large fleet, and for those that have left.
const MAX_CHANNELS: usize = 1024;

/// A server without lanes is tried again after this long, with the next stream: it may have a newer release by now.
const LANES_RETRY_DELAY: Duration = Duration::from_secs(60);

impl Peers {
    /// Sets the fleet of this server: every message names it from now on.
    pub fn belong(&self, fleet: u64) {
        self.fleet.store(fleet, Relaxed);
    }

    /// The fleet's number, or 0.
    pub fn fleet(&self) -> u64 {
        self.fleet.load(Relaxed)
    }

    /// Records that a server of this fleet has answered at this address.
    pub fn is_at(&self, server: ServerId, address: &str) {
        let mut all = self.heard_at.lock();
        if all.len() >= MAX_CHANNELS {
            all.clear();
        }
        if all.get(&server).is_none_or(|a| a != address) {
            all.insert(server, address.to_string());
        }
    }

    fn last_address(&self, server: ServerId) -> Option<String> {
        self.heard_at.lock().get(&server).cloned()
    }

    /// How to reach the servers.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// The uptime of this process.
    pub(super) fn runs(&self) -> Duration {
        self.began.elapsed()
    }

    /// Reports that a connection from this server has closed.
    pub fn closed(&self, server: ServerId) {
        let _ = self.closings.send(server); // there may be no receiver
    }

    /// Receives the servers whose connections close from now on.
    pub(super) fn closings(&self) -> broadcast::Receiver<ServerId> {
        self.closings.subscribe()
    }

    /// Whether lanes may be tried at an address.
    pub(super) fn speaks_lanes(&self, address: &str) -> bool {
        self.http_alone.lock().get(address).is_none_or(|since| since.elapsed() >= LANES_RETRY_DELAY)
    }

    /// Records that this address answered gRPC, and not a lane if one was tried.
    pub(super) fn speaks_http_alone(&self, address: &str) {
        if self.speaks_lanes(address) {
            let mut known = self.http_alone.lock();
            if known.len() >= MAX_CHANNELS {
                known.clear();
            }
            known.insert(address.to_string(), Instant::now());
        }
    }

    pub(super) fn channel(&self, address: &str, bulk: bool) -> Result<Channel, String> {
        let key = (address.to_string(), bulk);
        let mut channels = self.channels.lock();
        if let Some(c) = channels.get(&key) {
            return Ok(c.clone());
        }
        let channel = channel(address, &self.access)?;
        if channels.len() >= MAX_CHANNELS {
            channels.clear();
        }
        channels.insert(key, channel.clone());
        Ok(channel)
    }
}

/// A connection to another server, opened on first use.
pub fn channel(address: &str, access: &Access) -> Result<Channel, String> {
    Ok(endpoint(address)?.connect_with_connector_lazy(access.connector()))
}

fn endpoint(address: &str) -> Result<Endpoint, String> {
    Ok(Endpoint::from_shared(format!("http://{address}"))
        .map_err(|e| format!("`{address}` is no address: {e}"))?
        .connect_timeout(Duration::from_secs(1))
        .initial_stream_window_size(limits::STREAM_WINDOW_BYTES)
        .initial_connection_window_size(limits::CONNECTION_WINDOW_BYTES)
        .max_frame_size(limits::FRAME_BYTES)
        // Otherwise a black-holed connection would hang until the kernel gives up.
        .http2_keep_alive_interval(Duration::from_millis(500))
        .keep_alive_timeout(Duration::from_secs(1))
        // An idle connection needs no probes: a fleet has three for each pair of servers.
        .keep_alive_while_idle(false))
}

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
            bulk,
            silent: false,
        }
    }
}

impl<C: LogChange> RaftNetworkFactory<Types<C>> for Network {
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
    bulk: bool,
    /// The last lane that was tried got no answer.
    pub(super) silent: bool,
}

/// The answers to a stream of appends.
pub(super) type Answers<'s, C> = BoxStream<'s, Result<StreamAppendResult<Types<C>>, RPCError<Types<C>>>>;
type AppendStream<'s, C> = Result<Answers<'s, C>, RPCError<Types<C>>>;

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
        let dialled = tokio::time::timeout(DIAL_TIMEOUT, dial(&self.address())).await;
        dialled.unwrap_or(DialResult::Unknown)
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
    async fn paced<Q: Serialize, A: DeserializeOwned>(
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

pub(super) fn unreachable<C: LogChange>(e: CallError) -> RPCError<Types<C>> {
    RPCError::Unreachable(Unreachable::new(&e))
}

impl<C: LogChange> RaftNetworkV2<Types<C>> for Connection {
    type SnapshotData = SnapshotData;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<Types<C>>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<Types<C>>, RPCError<Types<C>>> {
        let payloads = wire::payloads(&rpc.entries);
        // A megabyte on a slow link takes longer than a heartbeat's timeout.
        let ttl = option.hard_ttl().max(Duration::from_secs(5));
        self.paced(PeerCall::Append, &rpc, payloads, ttl).await.map_err(unreachable)
    }

    fn stream_append<'s, S>(&'s mut self, mut input: S, _: RPCOption) -> BoxFuture<'s, AppendStream<'s, C>>
    where
        S: Stream<Item = AppendEntriesRequest<Types<C>>> + OptionalSend + Unpin + 'static,
    {
        Box::pin(async move {
            // Before any dial: openraft backs off before it provides a request.
            let Some(first) = input.next().await else { return Ok(stream::empty().boxed()) };
            self.appends(first, input).await.map_err(unreachable)
        })
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<Types<C>>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types<C>>, RPCError<Types<C>>> {
        self.paced(PeerCall::Vote, &rpc, Vec::new(), option.hard_ttl()).await.map_err(unreachable)
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<Types<C>>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types<C>>, RPCError<Types<C>>> {
        self.paced(PeerCall::PreVote, &rpc, Vec::new(), option.hard_ttl()).await.map_err(unreachable)
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<Types<C>>, StreamingError<Types<C>>> {
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
        req: TransferLeaderRequest<Types<C>>,
        option: RPCOption,
    ) -> Result<openraft::raft::TransferLeaderResponse<Types<C>>, RPCError<Types<C>>> {
        self.paced(PeerCall::TransferLeader, &req, Vec::new(), option.hard_ttl()).await.map_err(unreachable)
    }
}

/// The first piece: the metadata of the parts.
pub(super) fn snapshot_head(meta: &SnapshotMeta, image: &RawImage) -> Result<Bytes, WireError> {
    let lengths: Vec<u32> = image.parts.iter().map(|p| p.len() as u32).collect();
    wire::encode(&(meta, &image.head[..], lengths))
}

impl Connection {
    /// Sends piece by piece, each at most one bucket, without a second copy of the state. A piece that does not
    /// arrive is retried; an interrupted transfer resumes where it stopped.
    async fn send_snapshot(&self, vote: Vote, snapshot: Snapshot, ttl: Duration) -> Result<Vote, CallError> {
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
                None => head.clone().into(),
                Some(i) => parts.get(i as usize).cloned().ok_or_else(|| {
                    CallError::Setup(format!("the follower asks for piece {index} of {of}"))
                })?,
            };
            let piece = SnapshotPiece { image, index, of, crc: wire::checksum(&payload) };
            match self.paced(PeerCall::Snapshot, &(vote, piece), vec![payload], ttl).await {
                Ok(SnapshotAnswer::Done(vote)) => return Ok(vote),
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

#[cfg(test)]
#[path = "network_tests.rs"]
mod tests;
