//! Answers to requests that are not of a worker's stream.

use super::CheckpointPart;
use paraft_common::InForce;
use paraft_proto::RefusalKind;
use std::fmt;
use tokio::sync::oneshot;

/// The handle of a requester that waits for one answer. The leader returns it with the answer, or drops it.
pub struct ReplyHandle<T>(oneshot::Sender<T>);

impl<T> ReplyHandle<T> {
    /// Answers; the requester may be gone.
    pub fn answer(self, answer: T) {
        let _ = self.0.send(answer);
    }
}

impl<T> From<oneshot::Sender<T>> for ReplyHandle<T> {
    fn from(tx: oneshot::Sender<T>) -> Self {
        Self(tx)
    }
}

impl<T> fmt::Debug for ReplyHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReplyHandle")
    }
}

/// The result of a switch: the mode in force, or the reason for the refusal.
pub type SwitchResult = Result<InForce, RefusalKind>;
/// How many rows an edit has changed, or the reason for the refusal.
pub type EditResult = Result<u64, RefusalKind>;
/// The shard's part of a checkpoint, or the reason for the refusal.
pub type FetchResult = Result<Box<CheckpointPart>, RefusalKind>;
