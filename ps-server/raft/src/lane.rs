//! A stream of appends over a lane: a separate connection per follower of a group, open while there are appends to
//! send.

use futures::{FutureExt, Stream, StreamExt, stream};
use paraft_lanes::{LaneError, Pool, Purpose, Receiver, send, shared::over_tcp};
use paraft_proto::{Incoming, PeerReply, PeerRequest, WithBulk, limits};
use paraft_tls::{Access, Wire, access::Expected};
use std::{task::Poll, time::Duration};
use tonic::Status;

/// Timeout until a server has accepted a connection and confirmed the lane.
const DIAL_TIMEOUT: Duration = Duration::from_secs(1);

/// Connects to a server, and starts a lane on the connection.
pub(super) async fn dial(address: &str, access: &Access) -> Result<Wire, LaneError> {
    let begins = async {
        let mut socket = access.dial(address, &Expected::SERVER).await?;
        paraft_lanes::dial(&mut socket, Purpose::Append).await?;
        Ok(socket)
    };
    tokio::time::timeout(DIAL_TIMEOUT, begins).await.unwrap_or(Err(LaneError::Silent(DIAL_TIMEOUT)))
}

/// Sends these requests while their answers are consumed, until `is_over`. A refusal of the other side ends the
/// lane and is an error.
pub(super) fn carry(
    socket: Wire,
    requests: impl Stream<Item = WithBulk<PeerRequest>> + Send + Unpin + 'static,
    is_over: impl Fn() -> bool + Send + 'static,
) -> Incoming<PeerReply> {
    let (read, write) = over_tcp(socket);
    // Closed as a whole after the last answer: middleboxes may not support half-closed connections.
    let mut sends = Box::pin(send(write, None, requests.chain(stream::pending())));
    let mut replies = Receiver::<PeerReply>::new(read, limits::MAX_MESSAGE_BYTES, Pool::new(0));
    let mut broken = false;
    Incoming::of(stream::poll_fn(move |cx| {
        // One task does both. An error while sending ends the replies too.
        broken = broken || sends.poll_unpin(cx).is_ready();
        if is_over() {
            return Poll::Ready(None);
        }
        replies.poll_next_unpin(cx).map(|reply| reply.map(answer))
    }))
}

fn answer(reply: Result<WithBulk<PeerReply>, LaneError>) -> Result<WithBulk<PeerReply>, Status> {
    let reply = reply.map_err(|e| Status::unavailable(e.to_string()))?;
    if reply.message.refused.is_empty() { Ok(reply) } else { Err(Status::unavailable(reply.message.refused)) }
}
