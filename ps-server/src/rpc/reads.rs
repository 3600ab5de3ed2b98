//! Weights for readers, from a replica that need not lead.

use super::{
    convert,
    exchange::{Replies, ShardsService, nobody},
};
use crate::{
    connections::{Rank, Visitor},
    replicas::Replica,
    shard::leader::Reply,
};
use paraft_proto::{PROTOCOL, ReadRequest, Refusal, RefusalKind};
use paraft_tls::Need;
use tokio::sync::mpsc;
use tokio_stream::{StreamExt, wrappers::ReceiverStream};

/// Answers that may wait for a slow reader; only its own stream waits with them.
pub(super) const QUEUE: usize = 8;

impl ShardsService {
    pub(super) fn read(&self, request: ReadRequest, visitor: Option<Visitor>) -> Replies {
        let (tx, rx) = mpsc::channel(QUEUE);
        let (service, server) = (self.clone(), self.server);
        tokio::spawn(async move {
            if let Err(refusal) = service.serve_read(request, visitor, &tx).await {
                let _ = tx.send(Reply::Refused(refusal)).await;
            }
        });
        Box::pin(ReceiverStream::new(rx).map(move |reply| Ok(convert::reply(server, reply).into())))
    }

    async fn serve_read(
        &self,
        request: ReadRequest,
        visitor: Option<Visitor>,
        out: &mpsc::Sender<Reply>,
    ) -> Result<(), Refusal> {
        if request.protocol != PROTOCOL {
            return Err(RefusalKind::Protocol { client: request.protocol, server: PROTOCOL }.into());
        }
        let by = visitor.as_ref().ok_or_else(nobody)?;
        let hosted = self.may(by, Need::Reader, &request.job, request.shard).await?;
        let shard = hosted.shard.id();
        if request.founding != 0 && request.founding != hosted.founding {
            // Which of the two is the shard's now, this replica does not know: it may be the one that was left behind.
            return Err(RefusalKind::OtherFounding(shard).into());
        }
        visitor.iter().for_each(|v| v.is(Rank::Reader));
        pour(&hosted, request, out).await
    }
}

/// Hands out weights of a replica, as they are there, until there are no more or nobody reads.
pub(super) async fn pour(
    hosted: &Replica,
    request: ReadRequest,
    out: &mpsc::Sender<Reply>,
) -> Result<(), Refusal> {
    let shard = hosted.shard.id();
    if hosted.shard.configured().is_none() {
        return Err(RefusalKind::Unavailable(format!("{shard} has no job yet")).into());
    }
    let mut read = convert::read(&hosted.shard, request)?;
    let mut applied = hosted.applied.clone();
    loop {
        // Before it looks: what is applied while it does is news.
        applied.mark_unchanged();
        for weights in read.take(&hosted.shard, &hosted.counters) {
            if out.send(Reply::Weights(Box::new(weights))).await.is_err() {
                return Ok(()); // nobody reads any more
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
    }
}
