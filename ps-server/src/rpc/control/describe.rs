//! The control group's description of its fleet, for `paraft status` and other callers.

use super::super::{groups, jobs, shape::shape_to};
use crate::{
    control::{Agent, ReplicaReport, Report},
    raft::{Membership, ReplicaId},
};
use paraft_proto::{DescribeReply, ServerInfo, ShardInfo};
use std::sync::Arc;

/// This server's answer; if it does not lead the control group, only the leader's address, and the jobs.
pub fn reply(agent: &Agent, leader: String) -> DescribeReply {
    let Some((state, control, heard, health)) = agent.overview() else {
        let jobs = agent.agreed.read(|s| jobs::to_info(&s.jobs, |_| 0));
        return DescribeReply { leader: leader.clone(), jobs, ..DescribeReply::default() };
    };
    let servers = state.servers.iter().map(|(id, m)| {
        let report = heard.get(id);
        let replicas = || report.iter().flat_map(|(r, _)| r.replicas.values());
        let unreached = agent.unreached(*id);
        let trouble = match report {
            Some((r, false)) if !r.control_trouble.is_empty() => {
                Some(format!("its replica of the control group has stopped: {}", r.control_trouble))
            }
            _ => unreached.clone(),
        };
        let asides = report.iter().flat_map(|(r, _)| r.asides.iter().flatten());
        let word = match report {
            Some((_, false)) if unreached.is_some() => "unreachable",
            Some((_, false)) if m.draining => "draining",
            Some((_, false)) => "up",
            _ => "silent",
        };
        ServerInfo {
            server: id.0,
            address: m.address.clone(),
            state: word.into(),
            bytes: replicas().map(|r| r.bytes).sum(),
            leads: replicas().filter(|r| r.leads).count() as u32,
            holds: replicas().count() as u32,
            asides: asides.map(|a| a.name.clone()).collect(),
            trouble: trouble.unwrap_or_default(),
        }
    });
    // A voter is one incarnation of a replica: its server may run without it.
    let answers = |n: &ReplicaId, holds: &dyn Fn(&Report) -> bool| {
        heard.get(&n.server()).is_some_and(|(r, silent)| !silent && holds(r))
    };
    let ids = |nodes: Vec<&ReplicaId>| nodes.into_iter().map(|n| n.server().0).collect::<Vec<_>>();
    let control_silent = control.voters.iter().filter(|n| !answers(n, &|r| r.node == **n));
    let shards = state.shards.keys().map(|shard| {
        let reports =
            || heard.values().filter(|(_, silent)| !silent).filter_map(|(r, _)| r.replicas.get(shard));
        let lead = reports().filter(|r| r.leads).max_by_key(|r| r.term);
        let (health, trouble) = health.get(shard).cloned().unwrap_or_default();
        let servers = |voting: bool| {
            let of = |m: &Membership| -> Vec<u64> {
                let votes = |n: &&ReplicaId| m.voters.contains(n) == voting;
                m.members.keys().filter(votes).map(|n| n.server().0).collect()
            };
            lead.map(|l| of(&l.membership)).unwrap_or_default()
        };
        let holds = |n: &ReplicaId, r: &Report| {
            r.replicas.get(shard).is_some_and(|p| p.node == *n && p.trouble.is_empty())
        };
        let silent = |l: &Arc<ReplicaReport>| {
            ids(l.membership.voters.iter().filter(|n| !answers(n, &|r| holds(n, r))).collect())
        };
        ShardInfo {
            shard: shard.shard().0,
            job: shard.job().0,
            state: health.name().into(),
            voters: servers(true),
            learners: servers(false),
            leader: lead.map(|l| l.node.server().0),
            trouble,
            silent: lead.map(silent).unwrap_or_default(),
        }
    });
    let bytes_of = |job| {
        let live = heard.values().filter(|(_, silent)| !silent).flat_map(|(r, _)| &r.replicas);
        live.filter(|(shard, _)| shard.job() == job).map(|(_, r)| r.bytes).sum()
    };
    DescribeReply {
        fleet: state.fleet,
        generation: state.generation,
        leader: leader.clone(),
        shape: state.shape.map(shape_to),
        servers: servers.collect(),
        shards: shards.collect(),
        jobs: jobs::to_info(&state.jobs, bytes_of),
        control_voters: ids(control.voters.iter().collect()),
        control_silent: ids(control_silent.collect()),
        groups: groups::to_info(agent),
    }
}
