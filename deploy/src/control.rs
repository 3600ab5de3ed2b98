//! `paraft drain`, and what `paraft status` shows of the control group.

use crate::{failure::Failure, jobs, status::addresses, table};
use clap::Args;
use comfy_table::{Table, presets};
use futures::{StreamExt, stream::FuturesUnordered};
use paraft_common::ServerId;
use paraft_proto::{DescribeReply, GroupInfo, JobInfo, no_leader};
use paraft_worker::exit;
use serde_json::json;
use std::{
    collections::BTreeSet,
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

/// An answer that takes longer comes from a server that is stopped.
const ASK: Duration = Duration::from_secs(2);
/// Longer than an election in a fleet that is well.
const ELECTION: Duration = Duration::from_secs(2);

type Answers = Vec<(String, Result<DescribeReply, String>)>;

/// Asks these servers at once what the control group knows, then those that they name, until `enough`.
async fn ask_all(servers: &[String], enough: impl Fn(&DescribeReply) -> bool) -> Answers {
    let ask = async |a: String| {
        let reply = paraft_client::describe(&a, ASK).await;
        (a, reply)
    };
    let mut asked: BTreeSet<String> = servers.iter().cloned().collect();
    let mut waiting: FuturesUnordered<_> = asked.iter().cloned().map(ask).collect();
    let mut answers = Answers::new();
    while let Some((address, reply)) = waiting.next().await {
        let last = reply.as_ref().is_ok_and(&enough);
        if let Ok(d) = &reply {
            let named = d.servers.iter().map(|s| &s.address).chain([&d.leader]).filter(|a| !a.is_empty());
            waiting.extend(named.filter(|a| asked.insert((*a).clone())).cloned().map(ask));
        }
        answers.push((address, reply));
        if last {
            break;
        }
    }
    answers
}

fn block_on<T>(what: impl Future<Output = T>) -> Option<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.ok().map(|r| r.block_on(what))
}

fn leads(answers: &Answers) -> Option<&DescribeReply> {
    let known = || answers.iter().filter_map(|(_, r)| r.as_ref().ok()).filter(|d| d.fleet != 0);
    known().find(|d| d.can_agree()).or_else(|| known().next())
}

/// What the leader of the control group knows; also that of one that has lost its majority.
pub fn describe(servers: &[String]) -> Option<DescribeReply> {
    let answers = block_on(ask_all(servers, |d| d.fleet != 0 && d.can_agree()))?;
    leads(&answers).cloned()
}

/// The jobs that the leader of the control group knows, or else those that a server knows that answers: they are agreed
/// on. `None`: nobody answers.
pub fn jobs(servers: &[String]) -> Option<Vec<JobInfo>> {
    let answers = block_on(ask_all(servers, |d| d.fleet != 0 && d.can_agree()))?;
    let leader = leads(&answers).map(|d| d.jobs.clone());
    leader.or_else(|| answers.iter().any(|(_, r)| r.is_ok()).then(|| jobs_of(&answers)))
}

fn jobs_of(answers: &Answers) -> Vec<JobInfo> {
    let known = answers.iter().filter_map(|(_, r)| r.as_ref().ok()).map(|d| &d.jobs);
    known.max_by_key(|jobs| jobs.len()).cloned().unwrap_or_default()
}

/// Nothing can be agreed on.
pub struct NoMajority {
    /// What a leader knows that has lost its majority and does not know it, where there is one.
    pub fleet: Option<Box<DescribeReply>>,
    /// The jobs, as far as a server knows that answers.
    pub jobs: Vec<JobInfo>,
    /// Who does not answer, and what to do.
    pub why: String,
}

/// What a leader knows that has a majority behind it: one that answers now, since a leader notices a crash only after a
/// while. One that is being elected is waited for.
pub fn agreeing(servers: &[String]) -> Result<DescribeReply, NoMajority> {
    let deadline = Instant::now() + ELECTION;
    loop {
        let answers = block_on(everyone(servers)).unwrap_or_default();
        match leads(&answers) {
            Some(d) if d.can_agree() => return Ok(d.clone()),
            known if Instant::now() > deadline => {
                let fleet = known.cloned().map(Box::new);
                return Err(NoMajority { fleet, jobs: jobs_of(&answers), why: no_leader(&answers) });
            }
            _ => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Asks these servers, and those of their fleet that are not among them. Who does not answer is noted as silent.
async fn everyone(servers: &[String]) -> Answers {
    let mut answers = ask_all(servers, |_| false).await;
    let answered: BTreeSet<String> =
        answers.iter().filter(|(_, r)| r.is_ok()).map(|(a, _)| a.clone()).collect();
    for fleet in answers.iter_mut().filter_map(|(_, r)| r.as_mut().ok()) {
        let silent: Vec<u64> =
            fleet.servers.iter().filter(|s| !answered.contains(&s.address)).map(|s| s.server).collect();
        silent.into_iter().for_each(|s| fleet.note_silent(s));
    }
    answers
}

/// Whom to give an order: the leader first, then the others of the fleet, then those of `given` that it does not know.
pub fn whom(fleet: &DescribeReply, given: &[String]) -> Vec<String> {
    let leader = Some(fleet.leader.as_str()).filter(|l| !l.is_empty());
    let known = fleet.servers.iter().map(|s| s.address.as_str());
    let mut all: Vec<String> = Vec::new();
    for address in leader.into_iter().chain(known).chain(given.iter().map(String::as_str)) {
        if !all.iter().any(|a| a == address) {
            all.push(address.to_string());
        }
    }
    all
}

/// Has a server emptied, or filled again, by the first of these servers that takes the order.
pub fn order(servers: &[String], id: ServerId, undo: bool, within: Duration) -> Result<(), String> {
    let asking = async {
        let mut why = Vec::new();
        for address in servers {
            match paraft_client::drain(address, id, undo, within).await {
                Ok(()) => return Ok(()),
                Err((e, _)) if e.starts_with("there is no") => return Err(e),
                Err((e, _)) => why.push(format!("{address}: {e}")),
            }
        }
        Err(why.join("; "))
    };
    block_on(asking).unwrap_or_else(|| Err("no runtime".into()))
}

pub fn drain(args: &DrainArgs) -> Result<i32, Failure> {
    let bad = || {
        Failure::new(exit::USAGE, format!("`{}` is no server id", args.server))
            .help("write a number, as `paraft status` shows it")
    };
    let server = ServerId(args.server.trim_start_matches('s').parse().map_err(|_| bad())?);
    let servers = addresses(args.of.as_deref(), &args.servers)?;
    let unable = |why: String| Failure::new(exit::UNAVAILABLE, why);
    let deadline = Instant::now() + PATIENCE;
    loop {
        // Asked each time: the leader may change between two tries.
        let fleet = agreeing(&servers).map_err(|e| unable(e.why))?;
        match order(&whom(&fleet, &servers), server, args.undo, PATIENCE) {
            Ok(()) => break,
            Err(e) if e.starts_with("there is no") => {
                return Err(Failure::new(exit::CONFIG, e).help("`paraft status` shows the fleet's servers"));
            }
            Err(why) if Instant::now() > deadline => {
                return Err(unable(format!("no server could take the order: {why}"))
                    .help("`paraft status` shows which servers answer"));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
    if args.undo {
        out!("{server} takes part again");
        return Ok(exit::OK);
    }
    let deadline = Instant::now() + Duration::from_secs(args.wait);
    let mut noted = false;
    loop {
        let fleet = match agreeing(&servers) {
            Ok(fleet) => fleet,
            Err(_) if Instant::now() < deadline => continue, // an election may take longer
            Err(e) => return Err(unable(e.why)),
        };
        let Some(now) = progress(&fleet, server) else {
            return Err(Failure::new(exit::CONFIG, format!("{server} is gone")));
        };
        match now {
            Draining::Done(what) => {
                out!("{what}");
                return Ok(exit::OK);
            }
            Draining::Goes(what) if Instant::now() > deadline => {
                return Err(unable(what).help("it goes on; ask again, or see `paraft status`"));
            }
            Draining::Needed(what) if Instant::now() > deadline => {
                return Err(unable(what).help(format!(
                    "start the silent servers again, each with its own --data, and ask again; `paraft drain {} --undo` \
                     takes the draining back",
                    server.0
                )));
            }
            Draining::Needed(what) if !noted && fleet.silent().next().is_some() => {
                eprintln!("{what}; waiting for that to change");
                noted = true;
            }
            Draining::Goes(_) | Draining::Needed(_) => {}
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// How far a server is emptied, in words.
#[derive(Debug, PartialEq)]
enum Draining {
    /// It can be stopped.
    Done(String),
    /// It still holds something that others can take.
    Goes(String),
    /// Nothing more can be moved, but a group would have no majority without it.
    Needed(String),
}

/// `None`: there is no such server.
fn progress(fleet: &DescribeReply, server: ServerId) -> Option<Draining> {
    let info = fleet.servers.iter().find(|s| s.server == server.0)?;
    let wanted = fleet.shape.as_ref().map_or(1, |s| s.replicas) as usize;
    let others = fleet.servers.iter().filter(|s| s.state == "up").count();
    let silent: Vec<String> = fleet
        .silent()
        .filter(|s| s.server != server.0)
        .map(|s| format!("s{} ({})", s.server, s.address))
        .collect();
    let is = if silent.len() == 1 { "is" } else { "are" };
    // What a silent one said last may be long past; the others know better whether they count on it.
    let (leads, holds) = match info.state.as_str() {
        "silent" => (0, fleet.shards.iter().filter(|s| s.voters.contains(&server.0)).count() as u32),
        _ => (info.leads, info.holds),
    };
    let stays = leads == 0 && others < wanted;
    if leads > 0 || holds > 0 && !stays {
        return Some(Draining::Goes(format!("{server} still leads {leads} and holds {holds} replicas")));
    }
    let has = match holds {
        0 => format!("{server} is empty"),
        _ => format!(
            "{server} leads nothing any more; its {holds} replicas stay, since {others} other servers cannot hold \
             {wanted} replicas of a shard"
        ),
    };
    let groups = fleet.depend_on(server.0, &[]);
    if !groups.is_empty() {
        let why = match silent.is_empty() {
            true => String::new(),
            false => format!("{} {is} silent, and ", silent.join(", ")),
        };
        let groups = groups.join(", ");
        return Some(Draining::Needed(format!(
            "{has}, but do not stop it: {why}without it there is no majority for {groups}"
        )));
    }
    let alone = together(fleet, server);
    Some(Draining::Done(match (silent.is_empty(), holds, alone) {
        (true, _, Some(alone)) => format!("{has}. It can be stopped, but {alone}"),
        (true, 0, None) => format!("{has}: it can be stopped"),
        (true, _, None) => format!("{has}. It can be stopped: the others go on"),
        (false, _, alone) => {
            let but = alone.map_or(String::new(), |a| format!("; but {a}"));
            format!(
                "{has}. It can be stopped, though {} {is} silent: the others are a majority{but}",
                silent.join(", ")
            )
        }
    }))
}

/// With which of the servers that are drained too this one must not be stopped, and why.
fn together(fleet: &DescribeReply, server: ServerId) -> Option<String> {
    let drained: Vec<u64> = fleet.draining().map(|s| s.server).filter(|s| *s != server.0).collect();
    let pairs: Vec<u64> =
        drained.iter().copied().filter(|d| !fleet.depend_on(server.0, &[*d]).is_empty()).collect();
    // Where each of them could be stopped beside it, all of them still might be too many.
    let (which, or) = if pairs.is_empty() { (drained, " and ") } else { (pairs, " or ") };
    let groups = fleet.depend_on(server.0, &which);
    if groups.is_empty() {
        return None;
    }
    let names: Vec<String> = which.iter().map(|s| format!("s{s}")).collect();
    let are = if which.len() == 1 { "is" } else { "are" };
    let both = if which.len() == 1 || or == " or " { "both" } else { "all of them" };
    Some(format!(
        "not together with {}, which {are} drained too: without {both} there is no majority for {}",
        names.join(or),
        groups.join(", ")
    ))
}

pub fn print(fleet: &DescribeReply) {
    let shape = fleet.shape.clone().unwrap_or_default();
    out!(
        "fleet {:016x}  generation {}  {} shards x {} replicas  {}  control group led by {} ({} of {} servers vote)",
        fleet.fleet,
        fleet.generation,
        shape.shards,
        shape.replicas,
        shape.durability,
        fleet.leader,
        fleet.control_voters.len(),
        fleet.servers.len()
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
    if !fleet.groups.is_empty() {
        let mut t = Table::new();
        t.load_style(presets::NOTHING);
        t.set_header(["group of", "job", "state", "generation", "step", "ranks", "leader", "wait"]);
        for g in &fleet.groups {
            let seating = g.seating.clone().unwrap_or_default();
            t.add_row([
                format!("w{}", g.worker),
                g.job.clone(),
                g.state.clone(),
                seating.generation.to_string(),
                g.step.to_string(),
                seating.ranks.iter().map(|r| r.rank.to_string()).collect::<Vec<_>>().join(", "),
                seating.ranks.first().map_or("-".into(), |r| format!("{} ({})", r.rank, r.address)),
                g.waiting.to_string(),
            ]);
        }
        out!("{t}");
    }
    jobs::print(&fleet.jobs);
}

fn groups_as_json(fleet: &DescribeReply) -> Vec<serde_json::Value> {
    let group = |g: &GroupInfo| {
        let seating = g.seating.clone().unwrap_or_default();
        let ranks: Vec<_> =
            seating.ranks.iter().map(|r| json!({"rank": r.rank, "address": r.address})).collect();
        json!({"job": g.job, "worker": g.worker, "state": g.state, "generation": seating.generation, "step": g.step, "ranks": ranks,
               "waiting": g.waiting})
    };
    fleet.groups.iter().map(group).collect()
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
                   "leader": s.leader, "silent": s.silent, "trouble": s.trouble})
        })
        .collect();
    json!({"fleet": format!("{:016x}", fleet.fleet), "generation": fleet.generation,
           "control": {"voters": fleet.control_voters, "silent": fleet.control_silent},
           "shape": {"shards": shape.shards, "replicas": shape.replicas, "durability": shape.durability},
           "leader": Some(&fleet.leader).filter(|l| !l.is_empty()),
           "servers": servers, "placement": shards, "groups": groups_as_json(fleet), "jobs": jobs::as_json(&fleet.jobs)})
}

#[cfg(test)]
mod tests {
    use super::*;
    use paraft_proto::{FleetShape, ServerInfo, ShardInfo};

    /// Server 1 is drained; shard 0 has replicas on `shard`, of which those on `silent` do not answer.
    fn fleet(servers: u64, control: &[u64], shard: &[u64], silent: &[u64]) -> DescribeReply {
        let of = |voters: &[u64]| voters.iter().copied().filter(|v| silent.contains(v)).collect();
        let server = |server| ServerInfo {
            server,
            address: format!("h{server}:1"),
            state: match (silent.contains(&server), server) {
                (true, _) => "silent",
                (false, 1) => "draining",
                (false, _) => "up",
            }
            .into(),
            holds: u32::from(shard.contains(&server)),
            ..ServerInfo::default()
        };
        DescribeReply {
            shape: Some(FleetShape { shards: 1, replicas: 3, durability: String::new() }),
            servers: (0..servers).map(server).collect(),
            shards: vec![ShardInfo { voters: shard.to_vec(), silent: of(shard), ..ShardInfo::default() }],
            control_voters: control.to_vec(),
            control_silent: of(control),
            ..DescribeReply::default()
        }
    }

    #[test]
    fn servers_that_are_drained_together_may_not_be_stopped_together() {
        let drained = |mut fleet: DescribeReply, servers: &[u64]| {
            let of = |s: &&mut ServerInfo| servers.contains(&s.server);
            fleet.servers.iter_mut().filter(of).for_each(|s| s.state = "draining".into());
            fleet
        };
        let (three, five) = (&[0, 1, 2][..], &[0, 1, 2, 3, 4][..]);
        let both =
            "s0, which is drained too: without both there is no majority for the control group, shard 0";
        for (fleet, words) in [
            (drained(fleet(3, three, three, &[]), &[0]), both),
            (drained(fleet(3, three, three, &[]), &[0, 2]), "together with s0 or s2, which are drained too"),
            (
                drained(fleet(5, five, five, &[]), &[0, 2]),
                "with s0 and s2, which are drained too: without all",
            ),
            (
                drained(fleet(5, five, &[1, 2, 3], &[]), &[0, 2]),
                "with s2, which is drained too: without both",
            ),
            (
                drained(fleet(5, five, five, &[4]), &[0]),
                "s4 (h4:1) is silent: the others are a majority; but not",
            ),
        ] {
            let Some(Draining::Done(said)) = progress(&fleet, ServerId(1)) else { panic!("{fleet:?}") };
            assert!(said.contains("It can be stopped") && said.contains(words), "{said}\n{words}");
        }
        let five = drained(fleet(5, five, five, &[]), &[0]);
        assert_eq!(together(&five, ServerId(1)), None, "five voters can lose two");
    }

    #[test]
    fn a_server_can_be_stopped_when_nothing_needs_it() {
        let all = &[0, 1, 2][..];
        for (fleet, words) in [
            (fleet(4, &[0, 2, 3], &[0, 2, 3], &[]), "done: s1 is empty: it can be stopped"),
            (fleet(3, all, all, &[]), "done: s1 leads nothing any more; its 1 replicas stay"),
            (fleet(3, all, all, &[2]), "needed: s1 leads nothing any more; its 1 replicas stay"),
            (fleet(4, &[0, 2, 3], all, &[]), "goes: s1 still leads 0 and holds 1 replicas"),
            // Nothing is left on it but its vote on placement.
            (fleet(4, all, &[0, 2, 3], &[2]), "needed: s1 is empty, but do not stop it: s2 (h2:1) is silent"),
            (fleet(5, &[0, 1, 2, 3, 4], &[0, 3, 4], &[2]), "done: s1 is empty. It can be stopped, though s2"),
            (fleet(5, &[0, 1, 2, 3, 4], &[0, 3, 4], &[2, 4]), "needed: s1 is empty, but do not stop it: s2"),
            // It is stopped already, and the others have taken everything over.
            (fleet(4, &[0, 2, 3], &[0, 2, 3], &[1]), "done: s1 is empty: it can be stopped"),
        ] {
            let said = match progress(&fleet, ServerId(1)).expect("it is there") {
                Draining::Done(s) => format!("done: {s}"),
                Draining::Goes(s) => format!("goes: {s}"),
                Draining::Needed(s) => format!("needed: {s}"),
            };
            assert!(said.starts_with(words), "{said}\n{words}");
        }
        assert_eq!(progress(&fleet(3, all, all, &[]), ServerId(9)), None);
    }
}
