//! Raft messages of the other servers, passed to the right group.

use crate::{
    connections::{self, Rank, Visitor},
    control::ControlReplica,
    raft::{Peers, ReplicaId, WireError, ended_here},
    replicas::Replicas,
    replicated::{Group, GroupId},
};
use futures::{FutureExt, Stream, StreamExt, TryStreamExt, future::ready, stream};
use http::{Request, Response};
use paraft_common::ServerId;
use paraft_proto::{
    Incoming, PeerCall, PeerReply, PeerRequest, WithBulk, bulk, limits,
    services::{self, Handler},
};
use std::{sync::Arc, time::Duration};
use tonic::{Code, Status, body::Body};

/// The service for servers.
#[derive(Clone)]
pub struct PeersService {
    /// The replicas of shards hosted here.
    pub replicas: Arc<Replicas>,
    /// The control group's replica.
    pub control: Arc<ControlReplica>,
    /// The connections to other servers, which know this fleet.
    pub peers: Arc<Peers>,
}

/// A peer's message holds up to 1 MiB of entries, or one larger entry, and their headers.
pub(super) const MAX_MESSAGE_BYTES: usize = 4 * limits::MAX_MESSAGE_BYTES;

/// A message must be complete within this time; its sender gives up earlier.
const TIMEOUT: Duration = Duration::from_secs(10);

impl Handler for PeersService {
    const NAME: &'static str = "paraft.v1.Peers";

    async fn handle(self, request: Request<Body>) -> Response<Body> {
        let visitor = connections::of(request.extensions());
        match request.uri().path() {
            services::CALL => {}
            services::APPEND => {
                let requests = Incoming::new(request.into_body(), MAX_MESSAGE_BYTES);
                return bulk::respond(Box::pin(self.appends(requests, visitor)));
            }
            _ => return services::refuse(Status::unimplemented("no such method")),
        }
        let read = tokio::time::timeout(TIMEOUT, services::only(request, MAX_MESSAGE_BYTES)).await;
        let request: WithBulk<PeerRequest> = match read {
            Ok(Ok(request)) => request,
            Ok(Err(refused)) => return refused,
            Err(_) => return services::refuse(Status::deadline_exceeded("its message did not come whole")),
        };
        let from = ReplicaId(request.message.from).server();
        match self.call(request).await {
            Ok(reply) => {
                self.answered(visitor.as_ref(), from);
                services::one(reply)
            }
            Err(status) => services::refuse(status),
        }
    }
}

impl PeersService {
    /// Marks the connection as a server's: only an answer of a replica shows that a member of its group asks.
    fn answered(&self, visitor: Option<&Visitor>, from: ServerId) {
        let Some(visitor) = visitor else { return };
        visitor.is(Rank::Server);
        let peers = self.peers.clone();
        visitor.when_closed(move || peers.closed(from));
    }

    /// Answers a leader's stream of appends over a lane, whose end has no status.
    pub(super) fn appends_on_lane(
        self,
        requests: Incoming<PeerRequest>,
        visitor: Visitor,
    ) -> impl Stream<Item = WithBulk<PeerReply>> + Send {
        // The end of a lane says nothing of the process: an idle lane ends. Heartbeats have a connection of
        // their own.
        visitor.when_closed(|| ());
        let answers = self.appends(requests, Some(visitor));
        answers.scan(false, |over, answer| {
            let next = (!*over).then(|| match answer {
                Ok(answer) => answer,
                Err(status) => {
                    *over = true;
                    PeerReply { refused: format!("refused: {}", status.message()), ..PeerReply::default() }
                        .into()
                }
            });
            ready(next)
        })
    }

    /// Answers a leader's stream of appends.
    fn appends(
        self,
        mut requests: Incoming<PeerRequest>,
        visitor: Option<Visitor>,
    ) -> impl Stream<Item = Result<WithBulk<PeerReply>, Status>> + Send {
        let answers = async move {
            let first = tokio::time::timeout(TIMEOUT, requests.message()).await;
            let late = |_| Status::deadline_exceeded("its first message did not come whole");
            let Some(first) = first.map_err(late)?? else { return Ok(stream::empty().boxed()) };
            let group = self.group(&first.message)?;
            let PeerRequest { group: id, from, to, fleet, .. } = first.message;
            if ReplicaId(to) != group.me() {
                return Err(Status::invalid_argument(format!("{} is not here any more", ReplicaId(to))));
            }
            let same = move |r: &PeerRequest| (r.group, r.from, r.to, r.fleet) == (id, from, to, fleet);
            let other = || WireError::new("an append of another group or replica");
            let requests = stream::once(ready(Ok(first))).chain(requests).map(move |request| {
                let request = request.map_err(WireError::new)?;
                if same(&request.message) { Ok(request) } else { Err(other()) }
            });
            let answers = group.answer_appends(requests).map(move |answer| {
                let header = answer.map_err(|e| Status::invalid_argument(e.to_string()))?;
                self.answered(visitor.as_ref(), ReplicaId(from).server());
                Ok(PeerReply { header, ..PeerReply::default() }.into())
            });
            Ok(answers.boxed())
        };
        answers.into_stream().try_flatten()
    }

    async fn call(&self, request: WithBulk<PeerRequest>) -> Result<PeerReply, Status> {
        let refused = |e: WireError| Status::invalid_argument(e.to_string());
        let group = match self.group(&request.message) {
            // Also for a restarted server that has no replica yet.
            Err(e) if e.code() == Code::NotFound && self.is_asked_for_its_end(&request.message) => {
                return Ok(PeerReply {
                    header: ended_here(&self.peers).map_err(refused)?,
                    ..PeerReply::default()
                });
            }
            group => group?,
        };
        let header = group.answer(request).await.map_err(refused)?;
        Ok(PeerReply { header, ..PeerReply::default() })
    }

    fn is_asked_for_its_end(&self, message: &PeerRequest) -> bool {
        let server = self.control.get().me().server();
        message.call() == PeerCall::Ended && ReplicaId(message.to).server() == server
    }

    /// The local replica of a message's group, if the message is of this fleet and from a member.
    fn group(&self, message: &PeerRequest) -> Result<Group, Status> {
        let id = GroupId::from_wire(message.group);
        let (own, theirs) = (self.peers.fleet(), message.fleet);
        // Before the founding no server has a fleet, and only the control group communicates.
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
        let from = ReplicaId(message.from);
        if !group.is_known_member(from) {
            return Err(Status::permission_denied(format!(
                "{from} is no member of {id}, as far as is known here"
            )));
        }
        Ok(group)
    }
}
