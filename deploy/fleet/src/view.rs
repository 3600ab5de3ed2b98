//! The health of a fleet, from the reply of every server: the view of the control group's leader is
//! only as new as their last report.

use paraft_common::{JobId, JobShard, ServerId, placement};
use paraft_proto::{DescribeReply, ShardStatus, StatusReply};
use serde_json::json;
use std::collections::BTreeMap;

/// The health of a fleet.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct FleetHealth {
    /// Shards that do not serve, and a control group that cannot commit.
    pub stalled: Vec<String>,
    /// Other defects, which reduce the fault tolerance.
    pub missing: Vec<String>,
}

impl FleetHealth {
    /// Whether every shard and the control group have a leader and a majority.
    pub fn serves(&self) -> bool {
        self.stalled.is_empty()
    }

    /// Whether every server also answers and every replica votes.
    pub fn is_whole(&self) -> bool {
        self.serves() && self.missing.is_empty()
    }

    /// One line for people.
    pub fn says(&self) -> String {
        let all: Vec<&str> = self.stalled.iter().chain(&self.missing).map(String::as_str).collect();
        match (self.serves(), all.is_empty()) {
            (_, true) => "whole: every server answers, every replica votes".into(),
            (true, _) => format!("serving, not whole: {}", all.join("; ")),
            (false, _) => format!("not serving: {}", all.join("; ")),
        }
    }

    /// For programs.
    pub fn as_json(&self) -> serde_json::Value {
        json!({"serving": self.serves(), "whole": self.is_whole(), "stalled": self.stalled, "missing": self.missing})
    }
}

/// Computes the health from the replies of the fleet's servers, in its order.
pub fn weigh(fleet: &DescribeReply, replies: &[Result<StatusReply, String>]) -> FleetHealth {
    let mut now = FleetHealth::default();
    let mut heard: BTreeMap<u64, &StatusReply> = BTreeMap::new();
    for (server, reply) in fleet.servers.iter().zip(replies) {
        match reply {
            Ok(reply) if reply.server == server.server => _ = heard.insert(server.server, reply),
            Ok(reply) => now.missing.push(format!(
                "{} answers as s{}, it should be s{}",
                server.address, reply.server, server.server
            )),
            Err(why) => {
                now.missing.push(format!("s{} at {} does not answer: {why}", server.server, server.address))
            }
        }
        if !server.trouble.is_empty() {
            now.missing.push(format!("s{}: {}", server.server, server.trouble));
        }
    }
    for (server, reply) in &heard {
        if !reply.control_trouble.is_empty() {
            now.missing
                .push(format!("s{server}: its replica of the control group: {}", reply.control_trouble));
        }
    }
    if !fleet.can_agree() {
        now.stalled.push("the control group has no majority".into());
    }
    // Draining servers are not needed.
    let stay = fleet.servers.iter().filter(|s| s.state != "draining").count();
    let (vote, should) = (fleet.control_voters.len(), placement::control_voters(stay));
    if vote < should {
        now.missing.push(format!("the control group: {vote} of {should} servers vote"));
    }
    for voter in fleet.control_voters.iter().filter(|v| !heard.contains_key(v)) {
        now.missing.push(format!("s{voter} votes in the control group and does not answer"));
    }
    for job in fleet.jobs.iter().filter(|j| !j.released) {
        // A job that ended before its shards existed has none.
        if job.ended_ms > 0 && fleet.shards.iter().all(|s| s.job != job.job) {
            continue;
        }
        let shape = job.shape.clone().unwrap_or_default();
        for shard in JobShard::all(JobId(job.job), shape.shards) {
            weigh_shard(shard, shape.replicas as usize, &heard, &mut now);
        }
    }
    // A fleet can be whole without its draining servers; otherwise name them.
    if !now.is_whole() {
        let drained = fleet.draining().filter(|s| heard.contains_key(&s.server)).map(|s| s.server);
        now.missing.extend(drained.map(|s| {
            format!(
                "s{s} is drained and is given nothing new: `paraft drain {s} --undo` has it take part again"
            )
        }));
    }
    now
}

fn weigh_shard(shard: JobShard, replicas: usize, heard: &BTreeMap<u64, &StatusReply>, now: &mut FleetHealth) {
    let reports = || heard.values().flat_map(|r| &r.shards).filter(move |s| s.name() == shard);
    let leader = reports().filter(|s| s.role == "leader" && s.trouble.is_empty()).max_by_key(|s| s.term);
    let stops = heard.iter().flat_map(|(server, r)| r.stopped.iter().map(move |w| (server, w)));
    let stops: Vec<String> = stops
        .filter(|(_, w)| w.name() == shard)
        .map(|(s, w)| format!("its storage on s{s}: {}", w.why))
        .collect();
    let Some(leader) = leader else {
        let why = if stops.is_empty() { String::new() } else { format!(": {}", stops.join(", ")) };
        return now.stalled.push(format!("{shard} has no leader{why}"));
    };
    let works = |node: &&u64| {
        let there = |s: &&ShardStatus| s.node == **node && s.trouble.is_empty() && s.role != "stopped";
        reports().any(|s| there(&s))
    };
    let working = leader.voters.iter().filter(works).count();
    if working * 2 <= leader.voters.len() {
        let of = leader.voters.len();
        now.stalled.push(format!("{shard}: {working} of {of} replicas answer, which is no majority"));
    }
    for node in leader.voters.iter().filter(|n| !works(n)) {
        now.missing.push(format!("{shard}: the replica that votes on {} is not there", ServerId(node >> 32)));
    }
    now.missing.extend(stops.iter().map(|s| format!("{shard}: {s}")));
    if leader.changing {
        now.missing.push(format!("{shard}: its membership is changing"));
    }
    if leader.voters.len() != replicas {
        now.missing.push(format!("{shard}: {} of {replicas} replicas vote", leader.voters.len()));
    }
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
