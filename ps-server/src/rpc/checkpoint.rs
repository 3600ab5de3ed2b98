//! A shard's part of a checkpoint, in flight to the worker that writes it.
//!
//! One message for each vector of a bucket, made when the stream asks for it. So the connection's window
//! bounds what is in flight, not the shard's size.

use crate::{
    replicas::Replica,
    shard::{
        bucket::{BucketData, vector_bytes},
        leader::{CheckpointImage, Event},
    },
};
use futures::{Stream, StreamExt, stream};
use paraft_common::{BucketId, Step};
use paraft_proto::{
    CheckpointPart, CheckpointRequest, Member, PROTOCOL, Piece, RefusalKind, Stopping, WithBulk,
    checkpoint_part::Kind,
};
use std::{pin::Pin, sync::Arc};
use tokio::sync::oneshot;
use tonic::Status;

/// The stream that answers the call.
pub type Parts = Pin<Box<dyn Stream<Item = Result<WithBulk<CheckpointPart>, Status>> + Send>>;

/// Answers one call; `hosted` is the requested replica, or why there is none here.
pub async fn parts(hosted: Result<Replica, RefusalKind>, request: CheckpointRequest) -> Parts {
    match fetch(hosted, &request).await {
        Ok((part, founding)) => {
            let first = header(&part, founding);
            // The part is released when the last piece is made, not when the transport drops the stream: a
            // client that has read that piece may ask for the next part at once.
            let pieces = stream::unfold(Some((part, 0, 0)), |state| async move {
                let (part, bucket, slot) = state?;
                let (id, data) = part.bucket(bucket)?;
                let piece = piece(id, &data, slot);
                let next = if slot < data.slots.len() { (bucket, slot + 1) } else { (bucket + 1, 0) };
                if next.0 > bucket {
                    part.release(bucket);
                }
                let more = next.0 < part.buckets();
                Some((piece, more.then_some((part, next.0, next.1))))
            });
            Box::pin(stream::once(async move { first }).chain(pieces).map(ok))
        }
        Err(kind) => Box::pin(stream::iter([ok(Kind::Refused(kind.into()))])),
    }
}

fn ok(kind: Kind) -> Result<WithBulk<CheckpointPart>, Status> {
    Ok(CheckpointPart { kind: Some(kind) }.into())
}

async fn fetch(
    hosted: Result<Replica, RefusalKind>,
    request: &CheckpointRequest,
) -> Result<(Arc<CheckpointImage>, u64), RefusalKind> {
    if request.protocol != PROTOCOL {
        return Err(RefusalKind::Protocol { client: request.protocol, server: PROTOCOL });
    }
    let Replica { leader, founding, .. } = hosted?;
    let (tx, rx) = oneshot::channel();
    let stopping = || RefusalKind::Unavailable("the server is shutting down".into());
    leader
        .send(Event::Fetch { step: Step(request.step), now: request.now, tx })
        .await
        .map_err(|_| stopping())?;
    Ok((rx.await.map_err(|_| stopping())??, founding))
}

fn header(part: &CheckpointImage, founding: u64) -> Kind {
    let s = &part.stopping;
    let e = s.evaluated;
    Kind::Header(paraft_proto::PartHeader {
        step: part.step.0,
        job: part.job.clone(),
        buckets: part.buckets() as u32,
        founding,
        members: part
            .members
            .iter()
            .map(|(w, clock, finished)| Member {
                worker: w.0,
                clock: clock.0,
                finished: *finished,
                ..Member::default()
            })
            .collect(),
        stopping: Some(Stopping {
            best_loss: s.best_loss,
            bad: s.bad,
            stop: s.stop,
            evaluated: e.is_some(),
            epoch: e.map_or(0, |e| e.epoch),
            loss_sum: e.map_or(0.0, |e| e.loss_sum),
            correct: e.map_or(0, |e| e.correct),
            count: e.map_or(0, |e| e.count),
        }),
    })
}

fn piece(id: BucketId, data: &Arc<BucketData>, slot: usize) -> Kind {
    Kind::Piece(Piece {
        bucket: id.0,
        part: slot as u32,
        payload: vector_bytes(data, slot),
        version: data.version.0,
        clock: data.clock,
    })
}
