//! A worker's stream to a shard over a lane: the same messages as over gRPC, and the same service.

use super::exchange::ShardsService;
use crate::connections::Lane;
use futures::StreamExt;
use paraft_lanes::{Purpose, Receiver, answer, send};
use paraft_proto::{Incoming, ToShard, limits};
use std::{future::ready, time::Duration};
use tokio::sync::oneshot;
use tonic::Status;

/// What was said last may still be on its way when the other side has gone silent, or has said its last.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Answers a lane until it ends.
pub async fn lane(service: ShardsService, lane: Lane) {
    let (purpose, visitor) = (lane.purpose, lane.visitor());
    let ((read, mut write, shared), must_go) = lane.parts();
    let serves = async {
        answer(&mut write, purpose).await?;
        match purpose {
            Purpose::Exchange => {
                let (over, ended) = oneshot::channel::<()>();
                let messages =
                    Receiver::<ToShard>::new(read, limits::MAX_MESSAGE_BYTES, service.pool.clone());
                // Who lets the stream go lets `over` go with it.
                let messages = messages.map(move |m| {
                    let _ = &over;
                    m.map_err(|e| Status::unavailable(e.to_string()))
                });
                let replies = service.exchange(Incoming::of(messages), Some(visitor), shared.clone());
                let sends = send(write, shared, replies.filter_map(|r| ready(r.ok())));
                let ended = async {
                    let _ = ended.await;
                    tokio::time::sleep(LAST_WORDS).await;
                };
                tokio::select! { sent = sends => sent, () = ended => Ok(()) }
            }
        }
    };
    tokio::select! {
        served = serves => if let Err(error) = served {
            tracing::debug!(%error, "a lane ended");
        },
        () = must_go => {}
    }
}
