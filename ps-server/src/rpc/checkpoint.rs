//! A shard's part of a checkpoint on its way to the worker that writes it.
//!
//! One message for each vector of a bucket, made when the stream asks for it: what is on the way is bounded by
//! the connection's window, not by the shard.

use crate::{
    replicas::Replica,
    shard::{
        bucket::{BucketData, vector_bytes},
        leader::{Event, Section},
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

/// What the call answers.
pub type Parts = Pin<Box<dyn Stream<Item = Result<WithBulk<CheckpointPart>, Status>> + Send>>;

/// Answers one call; `hosted` is the replica that it asks for, or why there is none here.
pub async fn parts(hosted: Result<Replica, RefusalKind>, request: CheckpointRequest) -> Parts {
    match fetch(hosted, &request).await {
        Ok((section, origin)) => {
            let first = header(&section, origin);
            // The section goes when the last piece is made, not when the transport lets the stream go: whoever has read
            // that piece may ask for the next section at once.
            let pieces = stream::unfold(Some((section, 0, 0)), |state| async move {
                let (section, bucket, part) = state?;
                let (id, data) = section.bucket(bucket)?;
                let piece = piece(id, &data, part);
                let next = if part < data.slots.len() { (bucket, part + 1) } else { (bucket + 1, 0) };
                if next.0 > bucket {
                    section.let_go(bucket);
                }
                let more = next.0 < section.buckets();
                Some((piece, more.then_some((section, next.0, next.1))))
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
) -> Result<(Arc<Section>, u64), RefusalKind> {
    if request.protocol != PROTOCOL {
        return Err(RefusalKind::Protocol { client: request.protocol, server: PROTOCOL });
    }
    let Replica { leader, origin, .. } = hosted?;
    let (tx, rx) = oneshot::channel();
    let stopping = || RefusalKind::Unavailable("the server is shutting down".into());
    leader.send(Event::Fetch { step: Step(request.step), tx }).await.map_err(|_| stopping())?;
    Ok((rx.await.map_err(|_| stopping())??, origin))
}

fn header(section: &Section, origin: u64) -> Kind {
    let s = &section.stopping;
    let e = s.evaluated;
    Kind::Section(paraft_proto::Section {
        step: section.step.0,
        job: section.job.clone(),
        buckets: section.buckets() as u32,
        origin,
        members: section
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

fn piece(id: BucketId, data: &Arc<BucketData>, part: usize) -> Kind {
    Kind::Piece(Piece {
        bucket: id.0,
        part: part as u32,
        payload: vector_bytes(data, part),
        version: data.version.0,
        clock: data.clock,
    })
}
