//! What planning knows: the servers' reports, and what is agreed.

use super::JobReport;
use crate::{
    control::state::State,
    raft::{Digest, Membership, ReplicaId},
};
use paraft_common::{JobShard, ServerId};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

/// What a server holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// host:port.
    pub address: String,
    /// Its replica of the control group.
    pub node: ReplicaId,
    /// Its replicas of shards.
    pub replicas: BTreeMap<JobShard, Arc<ReplicaReport>>,
    /// The servers that it has reached lately, at the addresses that are agreed on.
    pub reached: BTreeSet<ServerId>,
    /// Folders of replicas that were put aside; `None`: they are still being read.
    pub asides: Option<Vec<AsideReport>>,
    /// Why its replica of the control group does not run, or empty.
    pub control_trouble: String,
}

/// A replica's folder that was put aside.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AsideReport {
    /// Of which shard.
    pub shard: JobShard,
    /// Of which founding; 0: it does not say.
    pub founding: u64,
    /// In the server's data folder.
    pub name: String,
    /// Everything in it is whole.
    pub readable: bool,
}

/// One replica.
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
    /// Its storage does not serve it, for so long; it is tried again. `trouble` says why. Where its folder could not be
    /// read at all, `node` and `founding` are 0. One that leads all the same refuses the sessions of its shard: the storage of
    /// its server's replica of the control group fails.
    pub stopped: Option<Duration>,
    /// Nothing of it is left there, and that server has no room for another at present: `trouble` has the numbers.
    pub no_room: bool,
    pub digests: Vec<Digest>,
    /// Of the leader's replica only: the members that lack a few entries at most.
    pub caught_up: BTreeSet<ReplicaId>,
    /// Of the leader's replica only.
    pub job: Option<JobReport>,
}

impl Report {
    /// Whether nothing could be planned by this that could not by the one before: only what replicas have applied, and what
    /// that hashes to, has moved on, as it does with every push.
    pub fn is_like(&self, before: &Self) -> bool {
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

    /// Without its replicas.
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

    /// What of it is not as in `before`, and the shards of which nothing is there any more.
    pub fn since(&self, before: &Self) -> (Self, Vec<JobShard>) {
        let same = |(shard, now): &(&JobShard, &Arc<ReplicaReport>)| {
            before.replicas.get(shard).is_some_and(|then| Arc::ptr_eq(then, now) || then == *now)
        };
        let changed = self.replicas.iter().filter(|r| !same(r)).map(|(s, r)| (*s, r.clone())).collect();
        let gone = before.replicas.keys().filter(|s| !self.replicas.contains_key(s)).copied().collect();
        (Self { replicas: changed, ..self.of_server() }, gone)
    }

    /// The other way round: the report of which this is what has changed since `before`.
    pub fn upon(mut self, before: &Self, gone: &[JobShard]) -> Self {
        let mut replicas = before.replicas.clone();
        replicas.retain(|shard, _| !gone.contains(shard));
        replicas.append(&mut self.replicas);
        Self { replicas, ..self }
    }
}

/// A report and when it came.
#[derive(Clone, Debug)]
pub struct LastReport {
    /// Drawn at random by who has sent it; 0: it was not sent.
    pub number: u64,
    /// What.
    pub report: Report,
    /// When.
    pub at: Instant,
}

/// How patient the fleet is.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// A server that reports nothing for this long is silent: nothing new is given to it.
    pub silent: Duration,
    /// Its replicas are replaced after this long, where another server can take them.
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

/// What planning needs to know.
pub struct View<'a> {
    /// Agreed.
    pub state: &'a State,
    /// The control group's membership.
    pub control: &'a Membership,
    /// The latest report of each server.
    pub heard: &'a BTreeMap<ServerId, LastReport>,
    /// Now.
    pub now: Instant,
    /// Since when this server leads the control group: silence before it proves nothing.
    pub since: Instant,
    /// Of the control group's members, those that lack a few entries at most.
    pub control_caught_up: &'a BTreeSet<ReplicaId>,
    /// Since when every replica of a shard has been seen to be lost.
    pub lost_since: &'a BTreeMap<JobShard, Instant>,
    /// Settings.
    pub timeouts: Timeouts,
    /// A random number for a new founding.
    pub founding: u64,
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
        (self.now.saturating_duration_since(heard.at) <= self.timeouts.silent).then_some(&heard.report)
    }

    pub(super) fn draining(&self, server: ServerId) -> bool {
        self.state.servers.get(&server).is_some_and(|s| s.draining)
    }

    /// A person has said that it will not come back.
    pub(super) fn forgotten(&self, server: ServerId) -> bool {
        !self.state.servers.contains_key(&server)
    }

    /// Whether a majority of the servers that are there, itself among them, reaches it at the address that is agreed on.
    pub(super) fn reached(&self, server: ServerId) -> bool {
        let there = || self.state.servers.keys().filter_map(|s| Some((*s, self.live(*s)?)));
        let reach = there().filter(|(s, r)| *s == server || r.reached.contains(&server)).count();
        reach * 2 > there().count()
    }

    /// Servers that report and that too few of the others reach, and what that means.
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

    /// Live servers that may be given something.
    pub(super) fn usable(&self) -> impl Iterator<Item = (ServerId, &Report)> {
        let may = |s: &&ServerId| !self.draining(**s) && self.reached(**s);
        self.state.servers.keys().filter(may).filter_map(|s| Some((*s, self.live(*s)?)))
    }

    /// The report of a replica whose storage does not serve it at present.
    pub(super) fn stopped(&self, shard: JobShard, n: ReplicaId) -> Option<&ReplicaReport> {
        let report = self.live(n.server())?.replicas.get(&shard)?;
        (report.stopped.is_some() && (report.node == n || report.node == ReplicaId(0))).then_some(&**report)
    }

    /// The folders of a shard's replicas of this founding that lie aside and can be read, and where. `None`: some server
    /// that is there has not said yet.
    pub(super) fn readable_asides(&self, shard: JobShard, founding: u64) -> Option<Vec<(ServerId, &str)>> {
        let mut found = Vec::new();
        for (server, report) in self.state.servers.keys().filter_map(|s| Some((*s, self.live(*s)?))) {
            let here = report.asides.as_ref()?.iter();
            let ours = here.filter(|a| a.shard == shard && a.founding == founding && a.readable);
            found.extend(ours.map(|a| (server, a.name.as_str())));
        }
        Some(found)
    }

    /// Why a server cannot host a replica of the shard, where that is for want of room. It says so until there is some.
    pub(super) fn no_room(&self, server: ServerId, shard: JobShard) -> Option<&str> {
        let report = self.live(server)?.replicas.get(&shard)?;
        report.no_room.then_some(report.trouble.as_str())
    }

    pub(super) fn bytes(&self, server: ServerId) -> u64 {
        self.live(server).map_or(0, |r| r.replicas.values().map(|p| p.bytes).sum())
    }

    /// The report of a shard's leader: of those that say they lead, the one of the latest term.
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
