//! `paraft bench kernels`: a training step alone on one thread of the CPU, with each set of vector instructions.
//!
//! A step is forward, loss and backward, and the loss read: what a worker does between a pull and its last push, without either. The same in
//! PyTorch with the same instructions, where one is named, in the same run and in turn with it. Each measurement is a process of its own,
//! since a process chooses its instructions once.

use super::{
    figure::{self, Figure},
    flags::repeats,
    gpu::samples,
    meter::printed,
};
use clap::{Args, ValueEnum};
use paraft_fleet::failure::Failure;
use paraft_models::{DataShape, ModelConfig, ModelError, Sample};
use paraft_simd::Isa;
use paraft_worker::exit;
use serde_json::json;
use std::{
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

const SCRIPT: &str = concat!(
    include_str!("../../../tools/bench/torch_models.py"),
    include_str!("../../../tools/bench/torch_cpu.py")
);
/// The hidden command of the measuring process.
const COMMAND: &str = "kernel-steps";
/// Warm-up steps, and the minimum of measured steps.
const STEPS: usize = 5;

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum BenchModel {
    /// 784-256-128-10, batch 64.
    Mlp,
    /// 784-128-128-128-784, batch 128.
    Autoencoder,
    /// The ConvNet on 28 x 28, batch 100.
    Convnet,
    /// 4 layers, 4 heads, width 128, vocabulary 256, 64 tokens, batch 8.
    Transformer,
}

#[derive(Args)]
pub struct KernelsBenchArgs {
    /// Models, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "mlp,autoencoder,convnet,transformer")]
    models: Vec<BenchModel>,
    /// Sets of vector instructions, comma-separated [default: every one of this machine].
    #[arg(long, value_delimiter = ',', value_parser = level)]
    levels: Vec<Isa>,
    /// Milliseconds of each repeat, without the start.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=3_600_000))]
    millis: u32,
    /// Repeats, in turn with PyTorch's; the median counts.
    #[arg(long, default_value_t = 5, value_parser = repeats)]
    repeats: usize,
    /// A Python with PyTorch.
    #[arg(long)]
    torch: Option<PathBuf>,
    /// One JSON object for each figure.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct StepsArgs {
    model: BenchModel,
    millis: u32,
}

/// A set that this machine has.
fn level(name: &str) -> Result<Isa, String> {
    let isa = Isa::named(name).ok_or("avx512, avx2 or portable")?;
    isa.level().map(|_| isa).ok_or_else(|| "this machine doesn't have it".into())
}

impl BenchModel {
    /// Its name, what it is, its data and the samples of a step.
    fn case(self) -> (&'static str, ModelConfig, DataShape, usize) {
        let images = DataShape { sample: Sample::Values(784), classes: Some(10) };
        match self {
            Self::Mlp => ("mlp", ModelConfig::Mlp { hidden: vec![256, 128] }, images, 64),
            Self::Autoencoder => {
                ("autoencoder", ModelConfig::Autoencoder { hidden: vec![128, 128, 128] }, images, 128)
            }
            Self::Convnet => ("convnet", ModelConfig::Convnet, images, 100),
            Self::Transformer => {
                let config = ModelConfig::Transformer {
                    layers: 4,
                    heads: 4,
                    width: 128,
                    checkpoint_activations: false,
                };
                let (time, vocab) = (64, 256);
                (
                    "transformer",
                    config,
                    DataShape { sample: Sample::Tokens { time, vocab }, classes: Some(vocab) },
                    8,
                )
            }
        }
    }
}

pub fn run(args: &KernelsBenchArgs) -> Result<i32, Failure> {
    let all = || Isa::ALL.into_iter().filter(|isa| isa.level().is_some()).collect();
    let levels: Vec<Isa> = if args.levels.is_empty() { all() } else { args.levels.clone() };
    let mut figures = Vec::new();
    for which in &args.models {
        let (name, _, _, n) = which.case();
        let mut times = vec![(Vec::new(), Vec::new()); levels.len()];
        for _ in 0..args.repeats {
            for (isa, (ours, theirs)) in levels.iter().zip(&mut times) {
                ours.push(own(name, *isa, args.millis)?);
                if let Some(python) = &args.torch {
                    theirs.push(torch(python, (name, n), *isa, args.millis)?);
                }
            }
        }
        for (isa, (ours, theirs)) in levels.iter().zip(&times) {
            let figure = Figure::alone("kernels", &format!("{name}, batch {n}, {isa}"), "step", "ms", ours);
            // Theirs over ours: how many times as fast.
            figures.extend(figure.map(|f| f.against("PyTorch", theirs, ours)));
        }
    }
    figure::show(&figures, args.json);
    Ok(exit::OK)
}

/// What `run` starts: prints the seconds of each step.
pub fn steps(args: &StepsArgs) -> Result<i32, Failure> {
    let seconds = measure(args).map_err(|e| Failure::new(exit::FAILED, e))?;
    out!("{}", json!(seconds));
    Ok(exit::OK)
}

fn measure(args: &StepsArgs) -> Result<Vec<f64>, ModelError> {
    let (_, config, data, n) = args.model.case();
    let mut model = config.build(data)?;
    let len = model.tensors().iter().map(|t| t.len()).sum();
    let (mut weights, mut grads) = (vec![0.0; len], vec![0.0; len]);
    model.init(1, &mut weights);
    let batch = samples(data, n);
    for _ in 0..STEPS {
        model.step(&weights, &mut grads, &batch, &mut |_, _| {})?;
    }
    let (mut seconds, begun) = (Vec::new(), Instant::now());
    while begun.elapsed() < Duration::from_millis(args.millis.into()) || seconds.len() < STEPS {
        let began = Instant::now();
        model.step(&weights, &mut grads, &batch, &mut |_, _| {})?;
        seconds.push(began.elapsed().as_secs_f64());
    }
    Ok(seconds)
}

fn own(name: &str, isa: Isa, millis: u32) -> Result<f64, Failure> {
    let paraft = std::env::current_exe().map_err(|e| Failure::new(exit::FAILED, e))?;
    let mut command = Command::new(paraft);
    command.args(["bench", COMMAND, name, &millis.to_string()]).env(paraft_simd::VARIABLE, isa.name());
    printed(command)
}

fn torch(python: &PathBuf, (name, n): (&str, usize), isa: Isa, millis: u32) -> Result<f64, Failure> {
    let (aten, onednn, mkl) = match isa {
        Isa::Avx512 => ("avx512", "AVX512_CORE", "AVX512"),
        Isa::Avx2 => ("avx2", "AVX2", "AVX2"),
        Isa::Portable => ("default", "SSE41", "SSE4_2"),
    };
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT, name, &n.to_string(), &millis.to_string()]);
    command.env("ATEN_CPU_CAPABILITY", aten).env("ONEDNN_MAX_CPU_ISA", onednn);
    command.env("MKL_ENABLE_INSTRUCTIONS", mkl).env("OMP_NUM_THREADS", "1");
    printed(command)
}
