//! Jobs and their checkpoints, as the control group or the folder of an ended run knows them: in
//! `paraft status`, `paraft jobs` and `paraft checkpoint list`.

use clap::Args;
use comfy_table::CellAlignment;
use paraft_fleet::{
    ask,
    failure::Failure,
    out, table,
    targets::{FleetArg, Target},
};
use paraft_host::clock::unix_ms;
use paraft_proto::{CheckpointInfo, JobInfo, ShardStatus};
use paraft_worker::exit;
use serde_json::{Value, json};
use std::{collections::BTreeMap, time::Duration};

#[derive(Args)]
pub struct ListArgs {
    #[command(flatten)]
    pub fleet: FleetArg,
    /// One JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// `paraft jobs`.
pub fn all(args: &ListArgs) -> Result<i32, Failure> {
    let (jobs, modes) = match args.fleet.to_ask()?.target()? {
        Target::Servers(servers) => (ask::jobs(&servers)?, modes(&servers)),
        Target::Ended(run) => {
            let job = run.as_job();
            let mode = BTreeMap::from([(u64::from(job.job), run.mode)]);
            (vec![job], mode)
        }
    };
    if args.json {
        let mut all = as_json(&jobs);
        for one in all.as_array_mut().into_iter().flatten() {
            one["mode_in_force"] = json!(one["number"].as_u64().and_then(|n| modes.get(&n)));
        }
        out!("{}", json!({ "jobs": all }));
        return Ok(exit::OK);
    }
    let named: Vec<&JobInfo> = jobs.iter().filter(|j| !j.name.is_empty()).collect();
    if named.is_empty() {
        out!("this fleet has no jobs: `paraft submit JOB --fleet FLEET` gives it one");
        return Ok(exit::OK);
    }
    let mut t =
        table::plain(["job", "", "state", "mode", "workers", "shards", "bytes", "begun", "weights", "run"]);
    for j in named {
        let shape = j.shape.clone().unwrap_or_default();
        let dash = |text: &str| if text.is_empty() { "-".to_string() } else { text.to_string() };
        t.add_row([
            j.name.clone(),
            j.job.to_string(),
            if j.stopping && j.ended_ms == 0 { "stopping".into() } else { j.state.clone() },
            dash(modes.get(&u64::from(j.job)).unwrap_or(&j.mode)),
            if j.workers == 0 { "-".into() } else { j.workers.to_string() },
            format!("{} x {}", shape.shards, shape.replicas),
            table::bytes(j.bytes),
            ago(j.first_seen_ms),
            kept(j),
            dash(&j.run),
        ]);
    }
    out!("{t}");
    Ok(exit::OK)
}

/// The mode in force of each job that has a leader: what the control group knows is the one in which it began.
fn modes(servers: &[String]) -> BTreeMap<u64, String> {
    let all = ask::describe(servers).map_or_else(|| servers.to_vec(), |f| ask::whom(&f, servers));
    let replies = ask::ask_within(&all, false, MODE_TIMEOUT);
    // A shard that has not begun has none.
    let begun = |((job, shard), s): ((u32, u32), &ShardStatus)| {
        (shard == 0 && !s.mode.is_empty()).then(|| (u64::from(job), s.mode.clone()))
    };
    ask::led(replies.iter().flatten()).into_iter().filter_map(begun).collect()
}

/// For the mode of a job alone a server that hangs is not waited for.
const MODE_TIMEOUT: Duration = Duration::from_millis(500);

/// Until when a job's weights are there.
fn kept(job: &JobInfo) -> String {
    match (job.released, job.ended_ms, job.keep_ms) {
        (true, ..) => "gone".into(),
        (false, 1.., Some(keep)) => {
            let left = Duration::from_millis((job.ended_ms + keep).saturating_sub(unix_ms()));
            format!("kept for {}", span(left.as_secs()))
        }
        _ => "here".into(),
    }
}

/// `paraft checkpoint list`.
pub fn list(args: &ListArgs) -> Result<i32, Failure> {
    let jobs = match args.fleet.to_ask()?.target()? {
        Target::Servers(servers) => ask::jobs(&servers).map_err(|none| {
            none.help("`paraft checkpoint inspect FOLDER` shows what is on the disk, without servers")
        })?,
        Target::Ended(run) => vec![run.as_job()],
    };
    if args.json {
        out!("{}", json!({ "jobs": as_json(&jobs) }));
        return Ok(exit::OK);
    }
    if jobs.iter().all(|j| j.name.is_empty()) {
        out!("the control group knows of no job");
    }
    for job in jobs.iter().filter(|j| !j.name.is_empty()) {
        out!("{}", headline(job));
        if job.checkpoints.is_empty() {
            out!("  no checkpoints");
            continue;
        }
        let mut t = table::plain(["step", "versions", "loss", "bytes", "written", "by", "", "folder"]);
        for c in &job.checkpoints {
            t.add_row([
                c.step.to_string(),
                versions(c),
                c.loss.map_or("-".into(), |l| format!("{l:.4}")),
                table::bytes(c.bytes),
                ago(c.written_ms),
                c.worker.map_or("-".into(), |w| format!("w{w}")),
                marks(job, c),
                c.path.clone(),
            ]);
        }
        for column in t.column_iter_mut().take(4) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        out!("{t}");
    }
    Ok(exit::OK)
}

/// For `paraft status`: each job with its latest and best checkpoint.
pub fn print(jobs: &[JobInfo]) {
    for job in jobs.iter().filter(|j| !j.name.is_empty()) {
        out!("{}", headline(job));
        let best = best(job);
        let shown =
            job.checkpoints.last().into_iter().chain(best.filter(|b| Some(*b) != job.checkpoints.last()));
        for c in shown {
            let loss = c.loss.map_or(String::new(), |l| format!("  loss {l:.4}"));
            out!("  {}: step {}{loss}  {}  {}", marks(job, c), c.step, ago(c.written_ms), c.path);
        }
    }
}

/// For `paraft status JOB`: where its record is, and until when its weights are kept.
pub fn print_place(job: &JobInfo) {
    let run = if job.run.is_empty() { "not on record" } else { &job.run };
    out!("  weights {} ({})  run {run}", kept(job), table::bytes(job.bytes));
}

fn headline(job: &JobInfo) -> String {
    format!(
        "job {}  {}  begun in {}  {} workers  {}  first seen {}",
        job.name,
        job.state,
        job.mode,
        job.workers,
        job.durability,
        ago(job.first_seen_ms)
    )
}

/// Of several folders', the one that was written last.
fn best(job: &JobInfo) -> Option<&CheckpointInfo> {
    job.checkpoints.iter().rev().find(|c| c.best)
}

fn marks(job: &JobInfo, c: &CheckpointInfo) -> String {
    let latest = (job.checkpoints.last() == Some(c)).then_some("latest");
    let best = c.best.then_some("best");
    latest.into_iter().chain(best).collect::<Vec<_>>().join(", ")
}

fn versions(c: &CheckpointInfo) -> String {
    match (c.lowest_version, c.highest_version) {
        (a, b) if a == b => a.to_string(),
        (a, b) => format!("{a} to {b}"),
    }
}

/// A moment for people: how long ago it was, by this machine's clock.
fn ago(moment_ms: u64) -> String {
    format!("{} ago", span(unix_ms().saturating_sub(moment_ms) / 1000))
}

/// A time for people.
fn span(seconds: u64) -> String {
    let (n, unit) = match seconds {
        0..120 => (seconds, "s"),
        120..7_200 => (seconds / 60, "min"),
        7_200..172_800 => (seconds / 3_600, "h"),
        _ => (seconds / 86_400, "days"),
    };
    format!("{n} {unit}")
}

/// The value of `jobs` in `--json`.
pub fn as_json(jobs: &[JobInfo]) -> Value {
    let checkpoint = |c: &CheckpointInfo| {
        json!({"path": c.path, "step": c.step, "versions": [c.lowest_version, c.highest_version], "bytes": c.bytes,
               "loss": c.loss, "written_ms": c.written_ms, "worker": c.worker, "best": c.best})
    };
    let job = |j: &JobInfo| {
        let shape = j.shape.clone().unwrap_or_default();
        json!({"job": j.name, "number": j.job, "run": j.run, "shards": shape.shards, "replicas": shape.replicas, "bytes": j.bytes,
               "stopping": j.stopping, "ended_ms": j.ended_ms, "keep_ms": j.keep_ms, "released": j.released, "founding": format!("{:016x}", j.founding), "state": j.state, "mode": j.mode,
               "workers": j.workers, "durability": j.durability, "first_seen_ms": j.first_seen_ms,
               "latest": j.checkpoints.last().map(checkpoint), "best": best(j).map(checkpoint),
               "checkpoints": j.checkpoints.iter().map(checkpoint).collect::<Vec<_>>()})
    };
    jobs.iter().filter(|j| !j.name.is_empty()).map(job).collect()
}
