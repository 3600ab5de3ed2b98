//! `paraft status`: what the servers of a fleet know.

use crate::{control, ended, jobs, memory};
use clap::Args;
use comfy_table::Table;
use paraft_common::{histogram::DelayHistogram, need::Bytes};
use paraft_fleet::{
    ask::{self, ask_all},
    failure::Failure,
    out, table,
    targets::{FleetArg, Target, job_name},
    view::{self, FleetHealth},
};
use paraft_proto::{DescribeReply, ShardStatus, StatusReply, TableStatus};
use paraft_worker::exit;
use serde_json::json;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct StatusArgs {
    /// Show this job alone, by its name.
    #[arg(value_parser = job_name)]
    pub job: Option<String>,
    #[command(flatten)]
    pub fleet: FleetArg,
    /// Also hash the replicated state, to compare replicas (reads all of it).
    #[arg(long)]
    pub digest: bool,
    /// One JSON object for each server, and one for the fleet; one for a run that has ended.
    #[arg(long)]
    pub json: bool,
    /// Wait until the fleet serves (every shard has a leader and a majority), or until it is whole (every server answers
    /// and every replica votes), and say nothing else.
    #[arg(long, value_enum, value_name = "FOR")]
    pub wait: Option<WaitFor>,
    /// With --wait: at most this many seconds.
    #[arg(long, default_value_t = 60, requires = "wait")]
    pub timeout: u64,
}

/// What `--wait` waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum WaitFor {
    /// Every shard has a leader and a majority.
    Serving,
    /// Every server answers, and every replica votes.
    Whole,
}

/// How a fleet is: all its servers are asked.
fn asked(fleet: &DescribeReply) -> FleetHealth {
    let all: Vec<String> = fleet.servers.iter().map(|s| s.address.clone()).collect();
    view::weigh(fleet, &ask_all(&all, false))
}

fn wait(addresses: &[String], what: WaitFor, timeout: Duration) -> Result<i32, Failure> {
    let deadline = Instant::now() + timeout;
    loop {
        let now = match ask::agreeing(addresses) {
            Ok(fleet) => asked(&fleet),
            Err(none) => FleetHealth { stalled: vec![none.why], missing: Vec::new() },
        };
        let there = match what {
            WaitFor::Serving => now.serves(),
            WaitFor::Whole => now.is_whole(),
        };
        if there {
            return Ok(exit::OK);
        }
        if Instant::now() >= deadline {
            return Err(Failure::new(exit::UNAVAILABLE, format!("after {timeout:?}: {}", now.says())));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

pub fn run(args: &StatusArgs) -> Result<i32, Failure> {
    let job = args.job.as_deref();
    let fleet = args.fleet.to_ask()?;
    if let Some(what) = args.wait {
        // Servers that have ended will never serve.
        return wait(&fleet.servers()?, what, Duration::from_secs(args.timeout));
    }
    let addresses = match fleet.target()? {
        Target::Servers(addresses) => addresses,
        Target::Ended(run) => {
            job.map_or(Ok(()), |job| run.is_of(job))?;
            return Ok(ended::status(&run, args.json));
        }
    };
    if let Some(name) = job {
        return of_job(name, &addresses, args);
    }
    let replies = ask_all(&addresses, args.digest);
    for (address, reply) in addresses.iter().zip(&replies) {
        match reply {
            Err(why) if args.json => out!("{}", json!({"address": address, "error": why})),
            Err(why) => out!("{address}: {why}"),
            Ok(r) if args.json => out!("{}", as_json(r)),
            Ok(r) => print(r, args.digest),
        }
    }
    let silent = replies.iter().filter(|r| r.is_err()).count();
    if silent == replies.len() {
        return Err(Failure::new(exit::UNAVAILABLE, "no server answered"));
    }
    let none = match ask::agreeing(&addresses) {
        Ok(fleet) => {
            let now = asked(&fleet);
            if args.json {
                let mut last = control::as_json(&fleet);
                last["now"] = now.as_json();
                out!("{last}");
            } else {
                control::print(&fleet);
                out!("{}", now.says());
            }
            return Ok(exit::OK);
        }
        Err(none) => none,
    };
    // Jobs are agreed on, so any server has them; the rest only a leader knows.
    match &none.fleet {
        _ if args.json => {
            let mut last = none.fleet.as_ref().map_or_else(|| json!({}), |f| control::as_json(f));
            last["leader"] = serde_json::Value::Null;
            last["jobs"] = jobs::as_json(&none.jobs);
            last["trouble"] = none.why.as_str().into();
            out!("{last}");
        }
        Some(fleet) => control::print(fleet),
        None => jobs::print(&none.jobs),
    }
    Err(Failure::new(exit::UNAVAILABLE, none.why))
}

/// One job: what the control group has of it, and its shards as their leaders see them.
fn of_job(name: &str, addresses: &[String], args: &StatusArgs) -> Result<i32, Failure> {
    let jobs = ask::jobs(addresses)?;
    let Some(job) = jobs.iter().find(|j| j.name == name) else {
        return Err(Failure::new(exit::CONFIG, format!("this fleet has no job `{name}`"))
            .help("`paraft jobs` lists those that it has"));
    };
    let all = ask::describe(addresses).map_or_else(|| addresses.to_vec(), |f| ask::whom(&f, addresses));
    let replies = ask_all(&all, args.digest);
    let led = ask::led(replies.iter().flatten());
    let ours = led.range((job.job, 0)..=(job.job, u32::MAX));
    let led: BTreeMap<u32, &ShardStatus> = ours.map(|((_, shard), s)| (*shard, *s)).collect();
    let wanted = if job.released { 0 } else { job.shape.as_ref().map_or(0, |s| s.shards) };
    let without: Vec<String> = (0..wanted).filter(|s| !led.contains_key(s)).map(|s| s.to_string()).collect();
    if args.json {
        let mut one = jobs::as_json(std::slice::from_ref(job))[0].take();
        one["leaders"] = led.values().map(|s| shard_as_json(s)).collect();
        one["leaderless"] = json!(without);
        out!("{one}");
    } else {
        jobs::print(std::slice::from_ref(job));
        jobs::print_place(job);
        if !led.is_empty() {
            let led: Vec<_> = led.values().copied().collect();
            out!("{}", shards(&led, args.digest));
            if let Some(tables) = tables(&led) {
                out!("{tables}");
            }
        }
    }
    match without.is_empty() {
        true => Ok(exit::OK),
        false => {
            let why = format!("no leader is seen of shard {} of job {name}", without.join(", "));
            Err(Failure::new(exit::UNAVAILABLE, why)
                .help("`paraft status` without the job shows the servers"))
        }
    }
}

/// The mode in force, and whether a rule chooses it.
fn mode(s: &ShardStatus) -> String {
    match s.mode_auto.as_str() {
        "" => s.mode.clone(),
        loosest => format!("{} (auto, up to {loosest})", s.mode),
    }
}

fn delays(s: &ShardStatus) -> DelayHistogram {
    DelayHistogram::from_counts(&s.delay_counts)
}

fn print(r: &StatusReply, digest: bool) {
    out!(
        "s{} {}  paraft {}  cpu {:.2} s  peak {}",
        r.server,
        r.address,
        r.version,
        r.cpu_seconds,
        table::bytes(r.peak_rss_bytes)
    );
    if let Some(line) = memory::line(r) {
        out!("  {line}");
    }
    if r.replicas_diverged > 0 {
        out!(
            "  {} of its replicas had diverged from the others and were replaced: check its memory",
            r.replicas_diverged
        );
    }
    out!("  {}", connections(r));
    for w in &r.stopped {
        out!("  {} waits for {:.1} s: {}", w.name(), w.stopped_ms as f64 / 1e3, w.why);
    }
    if !r.control_trouble.is_empty() {
        let seconds = r.control_stopped_ms as f64 / 1e3;
        out!("  the control group's replica waits for its storage for {seconds:.1} s: {}", r.control_trouble);
    }
    out!("{}", shards(&r.shards.iter().collect::<Vec<_>>(), digest));
}

/// One row a shard.
fn shards(of: &[&ShardStatus], digest: bool) -> Table {
    let mut header = vec![
        "shard",
        "role",
        "term",
        "leader",
        "mode",
        "version",
        "members (clock)",
        "slowest",
        "delay p50/p99/max",
        "pushes",
        "waited",
        "lost",
    ];
    if digest {
        header.push("digest@index");
    }
    let mut t = table::plain(header);
    for s in of {
        let d = delays(s);
        let members: Vec<String> =
            s.members.iter().map(|m| format!("w{}({}{})", m.worker, m.clock, state_of(m))).collect();
        let q = |v: Option<u64>| v.map_or("-".to_string(), |v| v.to_string());
        let slowest = s.members.iter().filter(|m| !m.finished).map(|m| m.clock).min();
        let waiting = if s.started || s.members.is_empty() {
            String::new()
        } else {
            match (s.expected_workers as usize).saturating_sub(s.members.len()) {
                1 => " (waiting for 1 worker)".to_string(),
                n => format!(" (waiting for {n} workers)"),
            }
        };
        let mut row = vec![
            s.name().name().to_string(),
            s.role.clone(),
            s.term.to_string(),
            s.leader.map_or("-".into(), |l| format!("s{l}")),
            mode(s),
            s.version.to_string(),
            members.join(" ") + &waiting,
            q(slowest),
            format!("{} / {} / {}", q(d.quantile(0.5)), q(d.quantile(0.99)), q(d.max())),
            s.pushes.to_string(),
            s.pulls_waited.to_string(),
            lost(s),
        ];
        if digest {
            row.push(format!("{:016x}@{}", s.digest, s.applied_index));
        }
        t.add_row(row);
    }
    t
}

/// The sparse tables of a job, over all its shards; `None`: it has none.
pub(crate) fn tables(of: &[&ShardStatus]) -> Option<Table> {
    let all = paraft_dashboard::facts::tables(of.iter().copied());
    let mut t = table::plain(vec![
        "table",
        "rows",
        "room for",
        "created",
        "revived",
        "evicted",
        "expired",
        "gradients dropped",
        "memory",
    ]);
    for s in &all {
        let numbers = [s.rows, s.most, s.created, s.revived, s.evicted, s.expired, s.dropped];
        let row = [s.name.clone()].into_iter().chain(numbers.map(|n| n.to_string()));
        t.add_row(row.chain([Bytes(s.bytes).to_string()]));
    }
    (!all.is_empty()).then_some(t)
}

/// Connections, descriptors, and what waits: where each bound is.
fn connections(r: &StatusReply) -> String {
    let c = r.connections.unwrap_or_default();
    let mut line = format!(
        "connections {} of {} (servers {}, workers {}, readers {}, unknown {})",
        c.servers + c.workers + c.readers + c.unknown,
        c.limit,
        c.servers,
        c.workers,
        c.readers,
        c.unknown
    );
    for (count, what) in [
        (c.shed, "shed"),
        (c.refused, "refused"),
        (c.silent, "silent"),
        (c.stalled, "stalled"),
        (c.denied, "denied"),
    ] {
        if count > 0 {
            line += &format!(", {count} {what}");
        }
    }
    line + &format!(
        "  descriptors {} of {}  queued {} of {}",
        r.descriptors,
        r.descriptors_limit,
        table::bytes(r.queued_bytes),
        table::bytes(r.queued_bytes_limit)
    )
}

/// What a member does, and what is left of its lease.
fn state_of(m: &paraft_proto::Member) -> String {
    match (m.finished, m.idle, m.lease_ms) {
        (true, ..) => ", finished".into(),
        (false, true, None) => ", idle".into(),
        (false, true, Some(ms)) => format!(", idle, lease {ms} ms"),
        (false, false, Some(ms)) => format!(", lease {ms} ms"),
        (false, false, None) => String::new(),
    }
}

/// Workers, and pushes where any were lost.
fn lost(s: &ShardStatus) -> String {
    match s.pushes_lost {
        0 => s.workers_lost.to_string(),
        n => format!("{}, {n} pushes", s.workers_lost),
    }
}

fn shard_as_json(s: &ShardStatus) -> serde_json::Value {
    let d = delays(s);
    let mut shard = json!({
        "job": s.job, "shard": s.shard, "role": s.role, "term": s.term, "leader": s.leader, "mode": s.mode, "mode_number": s.mode_number, "mode_auto": s.mode_auto,
        "version": s.version, "applied_index": s.applied_index, "digest": format!("{:016x}", s.digest),
        "started": s.started, "expected_workers": s.expected_workers,
        "members": s.members.iter().map(|m| json!({
            "worker": m.worker, "session": m.session, "clock": m.clock, "last_seq": m.last_seq, "finished": m.finished,
            "idle": m.idle, "lease_ms": m.lease_ms,
        })).collect::<Vec<_>>(),
        "delay_p50": d.quantile(0.5), "delay_p99": d.quantile(0.99), "delay_max": d.max(),
        "delay": s.delay_counts, "pushes": s.pushes, "duplicates": s.duplicates, "refused": s.refused,
        "pulls": s.pulls, "pulls_waited": s.pulls_waited, "not_modified": s.not_modified, "max_step_lead": s.max_step_lead,
        "bytes_pushed": s.bytes_pushed, "bytes_pulled": s.bytes_pulled, "workers_lost": s.workers_lost,
        "buckets": s.buckets, "values": s.values,
        "durability": s.durability, "pushes_lost": s.pushes_lost,
        "bytes_logged": s.bytes_logged, "deltas": s.deltas,
        "chunks": s.chunks.map(|c| json!({
            "epoch": c.epoch, "per_epoch": c.per_epoch, "done": c.done, "held": c.held, "returned": c.returned,
        })),
    });
    shard["leads"] = s.leads.into();
    shard["redirected"] = s.redirected.into();
    for (key, bytes) in
        [("state_bytes", s.state_bytes), ("log_bytes", s.log_bytes), ("log_memory_bytes", s.log_memory_bytes)]
    {
        shard[key] = bytes.into();
    }
    let table = |t: &TableStatus| {
        json!({
            "name": t.name, "rows": t.rows, "created": t.created, "revived": t.revived, "evicted": t.evicted,
            "expired": t.expired, "refused": t.refused, "too_rare": t.too_rare, "bytes": t.bytes, "most": t.most,
        })
    };
    shard["tables"] = s.tables.iter().map(table).collect();
    shard["memory"] = memory::shard_as_json(s);
    shard
}

fn as_json(r: &StatusReply) -> serde_json::Value {
    let shards: Vec<_> = r.shards.iter().map(shard_as_json).collect();
    json!({
        "server": r.server, "address": r.address, "version": r.version, "protocol": r.protocol,
        "cpu_seconds": r.cpu_seconds, "peak_rss_bytes": r.peak_rss_bytes, "storage_free": r.storage_free,
        "storage_size": r.storage_size, "replicas_diverged": r.replicas_diverged,
        "stopped": r.stopped.iter().map(|w| json!({
            "job": w.job, "shard": w.shard, "why": w.why, "stopped_ms": w.stopped_ms,
        })).collect::<Vec<_>>(),
        "connections": r.connections.map(|c| json!({
            "unknown": c.unknown, "readers": c.readers, "workers": c.workers, "servers": c.servers, "limit": c.limit,
            "shed": c.shed, "refused": c.refused, "silent": c.silent, "stalled": c.stalled, "denied": c.denied,
        })),
        "descriptors": r.descriptors, "descriptors_limit": r.descriptors_limit,
        "queued_bytes": r.queued_bytes, "queued_bytes_limit": r.queued_bytes_limit,
        "memory": memory::server_as_json(r), "shards": shards,
    })
}
