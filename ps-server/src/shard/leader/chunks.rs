//! Requests for data chunks (leased sampler) that wait for an answer. The answers are read from the replicated
//! state after every apply: the request itself, another worker's request that completes an epoch, a member that
//! leaves. So if an answer is lost with a leader, the next leader gives it again when the worker repeats its
//! request.

use super::messages::{ConnId, Reply};
use crate::shard::{chunks::Answer, state::Meta};
use paraft_common::WorkerId;
use std::collections::BTreeMap;

/// A request without a final answer.
#[derive(Debug)]
struct ChunkRequest {
    worker: WorkerId,
    request: u64,
    /// Its worker was told to wait.
    told_to_wait: bool,
}

/// The waiting requests, one per stream.
#[derive(Debug, Default)]
pub struct ChunkRequests(BTreeMap<ConnId, ChunkRequest>);

impl ChunkRequests {
    /// Adds a worker's request.
    pub fn ask(&mut self, conn: ConnId, worker: WorkerId, request: u64) {
        self.0.insert(conn, ChunkRequest { worker, request, told_to_wait: false });
    }

    /// The stream is closed.
    pub fn closed(&mut self, conn: ConnId) {
        self.0.remove(&conn);
    }

    /// Whether no request waits.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Answers every request that the state has an answer for.
    pub fn take_answers(&mut self, state: &Meta) -> Vec<(ConnId, Reply)> {
        let Some(chunks) = &state.chunks else { return Vec::new() };
        self.answer_where(|ask| chunks.answer(ask.worker, ask.request, state.stop))
    }

    fn answer_where(&mut self, answer: impl Fn(&ChunkRequest) -> Option<Answer>) -> Vec<(ConnId, Reply)> {
        let mut answers = Vec::new();
        self.0.retain(|conn, ask| {
            let answer = answer(ask);
            let waits = matches!(answer, None | Some(Answer::Wait));
            if let Some(answer) = answer.filter(|_| !(waits && ask.told_to_wait)) {
                answers.push((*conn, Reply::Acquired { request: ask.request, answer }));
                ask.told_to_wait = true;
            }
            waits
        });
        answers
    }
}

#[cfg(test)]
#[path = "chunks_tests.rs"]
mod tests;
