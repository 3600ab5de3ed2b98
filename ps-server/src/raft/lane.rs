//! A stream of appends over a lane: a connection of its own for each follower of a group, for as long as there is something to send.

use futures::{FutureExt, Stream, StreamExt, stream};
use paraft_lanes::{LaneError, Pool, Purpose, Receiver, send, shared::over_tcp};
use paraft_proto::{Incoming, PeerReply, PeerRequest, WithBulk, limits};
use paraft_tls::{Access, Wire, access::Expected};
use std::{task::Poll, time::Duration};
use tonic::Status;

/// Until a server has taken a connection, and said that it is a lane.
const DIAL_TIMEOUT: Duration = Duration::from_secs(1);

/// Makes a connection to a server, and begins a lane on it.
pub(super) async fn dial(address: &str, access: &Access) -> Result<Wire, LaneError> {
    let begins = async {
        let mut socket = access.dial(address, &Expected::SERVER).await?;
        paraft_lanes::dial(&mut socket, Purpose::Append).await?;
        Ok(socket)
    };
    tokio::time::timeout(DIAL_TIMEOUT, begins).await.unwrap_or(Err(LaneError::Silent(DIAL_TIMEOUT)))
}

/// Sends these requests for as long as somebody waits for their answers, until `is_over`. A refusal of the other side, which ends
/// the lane, is an error.
pub(super) fn carry(
    socket: Wire,
    requests: impl Stream<Item = WithBulk<PeerRequest>> + Send + Unpin + 'static,
    is_over: impl Fn() -> bool + Send + 'static,
) -> Incoming<PeerReply> {
    let (read, write) = over_tcp(socket);
    // Closed as a whole, when the last answer is here: what lies between may not know connections that are closed by half.
    let mut sends = Box::pin(send(write, None, requests.chain(stream::pending())));
    let mut replies = Receiver::<PeerReply>::new(read, limits::MAX_MESSAGE_BYTES, Pool::new(0));
    let mut broken = false;
    Incoming::of(stream::poll_fn(move |cx| {
        // One task does both. What breaks the sending ends the replies as well.
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
