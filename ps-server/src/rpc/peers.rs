//! Raft messages of the other servers, handed to the right group.

use crate::{
    connections::{self, Rank},
    control::ControlReplica,
    raft::{Peers, ReplicaId},
    replicas::Replicas,
    replicated::GroupId,
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
    pub control: Arc<ControlReplica>,
    /// Which fleet this is.
    pub peers: Arc<Peers>,
}

/// A peer's message holds up to 1 MiB of entries, or one larger entry, and their headers.
const MAX_MESSAGE_BYTES: usize = 4 * limits::MAX_MESSAGE_BYTES;

/// A message must be here whole within this time; who sent it has given up before.
const TIMEOUT: Duration = Duration::from_secs(10);

impl Handler for PeersService {
    const NAME: &'static str = "paraft.v1.Peers";

    async fn handle(self, request: Request<Body>) -> Response<Body> {
        if request.uri().path() != services::CALL {
            return services::refuse(Status::unimplemented("no such method"));
        }
        let visitor = connections::of(request.extensions());
        let read = tokio::time::timeout(TIMEOUT, services::only(request, MAX_MESSAGE_BYTES)).await;
        let request: WithBulk<PeerRequest> = match read {
            Ok(Ok(request)) => request,
            Ok(Err(refused)) => return refused,
            Err(_) => return services::refuse(Status::deadline_exceeded("its message did not come whole")),
        };
        let from = ReplicaId(request.message.from).server();
        match self.call(request).await {
            Ok(reply) => {
                // Only what a replica has answered shows that a member of its group asks.
                if let Some(visitor) = visitor {
                    visitor.is(Rank::Server);
                    let peers = self.peers.clone();
                    visitor.when_closed(move || peers.closed(from));
                }
                services::one(reply)
            }
            Err(status) => services::refuse(status),
        }
    }
}

impl PeersService {
    async fn call(&self, request: WithBulk<PeerRequest>) -> Result<PeerReply, Status> {
        let id = GroupId::from_wire(request.message.group);
        let (own, theirs) = (self.peers.fleet(), request.message.fleet);
        // Before the founding nobody has a fleet, and only the control group talks.
        let founding = id == GroupId::Control && (own == 0 || theirs == 0);
        if own != theirs && !founding {
            return Err(Status::permission_denied(format!(
                "this server belongs to another fleet: a message for {id} came from fleet {theirs:016x}"
            )));
        }
        let group = match id {
            GroupId::Control => self.control.get(),
            GroupId::Shard(shard) => {
                let replica = self.replicas.get(shard);
                replica.ok_or_else(|| Status::not_found(format!("{shard} is not on this server")))?.group
            }
        };
        let from = ReplicaId(request.message.from);
        if !group.knows(from) {
            return Err(Status::permission_denied(format!(
                "{from} is no member of {id}, as far as is known here"
            )));
        }
        let header = group.answer(request).await.map_err(|e| Status::invalid_argument(e.to_string()))?;
        Ok(PeerReply { header })
    }
}
