//! `paraft replay`: the weights that servers' logs and snapshots hold, without running a server.

use crate::checkpoint::{may_write, unwritten};
use clap::Args;
use paraft_checkpoint::weights;
use paraft_common::{JobId, JobShard, Layout, Mode, ShardId, placement};
use paraft_fleet::{failure::Failure, fleet::JOB_FILE, out, table};
use paraft_server::replay::{self, Replica};
use paraft_store::RealDisk;
use paraft_worker::{Job, cli, exit};
use serde_json::json;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
};

#[derive(Args)]
pub struct ReplayArgs {
    /// Data folders of servers that do not run, or a run's folder (then its servers'). More than one: what they hold is
    /// compared, and the replica whose log goes furthest counts.
    #[arg(required = true)]
    pub data: Vec<PathBuf>,
    /// Stop after this entry of the log; needs --shard. Default: go to the end.
    #[arg(long, requires = "shard")]
    pub index: Option<u64>,
    /// Only this shard: 2, or of job 7 of the fleet 7.2.
    #[arg(long)]
    pub shard: Option<JobShard>,
    /// Only this job, by its number, as `paraft jobs` shows it.
    #[arg(long, value_name = "N", conflicts_with = "shard")]
    pub only: Option<u32>,
    /// Write the weights here, as safetensors.
    #[arg(long, value_name = "FILE", conflicts_with = "shard")]
    pub to: Option<PathBuf>,
    /// The job file, for the tensors' names. Default: the one in the run's folder; without one the file holds `params`
    /// and `buffers`, flat.
    #[arg(long)]
    pub job: Option<PathBuf>,
    /// One JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &ReplayArgs) -> Result<i32, Failure> {
    args.to.as_deref().map_or(Ok(()), may_write)?;
    let mut shards: BTreeMap<JobShard, Vec<Replica>> = BTreeMap::new();
    // The others may be whole: what they hold is shown, and at the end what was wrong.
    let mut damaged = Vec::new();
    let folders: Vec<PathBuf> = args.data.iter().flat_map(|d| servers_of(d)).collect();
    one_fleet(&folders)?;
    for data in folders {
        let found = replay::find(&data).map_err(|e| Failure::new(exit::DATA, e))?;
        let wanted = |id: &JobShard| {
            args.shard.is_none_or(|s| s == *id) && args.only.is_none_or(|job| JobId(job) == id.job())
        };
        for (id, path) in found.into_iter().filter(|(id, _)| wanted(id)) {
            let upto = args.index.unwrap_or(u64::MAX);
            match replay::replay(Arc::new(RealDisk), id, &path, upto) {
                Ok(r) if args.index.is_some_and(|i| r.replayed.index < i) => {
                    damaged.push(format!("{}: its log ends at entry {}", path.display(), r.replayed.index));
                }
                Ok(r) => shards.entry(id).or_default().push(r),
                Err(e) => damaged.push(e),
            }
        }
    }
    if shards.is_empty() && !damaged.is_empty() {
        return Err(unreadable(&damaged));
    }
    if shards.is_empty() {
        let why = "no replica of a shard is on disk there";
        return Err(
            Failure::new(exit::DATA, why).help("only `durability = \"quorum-disk\"` keeps logs on disk")
        );
    }
    let mut same = true;
    let mut rows = Vec::new();
    for (id, replicas) in &mut shards {
        // The one that a majority would elect: its log holds everything that was acknowledged, if a majority's is here.
        replicas.sort_by_key(|r| std::cmp::Reverse((r.replayed.term, r.replayed.index)));
        let differs = disagreement(replicas);
        same &= differs.is_none();
        for r in replicas.iter() {
            rows.push((*id, r, differs));
        }
    }
    if args.json {
        let rows: Vec<_> = rows
            .iter()
            .map(|(id, r, differs)| {
                let d = &r.replayed;
                json!({
                    "job": id.job().0, "shard": id.shard().0, "folder": r.path, "founding": r.founding, "snapshot": d.snapshot, "entries": d.entries,
                    "index": d.index, "end": d.end, "term": d.term, "version": version(r),
                    "digest": d.digests.last().map(|(_, d)| format!("{:016x}", d.digest)),
                    "checks": d.digests.len(), "differs_at": differs,
                })
            })
            .collect();
        out!("{}", json!({"replicas": rows, "agree": same}));
    } else {
        print(&rows);
    }
    if let Some(to) = &args.to {
        let jobs: BTreeSet<u32> = shards.keys().map(|s| s.job().0).collect();
        if jobs.len() > 1 {
            let jobs = jobs.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
            let why = format!("--to writes the weights of one job, and jobs {jobs} are there");
            return Err(Failure::new(exit::USAGE, why).help("say which with --only N"));
        }
        let heads: BTreeMap<ShardId, &Replica> =
            shards.iter().filter_map(|(s, r)| Some((s.shard(), r.first()?))).collect();
        write(args, to, &heads)?;
        if !args.json {
            out!("weights  {}", to.display());
        }
    }
    if !damaged.is_empty() {
        return Err(unreadable(&damaged));
    }
    Ok(if same { exit::OK } else { exit::FAILED })
}

/// Servers of two fleets hold shards of the same numbers and of other models: neither completes the other.
fn one_fleet(folders: &[PathBuf]) -> Result<(), Failure> {
    let mut first: Option<(&Path, u64)> = None;
    for folder in folders {
        let fleet = replay::fleet_of(Arc::new(RealDisk), folder).map_err(|e| Failure::new(exit::DATA, e))?;
        match (first, fleet) {
            (Some((other, known)), Some(fleet)) if known != fleet => {
                let which = format!(
                    "{} is of fleet {known:016x}, {} of fleet {fleet:016x}: they hold different states",
                    other.display(),
                    folder.display()
                );
                return Err(
                    Failure::new(exit::DATA, which).help("replay the folders of each fleet by themselves")
                );
            }
            (None, Some(fleet)) => first = Some((folder, fleet)),
            _ => {}
        }
    }
    Ok(())
}

fn unreadable(damaged: &[String]) -> Failure {
    Failure::new(exit::DATA, damaged.join("\n  "))
        .help("a folder that is in use belongs to a server that runs; of a damaged one take the other replicas' folders")
}

/// A run's folder means its servers' folders.
fn servers_of(path: &Path) -> Vec<PathBuf> {
    let servers: Vec<_> =
        (0..1024).map(|id| paraft_fleet::fleet::server_data(path, id)).take_while(|p| p.is_dir()).collect();
    if servers.is_empty() { vec![path.to_path_buf()] } else { servers }
}

/// Where two replicas hold the same entry and hash to different states.
fn disagreement(replicas: &[Replica]) -> Option<u64> {
    let mut seen = BTreeMap::new();
    let all = replicas.iter().flat_map(|r| {
        r.replayed.digests.iter().map(move |(term, d)| ((r.founding, d.index, *term), d.digest))
    });
    let mut differs = all.filter(|(at, digest)| *seen.entry(*at).or_insert(*digest) != *digest);
    differs.next().map(|((_, index, _), _)| index)
}

fn version(r: &Replica) -> u64 {
    r.shard.configured().map_or(0, |c| c.buckets.iter().map(|b| b.version().0).sum())
}

fn print(rows: &[(JobShard, &Replica, Option<u64>)]) {
    let mut t = table::plain([
        "shard", "snapshot", "entries", "index", "term", "version", "checks", "digest", "folder",
    ]);
    for (id, r, _) in rows {
        let d = &r.replayed;
        t.add_row([
            id.name().to_string(),
            d.snapshot.to_string(),
            d.entries.to_string(),
            d.index.to_string(),
            d.term.to_string(),
            version(r).to_string(),
            d.digests.len().to_string(),
            d.digests.last().map(|(_, d)| format!("{:016x}", d.digest)).unwrap_or_default(),
            r.path.display().to_string(),
        ]);
    }
    out!("{t}");
    let mut reported = Vec::new();
    for (id, _, differs) in rows {
        if let Some(index) = differs.filter(|_| !reported.contains(id)) {
            out!("{id}: the replicas DIFFER at log index {index}");
            reported.push(*id);
        }
    }
}

/// Puts the shards' weights together.
fn write(args: &ReplayArgs, to: &Path, heads: &BTreeMap<ShardId, &Replica>) -> Result<(), Failure> {
    let bad = |why: String| Failure::new(exit::DATA, why);
    let first = heads.values().next().ok_or_else(|| bad("no replica".into()))?;
    let missing: Vec<_> = (0..first.shards).filter(|s| !heads.contains_key(&ShardId(*s))).collect();
    if !missing.is_empty() {
        return Err(bad(format!("shards {missing:?} of {} are missing", first.shards))
            .help("give the data folders of all servers"));
    }
    let steps_of = |r: &Replica| {
        r.shard
            .configured()
            .into_iter()
            .flat_map(|c| c.buckets.iter().map(|b| b.version().0).collect::<Vec<_>>())
    };
    let bsp = first.shard.configured().is_some_and(|c| c.job.first_mode() == Mode::Bsp);
    let (least, most) =
        heads.values().flat_map(|r| steps_of(r)).fold((u64::MAX, 0), |(a, b), v| (a.min(v), b.max(v)));
    if bsp && least < most.saturating_sub(1) {
        return Err(bad(format!(
            "the shards are at different steps, {least} to {most}: no step has these weights"
        ))
        .help("a majority's logs of some shard may be missing or cut; look at the table without --to"));
    }
    let configured = first.shard.configured().ok_or_else(|| bad("no job has been configured".into()))?;
    let flat = configured.job.layout();
    let mut weights = vec![0.0; flat.len()];
    let mut steps = 0;
    for (id, head) in heads {
        let c = head.shard.configured().ok_or_else(|| bad(format!("shard {} has no job", id.0)))?;
        for b in &c.buckets {
            debug_assert_eq!(placement::shard_of(&flat, b.id, first.shards), *id);
            let image = b.image();
            if !image.initialised {
                return Err(bad(format!("{} of shard {} never got its first weights", b.id, id.0)));
            }
            weights[b.spec.range()].copy_from_slice(&image.weights);
            // Updates of a bucket are steps in BSP, and pushes otherwise.
            let per_step = if c.job.first_mode() == Mode::Bsp { 1 } else { u64::from(c.job.workers.max(1)) };
            steps = steps.max(image.version.0 / per_step);
        }
    }
    let layout = named(args)?.filter(|l| (l.len(), l.params_len()) == (flat.len(), flat.params_len()));
    let layout = match layout {
        Some(layout) => layout,
        None if args.job.is_some() => {
            return Err(bad("the job's model has another size than the replayed one".into()));
        }
        None => flat,
    };
    weights::save(to, &layout, &weights, steps).map_err(|e| unwritten(to, e))
}

/// The tensors of the job's model.
fn named(args: &ReplayArgs) -> Result<Option<Layout>, Failure> {
    let beside =
        args.data.iter().flat_map(|d| [d.join(JOB_FILE), d.with_file_name(JOB_FILE)]).find(|p| p.exists());
    let Some(path) = args.job.clone().or(beside) else { return Ok(None) };
    let job = Job::load(&path, &[])?;
    if job.cluster.own_program() || job.is_sparse() {
        return Ok(None); // only its own binary knows the model, or rows are no tensors
    }
    let (model, _) = cli::built_in(&job)?;
    Ok(Some(job.layout(model.tensors()).map_err(|e| Failure::new(exit::CONFIG, e))?))
}
