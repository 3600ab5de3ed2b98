//! Where the logs of voters end, as they said when they voted for this replica.
//!
//! openraft begins a leadership with a search: it asks each follower about eight entries in the middle of the log,
//! then in the middle of the rest, and so on. A log of 4096 entries takes ten such round trips, and no push is
//! acknowledged before the last. But a voter has already told the end of its log, with everything before it on disk:
//! so these questions are answered here.
//!
//! The answers are chosen so that openraft takes none for a sign of life of the follower, on which reads depend: a
//! request may be answered with the entry *before* those that it carries, or with an earlier one that is missing. Nor
//! do they commit anything: all entries before an election are of earlier terms.

use super::types::{LogId, Types, Vote};
use openraft::{
    EntryPayload,
    raft::{AppendEntriesRequest, StreamAppendError, StreamAppendResult, VoteRequest, VoteResponse},
};
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc};

/// The search ends this close before the end of a voter's log: it gets these entries again, together with the next.
const NEAR_ENTRIES: u64 = 32;
/// ...unless eight of them have more bytes: then the follower is asked.
const FEW_BYTES: usize = 256 << 10;

/// More are forgotten, if they are of earlier leaderships: replicas without a disk change their names.
const MAX_KNOWN: usize = 64;

/// The logs of a group's voters.
#[derive(Clone, Default)]
pub struct VoterLogs(Arc<Mutex<HashMap<u64, Known>>>);

/// What is known of a voter in one leadership.
struct Known {
    /// The vote for it.
    vote: Vote,
    /// `None`: the follower answers for itself, from now on. What it said before is outdated.
    log: Option<VoterLog>,
}

struct VoterLog {
    /// The end of its log when it voted. Our log has this entry too.
    last: LogId,
    /// The last entry that was answered for it, as one that it has.
    has: Option<LogId>,
    /// It was answered that it lacks the entry after the end.
    ends: bool,
}

impl VoterLogs {
    /// A voter has answered a request. Only an end in the last term of our log counts: a term has one leader, so two
    /// logs with entries of one term agree up to the end of the shorter.
    pub fn voted(&self, voter: u64, asked: &VoteRequest<Types>, answer: &VoteResponse<Types>) {
        let granted = answer.vote_granted && answer.is_granted_to(&asked.vote);
        let ours = asked.last_log_id.filter(|_| granted);
        let last = answer.last_log_id.zip(ours).filter(|(last, ours)| {
            last.committed_leader_id() == ours.committed_leader_id() && last.index <= ours.index
        });
        let Some((last, _)) = last else { return };
        let mut all = self.0.lock();
        // A vote may come after this replica leads and has begun to send.
        if all.get(&voter).is_some_and(|known| known.vote.leader_id() == asked.vote.leader_id()) {
            return;
        }
        if all.len() >= MAX_KNOWN {
            all.retain(|_, known| known.vote.leader_id() == asked.vote.leader_id());
        }
        let log = Some(VoterLog { last, has: None, ends: false });
        all.insert(voter, Known { vote: asked.vote, log });
    }

    /// The answer to a request that searches for the end of a voter's log, if it is known. The first request without
    /// an answer ends this.
    pub fn answer(
        &self,
        voter: u64,
        request: &AppendEntriesRequest<Types>,
    ) -> Option<StreamAppendResult<Types>> {
        if request.entries.is_empty() {
            return None; // a heartbeat
        }
        let mut all = self.0.lock();
        let known = all.get_mut(&voter).filter(|known| known.vote.leader_id() == request.vote.leader_id());
        let answer = known.and_then(|known| known.log.as_mut()?.answer(request));
        if answer.is_none() {
            all.insert(voter, Known { vote: request.vote, log: None });
        }
        answer
    }

    /// The leader with this vote sends a snapshot, which changes the follower's log.
    pub fn sends_snapshot(&self, voter: u64, vote: Vote) {
        self.0.lock().insert(voter, Known { vote, log: None });
    }
}

impl VoterLog {
    /// Each answer narrows the search; otherwise it would not end.
    fn answer(&mut self, request: &AppendEntriesRequest<Types>) -> Option<StreamAppendResult<Types>> {
        let before = request.prev_log_id?;
        let lacks = |after: LogId| {
            let missing = LogId::new(*after.committed_leader_id(), after.index + 1);
            (missing.index < before.index).then_some(Err(StreamAppendError::Conflict(missing)))
        };
        if before.index > self.last.index {
            return lacks(self.last).filter(|_| !std::mem::replace(&mut self.ends, true));
        }
        if Some(before) <= self.has {
            return None;
        }
        if let Some(has) = self.has.filter(|has| self.last.index - has.index < NEAR_ENTRIES)
            && bytes(request) <= FEW_BYTES
            && let Some(answer) = lacks(has)
        {
            // The last answer: the search ends at an entry that the follower has.
            (self.last, self.ends) = (has, true);
            return Some(answer);
        }
        self.has = Some(before);
        Some(Ok(Some(before)))
    }
}

fn bytes(request: &AppendEntriesRequest<Types>) -> usize {
    let payload = |payload: &EntryPayload<paraft_changes::Change, _, _>| match payload {
        EntryPayload::Normal(change) => change.payload().len(),
        _ => 0,
    };
    request.entries.iter().map(|e| payload(&e.payload)).sum()
}

#[cfg(test)]
#[path = "voter_logs_tests.rs"]
mod tests;
