//! A shard's part of a checkpoint, in flight to the worker that writes it.
//!
//! One message for each vector of a bucket, made when the stream asks for it. So the connection's window
//! bounds what is in flight, not the shard's size.

use super::check_protocol;
use crate::{
    raft::LazyPart,
    replicas::Replica,
    shard::{
        bucket::BucketData,
        cut::{Cut, Part},
        leader::{CheckpointPart, Event},
        partition::RowsImage,
    },
};
use futures::{Stream, StreamExt, stream};
use paraft_common::{BucketId, Step, Version};
use paraft_proto::{
    CheckpointPart as PartMessage, CheckpointRequest, Member, Piece, RefusalKind, Stopping, WithBulk,
    checkpoint_part::Kind,
};
use std::pin::Pin;
use tokio::sync::oneshot;
use tonic::Status;

/// The stream that answers the call.
pub type Parts = Pin<Box<dyn Stream<Item = Result<WithBulk<PartMessage>, Status>> + Send>>;

/// Answers one call; `hosted` is the requested replica, or why there is none here.
pub async fn parts(hosted: Result<Replica, RefusalKind>, request: CheckpointRequest) -> Parts {
    match fetch(hosted, &request).await {
        Ok((part, founding)) => {
            let first = header(&part, founding);
            let CheckpointPart { conf, mut cut, fetching, .. } = *part;
            let rows = std::mem::take(&mut cut.rows);
            let parts = cut.into_parts(BucketData::trained_vectors);
            let dense = conf.buckets.len() - rows.len();
            let tiles = rows.into_iter().zip(dense..).flat_map(|(rows, place): (RowsImage, usize)| {
                let history = rows.history().map(|piece| piece.read());
                let payloads = rows.into_tiles().map(|tile| tile.read()).chain(history).zip(1..);
                let part =
                    move |(payload, vector)| Part { place, vector, version: Version(0), clock: 0.0, payload };
                payloads.map(part)
            });
            let parts = parts.chain(tiles).peekable();
            // The part counts as fetched when the last piece is made, not when the transport drops the stream: a
            // client that has read that piece may ask for the next part at once.
            let pieces = stream::unfold(Some((parts, conf, fetching)), |state| async move {
                let (mut parts, conf, fetching) = state?;
                let part = parts.next()?;
                let next = parts.peek().map(|next| next.place);
                if next != Some(part.place) {
                    conf.note_release();
                }
                let piece = piece(conf.buckets[part.place].id, part);
                Some((piece, next.map(|_| (parts, conf, fetching))))
            });
            Box::pin(stream::once(async move { first }).chain(pieces).map(ok))
        }
        Err(kind) => Box::pin(stream::iter([ok(Kind::Refused(kind.into()))])),
    }
}

fn ok(kind: Kind) -> Result<WithBulk<PartMessage>, Status> {
    Ok(PartMessage { kind: Some(kind) }.into())
}

async fn fetch(
    hosted: Result<Replica, RefusalKind>,
    request: &CheckpointRequest,
) -> Result<(Box<CheckpointPart>, u64), RefusalKind> {
    check_protocol(request.protocol)?;
    let Replica { leader, founding, .. } = hosted?;
    let (tx, rx) = oneshot::channel();
    let stopping = || RefusalKind::Unavailable("the server is shutting down".into());
    leader
        .send(Event::Fetch { step: Step(request.step), now: request.now, tx })
        .await
        .map_err(|_| stopping())?;
    Ok((rx.await.map_err(|_| stopping())??, founding))
}

fn header(part: &CheckpointPart, founding: u64) -> Kind {
    let Cut { meta, buckets, rows, .. } = &part.cut;
    let s = meta.stopping(part.conf.job.early_stop);
    let e = s.evaluated;
    Kind::Header(paraft_proto::PartHeader {
        step: part.step.0,
        job: meta.job.clone(),
        buckets: buckets.len() as u32,
        founding,
        rows: rows.iter().map(|rows| rows.header().rows).collect(),
        history: rows.iter().map(|rows| rows.history().map(|piece| piece.bytes() as u64).sum()).collect(),
        members: meta
            .members
            .iter()
            .map(|(w, m)| Member {
                worker: w.0,
                clock: m.clock().0,
                finished: m.finished,
                ..Member::default()
            })
            .collect(),
        stopping: Some(Stopping {
            best_loss: s.best_loss,
            bad: s.bad,
            stop: s.stop,
            evaluated: e.is_some(),
            epoch: e.map_or(0, |e| e.number),
            loss_sum: e.map_or(0.0, |e| e.loss_sum),
            correct: e.map_or(0, |e| e.correct),
            count: e.map_or(0, |e| e.count),
        }),
    })
}

fn piece(id: BucketId, part: Part) -> Kind {
    let Part { vector, version, clock, payload, .. } = part;
    Kind::Piece(Piece { bucket: id.0, part: vector as u32, payload, version: version.0, clock })
}
