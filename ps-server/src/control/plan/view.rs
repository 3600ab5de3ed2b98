//! What planning knows: the servers' reports, and what is agreed.

use super::JobReport;
use crate::{
    control::state::State,
    raft::{Digest, Membership, ReplicaId},
};
use paraft_common::{ServerId, ShardId};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// What a server holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// host:port.
    pub address: String,
    /// Its replica of the control group.
    pub node: ReplicaId,
    /// Its replicas of shards.
    pub replicas: BTreeMap<ShardId, ReplicaReport>,
}

/// One replica.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // as in control.proto
pub struct ReplicaReport {
    pub node: ReplicaId,
    pub origin: u64,
    pub founded: bool,
    pub leads: bool,
    pub term: u64,
    pub applied: u64,
    pub bytes: u64,
    pub membership: Membership,
    pub trouble: String,
    pub digests: Vec<Digest>,
    /// Of the leader's replica only: the members that lack a few entries at most.
    pub caught_up: BTreeSet<ReplicaId>,
    /// Of the leader's replica only.
    pub job: Option<JobReport>,
}

/// A report and when it came.
#[derive(Clone, Debug)]
pub struct Heard {
    /// What.
    pub report: Report,
    /// When.
    pub at: Instant,
}

/// How patient the fleet is.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// A server that reports nothing for this long is silent: nothing new is given to it.
    pub silent: Duration,
    /// Its replicas are replaced after this long, where another server can take them.
    pub replace: Duration,
    /// A leader is moved back only after the fleet has been whole for this long.
    pub settle: Duration,
}

impl Patience {
    /// For a fleet with this election timeout, which replaces servers that are silent for `replace`.
    pub fn new(election: Duration, replace: Duration) -> Self {
        Self { silent: (election * 6).max(Duration::from_secs(1)), replace, settle: election * 15 }
    }
}

/// What planning needs to know.
pub struct View<'a> {
    /// Agreed.
    pub state: &'a State,
    /// The control group's membership.
    pub control: &'a Membership,
    /// The latest report of each server.
    pub heard: &'a BTreeMap<ServerId, Heard>,
    /// Now.
    pub now: Instant,
    /// Since when this server leads the control group: silence before it proves nothing.
    pub since: Instant,
    /// Settings.
    pub patience: Patience,
    /// A random number for a new founding.
    pub origin: u64,
    /// The time of day, in ms of unix time: for people to read, nothing is decided by it.
    pub unix_ms: u64,
}

impl View<'_> {
    pub(super) fn age(&self, server: ServerId) -> Duration {
        let last = self.heard.get(&server).map_or(self.since, |h| h.at.max(self.since));
        self.now.saturating_duration_since(last)
    }

    /// Its latest report, if it is not silent.
    pub(super) fn live(&self, server: ServerId) -> Option<&Report> {
        let heard = self.heard.get(&server)?;
        (self.now.saturating_duration_since(heard.at) <= self.patience.silent).then_some(&heard.report)
    }

    pub(super) fn draining(&self, server: ServerId) -> bool {
        self.state.servers.get(&server).is_some_and(|s| s.draining)
    }

    /// Live servers that may be given something.
    pub(super) fn usable(&self) -> impl Iterator<Item = (ServerId, &Report)> {
        self.state.servers.keys().filter(|s| !self.draining(**s)).filter_map(|s| Some((*s, self.live(*s)?)))
    }

    pub(super) fn bytes(&self, server: ServerId) -> u64 {
        self.live(server).map_or(0, |r| r.replicas.values().map(|p| p.bytes).sum())
    }

    /// The report of a shard's leader: of those that say they lead, the one of the latest term.
    pub(super) fn leader(&self, shard: ShardId, origin: u64) -> Option<(ServerId, &ReplicaReport)> {
        let leads = |s: &ServerId| {
            let r = self.live(*s)?.replicas.get(&shard)?;
            (r.leads && r.origin == origin).then_some((*s, r))
        };
        self.state.servers.keys().filter_map(leads).max_by_key(|(_, r)| r.term)
    }
}
