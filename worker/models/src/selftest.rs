//! Checks this machine's GPU: every operator ([`parity`]), a step of each model against the CPU, and identical bits
//! from identical steps, with all layers present or one at a time. `paraft doctor --selftest`.

use crate::{
    Batch, CudaOptions, DataShape, Flat, Keep, Model, ModelConfig, ModelError, NetResult, Part, Precision,
    Sample, Weights,
};
use paraft_common::Encoding;
use paraft_compute::{
    CpuDevice,
    cuda::CudaDevice,
    parity::{self, Case},
};

/// The allowed error of a model's gradient, relative to its length. Consecutive operators round, and different
/// rounding moves values behind a maximum or a ReLU.
fn allowed(precision: Precision) -> f64 {
    match precision {
        Precision::F32 => 1e-4,
        Precision::Tf32 => 3e-2,
        Precision::Bf16 => 0.15,
        Precision::F16 => 0.12,
    }
}

/// Runs everything on one device in one precision. An error means that the device cannot do a request; a wrong
/// result is a [`Case`].
pub fn run(options: CudaOptions, seed: u64) -> Result<Vec<Case>, ModelError> {
    let mut cases = parity::operators(&mut CudaDevice::new(options)?, Some(options.precision), seed)?;
    cases.extend(steps(options, seed)?);
    cases.extend(repeats(options, seed)?);
    if options.precision != Precision::F16 {
        cases.extend(by_layers(options, seed)?);
    }
    Ok(cases)
}

/// Small versions of the built-in models, with data.
fn models() -> Vec<(ModelConfig, DataShape)> {
    let values = DataShape { sample: Sample::Values(64), classes: Some(10) };
    let text = DataShape { sample: Sample::Tokens { time: 19, vocab: 37 }, classes: Some(37) };
    let transformer = |checkpoint_activations| ModelConfig::Transformer {
        layers: 2,
        heads: 2,
        width: 32,
        checkpoint_activations,
    };
    vec![
        (ModelConfig::LogisticRegression, values),
        (ModelConfig::Mlp { hidden: vec![33, 20] }, values),
        (ModelConfig::Mlp { hidden: vec![21] }, DataShape { classes: None, ..values }),
        (ModelConfig::Autoencoder { hidden: vec![20, 7] }, values),
        (ModelConfig::Convnet, values),
        (transformer(false), text),
        (transformer(true), text),
    ]
}

fn name(config: &ModelConfig, data: DataShape) -> String {
    match data.classes {
        None => format!("{} of numbers", config.name()),
        Some(_) => config.name().to_owned(),
    }
}

struct Noise(u64);

impl Noise {
    fn values(&mut self, len: usize) -> Vec<f32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1u32 << 24) as f32
        };
        (0..len).map(|_| next()).collect()
    }

    fn ids(&mut self, len: usize, below: usize) -> Vec<u32> {
        self.values(len).iter().map(|v| (v * below as f32) as u32).collect()
    }

    /// Far from what a new model predicts: of a small difference, rounding would be a large part.
    fn targets(&mut self, len: usize) -> Vec<f32> {
        self.values(len).iter().map(|v| v + 1.0).collect()
    }

    fn batch(&mut self, data: DataShape, n: usize) -> Batch {
        let classes = data.classes.unwrap_or(1);
        match data.sample {
            Sample::Values(len) => Batch {
                inputs: self.values(n * len),
                labels: self.ids(n, classes),
                targets: if data.classes.is_none() { self.targets(n) } else { Vec::new() },
                n,
                ..Batch::default()
            },
            Sample::Tokens { time, vocab } => Batch {
                tokens: self.ids(n * time, vocab),
                labels: self.ids(n * time, classes),
                n,
                ..Batch::default()
            },
        }
    }
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    let length = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
    let apart = length(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    apart / length(&mut b.iter().map(|b| f64::from(*b))).max(1e-6)
}

fn len_of(model: &dyn Model) -> usize {
    model.tensors().iter().map(paraft_common::TensorSpec::len).sum()
}

/// Two steps of each model and an evaluation, against the CPU's.
pub fn steps(options: CudaOptions, seed: u64) -> Result<Vec<Case>, ModelError> {
    let mut cases = Vec::new();
    for (config, data) in models() {
        let (mut cpu, mut gpu) = (config.build(data)?, config.build_on(options, data)?);
        let len = len_of(cpu.as_ref());
        let mut noise = Noise(seed);
        let mut params = vec![0.0; len];
        cpu.init(seed, &mut params);
        let mut case = |what: &str, n: usize, error: f64, allowed: f64| {
            let what = format!("{}, {n} samples, {what}", name(&config, data));
            cases.push(Case { what, error, allowed });
        };
        // A second, smaller batch: the workspaces are larger than it needs.
        for n in [5, 3] {
            let b = noise.batch(data, n);
            let (mut want, mut got) = (vec![f32::NAN; len], vec![f32::NAN; len]);
            let loss = cpu.step(&params, &mut want, &b, &mut |_, _| {})?;
            let got_loss = gpu.step(&params, &mut got, &b, &mut |_, _| {})?;
            let allowed = allowed(options.precision);
            case("gradient", n, distance(&got, &want), allowed);
            let of = |got: f64, want: f64| (got - want).abs() / want.abs().max(1e-3);
            case("loss", n, of(got_loss.into(), loss.into()), allowed.min(0.02));
            let (want_sums, got_sums) = (cpu.evaluate(&params, &b)?, gpu.evaluate(&params, &b)?);
            case("evaluation", n, of(got_sums.loss_sum, want_sums.loss_sum), allowed.min(0.02));
            case("count", n, of(got_sums.count as f64, want_sums.count as f64), 0.0);
            params.iter_mut().zip(&want).for_each(|(p, g)| *p -= 0.05 * g);
        }
    }
    Ok(cases)
}

/// Ten steps of each model, twice, the second time without CUDA graphs: identical bits.
pub fn repeats(options: CudaOptions, seed: u64) -> Result<Vec<Case>, ModelError> {
    let mut cases = Vec::new();
    for (config, data) in models() {
        let one = ten_steps(options, &config, data, seed)?;
        let two = ten_steps(CudaOptions { eager: true, ..options }, &config, data, seed)?;
        let error = if one == two { 0.0 } else { distance(&one, &two).max(f64::MIN_POSITIVE) };
        let what = format!("{}, ten steps twice, the same bits", name(&config, data));
        cases.push(Case { what, error, allowed: 0.0 });
    }
    Ok(cases)
}

/// The host's flat vectors, for a model with some layers on its device.
struct Host<'a> {
    weights: &'a [f32],
    edition: u64,
    gradient: Vec<f32>,
}

impl Weights<CpuDevice> for Host<'_> {
    fn params(&mut self, _: usize) -> NetResult<&[f32]> {
        Ok(self.weights)
    }

    fn edition(&mut self, _: usize) -> NetResult<u64> {
        Ok(self.edition)
    }
}

impl Flat<CpuDevice> for Host<'_> {
    fn layer(&mut self, _: usize) -> NetResult<(&[f32], &mut [f32])> {
        Ok((self.weights, &mut self.gradient))
    }

    fn ready(&mut self, _: usize) -> NetResult {
        Ok(())
    }
}

/// Steps of each model with one layer on the device at a time: the bits of steps with all layers.
pub fn by_layers(options: CudaOptions, seed: u64) -> Result<Vec<Case>, ModelError> {
    let mut cases = Vec::new();
    for (config, data) in models() {
        let mut whole = config.build_on(options, data)?;
        let mut some = config.build_layered(options, |_| Keep::Values(0), data)?;
        let mut weights = vec![0.0; len_of(whole.as_ref())];
        whole.init(seed, &mut weights);
        let (mut noise, mut error) = (Noise(seed), 0.0);
        for edition in 1..4 {
            let b = noise.batch(data, 4);
            let mut want = vec![f32::NAN; weights.len()];
            whole.step(&weights, &mut want, &b, &mut |_, _| {})?;
            let mut host = Host { weights: &weights, edition, gradient: vec![f32::NAN; weights.len()] };
            some.step_by_layers(&mut host, &b)?;
            let same = host.gradient.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
            if !same {
                error = distance(&host.gradient, &want).max(f64::MIN_POSITIVE);
            }
            weights.iter_mut().zip(&want).for_each(|(w, g)| *w -= 0.05 * g);
        }
        let what = format!("{}, layer by layer, the same bits", name(&config, data));
        cases.push(Case { what, error, allowed: 0.0 });
    }
    Ok(cases)
}

/// The weights after ten steps of plain SGD, through a worker's calls.
pub fn ten_steps(
    options: CudaOptions,
    config: &ModelConfig,
    data: DataShape,
    seed: u64,
) -> Result<Vec<f32>, ModelError> {
    let mut model = config.build_on(options, data)?;
    let len = len_of(model.as_ref());
    let mut weights = vec![0.0; len];
    model.init(seed, &mut weights);
    let mut noise = Noise(seed);
    let parts: Vec<Part> = (0..len)
        .step_by(100)
        .map(|at| Part { range: at..len.min(at + 100), encoding: Encoding::F32 })
        .collect();
    let gpu = model.resident().ok_or_else(|| ModelError::new("a model on a GPU is resident"))?;
    for step in 0..10 {
        let host = gpu.host_mut()?;
        let mut changed = Vec::new();
        // Like pulls: everything at first, then what changed. Some buckets stay.
        let kept = |i: usize| step > 0 && (i + step).is_multiple_of(3);
        for (_, p) in parts.iter().enumerate().filter(|(i, _)| !kept(*i)) {
            host[p.range.clone()].copy_from_slice(&weights[p.range.clone()]);
            changed.push(p.range.clone());
        }
        gpu.landed(&changed)?;
        gpu.step_resident(&noise.batch(data, 4), &parts, &mut |i, bytes| {
            let values = bytes.as_ref().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
            let part = &mut weights[parts[i].range.clone()];
            part.iter_mut().zip(values).for_each(|(w, g)| *w -= 0.05 * g);
        })?;
    }
    Ok(weights)
}
