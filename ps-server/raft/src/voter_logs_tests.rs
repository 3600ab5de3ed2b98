//! Tests of what is answered for voters, against a model of openraft's search.

use super::*;
use crate::{
    testing::write,
    types::{Committed, Entry},
};

const VOTER: u64 = 7;
const TERM: u64 = 5;

fn log_id(term: u64, index: u64) -> LogId {
    LogId::new(Committed { term }, index)
}

/// A candidate of term 5 with this end of its log, and the answer of a voter with that end.
fn election(ours: LogId, theirs: LogId, granted: bool) -> VoterLogs {
    let logs = VoterLogs::default();
    let vote = Vote::new(TERM, 1);
    let asked = VoteRequest::new(vote, Some(ours));
    logs.voted(VOTER, &asked, &VoteResponse::new(vote, Some(theirs), granted));
    logs
}

/// An append of the leader of this term, with eight entries of this many bytes after `before`, or none.
fn request(term: u64, before: Option<LogId>, bytes: Option<usize>) -> AppendEntriesRequest<Types> {
    let entry = |index, bytes| Entry {
        log_id: log_id(4, index),
        payload: EntryPayload::Normal(write(0, vec![0; bytes])),
    };
    let first = before.map_or(0, |b| b.index + 1);
    let entries = bytes.map(|bytes| (first..first + 8).map(|index| entry(index, bytes)).collect());
    AppendEntriesRequest {
        vote: Vote::new_committed(term, 1),
        prev_log_id: before,
        entries: entries.unwrap_or_default(),
        leader_commit: None,
    }
}

/// openraft's search in a log of this length for the end of a follower's, in entries of these bytes: the number of
/// questions to the follower, and the entry after which the leader sends.
fn search(logs: &VoterLogs, length: u64, follower: u64, bytes: usize) -> (u32, u64) {
    let (mut matching, mut end, mut asked) = (None::<u64>, length, 0);
    loop {
        let next = matching.map_or(0, |m| m + 1);
        assert!(next <= end, "{matching:?} of {end}");
        if next == end {
            return (asked, next);
        }
        let start = next + (end - next) / 16 * 8;
        let before = start.checked_sub(1).map(|index| log_id(4, index));
        let answer = logs.answer(VOTER, &request(TERM, before, Some(bytes))).unwrap_or_else(|| {
            asked += 1;
            match before {
                Some(before) if before.index > follower => Err(StreamAppendError::Conflict(before)),
                _ => Ok(Some(log_id(4, (start + 7).min(length)))),
            }
        });
        match answer {
            Ok(has) => {
                let has = has.expect("an entry");
                assert!(Some(has.index) > matching, "no progress");
                assert!(asked > 0 || Some(has) == before, "more would be a sign of life");
                assert!(asked > 0 || has.index <= follower, "it may lack {has}");
                (matching, end) = (Some(has.index), end.max(has.index + 1));
            }
            Err(StreamAppendError::Conflict(lacks)) => {
                assert!(lacks.index < end, "no progress");
                assert!(asked > 0 || Some(lacks) < before, "a later one would be a sign of life");
                end = lacks.index;
            }
            Err(e) => panic!("{e:?}"),
        }
    }
}

#[test]
fn search_in_small_entries_asks_the_follower_nothing() {
    for (length, follower) in [(4096, 4095), (4096, 4000), (4096, 150), (4096, 40), (375, 374), (40, 39)] {
        let logs = election(log_id(4, length - 1), log_id(4, follower), true);
        let (asked, next) = search(&logs, length, follower, 100);
        assert_eq!(asked, 0, "{follower} of {length}");
        assert!(next <= follower + 1 && follower + 1 - next < NEAR_ENTRIES, "{next}, {follower} of {length}");
    }
}

#[test]
fn search_in_large_entries_asks_about_the_last_ones() {
    for follower in [4095, 4000, 150] {
        let logs = election(log_id(4, 4095), log_id(4, follower), true);
        let (asked, next) = search(&logs, 4096, follower, 1 << 20);
        assert!(asked <= 3 && next > follower, "{asked} questions, {next} of {follower}");
    }
}

#[test]
fn heartbeats_and_other_replicas_are_not_answered() {
    let logs = election(log_id(4, 100), log_id(4, 90), true);
    let before = Some(log_id(4, 50));
    assert!(logs.answer(VOTER, &request(TERM, before, None)).is_none(), "a heartbeat");
    assert!(logs.answer(VOTER + 1, &request(TERM, before, Some(1))).is_none());
    assert!(logs.answer(VOTER, &request(TERM, before, Some(1))).is_some());
    assert!(logs.answer(VOTER, &request(TERM, before, Some(1))).is_none(), "the search does not advance");
    assert!(logs.answer(VOTER, &request(TERM, Some(log_id(4, 60)), Some(1))).is_none(), "so it is over");
}

#[test]
fn end_that_our_log_may_lack_is_not_believed() {
    for (theirs, granted) in [(log_id(3, 90), true), (log_id(4, 101), true), (log_id(4, 90), false)] {
        let logs = election(log_id(4, 100), theirs, granted);
        let asked = request(TERM, Some(log_id(3, 50)), Some(1));
        assert!(logs.answer(VOTER, &asked).is_none(), "{theirs}, {granted}");
    }
}

#[test]
fn vote_counts_for_its_leadership_alone() {
    let logs = election(log_id(4, 100), log_id(4, 90), true);
    assert!(logs.answer(VOTER, &request(TERM + 1, Some(log_id(4, 50)), Some(1))).is_none());
}

#[test]
fn follower_that_was_sent_something_answers_for_itself() {
    let vote = Vote::new(TERM, 1);
    let asked = VoteRequest::new(vote, Some(log_id(4, 100)));
    let voted = VoteResponse::new(vote, Some(log_id(4, 90)), true);
    let search = request(TERM, Some(log_id(4, 50)), Some(1));
    // Its vote comes late, when it may have all entries.
    let logs = VoterLogs::default();
    assert!(logs.answer(VOTER, &search).is_none());
    logs.voted(VOTER, &asked, &voted);
    assert!(logs.answer(VOTER, &request(TERM, Some(log_id(TERM, 4000)), Some(1))).is_none());
    // It has a snapshot.
    let logs = VoterLogs::default();
    logs.voted(VOTER, &asked, &voted);
    logs.sends_snapshot(VOTER, Vote::new_committed(TERM, 1));
    assert!(logs.answer(VOTER, &search).is_none());
    // The same voter votes for the next leadership.
    let vote = Vote::new(TERM + 1, 1);
    let asked = VoteRequest::new(vote, Some(log_id(4, 100)));
    logs.voted(VOTER, &asked, &VoteResponse::new(vote, Some(log_id(4, 90)), true));
    assert!(logs.answer(VOTER, &request(TERM + 1, Some(log_id(4, 50)), Some(1))).is_some());
}

#[test]
fn voters_of_earlier_leaderships_are_forgotten() {
    let logs = VoterLogs::default();
    for voter in 0..1000 {
        let vote = Vote::new(voter, 1);
        let asked = VoteRequest::new(vote, Some(log_id(4, 100)));
        logs.voted(voter, &asked, &VoteResponse::new(vote, Some(log_id(4, 90)), true));
    }
    assert!(logs.0.lock().len() <= MAX_KNOWN);
}
