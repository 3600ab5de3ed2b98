//! The service for workers, and for people who ask about jobs or switch them: each call to its answer.

use super::{
    audit::Audit,
    checkpoint,
    readers::Readers,
    rights::visitor,
    rows::{self, RowsStream},
    save,
    status::StatusService,
    switch,
    versions::VersionStream,
};
use crate::{
    connections::{self, Rank, Visitor},
    control::Agent,
    replicas::Replicas,
};
use paraft_proto::{
    CheckpointRequest, EditRowsReply, EditRowsRequest, Incoming, ReadRowsRequest, ReadVersionRequest,
    RefusalKind, SaveReply, SaveRequest, StatusReply, StatusRequest, SwitchModeReply, SwitchModeRequest,
    bulk, limits,
    services::{self, Handler},
    shards_server::{Shards, ShardsServer},
};
use paraft_tls::{Access, Need};
use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status, body::Body};
use tower::Service;

/// Timeout for a stream's first message: its client sends it as soon as it has the stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of streams without a first message, over all connections. Each connection has a bound of
/// its own, but many connections together would reach a million streams.
pub const MAX_UNOPENED_STREAMS: usize = 4096;

/// The service for workers.
#[derive(Clone)]
pub struct ShardsService {
    /// This server.
    pub server: u64,
    /// The shards hosted here.
    pub replicas: Arc<Replicas>,
    /// Knows the addresses of the other servers.
    pub agent: Arc<Agent>,
    /// Answers Status.
    pub status: StatusService,
    /// Numbers the streams.
    pub streams: Arc<AtomicU64>,
    /// Permits for streams without a first message: [`MAX_UNOPENED_STREAMS`].
    pub unopened: Arc<Semaphore>,
    /// The readers of weights.
    pub readers: Arc<Readers>,
    /// Records what people ask of jobs.
    pub audit: Arc<Audit>,
    /// How to reach other servers, to fetch their weights.
    pub access: Access,
}

#[tonic::async_trait]
impl Shards for ShardsService {
    type ReadRowsStream = RowsStream;
    type ReadVersionStream = VersionStream;

    async fn read_rows(&self, request: Request<ReadRowsRequest>) -> Result<Response<RowsStream>, Status> {
        let by = connections::of(request.extensions());
        Ok(Response::new(self.rows(request.into_inner(), by)))
    }

    async fn read_version(
        &self,
        request: Request<ReadVersionRequest>,
    ) -> Result<Response<VersionStream>, Status> {
        let by = connections::of(request.extensions());
        Ok(Response::new(self.version(request.into_inner(), by)))
    }

    async fn status(&self, request: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        connections::mark(request.extensions(), Rank::Reader);
        let by = visitor(request.extensions())?;
        let mut all = {
            let StatusRequest { digest, logs } = request.into_inner();
            self.status.reply(digest, logs).await
        };
        if !by.may_read_all() {
            // A job that has not begun has no name yet, and nothing to show.
            all.shards.retain(|s| by.sees(&s.job_name));
            all.stopped.clear();
        }
        Ok(Response::new(all))
    }

    async fn switch_mode(
        &self,
        request: Request<SwitchModeRequest>,
    ) -> Result<Response<SwitchModeReply>, Status> {
        connections::mark(request.extensions(), Rank::Reader);
        let by = visitor(request.extensions())?;
        let request = request.into_inner();
        let hosted = self.may(&by, Need::Submit, &request.job, request.shard).await;
        let reply = switch::reply(hosted, &request).await;
        let why = reply.refused.as_ref().map(|r| r.message.as_str());
        // A server that does not lead the shard refuses, and knows nothing of the order.
        if reply.refused.as_ref().is_none_or(|r| r.leader.is_empty()) {
            let act =
                format!("switch of job `{}`, shard {}, to {}", request.job, request.shard, request.mode);
            self.audit.note(&by, act, why);
        }
        Ok(Response::new(reply))
    }

    async fn edit_rows(&self, request: Request<EditRowsRequest>) -> Result<Response<EditRowsReply>, Status> {
        connections::mark(request.extensions(), Rank::Reader);
        let by = visitor(request.extensions())?;
        let request = request.into_inner();
        let hosted = self.may(&by, Need::Submit, &request.job, request.shard).await;
        let act = format!(
            "rows of table `{}` of job `{}`, partition {}: {} bytes of ids to remove, {} bytes of rows to write",
            request.table,
            request.job,
            request.partition,
            request.remove.len(),
            request.put.len()
        );
        let reply = rows::edit(hosted, request).await;
        let refused = reply.refused.as_ref();
        if refused.is_none_or(|r| r.leader.is_empty()) {
            self.audit.note(&by, act, refused.map(|r| r.message.as_str()));
        }
        Ok(Response::new(reply))
    }

    async fn save(&self, request: Request<SaveRequest>) -> Result<Response<SaveReply>, Status> {
        connections::mark(request.extensions(), Rank::Reader);
        let by = visitor(request.extensions())?;
        let request = request.into_inner();
        let hosted = self.may(&by, Need::Submit, &request.job, 0).await;
        let reply = save::reply(hosted, &request);
        let refused = reply.refused.as_ref();
        if refused.is_none_or(|r| r.leader.is_empty()) {
            let act = format!("checkpoint of job `{}` now", request.job);
            self.audit.note(&by, act, refused.map(|r| r.message.as_str()));
        }
        Ok(Response::new(reply))
    }
}

impl Handler for ShardsService {
    const NAME: &'static str = "paraft.v1.Shards";

    async fn handle(self, request: http::Request<Body>) -> http::Response<Body> {
        let visitor = connections::of(request.extensions());
        match request.uri().path() {
            services::EXCHANGE => {
                let inbound = Incoming::new(request.into_body(), limits::MAX_MESSAGE_BYTES);
                bulk::respond(self.exchange(inbound, visitor, None))
            }
            services::READ => match self.only(request).await {
                Ok(request) => bulk::respond(self.read(request, visitor)),
                Err(refused) => refused,
            },
            services::CHECKPOINT => match self.only(request).await {
                Ok(request) => bulk::respond(self.checkpoint(request, visitor).await),
                Err(refused) => refused,
            },
            _ => match ShardsServer::new(self).call(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            },
        }
    }
}

/// The refusal of a request whose connection is unknown to the door.
pub(super) fn unknown_caller() -> RefusalKind {
    RefusalKind::Denied("the peer has no identity".into())
}

/// Why a stream's first message was not received. Its client may try again: a machine with too much to do is slow to send.
pub(super) enum Unopened {
    TooMany,
    Late,
}

impl From<Unopened> for RefusalKind {
    fn from(why: Unopened) -> Self {
        Self::Overloaded(match why {
            Unopened::TooMany => format!("{MAX_UNOPENED_STREAMS} streams wait for their first message"),
            Unopened::Late => {
                format!("the stream's first message did not arrive within {} s", OPEN_TIMEOUT.as_secs())
            }
        })
    }
}

impl ShardsService {
    /// Waits for a stream's first message, with a timeout and a bound on streams that wait.
    pub(super) async fn opened<T>(&self, says: impl Future<Output = T>) -> Result<T, Unopened> {
        let Ok(_waits) = self.unopened.try_acquire() else { return Err(Unopened::TooMany) };
        tokio::time::timeout(OPEN_TIMEOUT, says).await.map_err(|_| Unopened::Late)
    }

    /// The only message of a request, or the error as a response.
    async fn only<M: bulk::Bulk>(&self, request: http::Request<Body>) -> Result<M, http::Response<Body>> {
        let only = services::only(request, limits::MAX_MESSAGE_BYTES);
        let refused = |why: Unopened| {
            let status = match why {
                Unopened::TooMany => Status::resource_exhausted,
                Unopened::Late => Status::deadline_exceeded,
            };
            services::refuse(status(RefusalKind::from(why).to_string()))
        };
        Ok(self.opened(only).await.map_err(refused)??.message)
    }

    async fn checkpoint(&self, request: CheckpointRequest, by: Option<Visitor>) -> checkpoint::Parts {
        let hosted = match &by {
            Some(by) => self.may(by, Need::Worker, &request.job, request.shard).await,
            None => Err(unknown_caller()),
        };
        if hosted.is_ok() {
            by.inspect(|v| v.is(Rank::Reader));
        }
        checkpoint::parts(hosted, request).await
    }
}
