//! `paraft plan`: how the worker of a job can hold its model, before anything starts: the memory,
//! traffic and idle time of each way.

use clap::Args;
use comfy_table::{CellAlignment, Table};
use paraft_common::need::Bytes;
use paraft_fleet::{failure::Failure, out, table};
use paraft_models::{Layer, Model, Stages};
use paraft_proto::limits;
use paraft_worker::{
    Job, cli, exit,
    job::{ParallelConfig, Resident},
    worker::Plan,
};
use serde_json::json;
use std::{collections::BTreeSet, path::PathBuf};

#[derive(Args)]
pub struct PlanArgs {
    /// The job file.
    pub job: PathBuf,
    /// What a process of a worker may hold: 24GiB, say. Without, nothing is left out.
    #[arg(long)]
    pub memory: Option<Bytes>,
    /// Overrides a key of the job; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each way.
    #[arg(long)]
    pub json: bool,
}

/// Fixed bytes of a process: code, runtime, a minibatch.
const PROCESS: u64 = 32 << 20;
/// Bytes of a client's reusable buffers.
const BUFFERS: u64 = 32 << 20;
/// Maximal ranks of a worker in a plan.
const MAX_RANKS: usize = 64;
/// Numbers of slices of a stage in a plan.
const SLICES: [usize; 4] = [1, 2, 4, 8];
const F32: u64 = 4;

/// A way to hold a model.
#[derive(Clone, Debug, PartialEq)]
struct Way {
    name: String,
    /// The keys of a job that uses it.
    keys: String,
    processes: usize,
    /// Bytes of weights in the largest process.
    weights: u64,
    gradient: u64,
    activations: u64,
    /// Bytes of [`rest`].
    rest: u64,
    /// Bytes per step between all processes of a worker and the servers.
    with_servers: u64,
    /// Bytes per step between ranks.
    between: u64,
    bubble: f64,
}

impl Way {
    fn total(&self) -> u64 {
        self.weights + self.gradient + self.activations + self.rest
    }
}

/// The number of distinct parameter values of these layers.
fn values(layers: &[Layer]) -> u64 {
    let mut ranges: Vec<_> = layers.iter().flat_map(|l| l.params.iter().cloned()).collect();
    ranges.sort_by_key(|r| r.start);
    let (mut end, mut sum) = (0, 0);
    for r in ranges {
        sum += r.end.saturating_sub(r.start.max(end)) as u64;
        end = end.max(r.end);
    }
    sum
}

fn keeps(layers: &[Layer]) -> u64 {
    layers.iter().map(|l| l.keeps as u64).sum()
}

fn works(layers: &[Layer]) -> u64 {
    layers.iter().map(|l| l.works as u64).max().unwrap_or(0)
}

/// The other memory of a process with this many bytes of weights: pushes and pulls in flight, buffers,
/// fixed bytes.
fn rest(weights: u64) -> u64 {
    let (pushes, pulls) = (limits::PUSH_WINDOW_BYTES as u64, limits::PULL_AHEAD_BYTES as u64);
    weights.min(pushes) + weights.min(pulls) + BUFFERS + PROCESS
}

/// The ways for a model with this many parameters, and why other ways do not apply.
fn ways(job: &Job, of: &dyn Model, parameters: u64, steps: usize) -> (Vec<Way>, BTreeSet<String>) {
    let layers = &of.layers()[..];
    let (model, batch) = (parameters * F32, job.train.batch as u64);
    let meshes = u64::from(job.train.group_size);
    let whole = Way {
        name: "whole".into(),
        keys: "-".into(),
        processes: meshes as usize,
        weights: model,
        gradient: model,
        activations: batch * (keeps(layers) + works(layers)) * F32,
        rest: rest(model),
        with_servers: 2 * model,
        // The weights from the first rank to each, and two rounds of the ring.
        between: 3 * (meshes - 1) * model,
        bubble: 0.0,
    };
    let (mut ways, mut refused) = (vec![whole.clone()], BTreeSet::new());
    if layers.len() < 2 {
        return (ways, refused);
    }
    let mut other = job.clone();
    (other.memory.resident, other.parallel) = (Some(Resident::Layers(2)), ParallelConfig::default());
    let largest = layers.iter().map(|l| values(std::slice::from_ref(l)) * F32).max().unwrap_or(0);
    match other.refused() {
        Some(why) => {
            refused.insert(format!("streamed: {why}"));
        }
        None => ways.push(Way {
            name: "streamed".into(),
            keys: "memory.resident = 2".into(),
            weights: 2 * largest,
            gradient: largest,
            with_servers: 3 * model,
            ..whole
        }),
    }
    for slices in SLICES {
        // The layers of a slice; the loop ends at a number of slices that the model does not support.
        let Ok(own) = paraft_models::layers_of_slice(of, slices) else { break };
        // Skip more stages that hold as much as fewer do.
        let mut least = u64::MAX;
        let first = if slices == 1 { 2 } else { 1 };
        let all = first..=layers.len().min(MAX_RANKS / slices);
        for stages in all.filter(|n| slices == 1 || n.is_power_of_two()) {
            let mut given = job.clone();
            (given.parallel.pipeline, given.parallel.tensor) = (stages as u32, slices as u32);
            given.memory.resident = None;
            // `2bw` needs a micro-batch for each stage: no note for each number of stages.
            let few = stages > 1
                && given.parallel.schedule.overlaps_minibatches()
                && given.micro_batches() < stages;
            match given.refused() {
                Some(_) if few => continue,
                Some(why) => {
                    refused.insert(format!("stages and slices: {why}"));
                    continue;
                }
                None => {}
            }
            let Ok(cut) = given.stages(layers) else { continue };
            let way = mesh(&given, (layers, &cut), &own, steps);
            let less = way.filter(|way| way.total() < least / 100 * 98);
            least = less.as_ref().map_or(least, Way::total);
            ways.extend(less);
        }
    }
    (ways, refused)
}

/// Stages of the model's layers, or of a slice's, in as many meshes as the job has.
fn mesh(job: &Job, (layers, cut): (&[Layer], &Stages), own: &[Layer], steps: usize) -> Option<Way> {
    let (n, micro, batch) = (cut.len(), job.micro_batches(), job.train.batch as u64);
    let slices = u64::from(job.parallel.tensor);
    let counts: Vec<usize> = cut.layers().iter().map(std::ops::Range::len).collect();
    let of_slice = Stages::given(own, &counts).ok()?;
    let schedule = job.parallel.schedule;
    let part = batch.div_ceil(micro as u64);
    let versions = if schedule.overlaps_minibatches() { 2 } else { 1 };
    // For each stage: weights, gradient, activations.
    let of = |stage: usize| {
        let own = &own[cut.layers()[stage].clone()];
        let weights = values(own) * F32 * versions;
        let kept = schedule.kept(stage, n, micro) as u64;
        // The sum over micro-batches, plus one micro-batch's largest layer that is not added yet.
        let largest = own.iter().map(|l| values(std::slice::from_ref(l)) * F32).max().unwrap_or(0);
        let gradient = values(own) * F32 + largest;
        (weights, gradient, part * (kept * keeps(own) + works(own)) * F32)
    };
    let most = (0..n).map(of).max_by_key(|(w, g, a)| w + g + a).unwrap_or_default();
    let model = cut.own().iter().map(|r| r.len() as u64 * F32).sum::<u64>();
    let edges = cut.layers()[1..].iter().map(|l| layers[l.start - 1].outputs as u64).sum::<u64>();
    let lent = of_slice.loans().iter().map(|l| l.range.len() as u64).sum::<u64>();
    let sums = own.iter().map(|l| l.sums as u64).sum::<u64>();
    let meshes = u64::from(job.train.group_size);
    // Traffic between slices and between stages, plus the scatter and the gather.
    let of_mesh = batch * sums * slices * (slices - 1) + 2 * slices * (batch * edges + lent);
    let dealt = 2 * model * (slices - 1) / slices + 2 * model * (meshes - 1);
    let (name, keys) = match (n, slices) {
        (1, _) => (format!("{slices} slices"), format!("parallel.tensor = {slices}")),
        (_, 1) => (format!("{n} stages"), format!("parallel.pipeline = {n}")),
        _ => (
            format!("{n} stages x {slices} slices"),
            format!("parallel.pipeline = {n}, parallel.tensor = {slices}"),
        ),
    };
    Some(Way {
        name,
        keys,
        processes: n * (slices * meshes) as usize,
        weights: most.0,
        gradient: most.1,
        activations: most.2,
        // The first slice holds the weights of all its slices of a stage, one after the other.
        rest: rest(if slices > 1 { model / n as u64 } else { most.0 / versions }),
        with_servers: 2 * model,
        between: meshes * of_mesh * F32 + dealt,
        bubble: schedule.bubble_of(of_slice.costs(), micro, steps),
    })
}

pub fn run(args: &PlanArgs) -> Result<i32, Failure> {
    let job = Job::load(&args.job, &args.set)?;
    let (model, data) = cli::built_in(&job)?;
    let steps = Plan::new(&job, &data.train)?.between_ends(&job);
    let parameters = model.tensors().iter().map(|t| t.len() as u64).sum();
    let (ways, refused) = ways(&job, &*model, parameters, steps);
    let all = |w: &Way| w.processes as u64 * u64::from(job.train.workers);
    let fits = |w: &Way| args.memory.is_none_or(|Bytes(most)| w.total() <= most);
    if args.json {
        for w in &ways {
            out!(
                "{}",
                json!({
                    "way": w.name, "keys": w.keys, "processes": all(w), "weights_bytes": w.weights,
                    "gradient_bytes": w.gradient, "activations_bytes": w.activations, "rest_bytes": w.rest,
                    "total_bytes": w.total(), "with_servers_bytes": w.with_servers, "between_bytes": w.between,
                    "bubble": w.bubble, "fits": fits(w),
                })
            );
        }
    } else {
        out!("{}", table(&job, &ways, fits));
    }
    for why in refused {
        eprintln!("left out: {why}");
    }
    match (args.memory, ways.iter().min_by_key(|w| w.total())) {
        (Some(memory), Some(least)) if !ways.iter().any(fits) => Err(Failure::new(
            exit::FAILED,
            format!(
                "no process of {memory} can hold its part: the least is {} ({})",
                Bytes(least.total()),
                least.name
            ),
        )
        .help("a smaller train.batch, of a transformer model.checkpoint_activations = true, or more memory")),
        _ => Ok(exit::OK),
    }
}

fn table(job: &Job, ways: &[Way], fits: impl Fn(&Way) -> bool) -> Table {
    let mut t = table::plain([
        "way",
        "processes",
        "a process holds",
        "weights",
        "gradient",
        "activations",
        "rest",
        "servers a step",
        "ranks a step",
        "idle",
        "fits",
        "in the job file",
    ]);
    for w in ways {
        let bytes = |n: u64| if n == 0 { "-".to_string() } else { Bytes(n).to_string() };
        t.add_row([
            w.name.clone(),
            (w.processes as u64 * u64::from(job.train.workers)).to_string(),
            bytes(w.total()),
            bytes(w.weights),
            bytes(w.gradient),
            bytes(w.activations),
            bytes(w.rest),
            bytes(w.with_servers),
            bytes(w.between),
            if w.bubble == 0.0 { "-".into() } else { format!("{:.0} %", 100.0 * w.bubble) },
            if fits(w) { "yes" } else { "no" }.into(),
            w.keys.clone(),
        ]);
    }
    for column in t.column_iter_mut().skip(1).take(9) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    t
}
