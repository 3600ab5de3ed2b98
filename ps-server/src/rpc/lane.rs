//! Streams over lanes: the same messages as over gRPC, and the same services.

use super::{
    peers::{self, PeersService},
    shards::ShardsService,
};
use crate::connections::{Lane, Visitor, watched};
use futures::{Stream, StreamExt};
use paraft_lanes::{
    DENIED, FrameError, LaneError, Pool, Purpose, Receiver, answer, send,
    shared::{ReadHalf, Shared, WriteHalf},
};
use paraft_proto::{Incoming, PeerRequest, ToShard, WithBulk, bulk::Bulk, limits};
use paraft_tls::Need;
use std::{future::ready, sync::Arc, time::Duration};
use tokio::{io::AsyncWriteExt, sync::oneshot};
use tonic::Status;

/// Time for the last messages to go out after the peer has fallen silent, or has ended.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The services over lanes.
#[derive(Clone)]
pub struct Lanes {
    /// Workers.
    pub shards: ShardsService,
    /// Leaders of groups with a replica here.
    pub peers: PeersService,
    /// Buffers for their messages.
    pub pool: Arc<Pool>,
}

impl Lanes {
    /// Answers a lane until it ends.
    pub async fn serve(self, lane: Lane) {
        let (purpose, visitor) = (lane.purpose, lane.visitor());
        let ((read, mut write, shared), until_closing) = lane.parts();
        let serves = async {
            let need = match purpose {
                Purpose::Exchange => Need::Worker,
                Purpose::Append => Need::Peer,
            };
            if !visitor.rights().are_enough_for(need, None) {
                visitor.denied("a lane", need).await;
                write.write_all(DENIED).await?;
                return Ok(write.shutdown().await?);
            }
            answer(&mut write, purpose).await?;
            match purpose {
                Purpose::Exchange => self.exchange(read, write, shared, visitor).await,
                Purpose::Append => {
                    let requests = self.messages::<PeerRequest>(read, peers::MAX_MESSAGE_BYTES);
                    let replies = self.peers.clone().appends_on_lane(Incoming::of(requests), visitor);
                    send(write, shared, Box::pin(replies)).await
                }
            }
        };
        tokio::select! {
            served = serves => if let Err(error) = served {
                tracing::debug!(%error, "a lane ended");
            },
            () = until_closing => {}
        }
    }

    /// A worker's stream to a shard.
    async fn exchange(
        &self,
        read: ReadHalf,
        write: WriteHalf,
        shared: Option<Arc<Shared>>,
        visitor: Visitor,
    ) -> Result<(), LaneError> {
        let (over, ended) = oneshot::channel::<()>();
        // Dropping the stream drops `over` with it.
        let messages = self.messages::<ToShard>(read, limits::MAX_MESSAGE_BYTES).inspect(move |_| {
            let _ = &over;
        });
        let replies = self.shards.exchange(Incoming::of(messages), Some(visitor.clone()), shared.clone());
        let sends = send(write, shared, watched(replies.filter_map(|r| ready(r.ok())), &visitor));
        let ended = async {
            let _ = ended.await;
            tokio::time::sleep(FLUSH_TIMEOUT).await;
        };
        tokio::select! { sent = sends => sent, () = ended => Ok(()) }
    }

    fn messages<M: Bulk>(
        &self,
        read: ReadHalf,
        limit: usize,
    ) -> impl Stream<Item = Result<WithBulk<M>, Status>> + Send + use<M> {
        let messages = Receiver::new(read, limit, self.pool.clone());
        messages.map(|m| m.map_err(|e| status(&e)))
    }
}

/// As gRPC has it: a message that cannot be read is the peer's mistake, the end of a connection is not.
fn status(e: &LaneError) -> Status {
    match e {
        LaneError::Frame(FrameError::CutShort)
        | LaneError::Io(_)
        | LaneError::Silent(_)
        | LaneError::Refused(_)
        | LaneError::NoLanes => Status::unavailable(e.to_string()),
        LaneError::Frame(_) => Status::invalid_argument(e.to_string()),
    }
}

#[cfg(test)]
#[path = "lane_tests.rs"]
mod tests;
