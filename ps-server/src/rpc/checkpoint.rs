//! A shard's part of a checkpoint on its way to the worker that writes it.
//!
//! One message for each vector of a bucket, made when the stream asks for it: what is on the way is bounded by
//! the connection's window, not by the shard.

use super::exchange::Hosted;
use crate::shard::owner::{Cut, Event};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use paraft_common::{ShardId, Step, codec::put_f32_le};
use paraft_proto::{
    CheckpointPart, CheckpointRequest, Member, PROTOCOL, Piece, Refusal, RefusalKind, Stopping,
    checkpoint_part::Kind,
};
use std::{collections::BTreeMap, pin::Pin, sync::Arc};
use tokio::sync::oneshot;
use tonic::Status;

/// What the call answers.
pub type Parts = Pin<Box<dyn Stream<Item = Result<CheckpointPart, Status>> + Send>>;

/// Answers one call.
pub async fn parts(hosted: &BTreeMap<ShardId, Hosted>, request: CheckpointRequest) -> Parts {
    match fetch(hosted, &request).await {
        Ok(cut) => {
            let first = header(&cut);
            // The cut goes when the last piece is made, not when the transport lets the stream go: whoever has read
            // that piece may ask for the next cut at once.
            let pieces = stream::unfold(Some((cut, 0, 0)), |state| async move {
                let (cut, bucket, part) = state?;
                let slots = cut.buckets.get(bucket)?.1.slots.len();
                let piece = piece(&cut, bucket, part);
                let next = if part < slots { (bucket, part + 1) } else { (bucket + 1, 0) };
                let more = next.0 < cut.buckets.len();
                Some((piece, more.then_some((cut, next.0, next.1))))
            });
            Box::pin(stream::once(async move { first }).chain(pieces).map(ok))
        }
        Err(kind) => {
            let refused = paraft_proto::FromShard::from(Refusal::from(kind));
            let refused = match refused.kind {
                Some(paraft_proto::from_shard::Kind::Refused(r)) => Some(Kind::Refused(r)),
                _ => None,
            };
            Box::pin(stream::iter(refused).map(ok))
        }
    }
}

fn ok(kind: Kind) -> Result<CheckpointPart, Status> {
    Ok(CheckpointPart { kind: Some(kind) })
}

async fn fetch(
    hosted: &BTreeMap<ShardId, Hosted>,
    request: &CheckpointRequest,
) -> Result<Arc<Cut>, RefusalKind> {
    if request.protocol != PROTOCOL {
        return Err(RefusalKind::Protocol { client: request.protocol, server: PROTOCOL });
    }
    let shard = ShardId(request.shard);
    let owner = &hosted.get(&shard).ok_or(RefusalKind::WrongShard { shard })?.owner;
    let (tx, rx) = oneshot::channel();
    let stopping = || RefusalKind::Unavailable("the server is shutting down".into());
    owner.send(Event::Fetch { step: Step(request.step), tx }).await.map_err(|_| stopping())?;
    rx.await.map_err(|_| stopping())?
}

fn header(cut: &Cut) -> Kind {
    let s = &cut.stopping;
    let e = s.evaluated;
    Kind::Cut(paraft_proto::Cut {
        step: cut.step.0,
        job: cut.job.clone(),
        buckets: cut.buckets.len() as u32,
        members: cut
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

fn piece(cut: &Cut, bucket: usize, part: usize) -> Kind {
    let (id, data) = &cut.buckets[bucket];
    let values = part.checked_sub(1).map_or(&data.weights, |slot| &data.slots[slot]);
    let mut le = Vec::new();
    put_f32_le(values, &mut le);
    Kind::Piece(Piece {
        bucket: id.0,
        part: part as u32,
        payload: Bytes::from(le),
        version: data.version.0,
        clock: data.clock,
    })
}
