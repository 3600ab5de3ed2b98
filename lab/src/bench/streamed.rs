//! `paraft bench streamed`: a transformer whose worker holds some of its layers at a time (`memory.resident`) beside the same
//! with all of them: samples a second, and the worker's peak of anonymous memory against its budget.
//!
//! One worker, one server of one shard, TCP: what is on its way is in the worker's own memory and counted. Initial weights lie in a file
//! that the kernel may take out of memory; they are not.

use super::{
    figure::{self, Figure},
    transformer::{self, Run, Transformer},
};
use clap::Args;
use paraft_common::need::Bytes;
use paraft_fleet::{failure::Failure, launch};
use paraft_worker::exit;
use std::fs;

#[derive(Args)]
pub struct StreamedBenchArgs {
    /// Blocks of the transformer.
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(2..=1024))]
    pub layers: u32,
    /// Its width: a multiple of 64.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..=16384))]
    pub width: u32,
    /// Tokens of a sample.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub context: u32,
    /// Samples of a minibatch.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub batch: u32,
    /// Layers that the worker may hold.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub resident: u32,
    /// Steps of each run.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..=1_000_000))]
    pub steps: u64,
    /// Runs, streamed and whole in turn; the median counts.
    #[arg(long, default_value_t = 3, value_parser = super::repeats)]
    pub repeats: usize,
    /// Streamed runs alone, for a model that is larger than the memory.
    #[arg(long)]
    pub no_whole: bool,
    /// Overrides a key of the jobs; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

impl StreamedBenchArgs {
    fn model(&self) -> Transformer {
        let Self { layers, width, context, batch, steps, .. } = *self;
        Transformer { layers, width, context, batch, steps }
    }
}

pub fn run(args: &StreamedBenchArgs) -> Result<i32, Failure> {
    let scratch = tempfile::tempdir().map_err(|e| Failure::new(exit::IO, e))?;
    let interrupted = launch::interrupts();
    let text = args.model().text(scratch.path())?;
    let (mut streamed, mut whole) = (Vec::new(), Vec::new());
    for repeat in 0..args.repeats {
        for (resident, runs) in [(Some(args.resident), &mut streamed), (None, &mut whole)] {
            if resident.is_none() && args.no_whole {
                continue;
            }
            let dir = scratch.path().join(format!("{repeat}-{}", resident.is_some()));
            let memory = resident.map_or(String::new(), |n| format!("[memory]\nresident = {n}\n"));
            let job = args.model().job(&text, 1, &memory, &args.set)?;
            runs.push(transformer::train(&job, &dir, None, &interrupted)?);
            let _ = fs::remove_dir_all(&dir);
        }
    }
    figure::show(&figures(args, &streamed, &whole), args.json);
    Ok(exit::OK)
}

fn figures(args: &StreamedBenchArgs, streamed: &[Run], whole: &[Run]) -> Vec<Figure> {
    let case =
        format!("{} layers of {}, {} held", args.layers, Bytes(args.model().block() as u64), args.resident);
    let rates = |runs: &[Run]| runs.iter().map(|r| r.samples_per_s).collect::<Vec<_>>();
    let peaks = |runs: &[Run]| runs.iter().map(|r| r.peak_bytes / 1e6).collect::<Vec<_>>();
    let budget = vec![args.model().block() * f64::from(args.resident) / 1e6; streamed.len()];
    let model = vec![args.model().block() * f64::from(args.layers) / 1e6; whole.len()];
    let (rate, memory) = ("samples", "the worker's memory, most");
    let one = |case: &str, what, unit, values: &[f64], against: &str, theirs: &[f64]| {
        let figure = Figure::alone("streamed", case, what, unit, values)?;
        Some(if theirs.is_empty() { figure } else { figure.against(against, values, theirs) })
    };
    let all = "all layers held";
    [
        one(&case, rate, "samples/s", &rates(streamed), all, &rates(whole)),
        one(&case, memory, "MB", &peaks(streamed), "its budget", &budget),
        one(all, rate, "samples/s", &rates(whole), "-", &[]),
        one(all, memory, "MB", &peaks(whole), "the layers", &model),
    ]
    .into_iter()
    .flatten()
    .collect()
}
