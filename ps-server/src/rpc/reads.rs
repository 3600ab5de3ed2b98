//! Weights for readers, from any replica.

use super::{
    check_protocol, convert,
    exchange::Replies,
    readers::Reader,
    shards::{ShardsService, unknown_caller},
};
use crate::{
    connections::{Rank, Visitor},
    replicas::Replica,
};
use paraft_proto::{FromShard, ReadRequest, Refusal, RefusalKind, from_shard};
use paraft_tls::Need;
use std::{sync::atomic::Ordering::Relaxed, time::Duration};
use tokio::sync::mpsc;
use tokio_stream::{StreamExt, wrappers::ReceiverStream};

/// Copies in a stream that wait for the transport: this is a stream's part of the common bound.
const MAX_WAITING_COPIES: usize = 1;
/// A reader that waits for a version checks this long after an entry was applied: many readers must not wake
/// as often as there are updates.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl ShardsService {
    pub(super) fn read(&self, request: ReadRequest, visitor: Option<Visitor>) -> Replies {
        let service = self.clone();
        replies(|out| async move { service.serve_read(request, visitor, &out).await })
    }

    async fn serve_read(
        &self,
        request: ReadRequest,
        visitor: Option<Visitor>,
        out: &mpsc::Sender<FromShard>,
    ) -> Result<(), Refusal> {
        check_protocol(request.protocol)?;
        let by = visitor.as_ref().ok_or_else(unknown_caller)?;
        let hosted = self.may(by, Need::Reader, &request.job, request.shard).await?;
        let shard = hosted.shard.id();
        if request.founding != 0 && request.founding != hosted.founding {
            // This replica cannot tell which of the two foundings is the current one: its own may be
            // outdated.
            return Err(RefusalKind::OtherFounding(shard).into());
        }
        let reader = self.readers.reader(&by.rights().to_string())?;
        visitor.iter().for_each(|v| v.is(Rank::Reader));
        send_weights(&hosted, request, &reader, out).await
    }
}

/// What a task sends; its refusal is the last message.
pub(super) fn replies<F>(sends: impl FnOnce(mpsc::Sender<FromShard>) -> F) -> Replies
where
    F: Future<Output = Result<(), Refusal>> + Send + 'static,
{
    let (tx, rx) = mpsc::channel(MAX_WAITING_COPIES);
    let sending = sends(tx.clone());
    tokio::spawn(async move {
        if let Err(refusal) = sending.await {
            let _ = tx.send(refusal.into()).await;
        }
    });
    Box::pin(ReceiverStream::new(rx).map(|message: FromShard| Ok(message.into())))
}

/// Sends the current weights of a replica, until all are sent or the client is gone.
pub(super) async fn send_weights(
    hosted: &Replica,
    request: ReadRequest,
    reader: &Reader,
    out: &mpsc::Sender<FromShard>,
) -> Result<(), Refusal> {
    let shard = hosted.shard.id();
    if hosted.shard.configured().is_none() {
        return Err(RefusalKind::Unavailable(format!("{shard} has no job yet")).into());
    }
    let mut read = convert::read(&hosted.shard, request)?;
    let mut applied = hosted.applied.clone();
    loop {
        // Before it reads: an entry applied meanwhile must wake it again.
        applied.mark_unchanged();
        while let Some(due) = read.due(&*hosted.shard) {
            // A copy is made when there is room for it, and the client has read the one before.
            let Ok(place) = out.reserve().await else { return Ok(()) };
            let room = tokio::select! {
                room = reader.room(due.bytes) => room,
                () = out.closed() => return Ok(()),
            };
            if let Some(weights) = read.take(due, &*hosted.shard, room) {
                hosted.counters.bytes_pulled.fetch_add(weights.payload.len() as u64, Relaxed);
                place.send(FromShard { kind: Some(from_shard::Kind::Weights(weights)) });
            }
        }
        if read.is_over() {
            return Ok(());
        }
        tokio::select! {
            changed = applied.changed() => changed.map_err(|_| {
                RefusalKind::Unavailable(format!("this replica of {shard} has ended"))
            })?,
            () = out.closed() => return Ok(()),
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
