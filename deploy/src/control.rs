//! `paraft drain`, and what `paraft status` shows of the control group.

use crate::{failure::Failure, jobs, status::addresses, table};
use clap::Args;
use comfy_table::{Table, presets};
use paraft_common::ServerId;
use paraft_proto::{DescribeReply, JobInfo};
use paraft_worker::exit;
use serde_json::json;
use std::{
    collections::{BTreeSet, VecDeque},
    path::PathBuf,
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct DrainArgs {
    /// The server's id: 2 or s2.
    pub server: String,
    /// A run's folder, or a job file with cluster.addresses.
    #[arg(long)]
    pub of: Option<PathBuf>,
    /// Servers of the fleet as host:port, comma-separated.
    #[arg(long, env = "PARAFT_SERVERS", value_delimiter = ',')]
    pub servers: Vec<String>,
    /// Take the draining back: the server gets leaders and replicas again.
    #[arg(long)]
    pub undo: bool,
    /// Wait at most this many seconds until the server is empty.
    #[arg(long, default_value_t = 60)]
    pub wait: u64,
}

const PATIENCE: Duration = Duration::from_secs(6);

/// What the control group knows.
pub struct Known {
    /// In the words of its leader; `None` where it has none at present.
    pub fleet: Option<DescribeReply>,
    /// The leader's, or else those that a server knows that answered.
    pub jobs: Vec<JobInfo>,
}

/// Asks these servers, and the one that they say leads the control group. `None`: nobody answers.
pub fn ask(servers: &[String]) -> Option<Known> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let mut next: VecDeque<String> = servers.iter().cloned().collect();
    let mut asked = BTreeSet::new();
    let mut known: Option<Known> = None;
    while let Some(address) = next.pop_front() {
        if !asked.insert(address.clone()) {
            continue;
        }
        let Ok(reply) = runtime.block_on(paraft_client::describe(&address, PATIENCE)) else { continue };
        if reply.fleet != 0 {
            return Some(Known { jobs: reply.jobs.clone(), fleet: Some(reply) });
        }
        next.extend(Some(reply.leader).filter(|l| !l.is_empty()));
        let others = known.map(|k| k.jobs).unwrap_or_default();
        let jobs = if others.is_empty() { reply.jobs } else { others };
        known = Some(Known { fleet: None, jobs });
    }
    known
}

/// What the leader of the control group knows, where one of these servers is it or knows it.
pub fn describe(servers: &[String]) -> Option<DescribeReply> {
    ask(servers)?.fleet
}

pub fn drain(args: &DrainArgs) -> Result<i32, Failure> {
    let bad = || {
        Failure::new(exit::USAGE, format!("`{}` is no server id", args.server))
            .help("write a number, as `paraft status` shows it")
    };
    let server = ServerId(args.server.trim_start_matches('s').parse().map_err(|_| bad())?);
    let servers = addresses(args.of.as_deref(), &args.servers)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::new(exit::IO, format!("no runtime: {e}")))?;
    let deadline = Instant::now() + PATIENCE;
    let mut why = String::new();
    let accepted = 'asking: loop {
        for address in &servers {
            match runtime.block_on(paraft_client::drain(address, server, args.undo, PATIENCE)) {
                Ok(()) => break 'asking true,
                Err((e, _)) if e.contains("there is no") => {
                    return Err(
                        Failure::new(exit::CONFIG, e).help("`paraft status` shows the fleet's servers")
                    );
                }
                Err((e, _)) => why = format!("{address}: {e}"),
            }
        }
        if Instant::now() > deadline {
            break false;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    if !accepted {
        return Err(Failure::new(exit::UNAVAILABLE, format!("no server could take the order: {why}"))
            .help("name every server of the fleet with --servers"));
    }
    if args.undo {
        out!("{server} takes part again");
        return Ok(exit::OK);
    }
    let deadline = Instant::now() + Duration::from_secs(args.wait);
    loop {
        let Some(fleet) = describe(&servers) else {
            return Err(Failure::new(exit::UNAVAILABLE, "the control group does not answer any more"));
        };
        let Some(info) = fleet.servers.iter().find(|s| s.server == server.0) else {
            return Err(Failure::new(exit::CONFIG, format!("{server} is gone")));
        };
        let wanted = fleet.shape.as_ref().map_or(1, |s| s.replicas) as usize;
        let others = fleet.servers.iter().filter(|s| s.state == "up").count();
        if info.leads == 0 && info.holds == 0 {
            out!("{server} is empty: it can be stopped");
            return Ok(exit::OK);
        }
        if info.leads == 0 && others < wanted {
            out!(
                "{server} leads nothing any more; its {} replicas stay, since {others} other servers cannot hold {wanted} replicas of a shard. It can be stopped: the others go on",
                info.holds
            );
            return Ok(exit::OK);
        }
        if Instant::now() > deadline {
            let what = format!("{server} still leads {} and holds {} replicas", info.leads, info.holds);
            return Err(
                Failure::new(exit::UNAVAILABLE, what).help("it goes on; ask again, or see `paraft status`")
            );
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

pub fn print(fleet: &DescribeReply) {
    let shape = fleet.shape.clone().unwrap_or_default();
    out!(
        "fleet {:016x}  generation {}  {} shards x {} replicas  {}  control group led by {}",
        fleet.fleet,
        fleet.generation,
        shape.shards,
        shape.replicas,
        shape.durability,
        fleet.leader
    );
    let mut t = Table::new();
    t.load_style(presets::NOTHING);
    t.set_header(["server", "address", "state", "leads", "replicas", "bytes"]);
    for s in &fleet.servers {
        t.add_row([
            format!("s{}", s.server),
            s.address.clone(),
            s.state.clone(),
            s.leads.to_string(),
            s.holds.to_string(),
            table::bytes(s.bytes),
        ]);
    }
    out!("{t}");
    for s in fleet.shards.iter().filter(|s| s.state != "serving") {
        out!("shard {}: {} {}", s.shard, s.state, s.trouble);
    }
    jobs::print(&fleet.jobs);
}

pub fn as_json(fleet: &DescribeReply) -> serde_json::Value {
    let shape = fleet.shape.clone().unwrap_or_default();
    let servers: Vec<_> = fleet
        .servers
        .iter()
        .map(|s| {
            json!({"server": s.server, "address": s.address, "state": s.state, "leads": s.leads,
                   "replicas": s.holds, "bytes": s.bytes})
        })
        .collect();
    let shards: Vec<_> = fleet
        .shards
        .iter()
        .map(|s| {
            json!({"shard": s.shard, "state": s.state, "voters": s.voters, "learners": s.learners,
                   "leader": s.leader, "trouble": s.trouble})
        })
        .collect();
    json!({"fleet": format!("{:016x}", fleet.fleet), "generation": fleet.generation,
           "shape": {"shards": shape.shards, "replicas": shape.replicas, "durability": shape.durability},
           "leader": fleet.leader.split_whitespace().next(),
           "servers": servers, "placement": shards, "jobs": jobs::as_json(&fleet.jobs)})
}
