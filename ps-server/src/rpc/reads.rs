//! A worker's stream of reads from a replica that need not lead.

use super::{
    convert,
    exchange::{Reader, Replies, ShardsService, unreadable},
};
use crate::{
    connections::{Rank, Visitor},
    shard::{
        owner::{Message, Reply},
        reads::Read,
    },
};
use futures::StreamExt;
use paraft_common::{ShardId, WorkerId};
use paraft_proto::{Incoming, PROTOCOL, Refusal, RefusalKind, ToShard, to_shard};
use std::sync::atomic::Ordering::Relaxed;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Answers that may wait for a slow reader; only its own stream waits with them.
const QUEUE: usize = 8;

impl ShardsService {
    pub(super) fn reads(&self, mut inbound: Incoming<ToShard>, visitor: Option<Visitor>) -> Replies {
        let (tx, rx) = mpsc::channel(QUEUE);
        let (service, server, stages) = (self.clone(), self.server, self.replicas.stages().clone());
        tokio::spawn(async move {
            if let Err(refusal) = service.serve_reads(&mut inbound, visitor, &tx).await {
                let _ = tx.send((None, Reply::Refused(refusal))).await;
            }
        });
        let replies = ReceiverStream::new(rx).map(move |(of, reply): (Option<_>, Reply)| {
            if let Some((shard, worker)) = of {
                Reader { shard, worker, stages: stages.clone() }.takes(&reply);
            }
            Ok(convert::reply(server, reply).into())
        });
        Box::pin(replies)
    }

    async fn serve_reads(
        &self,
        inbound: &mut Incoming<ToShard>,
        visitor: Option<Visitor>,
        out: &mpsc::Sender<(Option<(ShardId, WorkerId)>, Reply)>,
    ) -> Result<(), Refusal> {
        let Some(to_shard::Kind::OpenReads(open)) = self.first(inbound).await? else {
            return Err(RefusalKind::NotOpened.into());
        };
        if open.protocol != PROTOCOL {
            return Err(RefusalKind::Protocol { client: open.protocol, server: PROTOCOL }.into());
        }
        let (shard, worker) = (ShardId(open.shard), WorkerId(open.worker));
        let hosted = self.replicas.get(shard).ok_or_else(|| self.elsewhere(shard))?;
        if open.origin == 0 {
            return Err(RefusalKind::NoOrigin.into());
        }
        if open.origin != hosted.origin {
            // Which of the two is the shard's now, this replica does not know: it may be the one that was left behind.
            return Err(RefusalKind::OtherFounding(shard).into());
        }
        visitor.iter().for_each(|v| v.is(Rank::Reader));
        let gone = || RefusalKind::Unavailable(format!("this replica of {shard} has ended"));
        let mut applied = hosted.applied.clone();
        let mut waiting: Option<Read> = None;
        loop {
            // Before it looks: what is applied while it does is news.
            applied.mark_unchanged();
            if let Some(read) = &mut waiting {
                for weights in read.take(&hosted.shard, &hosted.counters)? {
                    let last = weights.last;
                    if out.send((Some((shard, worker)), Reply::Weights(Box::new(weights)))).await.is_err() {
                        return Ok(()); // nobody reads any more
                    }
                    if last {
                        waiting = None;
                    }
                }
            }
            tokio::select! {
                message = inbound.message() => {
                    let Some(message) = message.map_err(unreadable)? else { return Ok(()) };
                    visitor.iter().for_each(Visitor::speaks);
                    match convert::message(&hosted.shard, message)? {
                        Message::Pull { done, last: false, section: false, have, at_least, only, loss: _ } => {
                            hosted.counters.pulls.fetch_add(1, Relaxed);
                            waiting = Some(Read::new(worker, done, only, (have, at_least)));
                        }
                        Message::Pull { .. } => return Err(RefusalKind::ReadsOnly("a final pull, or one for a checkpoint,").into()),
                        _ => return Err(RefusalKind::ReadsOnly("everything else").into()),
                    }
                }
                changed = applied.changed(), if waiting.is_some() => changed.map_err(|_| gone())?,
            }
        }
    }
}
