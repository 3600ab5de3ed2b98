//! `paraft bench pipeline`: a transformer whose worker's ranks hold a stage each (`parallel.pipeline`), by every schedule, beside a worker with
//! all of it: samples a second, the share of the time in which ranks compute nothing beside what the schedule leaves them, and the peak
//! memory of the rank that has most. Where a Python with PyTorch is named, beside its pipelines and its sharded parameters (FSDP2).
//!
//! When a rank computes is taken from its trace: from one of its spans `forward` and `backward` to the next it computes nothing.

use super::{
    figure::{self, Figure},
    transformer::{self, Run, Transformer},
};
use clap::Args;
use paraft_common::pipeline::PipelineSchedule;
use paraft_fleet::{failure::Failure, launch};
use paraft_trace::{Moment, Span, Stage, TRACE_FOLDER, spans};
use paraft_worker::exit;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

#[derive(Args)]
pub struct PipelineBenchArgs {
    /// Stages, a rank each. Give them as many cores.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub stages: u32,
    /// Micro-batches of a minibatch: as many as stages, or more.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=1024))]
    pub micro_batches: u32,
    /// Blocks of the transformer.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=1024))]
    pub layers: u32,
    /// Its width: a multiple of 64.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(64..=16384))]
    pub width: u32,
    /// Tokens of a sample.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub context: u32,
    /// Samples of a minibatch.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..=65536))]
    pub batch: u32,
    /// Steps of each run.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(4..=100_000))]
    pub steps: u64,
    /// Runs of each kind, in turn; the median counts.
    #[arg(long, default_value_t = 3, value_parser = super::repeats)]
    pub repeats: usize,
    /// A Python with PyTorch.
    #[arg(long)]
    pub torch: Option<PathBuf>,
    /// Overrides a key of the jobs; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

const SCHEDULES: [PipelineSchedule; 3] =
    [PipelineSchedule::GPipe, PipelineSchedule::OneForwardOneBackward, PipelineSchedule::DoubleBuffered];

const SCRIPT: &str = concat!(
    include_str!("../../../tools/bench/torch_models.py"),
    include_str!("../../../tools/bench/torch_pipeline.py")
);

/// What is ours, in the order of PyTorch's ways.
const OURS: [&str; 4] = ["one process", "gpipe", "1f1b", "2bw"];

/// What the script calls PyTorch's ways, and what people do.
const TORCH: [(&str, &str); 4] = [
    ("whole", "PyTorch, one process"),
    ("gpipe", "PyTorch, gpipe"),
    ("1f1b", "PyTorch, 1f1b"),
    ("fsdp", "PyTorch, FSDP2"),
];

pub fn run(args: &PipelineBenchArgs) -> Result<i32, Failure> {
    if args.micro_batches < args.stages || args.micro_batches > args.batch {
        let why = format!("--micro-batches {}: from --stages to --batch", args.micro_batches);
        return Err(Failure::new(exit::USAGE, why));
    }
    let scratch = tempfile::tempdir().map_err(|e| Failure::new(exit::IO, e))?;
    let interrupted = launch::interrupts();
    let PipelineBenchArgs { layers, width, context, batch, steps, .. } = *args;
    let model = Transformer { layers, width, context, batch, steps };
    let text = model.text(scratch.path())?;
    let mut whole = Vec::new();
    let mut cut: [(Vec<Run>, Vec<f64>); 3] = Default::default();
    let mut torch: [Vec<Run>; 4] = Default::default();
    for repeat in 0..args.repeats {
        let dir = scratch.path().join(format!("{repeat}-whole"));
        whole.push(transformer::train(&model.job(&text, 1, "", &args.set)?, &dir, None, &interrupted)?);
        for (schedule, (runs, idle)) in SCHEDULES.iter().zip(&mut cut) {
            let dir = scratch.path().join(format!("{repeat}-{}", schedule.name()));
            let parallel = format!(
                "[parallel]\npipeline = {}\nmicro_batches = {}\nschedule = \"{}\"\n",
                args.stages,
                args.micro_batches,
                schedule.name()
            );
            let job = model.job(&text, args.stages, &parallel, &args.set)?;
            runs.push(transformer::train(&job, &dir, Some(steps), &interrupted)?);
            idle.push(idle_share(&dir, args.stages, schedule.goes_on())?);
            let _ = fs::remove_dir_all(&dir);
        }
        for ((way, _), runs) in TORCH.iter().zip(&mut torch) {
            if let Some(python) = &args.torch {
                runs.push(theirs(python, way, args)?);
            }
        }
    }
    figure::show(&figures(args, &whole, &cut, &torch), args.json);
    Ok(exit::OK)
}

fn theirs(python: &Path, way: &str, args: &PipelineBenchArgs) -> Result<Run, Failure> {
    let failed = |what: String| Failure::new(exit::FAILED, format!("{}: {what}", python.display()));
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT, way]).env("OMP_NUM_THREADS", "1");
    for n in [args.stages, args.micro_batches, args.layers, args.width, args.context, args.batch] {
        command.arg(n.to_string());
    }
    // It leaves out two.
    command.arg((args.steps - 2).to_string());
    let output = command.stdin(Stdio::null()).output().map_err(|e| failed(e.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_string()));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().next_back().unwrap_or_default();
    let (samples_per_s, peak_bytes) =
        serde_json::from_str(last).map_err(|e| failed(format!("it printed {last:?}: {e}")))?;
    Ok(Run { samples_per_s, peak_bytes })
}

fn figures(
    args: &PipelineBenchArgs,
    whole: &[Run],
    cut: &[(Vec<Run>, Vec<f64>)],
    torch: &[Vec<Run>],
) -> Vec<Figure> {
    let rates = |runs: &[Run]| runs.iter().map(|r| r.samples_per_s).collect::<Vec<_>>();
    let peaks = |runs: &[Run]| runs.iter().map(|r| r.peak_bytes / 1e6).collect::<Vec<_>>();
    let mut all = Vec::new();
    let mut add = |case: &str, what, unit, values: &[f64], theirs: Option<(&str, &[f64])>| {
        let figure = Figure::alone("pipeline", case, what, unit, values);
        all.extend(figure.map(|f| match theirs {
            Some((name, theirs)) => f.against(name, values, theirs),
            None => f,
        }));
    };
    let one = "one process";
    add(one, "samples", "samples/s", &rates(whole), None);
    add(one, "a process's memory, most", "MB", &peaks(whole), None);
    for (schedule, (runs, idle)) in SCHEDULES.iter().zip(cut) {
        let case =
            format!("{} stages, {} micro-batches, {}", args.stages, args.micro_batches, schedule.name());
        add(&case, "samples", "samples/s", &rates(runs), Some((one, &rates(whole))));
        add(&case, "a process's memory, most", "MB", &peaks(runs), Some((one, &peaks(whole))));
        add(&case, "idle", "% of the time", &idle.iter().map(|i| 100.0 * i).collect::<Vec<_>>(), None);
        let equal = vec![(1.0, 2.0); args.stages as usize];
        let bubble = schedule.bubble(&equal, args.micro_batches as usize, args.steps as usize);
        add(&case, "idle by the schedule, equal stages", "% of the time", &[100.0 * bubble], None);
    }
    // Each with what is ours of the kind; shards of parameters with the fastest.
    let ours = [whole].into_iter().chain(cut.iter().map(|(runs, _)| runs.as_slice()));
    for ((ours, own), ((_, name), theirs)) in ours.zip(OURS).zip(TORCH.iter().zip(torch)) {
        if !theirs.is_empty() {
            add(own, "samples", "samples/s", &rates(ours), Some((name, &rates(theirs))));
            add(own, "a process's memory, most", "MB", &peaks(ours), Some((name, &peaks(theirs))));
        }
    }
    all
}

/// In which ranks computed nothing. Where a step ends before the next begins: of each step, from its first micro-batch on its way forward to its
/// last one back. Where they go on into each other: of all the time in which all ranks were at it. Without the first two steps and the last.
fn idle_share(run: &Path, stages: u32, goes_on: bool) -> Result<f64, Failure> {
    let mut ranks = Vec::new();
    for rank in 0..stages {
        let name = if rank == 0 { "worker-0".to_string() } else { format!("worker-0-rank-{rank}") };
        let path = run.join(TRACE_FOLDER).join(format!("{name}.jsonl"));
        let mut passes = spans(&path).map_err(|e| Failure::new(exit::IO, e))?;
        passes.retain(|span| matches!(span.stage, Stage::Forward | Stage::Backward));
        ranks.push(passes);
    }
    let all = || ranks.iter().flatten();
    let (first, last) =
        (all().map(|s| s.step.0).min().unwrap_or(0), all().map(|s| s.step.0).max().unwrap_or(0));
    let within = |s: &&Span| s.step.0 > first + 1 && s.step.0 < last;
    // Of so many ranks' time, from and to, these passes are.
    let (mut whole, mut busy) = (0.0, 0.0);
    let mut add = |passes: &[&Span], begin: Moment, end: Moment| {
        whole += end.since(begin).as_secs_f64() * f64::from(stages);
        let of = |s: &&Span| s.end.min(end).since(s.begin.max(begin)).as_secs_f64();
        busy += passes.iter().filter(|s| s.end > begin && s.begin < end).map(of).sum::<f64>();
    };
    if goes_on {
        let of =
            |r: &Vec<Span>, f: &dyn Fn(&Span) -> Moment| r.iter().filter(within).map(f).collect::<Vec<_>>();
        let begin = ranks.iter().filter_map(|r| of(r, &|s| s.begin).into_iter().min()).max();
        let end = ranks.iter().filter_map(|r| of(r, &|s| s.end).into_iter().max()).min();
        let (begin, end) = begin.zip(end).unwrap_or_default();
        add(&all().collect::<Vec<_>>(), begin, end.max(begin));
    } else {
        let mut between: Vec<&Span> = all().filter(within).collect();
        between.sort_by_key(|s| s.step);
        for step in between.chunk_by(|a, b| a.step == b.step) {
            let begin = step.iter().map(|s| s.begin).min().unwrap_or_default();
            add(step, begin, step.iter().map(|s| s.end).max().unwrap_or_default());
        }
    }
    if whole > 0.0 {
        return Ok(1.0 - busy / whole);
    }
    Err(Failure::new(exit::FAILED, "the ranks have recorded no micro-batches"))
}
