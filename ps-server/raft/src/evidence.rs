//! Failover on evidence: a leader whose process has ended is detected by that, not by its silence.
//!
//! ```text
//!  a connection from the leader's server closes ──▶ its address is dialled ──refused──▶ evidence
//!                                                     └──taken──▶ the process there is asked: does it lead with this vote?
//! ```
//!
//! The connection is that of heartbeats: lanes end whenever no worker pushes. A broken connection proves nothing by
//! itself. A refused dial does: the host is up, and no process listens. A voter that has seen this drops the
//! leader's lease and asks the other voters, which check themselves before they answer; each answer includes the
//! end of the voter's log. The best of the voters that have seen it starts an election at once (the longest log,
//! then the id), the others a little later, if necessary. A host that is down refuses nothing: then the election
//! timer decides.
//!
//! Evidence costs no safety, true or false: it only decides when to start an election. Votes are openraft's, on
//! disk before they are sent, one per term. Evidence is about one leadership (its vote): older evidence does not
//! count against the next one. A replica that finds the last accused leader alive accepts no more evidence for [a
//! time](super::belief::EVIDENCE_INTERVAL), so false evidence causes few elections.

use super::{
    belief::Belief,
    dial::DialResult,
    group::Group,
    leadership::Role,
    network::Connection,
    peers::Peers,
    types::{LogId, Vote},
    wire::{self, WireError},
};
use bytes::Bytes;
use futures::future::join_all;
use openraft::{async_runtime::WatchReceiver, raft::TransferLeaderRequest};
use paraft_changes::ReplicaId;
use paraft_proto::PeerCall;
use std::{
    sync::atomic::Ordering::SeqCst,
    time::{Duration, Instant},
};
use tokio::sync::broadcast::error::RecvError;

/// A voter that does not answer within this time counts as absent.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(100);
/// Number of checks of a process that accepts a dial and does not answer: it may be about to end.
const MAX_CHECKS: u32 = 3;
/// Pause between these checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);
/// Delay of a voter that is not the best, longer than an election takes.
const SECOND_ELECTION_DELAY: Duration = Duration::from_millis(50);
/// After this many elections, each after twice the pause, the election timer takes over: without the lease it fires
/// soon.
const MAX_ELECTIONS: u32 = 6;

/// A voter's answer to the question whether it sees the same.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct EvidenceAnswer {
    /// The leader's process has ended.
    pub ended: bool,
    /// The end of the voter's log.
    pub last: Option<LogId>,
    /// The uptime of the answering process.
    pub runs: Duration,
}

/// The answer of a server that hosts no replica of the group at present: none of its replicas is the leader.
pub fn ended_here(peers: &Peers) -> Result<Bytes, WireError> {
    wire::encode(&EvidenceAnswer { ended: true, last: None, runs: peers.runs() })
}

impl Group {
    /// Checks the leader whenever a connection from its server closes. A sleeping group that is not watched keeps
    /// sleeping: the next request finds out.
    pub(super) async fn watch_leader(self) {
        let mut leadership = self.leadership.clone();
        let mut closings = self.network.peers.closings();
        loop {
            let closed = tokio::select! {
                ended = leadership.wait_for(|l| l.role == Role::Stopped) => return drop(ended),
                closed = closings.recv() => closed,
            };
            let concerned = match closed {
                Ok(server) => self.leadership.borrow().leader == Some(server),
                Err(RecvError::Lagged(_)) => true,
                Err(RecvError::Closed) => return,
            };
            if concerned && (self.name.watched || !self.is_asleep()) {
                self.succeed().await;
            }
        }
    }

    /// If the leader's process has ended, takes part in electing the next.
    pub(super) async fn succeed(&self) {
        let Some(vote) = self.followed_vote() else { return };
        if !self.sees_end(&vote).await || self.evidence.succeeding.swap(true, SeqCst) {
            return;
        }
        for round in 0..MAX_ELECTIONS {
            let best = self.stands.load(SeqCst) && self.is_best(&vote).await;
            if self.followed_vote() != Some(vote) {
                break;
            }
            if best {
                self.wake();
                // With a pre-vote: a voter that has seen nothing still refuses.
                let _ = self.raft.trigger().elect(true).await;
            }
            tokio::time::sleep(SECOND_ELECTION_DELAY * (1 << round)).await;
            // Only now: the timer of a voter that slept fires at once, and would compete with the best.
            self.wake();
            if !self.sees_end(&vote).await {
                break;
            }
        }
        self.evidence.succeeding.store(false, SeqCst);
    }

    /// The vote of the leader that this replica follows, if it could vote for another.
    fn followed_vote(&self) -> Option<Vote> {
        let metrics = self.raft.server_metrics();
        let m = metrics.borrow_watched();
        let votes = m.membership_config.voter_ids().any(|id| id == m.id);
        (votes && m.vote.committed && m.vote.leader_id().voted_for != m.id).then_some(m.vote)
    }

    /// Whether this replica sees that the process of the leader with this vote has ended. If so, drops the leader's
    /// lease.
    async fn sees_end(&self, vote: &Vote) -> bool {
        let mut known = self.evidence.belief.lock().await;
        if self.followed_vote() != Some(*vote) {
            return false;
        }
        let (belief, accused) = &mut *known;
        let now = Instant::now();
        if belief.holds(vote, now) {
            return true;
        }
        let Some(leader) = self.connection(vote.leader_id().voted_for, false) else { return false };
        if !(belief.is_open(now) || self.last_evidence_was_true(belief, accused).await)
            || !self.has_ended(&leader, vote).await
        {
            return false;
        }
        *accused = Some(leader);
        let leader = vote.leader_id().voted_for;
        tracing::info!(
            group = %self.name,
            replica = %self.me,
            leader = %ReplicaId(leader),
            "the leader's address refuses connections: its process has ended"
        );
        belief.accept(*vote, Instant::now());
        // A transfer to another replica only drops the lease; if another leads by now, it does nothing.
        let dropped = TransferLeaderRequest::new(*vote, leader, None);
        self.ticks.lease_dropped(*vote);
        self.raft.handle_transfer_leader(dropped).await.is_ok()
    }

    /// Whether the last accepted evidence was true: no process answers, or one that started later.
    async fn last_evidence_was_true(&self, belief: &Belief, accused: &Option<Connection>) -> bool {
        let Some((accused, (vote, past))) = accused.as_ref().zip(belief.last(Instant::now())) else {
            return false;
        };
        match accused.dial().await {
            DialResult::Refused => true,
            DialResult::Unknown => false,
            DialResult::Taken => {
                let seen = accused.ask::<_, EvidenceAnswer>(PeerCall::Ended, &vote, ANSWER_TIMEOUT).await;
                seen.is_ok_and(|seen| seen.runs < past)
            }
        }
    }

    /// Dials the leader, and asks the process that answers.
    async fn has_ended(&self, leader: &Connection, vote: &Vote) -> bool {
        for _ in 0..MAX_CHECKS {
            match leader.dial().await {
                DialResult::Refused => return true,
                DialResult::Unknown => return false,
                DialResult::Taken => {}
            }
            match leader.ask::<_, EvidenceAnswer>(PeerCall::Ended, vote, ANSWER_TIMEOUT).await {
                Ok(seen) => return seen.ended,
                Err(e) => tracing::debug!(group = %self.name, error = %e, "the leader does not answer"),
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
        false
    }

    /// Whether a majority sees the same, and none of them has a longer log, or an equal log and a better id. (With
    /// fewer voters two replicas could find themselves the best, and split the votes.)
    async fn is_best(&self, vote: &Vote) -> bool {
        let others: Vec<u64> = {
            let metrics = self.raft.server_metrics();
            let m = metrics.borrow_watched();
            let others = m.membership_config.voter_ids();
            others.filter(|id| *id != m.id && *id != vote.leader_id().voted_for).collect()
        };
        let majority = (others.len() + 2) / 2 + 1; // including this replica and the leader
        others.iter().for_each(|id| self.prepare_appends(*id, vote));
        let asked = others.into_iter().map(|id| async move {
            let seen: Option<EvidenceAnswer> = self.ask(id, PeerCall::Ended, vote, ANSWER_TIMEOUT).await;
            seen.map(|seen| (id, seen))
        });
        // Ties go to the lower id in one group and to the higher one in the next, so that no server gets them all.
        let rank = |id: u64| if self.name.number.is_multiple_of(2) { u64::MAX - id } else { id };
        let seen: Vec<_> = join_all(asked).await.into_iter().flatten().filter(|(_, s)| s.ended).collect();
        let own = (self.last(), rank(self.me.0));
        seen.len() + 1 >= majority && seen.iter().all(|(id, s)| (s.last, rank(*id)) < own)
    }

    /// Opens the connection that a leader's appends use, with the same question: its handshake takes as long as the
    /// election.
    fn prepare_appends(&self, member: u64, vote: &Vote) {
        let Some(connection) = self.connection(member, true) else { return };
        let vote = *vote;
        tokio::spawn(async move {
            let _ = connection.ask::<_, EvidenceAnswer>(PeerCall::Ended, &vote, ANSWER_TIMEOUT).await;
        });
    }

    fn last(&self) -> Option<LogId> {
        self.raft.data_metrics().borrow_watched().last_log
    }

    /// Answers a voter that has seen a leader's end. The receiver is the leader itself, or another voter, which
    /// takes part from then on.
    pub(super) async fn answer_ended(&self, asked: ReplicaId, header: &[u8]) -> Result<Bytes, WireError> {
        let vote: Vote = wire::decode(header)?;
        let accused = ReplicaId(vote.leader_id().voted_for);
        let ended = if asked != self.me || accused == self.me {
            // An earlier incarnation on this server, or this one.
            asked != self.me || !self.leads_with(&vote)
        } else {
            let ended = self.sees_end(&vote).await;
            if ended {
                self.wake();
                let this = self.clone();
                tokio::spawn(async move { this.succeed().await });
            }
            ended
        };
        wire::encode(&EvidenceAnswer { ended, last: self.last(), runs: self.network.peers.runs() })
    }

    fn leads_with(&self, vote: &Vote) -> bool {
        let metrics = self.raft.server_metrics();
        let m = metrics.borrow_watched();
        m.vote == *vote && m.current_leader == Some(m.id)
    }
}
