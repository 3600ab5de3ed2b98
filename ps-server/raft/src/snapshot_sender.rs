//! Sends a snapshot to a follower, piece by piece.

use super::{
    image::RawImage,
    network::{CallError, Connection},
    types::{Snapshot, Vote},
    wire::{self, SnapshotAnswer, SnapshotPiece},
};
use paraft_common::Payload;
use paraft_proto::PeerCall;
use std::time::Duration;

impl Connection {
    /// Sends piece by piece, each at most one bucket, without a second copy of the state. A piece that does not
    /// arrive is retried; an interrupted transfer resumes where it stopped. A part that the follower has is released:
    /// later changes need not copy it.
    pub(super) async fn send_snapshot(
        &self,
        vote: Vote,
        snapshot: Snapshot,
        ttl: Duration,
    ) -> Result<Vote, CallError> {
        const TRIES: u32 = 5;
        let Snapshot { meta, snapshot: RawImage { head, parts } } = snapshot;
        let head = wire::encode(&(&meta, &head[..]))?;
        let image = u64::from(crc32fast::hash(&head)) << 32
            | meta.last_log_id.as_ref().map_or(0, |l| l.index & 0xffff_ffff);
        let mut pieces = (0..)
            .zip([Payload::from(head)].into_iter().chain(parts.into_iter().map(|part| part.read())))
            .peekable();
        let mut failures = 0;
        while let Some((index, payload)) = pieces.next() {
            let last = pieces.peek().is_none();
            let next = loop {
                let piece = SnapshotPiece { image, index, last, crc: wire::checksum(&payload) };
                match self.paced(PeerCall::Snapshot, &(vote, piece), vec![payload.clone()], ttl).await {
                    Ok(SnapshotAnswer::Done(vote)) => return Ok(vote),
                    Ok(SnapshotAnswer::Next(next)) if next == index => failures = 0,
                    Ok(SnapshotAnswer::Next(next)) => break next,
                    Err(e) if failures + 1 == TRIES => return Err(e),
                    Err(_) => failures += 1,
                }
            };
            failures = 0;
            if next < index {
                // It has dropped what it had. The next try sends the state of that moment.
                return Err(CallError::Setup(format!("the follower asks for piece {next} again")));
            }
            while pieces.next_if(|(i, _)| *i < next).is_some() {}
        }
        Err(CallError::Setup("the follower has all of a snapshot and has not installed it".into()))
    }
}
