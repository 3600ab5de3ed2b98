//! The methods whose messages carry bulk, written by hand; the others are generated.

use crate::{
    CheckpointPart, CheckpointRequest, FromShard, PeerReply, PeerRequest, ReadRequest, ToShard,
    bulk::{self, Incoming, WithBulk},
    limits,
};
use futures::{Stream, future::BoxFuture, stream};
use http::{Request, Response};
use std::{
    convert::Infallible,
    future::{Future, ready},
    task::{Context, Poll},
};
use tonic::{Status, body::Body, server::NamedService, transport::Channel};
use tower::Service;

/// `Shards.Exchange`.
pub const EXCHANGE: &str = "/paraft.v1.Shards/Exchange";
/// `Shards.Read`.
pub const READ: &str = "/paraft.v1.Shards/Read";
/// `Shards.Checkpoint`.
pub const CHECKPOINT: &str = "/paraft.v1.Shards/Checkpoint";
/// `Peers.Call`.
pub const CALL: &str = "/paraft.v1.Peers/Call";
/// `Peers.Append`.
pub const APPEND: &str = "/paraft.v1.Peers/Append";

/// `Shards.Exchange`: a worker's stream to a shard.
pub async fn exchange(
    channel: &Channel,
    messages: impl Stream<Item = WithBulk<ToShard>> + Send + Unpin + 'static,
) -> Result<Incoming<FromShard>, Status> {
    bulk::call(channel, EXCHANGE, messages, limits::MAX_MESSAGE_BYTES).await
}

/// `Shards.Read`: weights from any replica.
pub async fn read(channel: &Channel, request: ReadRequest) -> Result<Incoming<FromShard>, Status> {
    let request = stream::iter([WithBulk::from(request)]);
    bulk::call(channel, READ, request, limits::MAX_MESSAGE_BYTES).await
}

/// `Shards.Checkpoint`: one shard's part of a checkpoint.
pub async fn checkpoint(
    channel: &Channel,
    request: CheckpointRequest,
) -> Result<Incoming<CheckpointPart>, Status> {
    let request = stream::iter([WithBulk::from(request)]);
    bulk::call(channel, CHECKPOINT, request, limits::MAX_MESSAGE_BYTES).await
}

/// `Peers.Call`: one Raft message and its answer.
pub async fn peer_call(channel: &Channel, request: WithBulk<PeerRequest>) -> Result<PeerReply, Status> {
    let answer = bulk::call(channel, CALL, stream::iter([request]), limits::MAX_MESSAGE_BYTES).await?;
    Ok(answer.only().await?.message)
}

/// `Peers.Append`: a leader's appends to a follower, and its answers.
pub async fn peer_appends(
    channel: &Channel,
    requests: impl Stream<Item = WithBulk<PeerRequest>> + Send + Unpin + 'static,
) -> Result<Incoming<PeerReply>, Status> {
    bulk::call(channel, APPEND, requests, limits::MAX_MESSAGE_BYTES).await
}

/// The handler of the requests to one gRPC service.
pub trait Handler: Clone + Send + Sync + 'static {
    /// The service's name in the path of its methods.
    const NAME: &'static str;

    /// Answers one request.
    fn handle(self, request: Request<Body>) -> impl Future<Output = Response<Body>> + Send;
}

/// A [`Handler`] as tonic's router takes it.
#[derive(Clone, Debug)]
pub struct Route<H>(pub H);

impl<H: Handler> NamedService for Route<H> {
    const NAME: &'static str = H::NAME;
}

impl<H: Handler> Service<Request<Body>> for Route<H> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let handler = self.0.clone();
        Box::pin(async move { Ok(handler.handle(request).await) })
    }
}

/// The only message of a request.
///
/// # Errors
/// The error, as a response.
pub async fn only<M: bulk::Bulk>(
    request: Request<Body>,
    limit: usize,
) -> Result<WithBulk<M>, Response<Body>> {
    Incoming::new(request.into_body(), limit).only().await.map_err(refuse)
}

/// A response that is one message.
pub fn one<M: bulk::Bulk>(message: M) -> Response<Body> {
    bulk::respond(stream::once(ready(Ok(WithBulk::from(message)))))
}

/// A response that is only a status.
pub fn refuse(status: Status) -> Response<Body> {
    status.into_http()
}
