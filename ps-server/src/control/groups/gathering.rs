//! The ranks of one worker: those that wait, and when they are assigned.

use super::{
    DONE_RETENTION, GATHER_TIMEOUT, GROUP_TIMEOUT, JoinRequest, Key, LEADER_TIMEOUT, REQUEST_TIMEOUT,
};
use paraft_common::group::{Assigned, Assignment};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

/// A rank that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    pub asks: JoinRequest,
    pub since: Instant,
    /// When it sent its last request.
    pub asked: Instant,
}

/// The ranks that wait for a group, and the group that they were assigned to last.
#[derive(Debug, Default)]
pub(super) struct Gathering {
    pub assignment: Option<Assignment>,
    /// Time of its leader's last heartbeat.
    pub heard: Option<Instant>,
    /// The assigned ranks that others have lost.
    pub lost: BTreeSet<u32>,
    /// By rank.
    pub waiting: BTreeMap<u32, Waiting>,
    /// When its leader reported that the job is done.
    pub over: Option<Instant>,
    /// The settings of the ranks assigned last.
    pub settings: Option<String>,
    /// The group's current step.
    pub step: u64,
    /// Why a rank was turned away for which the waiting ranks may be waiting.
    pub turned_away: Option<String>,
}

impl Gathering {
    /// Whether its leader is heard.
    pub(super) fn speaks(&self, now: Instant) -> bool {
        self.over.is_none() && self.heard.is_some_and(|h| now.saturating_duration_since(h) < GROUP_TIMEOUT)
    }

    /// Whether the finished job is that of the waiting ranks: their settings are equal.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        let settings = self.waiting.values().next().map(|w| &w.asks.settings);
        self.over.is_some_and(|o| now.saturating_duration_since(o) < DONE_RETENTION)
            && settings.is_some_and(|s| self.settings.as_ref() == Some(s))
    }

    /// The group of the process, after assigning the waiting ranks if it is time.
    pub(super) fn assigned(&mut self, token: u64, learning: bool, now: Instant) -> Option<Assignment> {
        self.assign(learning, now);
        let waits = self.waiting.values().any(|w| w.asks.token == token);
        self.assignment.clone().filter(|s| !waits && s.place(token).is_some())
    }

    /// The message for a process when ranks have never come and the timeout is over: it stops waiting then.
    pub(super) fn incomplete(&mut self, key: &Key, token: u64, now: Instant) -> Option<String> {
        let first = self.waiting.values().min_by_key(|w| w.since).filter(|_| self.assignment.is_none())?;
        if now.saturating_duration_since(first.since) < first.asks.timeout {
            return None;
        }
        let missing: Vec<String> =
            (0..first.asks.size).filter(|r| !self.waiting.contains_key(r)).map(|r| r.to_string()).collect();
        let mut why = format!(
            "{} of {} ranks of worker {} have come within {:?}; missing: {} (start them, or a job with a smaller \
             train.group_size; cluster.timeout_ms is how long to wait)",
            self.waiting.len(),
            first.asks.size,
            key.worker,
            first.asks.timeout,
            missing.join(", ")
        );
        if let Some(turned_away) = &self.turned_away {
            why += &format!("; one was turned away: {turned_away}");
        }
        self.waiting.retain(|_, w| w.asks.token != token);
        Some(why)
    }

    /// What the process waits for besides absent ranks, as text: for a process of its own rank to go, or for
    /// a rank that was turned away to return.
    pub(super) fn in_the_way(&self, key: &Key, token: u64, now: Instant) -> Option<String> {
        let asks = &self.waiting.values().find(|w| w.asks.token == token)?.asks;
        let Some(assignment) = self.assignment.as_ref().filter(|_| self.speaks(now)) else {
            return self.turned_away.clone();
        };
        let assigned = assignment.ranks.iter().find(|r| r.rank == asks.rank && r.token != token)?;
        Some(format!(
            "rank {} of worker {} is in the group already, at {}: two processes have the same rank, or that one has \
             died a moment ago",
            asks.rank, key.worker, assigned.address
        ))
    }

    /// Drops the waiting ranks that do not ask any more.
    pub(super) fn forget(&mut self, now: Instant) {
        self.waiting.retain(|_, w| now.saturating_duration_since(w.asked) < REQUEST_TIMEOUT);
    }

    /// Assigns the waiting ranks, if it is time. `learning`: there may be a group that this leader does not
    /// know yet.
    fn assign(&mut self, learning: bool, now: Instant) {
        self.forget(now);
        let Some(since) = self.waiting.values().map(|w| w.since).min().filter(|_| !self.is_over(now)) else {
            return;
        };
        let waited = now.saturating_duration_since(since);
        let before = self.assignment.as_ref().filter(|_| self.speaks(now));
        let complete = match before {
            None if learning && self.assignment.is_none() => false,
            None => {
                let size = self.waiting.values().map(|w| w.asks.size).max().unwrap_or(1);
                let timeout = self.waiting.values().map(|w| w.asks.timeout).min().unwrap_or_default();
                // A job does not begin without ranks that have never come; an existing group continues with
                // the ranks that are left.
                self.waiting.len() as u32 >= size || (waited >= timeout && self.assignment.is_some())
            }
            Some(s) => {
                // A member that asks again has left its group. Until one has, newcomers wait, including those
                // with the rank of a live member.
                let left = |r: &Assigned| self.waiting.get(&r.rank).filter(|w| w.asks.token == r.token);
                let first_left = s.ranks.iter().filter_map(left).map(|w| w.since).min();
                let heard = self.heard.is_some_and(|h| now.saturating_duration_since(h) < LEADER_TIMEOUT);
                match first_left {
                    // Only processes that have replaced others, or are new.
                    None => {
                        let replaced = |r: &Assigned| self.waiting.contains_key(&r.rank);
                        !heard && s.ranks.iter().all(|r| replaced(r) || self.lost.contains(&r.rank))
                    }
                    Some(first) => {
                        let gone = |r: &Assigned| left(r).is_some() || self.lost.contains(&r.rank);
                        let leader_comes = heard && s.ranks.first().is_some_and(|l| !gone(l));
                        let late = now.saturating_duration_since(first) >= GATHER_TIMEOUT;
                        s.ranks.iter().all(gone) || (late && !leader_comes)
                    }
                }
            }
        };
        if !complete {
            return;
        }
        self.settings = self.waiting.values().next().map(|w| w.asks.settings.clone());
        let mut ranks: Vec<Waiting> = std::mem::take(&mut self.waiting).into_values().collect();
        let last = ranks.iter().map(|w| w.asks.last.generation).max().unwrap_or(0);
        let last = last.max(self.assignment.as_ref().map_or(0, |s| s.generation));
        // Members of the latest group first, in their order there.
        ranks.sort_by_key(|Waiting { asks, .. }| {
            (std::cmp::Reverse(asks.last.generation), asks.last.place(asks.token), asks.rank)
        });
        let assigned =
            |w: Waiting| Assigned { rank: w.asks.rank, token: w.asks.token, address: w.asks.address };
        let ranks = ranks.into_iter().map(assigned).collect();
        self.assignment = Some(Assignment { generation: last + 1, ranks });
        self.heard = Some(now);
        self.lost.clear();
        self.turned_away = None;
        self.over = None;
    }
}
