//! `paraft bench gpu`: a training step alone, and the kernels that only move bytes, on a GPU.
//!
//! A step is a batch that comes from the host's memory, forward, loss, backward, and the loss read: what a worker does between a pull and
//! its last push, without either. The same in PyTorch, where one is named, in the same run and in turn with it: eager, and compiled.
//!
//! A memory-bound kernel is compared with a copy within the device's memory: bytes that it must read and write, each once, over its time,
//! beside the copy's.

use super::{
    figure::{self, Figure},
    flags::repeats,
    meter::{milliseconds, printed},
};
use clap::{Args, ValueEnum};
use paraft_compute::cuda::{CudaDevice, measure};
use paraft_fleet::failure::Failure;
use paraft_models::{Batch, CudaOptions, DataShape, Model, ModelConfig, ModelError, Precision, Sample};
use paraft_worker::exit;
use std::{collections::BTreeMap, path::PathBuf, process::Command, time::Instant};

const SCRIPT: &str = concat!(
    include_str!("../../../tools/bench/torch_models.py"),
    include_str!("../../../tools/bench/torch_step.py")
);
/// Warm-up steps.
const WARM_UP: usize = 10;

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum BenchModel {
    /// 784-4096-4096-10, batch 4096, tf32.
    Mlp,
    /// The ConvNet on 28 x 28, batch 1024, tf32.
    Convnet,
    /// 124 million parameters (12 layers, 12 heads, width 768, vocabulary 50257), 1024 tokens, batch 8, bf16.
    Transformer,
}

#[derive(Args)]
pub struct GpuBenchArgs {
    /// Models, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "mlp,convnet,transformer")]
    models: Vec<BenchModel>,
    /// Steps of each repeat.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    steps: u32,
    /// Repeats, in turn with PyTorch's; the median counts.
    #[arg(long, default_value_t = 3, value_parser = repeats)]
    repeats: usize,
    /// Rows of 1024 values of the memory-bound kernels.
    #[arg(long, default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    rows: u32,
    /// Small models and batches: to see whether the command works. PyTorch is not asked.
    #[arg(long)]
    tiny: bool,
    /// A Python with PyTorch for CUDA.
    #[arg(long)]
    torch: Option<PathBuf>,
    /// One JSON object for each figure.
    #[arg(long)]
    json: bool,
}

/// A model with its data, batch and precision.
struct Case {
    name: &'static str,
    config: ModelConfig,
    data: DataShape,
    batch: usize,
    precision: (&'static str, Precision),
}

impl BenchModel {
    fn case(self, tiny: bool) -> Case {
        let images = DataShape { sample: Sample::Values(784), classes: Some(10) };
        let tf32 = ("tf32", Precision::Tf32);
        let or = |large: usize, small: usize| if tiny { small } else { large };
        match self {
            Self::Mlp => {
                let width = or(4096, 32);
                let config = ModelConfig::Mlp { hidden: vec![width, width] };
                Case { name: "mlp", config, data: images, batch: or(4096, 16), precision: tf32 }
            }
            Self::Convnet => {
                let config = ModelConfig::Convnet;
                Case { name: "convnet", config, data: images, batch: or(1024, 4), precision: tf32 }
            }
            Self::Transformer => {
                let (time, vocab) = (or(1024, 16), or(50_257, 64));
                let config = ModelConfig::Transformer {
                    layers: or(12, 1),
                    heads: or(12, 2),
                    width: or(768, 32),
                    checkpoint_activations: false,
                };
                let data = DataShape { sample: Sample::Tokens { time, vocab }, classes: Some(vocab) };
                let precision = ("bf16", Precision::Bf16);
                Case { name: "transformer", config, data, batch: or(8, 2), precision }
            }
        }
    }
}

/// `n` deterministic samples of this shape.
pub(super) fn samples(data: DataShape, n: usize) -> Batch {
    let ids = |len: usize, below: usize| (0..len).map(|i| (i * 7919 % below) as u32).collect();
    match data.sample {
        Sample::Values(len) => Batch {
            inputs: (0..n * len).map(|i| (i % 251) as f32 / 251.0).collect(),
            labels: ids(n, 10),
            n,
            ..Batch::default()
        },
        Sample::Tokens { time, vocab } => {
            Batch { tokens: ids(n * time, vocab), labels: ids(n * time, vocab), n, ..Batch::default() }
        }
    }
}

pub fn run(args: &GpuBenchArgs) -> Result<i32, Failure> {
    let failed = |e: ModelError| Failure::new(exit::UNAVAILABLE, e);
    let kernels = kernels(args).map_err(failed)?;
    figure::show(&kernels, args.json);
    for which in &args.models {
        let figures = steps(args, &which.case(args.tiny))?;
        figure::show(&figures, args.json);
    }
    Ok(exit::OK)
}

fn kernels(args: &GpuBenchArgs) -> Result<Vec<Figure>, ModelError> {
    let mut figures = Vec::new();
    for (name, precision) in [("f32", Precision::F32), ("bf16", Precision::Bf16)] {
        let mut device = CudaDevice::new(CudaOptions { precision, ..CudaOptions::default() })?;
        let mut rates: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
        let mut order = Vec::new();
        for _ in 0..args.repeats {
            for rate in measure::memory_bound(&mut device, args.rows as usize, args.steps)? {
                if !rates.contains_key(rate.what) {
                    order.push(rate.what);
                }
                rates.entry(rate.what).or_default().push(rate.bytes as f64 / rate.seconds / 1e9);
            }
        }
        let copies = rates.get("copy").cloned().unwrap_or_default();
        for what in order {
            let case = format!("{name}, {} x 1024", args.rows);
            let figure = Figure::alone("gpu", &case, what, "GB/s", &rates[what]);
            figures.extend(figure.map(|f| match what {
                "copy" => f.itself("copy in the device's memory"),
                _ => f.against("copy in the device's memory", &rates[what], &copies),
            }));
        }
    }
    Ok(figures)
}

/// Milliseconds of a step, one number per repeat: the median of its steps.
fn steps(args: &GpuBenchArgs, case: &Case) -> Result<Vec<Figure>, Failure> {
    let failed = |e: ModelError| Failure::new(exit::UNAVAILABLE, e);
    let options = CudaOptions { precision: case.precision.1, ..CudaOptions::default() };
    let mut model = case.config.build_on(options, case.data).map_err(failed)?;
    let mut weights = vec![0.0; model.tensors().iter().map(|t| t.len()).sum()];
    model.init(1, &mut weights);
    let batch = samples(case.data, case.batch);
    let (mut ours, mut eager, mut compiled) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.repeats {
        ours.push(own(model.as_mut(), &weights, &batch, args.steps as usize).map_err(failed)?);
        if let Some(python) = args.torch.as_ref().filter(|_| !args.tiny) {
            eager.push(torch(python, case, args, "eager")?);
            compiled.push(torch(python, case, args, "compile")?);
        }
    }
    let place = format!("{}, batch {}, {}", case.name, case.batch, case.precision.0);
    let mut figures = Vec::new();
    let figure = |what, values: &[f64]| Figure::alone("gpu", &place, what, "ms", values);
    for (reference, theirs) in [("PyTorch eager", &eager), ("torch.compile", &compiled)] {
        if theirs.is_empty() {
            continue;
        }
        // PyTorch's time over ours: the speed-up.
        if let Some(f) = figure("step", &ours) {
            let speed = f.against(reference, theirs, &ours);
            figures.push(speed);
        }
    }
    if figures.is_empty() {
        figures.extend(figure("step", &ours));
    }
    Ok(figures)
}

fn own(model: &mut dyn Model, weights: &[f32], batch: &Batch, steps: usize) -> Result<f64, ModelError> {
    let Some(gpu) = model.resident() else { return Err(ModelError::new("it is not on a GPU")) };
    gpu.host_mut()?.copy_from_slice(weights);
    gpu.landed(std::slice::from_ref(&(0..weights.len())))?;
    let mut seconds = Vec::with_capacity(steps);
    for i in 0..WARM_UP + steps {
        let began = Instant::now();
        gpu.step_resident(batch, &[], &mut |_, _| {})?;
        if i >= WARM_UP {
            seconds.push(began.elapsed().as_secs_f64());
        }
    }
    Ok(milliseconds(&seconds))
}

fn torch(python: &PathBuf, case: &Case, args: &GpuBenchArgs, how: &str) -> Result<f64, Failure> {
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT, case.name, &case.batch.to_string(), case.precision.0]);
    command.args([&args.steps.to_string(), how]);
    printed(command)
}
