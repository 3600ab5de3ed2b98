//! What one shard sends of a version: each message is checked before it counts.

use super::{
    ask::{Answer, Failed},
    servers::SILENCE,
};
use bytes::Bytes;
use paraft_common::difference::{Code, decode};
use paraft_proto::{VersionMessage, VersionOf, VersionPiece, WireKind, version_message::Kind};
use std::{collections::BTreeMap, time::Instant};
use tonic::Streaming;
use xxhash_rust::xxh3::xxh3_64;

/// Receives the pieces of a shard, of which the first must come by `begins`, and how far the shard is then.
pub(super) async fn receive(
    shard: u32,
    answer: Answer,
    buckets: &[u32],
    (width, old): (usize, Option<&BTreeMap<u32, Bytes>>),
    begins: Instant,
) -> Result<(VersionOf, Vec<Arrived>), Failed> {
    let Answer { of, mut stream } = answer;
    let mut pieces = Pieces { of, buckets, width, old, arrived: Vec::with_capacity(buckets.len()) };
    let named = |failed| match failed {
        Failed::Replica(why) => Failed::Replica(format!("shard {shard}: {why}")),
        other => other,
    };
    loop {
        let message = if pieces.arrived.is_empty() && !pieces.buckets.is_empty() {
            let message = tokio::time::timeout_at(begins.into(), next(&mut stream)).await;
            message.unwrap_or(Err(Failed::Late))
        } else {
            next(&mut stream).await
        };
        match message.map_err(named)? {
            Some(message) => pieces.take(message).map_err(named)?,
            None => break,
        }
    }
    pieces.whole().map_err(named)
}

/// A bucket that has arrived, checked.
pub(super) struct Arrived {
    pub bucket: u32,
    pub version: u64,
    pub digest: u64,
    pub values: Bytes,
    /// Bytes on the wire.
    pub received: u64,
}

/// What has arrived of one shard's version.
struct Pieces<'a> {
    of: VersionOf,
    /// The buckets that must come, rising.
    buckets: &'a [u32],
    /// Bytes of a value.
    width: usize,
    /// What the reader has.
    old: Option<&'a BTreeMap<u32, Bytes>>,
    arrived: Vec<Arrived>,
}

impl Pieces<'_> {
    fn take(&mut self, message: VersionMessage) -> Result<(), Failed> {
        let broken = |what: String| Err(Failed::Replica(what));
        match message.kind {
            Some(Kind::Piece(piece)) => {
                if self.buckets.get(self.arrived.len()) != Some(&piece.bucket) {
                    return broken(format!("bucket {} is out of place", piece.bucket));
                }
                let (bucket, received) = (piece.bucket, piece.payload.len() as u64);
                let (version, digest) = (piece.version, piece.digest);
                let values = match self.values(piece) {
                    Ok(values) if xxh3_64(&values) == digest => values,
                    Ok(_) => return broken(format!("bucket {bucket} was damaged on its way")),
                    Err(why) => return broken(format!("bucket {bucket}: {why}")),
                };
                self.arrived.push(Arrived { bucket, version, digest, values, received });
                Ok(())
            }
            Some(Kind::Refused(refused)) if refused.kind() == WireKind::NoVersion => {
                Err(Failed::Passed(self.of.reached.max(self.of.step)))
            }
            Some(Kind::Refused(refused)) => broken(refused.message),
            // It waits, or this was all.
            Some(Kind::Of(now)) if now.step == self.of.step => {
                if !self.arrived.is_empty() && self.arrived.len() < self.buckets.len() {
                    return broken("a message is out of place".into());
                }
                self.of.reached = self.of.reached.max(now.reached);
                self.of.over = now.over;
                match self.arrived.is_empty() && now.over && now.step > now.reached {
                    true => Err(Failed::Ended(now.reached)),
                    false => Ok(()),
                }
            }
            _ => broken("a message is out of place".into()),
        }
    }

    fn values(&self, piece: VersionPiece) -> Result<Bytes, &'static str> {
        let code = Code::of(piece.code).ok_or("it has an unknown code")?;
        if code == Code::Whole {
            return Ok(piece.payload);
        }
        let old = self
            .old
            .and_then(|old| old.get(&piece.bucket))
            .ok_or("a difference to what the reader has not")?;
        match code {
            Code::Same => Ok(old.clone()),
            _ => decode(code, self.width, old, &piece.payload).map(Bytes::from),
        }
    }

    fn whole(self) -> Result<(VersionOf, Vec<Arrived>), Failed> {
        match self.arrived.len() == self.buckets.len() {
            true => Ok((self.of, self.arrived)),
            false => Err(Failed::Replica("its answer ended early".into())),
        }
    }
}

pub(super) async fn next(stream: &mut Streaming<VersionMessage>) -> Result<Option<VersionMessage>, Failed> {
    let message = tokio::time::timeout(SILENCE, stream.message()).await;
    let message = message.map_err(|_| Failed::Replica(format!("silent for {SILENCE:?}")))?;
    message.map_err(|s| Failed::Replica(format!("its answer broke off: {}", s.message())))
}

#[cfg(test)]
#[path = "pieces_tests.rs"]
mod tests;
