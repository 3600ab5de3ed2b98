//! Groups that have nothing to do sleep: no heartbeats, no timers. A server with many idle groups costs what one costs.
//!
//! ```text
//!  leader    quiet ──asks every member──all have the same last entry──▶ asleep ──it is asked for anything──▶ awake
//!  follower  awake ──its leader asks──▶ asleep ──its leader's message, a vote, or its leader is not reached──▶ awake
//! ```
//!
//! Raft's safety does not depend on time, so sleep costs time only. A sleeping leader may be deposed without its
//! knowledge, so it confirms its leadership before it acts again ([`Group::ensure_awake`]). A sleeping follower
//! does not notice that its leader died, so the next request to the group wakes it, and its server checks the
//! leader. A group that nobody asks for anything is watched ([`GroupName::watched`](super::GroupName)): if its
//! leader's process ends, its followers wake at once.

use super::{
    group::{Group, ProposeError},
    types::{LogId, Vote},
    wire::{self, WireError},
};
use bytes::Bytes;
use futures::future::join_all;
use openraft::async_runtime::WatchReceiver;
use paraft_proto::PeerCall;
use std::{
    sync::atomic::Ordering::SeqCst,
    time::{Duration, Instant},
};

/// A member that does not answer in this time does not go to sleep, or is down.
const SLEEP_TIMEOUT: Duration = Duration::from_millis(500);

/// A leader falls asleep within this time after its followers: a later heartbeat means that it is awake.
const LAST_HEARTBEAT: Duration = Duration::from_secs(1);

/// Bytes that a sleeping replica's log may keep without being needed.
const MAX_ASLEEP_BYTES: u64 = 64 << 10;

/// The common state with which all members go to sleep: the vote of the leadership, and the last entry of the log.
type Level = (Vote, Option<LogId>);

impl Group {
    /// Whether this replica sleeps.
    pub fn is_asleep(&self) -> bool {
        self.sleep.asleep.load(SeqCst)
    }

    /// Whether this replica has slept since the last call: a leader may be deposed in its sleep without its
    /// knowledge.
    pub fn has_slept(&self) -> bool {
        self.sleep.slept.swap(false, SeqCst)
    }

    /// Wakes this replica: its timers run again, and its heartbeats if it leads.
    pub fn wake(&self) {
        self.sleep.activity.fetch_add(1, SeqCst);
        if self.sleep.asleep.swap(false, SeqCst) {
            tracing::debug!(group = %self.name, replica = %self.me, "the replica wakes");
            self.sleep_changed();
            self.sleep.woken.notify_waiters();
        }
    }

    /// Returns when this replica may act; at once if it is awake. A leader that slept has confirmed its leadership.
    /// A follower has woken its leader, or starts an election.
    ///
    /// # Errors
    /// The leadership was not confirmed.
    pub async fn ensure_awake(&self) -> Result<(), ProposeError> {
        self.sleep.activity.fetch_add(1, SeqCst);
        if !self.is_asleep() {
            return Ok(());
        }
        let leads = self.leadership.borrow().leads;
        if leads {
            return self.barrier().await; // which wakes it
        }
        let leader = self.raft.server_metrics().borrow_watched().current_leader;
        let told = match leader {
            Some(leader) => self.ask(leader, PeerCall::Wake, &(), SLEEP_TIMEOUT).await.unwrap_or(false),
            None => false,
        };
        if !told {
            self.wake();
            let this = self.clone();
            tokio::spawn(async move { this.succeed().await });
        }
        Ok(())
    }

    /// Puts the group to sleep if this replica leads it, every member has its whole log, and no request arrives
    /// meanwhile; returns whether it sleeps.
    pub async fn sleep(&self) -> bool {
        let before = self.sleep.activity.load(SeqCst);
        let Some((level, others)) = self.level() else { return false };
        let asked = others.into_iter().map(|id| self.ask(id, PeerCall::Sleep, &level, SLEEP_TIMEOUT));
        if join_all(asked).await.into_iter().any(|agreed: Option<bool>| agreed != Some(true)) {
            return false;
        }
        self.fall_asleep();
        // A later request finds the replica asleep and wakes it.
        if self.sleep.activity.load(SeqCst) != before {
            self.wake();
        }
        self.is_asleep()
    }

    fn fall_asleep(&self) {
        self.sleep.slept.store(true, SeqCst);
        *self.sleep.since.lock() = Some(Instant::now());
        self.sleep.asleep.store(true, SeqCst);
        self.sleep_changed();
        // A request may have woken it meanwhile.
        if self.is_asleep() {
            tracing::debug!(group = %self.name, replica = %self.me, "the idle replica sleeps");
            // No member needs its entries any more: all have them.
            if self.log_size().bytes > MAX_ASLEEP_BYTES {
                self.sleep.compact.notify_one();
            }
        }
    }

    /// Whether this replica sleeps while its leader, which has sent a heartbeat, is awake.
    pub(super) fn sleeps_alone(&self) -> bool {
        self.is_asleep() && self.sleep.since.lock().is_some_and(|since| since.elapsed() > LAST_HEARTBEAT)
    }

    /// Returns when this replica is awake; at once if it is.
    pub(super) async fn until_awake(&self) {
        loop {
            // Before the look: a wake in between is not missed.
            let mut woken = std::pin::pin!(self.sleep.woken.notified());
            woken.as_mut().enable();
            if !self.is_asleep() {
                return;
            }
            woken.await;
        }
    }

    /// The common state for sleep, and the other members; `None`: the group is not idle.
    fn level(&self) -> Option<(Level, Vec<u64>)> {
        let metrics = self.raft.metrics();
        let m = metrics.borrow_watched();
        let last = LogId::new(*m.last_applied.as_ref()?.committed_leader_id(), m.last_log_index?);
        let applied = m.last_applied.as_ref() == Some(&last);
        let joint = m.membership_config.get_joint_config().len() > 1;
        let replicated = m.replication.as_ref()?;
        let others: Vec<u64> =
            m.membership_config.nodes().map(|(id, _)| *id).filter(|id| *id != m.id).collect();
        let have = others.iter().all(|id| replicated.get(id).and_then(|at| at.as_ref()) == Some(&last));
        (m.current_leader == Some(m.id) && applied && !joint && have).then(|| ((m.vote, Some(last)), others))
    }

    /// Answers a leader that wants to put its group to sleep.
    pub(super) fn answer_sleep(&self, header: &[u8]) -> Result<Bytes, WireError> {
        let (vote, last): Level = wire::decode(header)?;
        let metrics = self.raft.metrics();
        let agrees = {
            let m = metrics.borrow_watched();
            let level = m.last_log_index == last.as_ref().map(|l| l.index) && m.last_applied == last;
            m.vote == vote && level && m.current_leader.is_some()
        };
        if agrees {
            self.fall_asleep();
        }
        wire::encode(&agrees)
    }

    /// Answers a member with a request: whether this replica leads, and is awake now.
    pub(super) fn answer_wake(&self) -> Result<Bytes, WireError> {
        self.wake();
        wire::encode(&self.leadership.borrow().leads)
    }
}
