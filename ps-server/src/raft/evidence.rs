//! Failover on evidence: a leader whose process has ended is known by that, not by its silence.
//!
//! ```text
//!  a connection from the leader's server closes ──▶ its address is dialled ──refused──▶ evidence
//!                                                     └──taken──▶ the process there is asked: does it lead with this vote?
//! ```
//!
//! The connection is that of heartbeats: lanes end whenever nothing is pushed. That it is broken says nothing by itself. A refused dial
//! does: the host is there, and nobody listens. Whoever has seen that drops the leader's lease and asks the other voters, who look for themselves before they answer; with the answers comes how
//! far each one's log goes. The best of those who have seen it stands at once (the longest log, then the id), the others a
//! little later, if need be. A host that has gone refuses nothing: that takes the timer.
//!
//! Evidence costs no safety, true or false: it only says when to stand. Votes are openraft's, on the disk before they are sent,
//! one for each term. It is of one leadership (its vote): what was seen before does not count against the next. And whoever
//! finds that the last accused lives believes no more evidence for [a time](super::belief::ONCE_IN), so that false evidence costs
//! few elections.

use super::{
    belief::Belief,
    group::Group,
    leadership::Role,
    network::{Connection, Dialled, Peers},
    replica::ReplicaId,
    replicated::Logged,
    types::{LogId, Vote},
    wire::{self, WireError},
};
use bytes::Bytes;
use futures::future::join_all;
use openraft::{async_runtime::WatchReceiver, raft::TransferLeaderRequest};
use paraft_proto::PeerCall;
use std::{
    sync::atomic::Ordering::SeqCst,
    time::{Duration, Instant},
};
use tokio::sync::broadcast::error::RecvError;

/// Who is asked answers this soon, or counts as not there.
const ANSWER: Duration = Duration::from_millis(100);
/// A process that takes a dial and does not answer may be about to end: it is looked at so often,
const LOOKS: u32 = 3;
/// with this pause.
const LOOK_PAUSE: Duration = Duration::from_millis(10);
/// Whoever is not the best stands this much later, if nobody has been elected. Longer than an election takes.
const LATER: Duration = Duration::from_millis(50);
/// After so many times, each with twice the pause, the timer takes over: without the lease it is soon over.
const ROUNDS: u32 = 6;

/// What a voter answers who is asked whether it sees the same.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Seen {
    /// That process has ended.
    pub ended: bool,
    /// How far the log of who answers goes.
    pub last: Option<LogId>,
    /// For how long the process that answers has run.
    pub runs: Duration,
}

/// The answer of a server that hosts no replica of the group at present: none of its own leads it.
pub fn ended_here(peers: &Peers) -> Result<Bytes, WireError> {
    wire::encode(&Seen { ended: true, last: None, runs: peers.runs() })
}

impl<C: Logged> Group<C> {
    /// Looks after the leader whenever a connection from its server closes. A group that sleeps sleeps on: whoever comes for
    /// it finds out.
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
            if concerned && !self.is_asleep() {
                self.succeed().await;
            }
        }
    }

    /// Where the leader's process has ended: takes part in finding the next.
    pub(super) async fn succeed(&self) {
        let Some(vote) = self.followed() else { return };
        if !self.sees_end(&vote).await || self.evidence.succeeding.swap(true, SeqCst) {
            return;
        }
        for round in 0..ROUNDS {
            let best = self.stands.load(SeqCst) && self.is_best(&vote).await;
            if self.followed() != Some(vote) {
                break;
            }
            if best {
                // With a pre-vote: whoever has seen nothing still refuses.
                let _ = self.raft.trigger().elect(true).await;
            }
            tokio::time::sleep(LATER * (1 << round)).await;
            if !self.sees_end(&vote).await {
                break;
            }
        }
        self.evidence.succeeding.store(false, SeqCst);
    }

    /// The vote of the leader that this replica follows, where it could vote for another.
    fn followed(&self) -> Option<Vote> {
        let metrics = self.raft.server_metrics();
        let m = metrics.borrow_watched();
        let votes = m.membership_config.voter_ids().any(|id| id == m.id);
        (votes && m.vote.committed && m.vote.leader_id().voted_for != m.id).then_some(m.vote)
    }

    /// Whether the process of the leader with this vote has ended, as far as this replica sees. If so, its lease is dropped.
    async fn sees_end(&self, vote: &Vote) -> bool {
        let mut known = self.evidence.belief.lock().await;
        if self.followed() != Some(*vote) {
            return false;
        }
        let (belief, accused) = &mut *known;
        let now = Instant::now();
        if belief.holds(vote, now) {
            return true;
        }
        let Some(leader) = self.connection(vote.leader_id().voted_for) else { return false };
        if !(belief.is_open(now) || self.was_so(belief, accused).await)
            || !self.has_ended(&leader, vote).await
        {
            return false;
        }
        *accused = Some(leader);
        let leader = vote.leader_id().voted_for;
        tracing::info!(group = %self.name, replica = %self.me, leader = %ReplicaId(leader), "the leader's address refuses connections: its process has ended");
        belief.begins(*vote, Instant::now());
        // A transfer to somebody else drops the lease and does no more; where another leads by now, not even that.
        let dropped = TransferLeaderRequest::new(*vote, leader, None);
        self.raft.handle_transfer_leader(dropped).await.is_ok()
    }

    /// Whether what was believed last was so: nobody is there, or a process that began since.
    async fn was_so(&self, belief: &Belief, accused: &Option<Connection>) -> bool {
        let Some((accused, (vote, past))) = accused.as_ref().zip(belief.last(Instant::now())) else {
            return false;
        };
        match accused.dial().await {
            Dialled::Refused => true,
            Dialled::Unknown => false,
            Dialled::Taken => {
                let seen = accused.ask::<_, Seen>(PeerCall::Ended, &vote, ANSWER).await;
                seen.is_ok_and(|seen| seen.runs < past)
            }
        }
    }

    /// Dials the leader, and asks whoever takes it.
    async fn has_ended(&self, leader: &Connection, vote: &Vote) -> bool {
        for _ in 0..LOOKS {
            match leader.dial().await {
                Dialled::Refused => return true,
                Dialled::Unknown => return false,
                Dialled::Taken => {}
            }
            match leader.ask::<_, Seen>(PeerCall::Ended, vote, ANSWER).await {
                Ok(seen) => return seen.ended,
                Err(e) => tracing::debug!(group = %self.name, error = %e, "the leader does not answer"),
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
        false
    }

    /// Whether a majority sees the same, and nobody of it has more of the log, or as much and the better id. (With fewer two could
    /// find themselves the best, and split the votes.)
    async fn is_best(&self, vote: &Vote) -> bool {
        let others: Vec<u64> = {
            let metrics = self.raft.server_metrics();
            let m = metrics.borrow_watched();
            let others = m.membership_config.voter_ids();
            others.filter(|id| *id != m.id && *id != vote.leader_id().voted_for).collect()
        };
        let majority = (others.len() + 2) / 2 + 1; // of these, this one and the leader
        let asked = others.into_iter().map(|id| async move {
            let seen: Option<Seen> = self.ask(id, PeerCall::Ended, vote, ANSWER).await;
            seen.map(|seen| (id, seen))
        });
        // Ties go to the lower id in one group and to the higher one in the next, so that one server does not get them all.
        let rank = |id: u64| if self.name.number.is_multiple_of(2) { u64::MAX - id } else { id };
        let seen: Vec<_> = join_all(asked).await.into_iter().flatten().filter(|(_, s)| s.ended).collect();
        let own = (self.last(), rank(self.me.0));
        seen.len() + 1 >= majority && seen.iter().all(|(id, s)| (s.last, rank(*id)) < own)
    }

    fn last(&self) -> Option<LogId> {
        self.raft.data_metrics().borrow_watched().last_log
    }

    /// Answers a voter that has seen the end of a leader: the leader itself where it lives, or another voter, which takes
    /// part from then on.
    pub(super) async fn answer_ended(&self, asked: ReplicaId, header: &[u8]) -> Result<Bytes, WireError> {
        let vote: Vote = wire::decode(header)?;
        let accused = ReplicaId(vote.leader_id().voted_for);
        let ended = if asked != self.me || accused == self.me {
            // An incarnation of this server that has ended, or this one.
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
        wire::encode(&Seen { ended, last: self.last(), runs: self.network.peers.runs() })
    }

    fn leads_with(&self, vote: &Vote) -> bool {
        let metrics = self.raft.server_metrics();
        let m = metrics.borrow_watched();
        m.vote == *vote && m.current_leader == Some(m.id)
    }
}
