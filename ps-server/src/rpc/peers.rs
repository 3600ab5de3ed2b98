//! Raft messages of the other servers, handed to the right group.

use crate::{
    raft::{Group, GroupId},
    replicas::Replicas,
};
use paraft_proto::{PeerReply, PeerRequest, peers_server::Peers};
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// The service for servers.
#[derive(Clone)]
pub struct PeersService {
    /// The replicas of shards hosted here.
    pub replicas: Arc<Replicas>,
    /// The control group's replica.
    pub control: Group,
}

#[tonic::async_trait]
impl Peers for PeersService {
    async fn call(&self, request: Request<PeerRequest>) -> Result<Response<PeerReply>, Status> {
        let request = request.into_inner();
        let group = match GroupId::from_wire(request.group) {
            GroupId::Control => self.control.clone(),
            GroupId::Shard(shard) => {
                let replica = self.replicas.get(shard);
                replica.ok_or_else(|| Status::not_found(format!("{shard} is not on this server")))?.group
            }
        };
        let header = group.answer(request).await.map_err(|e| Status::invalid_argument(e.to_string()))?;
        Ok(Response::new(PeerReply { header }))
    }
}
