//! Where the logs of voters end, as they said when they voted for this replica.
//!
//! openraft begins a leadership with a search: it asks each follower about eight entries in the middle of the log,
//! then in the middle of the rest, and so on. A log of 4096 entries takes nine such round trips, and no push is
//! acknowledged before the last. But a voter has already told the end of its log, with everything before it on disk:
//! so questions about entries that it must have are answered here.
//!
//! Such an answer claims only the entry *before* those that the question carries. openraft takes this for no sign of
//! life: it does not confirm that the follower still follows, on which reads depend. Nor does it commit anything: all
//! entries before an election are of earlier terms.

use super::types::{LogId, Types, Vote};
use openraft::raft::{AppendEntriesRequest, VoteRequest, VoteResponse};
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc};

/// The logs of a group's voters.
#[derive(Clone, Default)]
pub struct VoterLogs(Arc<Mutex<HashMap<u64, VoterLog>>>);

struct VoterLog {
    /// The vote that it granted.
    granted: Vote,
    /// The end of its log then. Our log has this entry too.
    last: LogId,
    /// The last entry that was answered for it.
    answered: Option<LogId>,
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
        let mut all = self.0.lock();
        match last {
            Some((last, _)) => _ = all.insert(voter, VoterLog { granted: asked.vote, last, answered: None }),
            None => _ = all.remove(&voter),
        }
    }

    /// The answer to a request that searches for the end of a voter's log, if it is known: the entry before those of
    /// the request. The first request without an answer ends this: then the follower answers for itself.
    pub fn answer(&self, voter: u64, request: &AppendEntriesRequest<Types>) -> Option<LogId> {
        if request.entries.is_empty() {
            return None; // a heartbeat
        }
        let mut all = self.0.lock();
        let known = all.get_mut(&voter)?;
        let before = request.prev_log_id.filter(|before| {
            known.granted.leader_id() == request.vote.leader_id()
                && before.index <= known.last.index
                // Otherwise the search would not end.
                && Some(*before) > known.answered
        });
        match before {
            Some(_) => known.answered = before,
            None => _ = all.remove(&voter),
        }
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Committed, Entry};
    use openraft::EntryPayload;

    const VOTER: u64 = 7;

    fn log_id(term: u64, index: u64) -> LogId {
        LogId::new(Committed { term }, index)
    }

    /// A candidate of term 5 with this end of its log, and the answer of a voter with that end.
    fn election(ours: LogId, theirs: LogId, granted: bool) -> VoterLogs {
        let logs = VoterLogs::default();
        let vote = Vote::new(5, 1);
        let asked = VoteRequest::new(vote, Some(ours));
        logs.voted(VOTER, &asked, &VoteResponse::new(vote, Some(theirs), granted));
        logs
    }

    fn request(term: u64, before: LogId, entries: bool) -> AppendEntriesRequest<Types> {
        let blank = |index| Entry { log_id: log_id(4, index), payload: EntryPayload::Blank };
        AppendEntriesRequest {
            vote: Vote::new_committed(term, 1),
            prev_log_id: Some(before),
            entries: entries.then(|| blank(before.index + 1)).into_iter().collect(),
            leader_commit: None,
        }
    }

    #[test]
    fn search_is_answered_up_to_the_end_of_the_voters_log() {
        let logs = election(log_id(4, 100), log_id(4, 90), true);
        for index in [50, 70, 90] {
            assert_eq!(logs.answer(VOTER, &request(5, log_id(4, index), false)), None, "a heartbeat");
            let before = log_id(4, index);
            assert_eq!(logs.answer(VOTER, &request(5, before, true)), Some(before));
        }
        assert_eq!(logs.answer(VOTER, &request(5, log_id(4, 91), true)), None, "it may not have this entry");
        assert_eq!(logs.answer(VOTER, &request(5, log_id(4, 90), true)), None, "now it answers for itself");
        assert_eq!(logs.answer(VOTER + 1, &request(5, log_id(4, 50), true)), None);
    }

    #[test]
    fn search_that_does_not_advance_asks_the_follower() {
        let logs = election(log_id(4, 100), log_id(4, 90), true);
        let before = log_id(3, 40);
        assert_eq!(logs.answer(VOTER, &request(5, before, true)), Some(before));
        assert_eq!(logs.answer(VOTER, &request(5, before, true)), None);
    }

    #[test]
    fn end_that_our_log_may_lack_is_not_believed() {
        for (theirs, granted) in [(log_id(3, 90), true), (log_id(4, 101), true), (log_id(4, 90), false)] {
            let logs = election(log_id(4, 100), theirs, granted);
            assert_eq!(logs.answer(VOTER, &request(5, log_id(3, 50), true)), None, "{theirs}, {granted}");
        }
    }

    #[test]
    fn vote_counts_for_its_leadership_alone() {
        let logs = election(log_id(4, 100), log_id(4, 90), true);
        assert_eq!(logs.answer(VOTER, &request(6, log_id(4, 50), true)), None);
    }
}
