//! Fetches the vectors of a shard from whichever server has them: the weights from any replica, a checkpoint's part from
//! the leader.
//!
//! The caller asks [`Fetch::next_server`] with a request of its own, and reports what comes. A server that refuses,
//! breaks off or is silent is followed by the next one, which a refusal may name. A vector that has arrived is not asked
//! for again.

use paraft_common::{BucketId, Payload};
use paraft_proto::{Candidates, Refused};
use std::collections::BTreeMap;

/// A vector: its bucket, and 0 for the weights or n for the optimizer's slot n.
pub type VectorId = (BucketId, u32);

/// One shard's vectors, while they are fetched.
#[derive(Debug)]
pub struct Fetch {
    candidates: Candidates,
    /// The server that is asked.
    asked: String,
    /// The bytes of each vector that has not arrived.
    missing: BTreeMap<VectorId, usize>,
}

impl Fetch {
    /// Fetches these vectors of these lengths in bytes, from the first of `servers` that sends them.
    pub fn new(
        servers: impl IntoIterator<Item = String>,
        wanted: impl IntoIterator<Item = (VectorId, usize)>,
    ) -> Self {
        let (candidates, missing) = (Candidates::of(servers), wanted.into_iter().collect());
        Self { candidates, asked: String::new(), missing }
    }

    /// The server to ask now; `None`: everything has arrived, or all were asked.
    pub fn next_server(&mut self) -> Option<String> {
        if self.is_complete() {
            return None;
        }
        self.asked = self.candidates.next()?;
        Some(self.asked.clone())
    }

    /// The numbers of the buckets of which something is missing, rising.
    pub fn buckets(&self) -> Vec<u32> {
        let mut buckets: Vec<u32> = self.missing.keys().map(|(bucket, _)| bucket.0).collect();
        buckets.dedup();
        buckets
    }

    /// Whether everything has arrived.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty()
    }

    /// A vector has arrived.
    ///
    /// # Errors
    /// It does not fit: another server would not do better.
    pub fn arrived(&mut self, id: VectorId, payload: &Payload) -> Result<(), String> {
        let ((bucket, n), got) = (id, payload.len());
        match self.missing.remove(&id) {
            Some(bytes) if bytes == got => Ok(()),
            Some(bytes) => Err(format!("vector {n} of {bucket} has {got} bytes where {bytes} were expected")),
            None => Err(format!("vector {n} of {bucket} was not asked for, or sent twice")),
        }
    }

    /// The server that is asked refuses.
    pub fn refused(&mut self, refused: Refused) {
        self.candidates.failed(&self.asked, refused.message, &refused.leader);
    }

    /// The server that is asked cannot be reached, is silent, or has broken off.
    pub fn failed(&mut self, why: impl Into<String>) {
        self.candidates.failed(&self.asked, why, "");
    }

    /// Why each asked server did not send everything, in the order of the tries.
    pub fn causes(&self) -> &[(String, String)] {
        self.candidates.causes()
    }
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
