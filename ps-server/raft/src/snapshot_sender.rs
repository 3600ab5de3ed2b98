//! Sends a snapshot to a follower, piece by piece.

use super::{
    image::RawImage,
    network::{CallError, Connection},
    types::{Snapshot, SnapshotMeta, Vote},
    wire::{self, SnapshotAnswer, SnapshotPiece, WireError},
};
use bytes::Bytes;
use paraft_proto::PeerCall;
use std::time::Duration;

/// The first piece: the metadata of the parts.
fn snapshot_head(meta: &SnapshotMeta, image: &RawImage) -> Result<Bytes, WireError> {
    let lengths: Vec<u32> = image.parts.iter().map(|p| p.len() as u32).collect();
    wire::encode(&(meta, &image.head[..], lengths))
}

impl Connection {
    /// Sends piece by piece, each at most one bucket, without a second copy of the state. A piece that does not
    /// arrive is retried; an interrupted transfer resumes where it stopped.
    pub(super) async fn send_snapshot(
        &self,
        vote: Vote,
        snapshot: Snapshot,
        ttl: Duration,
    ) -> Result<Vote, CallError> {
        const TRIES: u32 = 5;
        let head = snapshot_head(&snapshot.meta, &snapshot.snapshot)?;
        let image = u64::from(crc32fast::hash(&head)) << 32
            | snapshot.meta.last_log_id.as_ref().map_or(0, |l| l.index & 0xffff_ffff);
        let parts = &snapshot.snapshot.parts;
        let of = 1 + parts.len() as u64;
        let mut index = 0u64;
        let mut failures = 0;
        loop {
            let payload = match index.checked_sub(1) {
                None => head.clone().into(),
                Some(i) => parts.get(i as usize).cloned().ok_or_else(|| {
                    CallError::Setup(format!("the follower asks for piece {index} of {of}"))
                })?,
            };
            let piece = SnapshotPiece { image, index, of, crc: wire::checksum(&payload) };
            match self.paced(PeerCall::Snapshot, &(vote, piece), vec![payload], ttl).await {
                Ok(SnapshotAnswer::Done(vote)) => return Ok(vote),
                Ok(SnapshotAnswer::Next(next)) => {
                    failures = 0;
                    index = next;
                }
                Err(e) if failures + 1 == TRIES => return Err(e),
                Err(_) => failures += 1,
            }
        }
    }
}
