//! Reports and directives: wire to domain and back.

use super::super::{auto, jobs};
use crate::{
    control::{Action, AsideReport, Directive, ReplicaReport, Report, SentReport},
    raft::{Digest, Membership, ReplicaId},
};
use paraft_common::{JobShard, ServerId};
use paraft_proto::{
    CheckDigest, Diverged, Found, Host, Remove, Replica, ReportRequest, Retire, Stop, Voters, directive,
};
use std::{sync::Arc, time::Duration};

/// A report for the wire.
pub fn to_report(fleet: u64, told: &SentReport) -> ReportRequest {
    let SentReport { server, number, since, report, gone } = told;
    let replicas = report.replicas.iter().map(|(shard, r)| paraft_proto::ReplicaReport {
        shard: shard.number(),
        node: r.node.0,
        founding: r.founding,
        founded: r.founded,
        leads: r.leads,
        term: r.term,
        applied: r.applied,
        bytes: r.bytes,
        members: r
            .membership
            .members
            .iter()
            .map(|(n, a)| Replica {
                node: n.0,
                address: a.clone(),
                voter: r.membership.voters.contains(n),
                caught_up: r.caught_up.contains(n),
            })
            .collect(),
        changing: r.membership.changing,
        membership_index: r.membership.index,
        trouble: r.trouble.clone(),
        stopped_ms: r.stopped.map(|d| d.as_millis() as u64),
        no_room: r.no_room,
        digests: r.digests.iter().map(|d| CheckDigest { index: d.index, digest: d.digest }).collect(),
        job: r.job.as_ref().map(jobs::to_report),
    });
    ReportRequest {
        fleet,
        server: server.0,
        address: report.address.clone(),
        node: report.node.0,
        replicas: replicas.collect(),
        reached: report.reached.iter().map(|s| s.0).collect(),
        asides: report.asides.iter().flatten().map(aside).collect(),
        asides_known: report.asides.is_some(),
        control_trouble: report.control_trouble.clone(),
        number: *number,
        since: *since,
        gone: gone.iter().map(|s| s.number()).collect(),
    }
}

fn aside(a: &AsideReport) -> paraft_proto::AsideReport {
    let AsideReport { shard, founding, name, readable } = a.clone();
    paraft_proto::AsideReport { shard: shard.number(), founding, name, readable }
}

/// A report from the wire. A job of an unknown kind is left out.
pub fn from_report(r: ReportRequest) -> SentReport {
    let aside = |a: paraft_proto::AsideReport| {
        let paraft_proto::AsideReport { shard, founding, name, readable } = a;
        AsideReport { shard: JobShard::from_number(shard), founding, name, readable }
    };
    let replica = |r: paraft_proto::ReplicaReport| {
        let voters = r.members.iter().filter(|m| m.voter).map(|m| ReplicaId(m.node)).collect();
        let caught_up = r.members.iter().filter(|m| m.caught_up).map(|m| ReplicaId(m.node)).collect();
        let members = r.members.into_iter().map(|m| (ReplicaId(m.node), m.address)).collect();
        let report = ReplicaReport {
            node: ReplicaId(r.node),
            founding: r.founding,
            founded: r.founded,
            leads: r.leads,
            term: r.term,
            applied: r.applied,
            bytes: r.bytes,
            membership: Membership { members, voters, changing: r.changing, index: r.membership_index },
            trouble: r.trouble,
            stopped: r.stopped_ms.map(Duration::from_millis),
            no_room: r.no_room,
            digests: r.digests.iter().map(|d| Digest { index: d.index, digest: d.digest }).collect(),
            caught_up,
            job: r.job.and_then(jobs::from_report),
        };
        (JobShard::from_number(r.shard), Arc::new(report))
    };
    let (server, number, since) = (ServerId(r.server), r.number, r.since);
    let gone = r.gone.into_iter().map(JobShard::from_number).collect();
    let report = Report {
        address: r.address,
        node: ReplicaId(r.node),
        replicas: r.replicas.into_iter().map(replica).collect(),
        reached: r.reached.into_iter().map(ServerId).collect(),
        asides: r.asides_known.then(|| r.asides.into_iter().map(aside).collect()),
        control_trouble: r.control_trouble,
    };
    SentReport { server, number, since, report, gone }
}

pub fn to_directive(d: Directive) -> paraft_proto::Directive {
    use directive::Kind;
    let replica =
        |(n, address): (ReplicaId, String), voter| Replica { node: n.0, address, voter, caught_up: false };
    let kind = match d.what {
        Action::Host { founding, shards, durability } => {
            Kind::Host(Host { founding, shards, durability: durability.name().into() })
        }
        Action::Remove => Kind::Remove(Remove {}),
        Action::Stop => Kind::Stop(Stop {}),
        Action::Found { founding, members } => {
            Kind::Found(Found { founding, members: members.into_iter().map(|m| replica(m, true)).collect() })
        }
        Action::Retire { node, index } => Kind::Retire(Retire { node: node.0, index }),
        Action::Learner(node, address) => Kind::Learner(replica((node, address), false)),
        Action::Voters(nodes) => Kind::Voters(Voters { nodes: nodes.into_iter().map(|n| n.0).collect() }),
        Action::Transfer(to) => Kind::Transfer(to.0),
        Action::Switch(s) => Kind::Switch(auto::to_switch(s)),
        Action::Diverged { node, at, majority } => {
            Kind::Diverged(Diverged { node: node.0, index: at.index, digest: at.digest, majority })
        }
    };
    paraft_proto::Directive { shard: d.shard.number(), kind: Some(kind) }
}

/// A directive from the wire; `None`: of an unknown kind.
pub fn from_directive(d: &paraft_proto::Directive) -> Option<Directive> {
    use directive::Kind;
    let what = match d.kind.as_ref()? {
        Kind::Host(h) => {
            Action::Host { founding: h.founding, shards: h.shards, durability: h.durability.parse().ok()? }
        }
        Kind::Remove(Remove {}) => Action::Remove,
        Kind::Stop(Stop {}) => Action::Stop,
        Kind::Found(f) => Action::Found {
            founding: f.founding,
            members: f.members.iter().map(|m| (ReplicaId(m.node), m.address.clone())).collect(),
        },
        Kind::Retire(r) => Action::Retire { node: ReplicaId(r.node), index: r.index },
        Kind::Learner(r) => Action::Learner(ReplicaId(r.node), r.address.clone()),
        Kind::Voters(v) => Action::Voters(v.nodes.iter().map(|n| ReplicaId(*n)).collect()),
        Kind::Transfer(to) => Action::Transfer(ReplicaId(*to)),
        Kind::Switch(s) => Action::Switch(auto::from_switch(s)?),
        Kind::Diverged(d) => Action::Diverged {
            node: ReplicaId(d.node),
            at: Digest { index: d.index, digest: d.digest },
            majority: d.majority,
        },
    };
    Some(Directive { shard: JobShard::from_number(d.shard), what })
}
