//! What the control group knows, as `paraft status` shows it.

use crate::jobs;
use paraft_fleet::{out, table};
use paraft_proto::{DescribeReply, GroupInfo, ServerInfo};
use serde_json::json;

/// For people.
pub fn print(fleet: &DescribeReply) {
    let shape = fleet.shape.clone().unwrap_or_default();
    // One that was founded for no job has none of its own.
    let own = match shape.shards {
        0 => "no job of its own".to_string(),
        shards => format!("{shards} shards x {} replicas  {}", shape.replicas, shape.durability),
    };
    out!(
        "fleet {:016x}  generation {}  {own}  control group led by {} ({} of {} servers vote)",
        fleet.fleet,
        fleet.generation,
        fleet.leader,
        fleet.control_voters.len(),
        fleet.servers.len()
    );
    let mut t = table::plain(["server", "address", "state", "leads", "replicas", "bytes"]);
    for s in &fleet.servers {
        t.add_row([
            format!("s{}", s.server),
            s.address.clone(),
            s.state.clone(),
            leads(fleet, s).map_or("-".into(), |n| n.to_string()),
            s.holds.to_string(),
            table::bytes(s.bytes),
        ]);
    }
    out!("{t}");
    for s in &fleet.servers {
        if !s.trouble.is_empty() {
            out!("s{}: {}", s.server, s.trouble);
        }
        if !s.asides.is_empty() {
            out!("s{}: quarantined: {} (`paraft data list`)", s.server, s.asides.join(", "));
        }
    }
    for s in fleet.shards.iter().filter(|s| s.state != "serving") {
        out!("{}: {} {}", s.name(), s.state, s.trouble);
    }
    if !fleet.groups.is_empty() {
        let mut t =
            table::plain(["group of", "job", "state", "generation", "step", "ranks", "leader", "wait"]);
        for g in &fleet.groups {
            let assignment = g.assignment.clone().unwrap_or_default();
            t.add_row([
                format!("w{}", g.worker),
                g.job.clone(),
                g.state.clone(),
                assignment.generation.to_string(),
                g.step.to_string(),
                assignment.ranks.iter().map(|r| r.rank.to_string()).collect::<Vec<_>>().join(", "),
                assignment.ranks.first().map_or("-".into(), |r| format!("{} ({})", r.rank, r.address)),
                g.waiting.to_string(),
            ]);
        }
        out!("{t}");
    }
    jobs::print(&fleet.jobs);
}

/// How many shards it leads; unknown for a silent server, or without a majority.
fn leads(fleet: &DescribeReply, s: &ServerInfo) -> Option<u32> {
    let is_away = ["silent", "unreachable"].contains(&s.state.as_str());
    (fleet.can_agree() && !is_away).then_some(s.leads)
}

fn groups_as_json(fleet: &DescribeReply) -> Vec<serde_json::Value> {
    let group = |g: &GroupInfo| {
        let assignment = g.assignment.clone().unwrap_or_default();
        let ranks: Vec<_> =
            assignment.ranks.iter().map(|r| json!({"rank": r.rank, "address": r.address})).collect();
        json!({"job": g.job, "worker": g.worker, "state": g.state, "generation": assignment.generation, "step": g.step, "ranks": ranks,
               "waiting": g.waiting})
    };
    fleet.groups.iter().map(group).collect()
}

/// For programs.
pub fn as_json(fleet: &DescribeReply) -> serde_json::Value {
    let shape = fleet.shape.clone().unwrap_or_default();
    let servers: Vec<_> = fleet
        .servers
        .iter()
        .map(|s| {
            json!({"server": s.server, "address": s.address, "state": s.state, "leads": leads(fleet, s),
                   "replicas": s.holds, "bytes": s.bytes, "trouble": s.trouble, "asides": s.asides})
        })
        .collect();
    let shards: Vec<_> = fleet
        .shards
        .iter()
        .map(|s| {
            json!({"job": s.job, "shard": s.shard, "state": s.state, "voters": s.voters, "learners": s.learners,
                   "leader": s.leader, "silent": s.silent, "trouble": s.trouble})
        })
        .collect();
    json!({"fleet": format!("{:016x}", fleet.fleet), "generation": fleet.generation,
           "control": {"voters": fleet.control_voters, "silent": fleet.control_silent},
           "shape": {"shards": shape.shards, "replicas": shape.replicas, "durability": shape.durability},
           "leader": Some(&fleet.leader).filter(|l| !l.is_empty()),
           "servers": servers, "placement": shards, "groups": groups_as_json(fleet), "jobs": jobs::as_json(&fleet.jobs)})
}
