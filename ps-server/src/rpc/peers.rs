//! Raft messages of the other servers, handed to the right group.

use crate::raft::{Group, Peers as PeerList};
use paraft_common::ShardId;
use paraft_proto::{PeerReply, PeerRequest, peers_server::Peers};
use std::{collections::BTreeMap, sync::Arc};
use tonic::{Request, Response, Status};

/// The service for servers.
#[derive(Clone)]
pub struct PeersService {
    /// The replicas hosted here.
    pub groups: Arc<BTreeMap<ShardId, Group>>,
    /// The fleet.
    pub peers: Arc<PeerList>,
}

#[tonic::async_trait]
impl Peers for PeersService {
    async fn call(&self, request: Request<PeerRequest>) -> Result<Response<PeerReply>, Status> {
        let request = request.into_inner();
        self.peers
            .recognise(request.from, request.incarnation)
            .map_err(|e| Status::failed_precondition(e.to_string()))?;
        let group = self.groups.get(&ShardId(request.shard)).ok_or_else(|| {
            Status::not_found(format!("shard {} is not on this server; do all servers have the same --servers, --shards and --replicas?", request.shard))
        })?;
        let header = group.answer(request).await.map_err(|e| Status::invalid_argument(e.to_string()))?;
        Ok(Response::new(PeerReply { header, incarnation: self.peers.incarnation() }))
    }
}
