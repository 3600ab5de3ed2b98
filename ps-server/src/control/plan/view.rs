//! The input of the plan: the servers' reports, and the agreed state.

use crate::{
    control::{jobs::JobFacts, state::State},
    raft::{Digest, Membership, ReplicaId},
};
use paraft_common::{JobShard, ServerId, auto};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

/// A server's report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// host:port.
    pub address: String,
    /// Its replica of the control group.
    pub node: ReplicaId,
    /// Its replicas of shards.
    pub replicas: BTreeMap<JobShard, Arc<ReplicaReport>>,
    /// The servers that it has reached lately, at their agreed addresses.
    pub reached: BTreeSet<ServerId>,
    /// Quarantined folders of replicas; `None`: they are still being read.
    pub asides: Option<Vec<AsideReport>>,
    /// Why its replica of the control group does not run; empty if it does.
    pub control_trouble: String,
}

/// A quarantined folder of a replica.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AsideReport {
    /// The shard.
    pub shard: JobShard,
    /// The founding; 0: unknown.
    pub founding: u64,
    /// Its name in the server's data folder.
    pub name: String,
    /// Everything in it is intact.
    pub readable: bool,
}

/// A job, as the leader of a shard knows it.
#[derive(Clone, Debug, PartialEq)]
pub struct JobReport {
    /// Its facts.
    pub facts: JobFacts,
    /// Number of shards that hold buckets of it: the first ones. The others do not know it.
    pub shards: u32,
    /// All its workers have joined, and no remaining member has anything left to do on this shard.
    pub finished: bool,
    /// On the first shard, if the rule chooses the staleness bound: the rule's input.
    pub auto: Option<auto::Report>,
}

/// A report about one replica.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)] // as in control.proto
pub struct ReplicaReport {
    pub node: ReplicaId,
    pub founding: u64,
    pub founded: bool,
    pub leads: bool,
    pub term: u64,
    pub applied: u64,
    pub bytes: u64,
    pub membership: Membership,
    pub trouble: String,
    /// For how long its storage has failed; it is retried. `trouble` says why. If its folder could not be
    /// read at all, `node` and `founding` are 0. A replica that still leads refuses the sessions of its
    /// shard: the storage of its server's replica of the control group fails.
    pub stopped: Option<Duration>,
    /// Nothing of it is left there, and that server has no room for another at present: `trouble` has the
    /// numbers.
    pub no_room: bool,
    pub digests: Vec<Digest>,
    /// Only of the leader's replica: the members that lack a few entries at most.
    pub caught_up: BTreeSet<ReplicaId>,
    /// Only of the leader's replica.
    pub job: Option<JobReport>,
}

impl Report {
    /// Whether the plan cannot change by this report: only the applied index and its digest differ from
    /// `before`, as they do with every push.
    pub fn is_equivalent(&self, before: &Self) -> bool {
        let like = |(a, b): (&Arc<ReplicaReport>, &Arc<ReplicaReport>)| {
            if Arc::ptr_eq(a, b) {
                return true;
            }
            let (a, b) = (&**a, &**b);
            let (applied, bytes, digests) = (b.applied, b.bytes, b.digests.clone());
            ReplicaReport { applied, bytes, digests, ..a.clone() } == *b
        };
        let replicas = self.replicas.keys().eq(before.replicas.keys())
            && self.replicas.values().zip(before.replicas.values()).all(like);
        replicas && self.of_server() == before.of_server()
    }

    /// The report without its replicas.
    fn of_server(&self) -> Self {
        let Self { address, node, replicas: _, reached, asides, control_trouble } = self;
        Self {
            address: address.clone(),
            node: *node,
            replicas: BTreeMap::new(),
            reached: reached.clone(),
            asides: asides.clone(),
            control_trouble: control_trouble.clone(),
        }
    }

    /// The difference to `before`, and the shards that are gone since.
    pub fn since(&self, before: &Self) -> (Self, Vec<JobShard>) {
        let same = |(shard, now): &(&JobShard, &Arc<ReplicaReport>)| {
            before.replicas.get(shard).is_some_and(|then| Arc::ptr_eq(then, now) || then == *now)
        };
        let changed = self.replicas.iter().filter(|r| !same(r)).map(|(s, r)| (*s, r.clone())).collect();
        let gone = before.replicas.keys().filter(|s| !self.replicas.contains_key(s)).copied().collect();
        (Self { replicas: changed, ..self.of_server() }, gone)
    }

    /// The reverse: the report whose difference to `before` this is.
    pub fn merged_onto(mut self, before: &Self, gone: &[JobShard]) -> Self {
        let mut replicas = before.replicas.clone();
        replicas.retain(|shard, _| !gone.contains(shard));
        replicas.append(&mut self.replicas);
        Self { replicas, ..self }
    }
}

/// A report and its time.
#[derive(Clone, Debug)]
pub struct LastReport {
    /// A random number of its sender; 0: it was not sent.
    pub number: u64,
    /// The report.
    pub report: Report,
    /// When it arrived.
    pub at: Instant,
}

/// The timeouts of a fleet.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// A server without a report for this long is silent: it is given nothing new.
    pub silent: Duration,
    /// Its replicas are replaced after this long, if another server can take them.
    pub replace: Duration,
    /// A leader is moved back only after the fleet has been whole for this long.
    pub settle: Duration,
}

impl Timeouts {
    /// For a fleet with this election timeout, which replaces servers that are silent for `replace`.
    pub fn new(election: Duration, replace: Duration) -> Self {
        Self { silent: (election * 6).max(Duration::from_secs(1)), replace, settle: election * 15 }
    }
}

/// The input of the plan.
pub struct View<'a> {
    /// The agreed state.
    pub state: &'a State,
    /// The control group's membership.
    pub control: &'a Membership,
    /// The latest report of each server.
    pub heard: &'a BTreeMap<ServerId, LastReport>,
    /// The current time.
    pub now: Instant,
    /// Since when this server leads the control group: earlier silence proves nothing.
    pub since: Instant,
    /// Members of the control group that lack a few entries at most.
    pub control_caught_up: &'a BTreeSet<ReplicaId>,
    /// Since when every replica of a shard is known to be lost.
    pub lost_since: &'a BTreeMap<JobShard, Instant>,
    /// The fleet's timeouts.
    pub timeouts: Timeouts,
    /// A random number for a new founding.
    pub founding: u64,
    /// The time of day in ms of unix time, for people: no decision depends on it.
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
        (self.now.saturating_duration_since(heard.at) <= self.timeouts.silent).then_some(&heard.report)
    }

    /// The servers that are not silent, and their reports.
    pub(super) fn all_live(&self) -> impl Iterator<Item = (ServerId, &Report)> {
        self.state.servers.keys().filter_map(|s| Some((*s, self.live(*s)?)))
    }

    pub(super) fn draining(&self, server: ServerId) -> bool {
        self.state.servers.get(&server).is_some_and(|s| s.draining)
    }

    /// Whether a person has ordered that it will not return.
    pub(super) fn forgotten(&self, server: ServerId) -> bool {
        !self.state.servers.contains_key(&server)
    }

    /// Whether a majority of the live servers, itself included, reaches it at its agreed address.
    pub(super) fn reached(&self, server: ServerId) -> bool {
        let reach = self.all_live().filter(|(s, r)| *s == server || r.reached.contains(&server)).count();
        reach * 2 > self.all_live().count()
    }

    /// Servers that report but are reached by too few others, and the consequence.
    pub fn unreached(&self) -> BTreeMap<ServerId, String> {
        let there = self.state.servers.iter().filter(|(s, _)| self.live(**s).is_some() && !self.reached(**s));
        let why = |address: &str| {
            format!(
                "the other servers do not reach it at {address}: it votes nowhere and gets nothing until they do \
                 (--advertise)"
            )
        };
        there.map(|(s, m)| (*s, why(&m.address))).collect()
    }

    /// Live servers that may be given replicas.
    pub(super) fn usable(&self) -> impl Iterator<Item = (ServerId, &Report)> {
        self.all_live().filter(|(s, _)| !self.draining(*s) && self.reached(*s))
    }

    /// The report of a replica that works.
    pub(super) fn working(&self, shard: JobShard, n: ReplicaId) -> Option<&ReplicaReport> {
        let report = self.live(n.server())?.replicas.get(&shard)?;
        (report.node == n && report.trouble.is_empty()).then_some(&**report)
    }

    /// Whether its server runs, but the replica is missing: it has lost its log. A replica that waits for its
    /// storage still has it.
    pub(super) fn vanished(&self, shard: JobShard, n: ReplicaId) -> bool {
        let answers = self.live(n.server()).is_some() || self.forgotten(n.server());
        answers && self.working(shard, n).is_none() && self.stopped(shard, n).is_none()
    }

    /// The report of a replica whose storage fails at present.
    pub(super) fn stopped(&self, shard: JobShard, n: ReplicaId) -> Option<&ReplicaReport> {
        let report = self.live(n.server())?.replicas.get(&shard)?;
        (report.stopped.is_some() && (report.node == n || report.node == ReplicaId(0))).then_some(&**report)
    }

    /// The readable quarantined folders of a shard's replicas of this founding, and their servers. `None`:
    /// some live server has not reported them yet.
    pub(super) fn readable_asides(&self, shard: JobShard, founding: u64) -> Option<Vec<(ServerId, &str)>> {
        let mut found = Vec::new();
        for (server, report) in self.all_live() {
            let here = report.asides.as_ref()?.iter();
            let ours = here.filter(|a| a.shard == shard && a.founding == founding && a.readable);
            found.extend(ours.map(|a| (server, a.name.as_str())));
        }
        Some(found)
    }

    /// Why a server has no room for a replica of the shard, if so. It reports this until there is room.
    pub(super) fn no_room(&self, server: ServerId, shard: JobShard) -> Option<&str> {
        let report = self.live(server)?.replicas.get(&shard)?;
        report.no_room.then_some(report.trouble.as_str())
    }

    pub(super) fn bytes(&self, server: ServerId) -> u64 {
        self.live(server).map_or(0, |r| r.replicas.values().map(|p| p.bytes).sum())
    }

    /// The report of a shard's leader: of the replicas that claim to lead, the one of the latest term.
    pub(in crate::control) fn leader(
        &self,
        shard: JobShard,
        founding: u64,
    ) -> Option<(ServerId, &ReplicaReport)> {
        let leads = |s: &ServerId| {
            let r = self.live(*s)?.replicas.get(&shard)?;
            (r.leads && r.founding == founding).then_some((*s, &**r))
        };
        self.state.servers.keys().filter_map(leads).max_by_key(|(_, r)| r.term)
    }
}
