//! Raft messages of the other servers, handed to the right group.

use crate::{
    connections::{self, Rank},
    raft::{Group, GroupId},
    replicas::Replicas,
};
use http::{Request, Response};
use paraft_proto::{
    PeerReply, PeerRequest, WithBulk, limits,
    services::{self, Handler},
};
use std::{sync::Arc, time::Duration};
use tonic::{Status, body::Body};

/// The service for servers.
#[derive(Clone)]
pub struct PeersService {
    /// The replicas of shards hosted here.
    pub replicas: Arc<Replicas>,
    /// The control group's replica.
    pub control: Group,
}

/// A peer's message holds up to 1 MiB of entries, or one larger entry, and their headers.
const MAX_MESSAGE_BYTES: usize = 4 * limits::MAX_MESSAGE_BYTES;

/// A message must be here whole within this time; who sent it has given up before.
const PATIENCE: Duration = Duration::from_secs(10);

impl Handler for PeersService {
    const NAME: &'static str = "paraft.v1.Peers";

    async fn handle(self, request: Request<Body>) -> Response<Body> {
        if request.uri().path() != services::CALL {
            return services::refuse(Status::unimplemented("no such method"));
        }
        let visitor = connections::of(request.extensions());
        let read = tokio::time::timeout(PATIENCE, services::only(request, MAX_MESSAGE_BYTES)).await;
        let request = match read {
            Ok(Ok(request)) => request,
            Ok(Err(refused)) => return refused,
            Err(_) => return services::refuse(Status::deadline_exceeded("its message did not come whole")),
        };
        match self.call(request).await {
            Ok(reply) => {
                // Only what a replica has answered shows that a member of its group asks.
                visitor.inspect(|v| v.is(Rank::Server));
                services::one(reply)
            }
            Err(status) => services::refuse(status),
        }
    }
}

impl PeersService {
    async fn call(&self, request: WithBulk<PeerRequest>) -> Result<PeerReply, Status> {
        let group = match GroupId::from_wire(request.message.group) {
            GroupId::Control => self.control.clone(),
            GroupId::Shard(shard) => {
                let replica = self.replicas.get(shard);
                replica.ok_or_else(|| Status::not_found(format!("{shard} is not on this server")))?.group
            }
        };
        let header = group.answer(request).await.map_err(|e| Status::invalid_argument(e.to_string()))?;
        Ok(PeerReply { header })
    }
}
