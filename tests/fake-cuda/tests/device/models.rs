//! Whole steps of models on the device against the same steps on the CPU, in every order in which a GPU might do them; and the
//! ways of weights and gradients to and from the device.

use crate::Session;
use anyhow::{Context, Result, ensure};
use paraft_common::{Encoding, Layout, TensorKind};
use paraft_models::{
    Batch, CudaOptions, DataShape, Model, ModelConfig, NormKind, Part, Precision, Resident, Sample,
};

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
}

const VALUES: DataShape = DataShape { sample: Sample::Values(64), classes: Some(10) };
const TEXT: DataShape = DataShape { sample: Sample::Tokens { time: 19, vocab: 37 }, classes: Some(37) };

fn transformer(norm: NormKind, checkpoint_activations: bool) -> ModelConfig {
    ModelConfig::Transformer { layers: 2, heads: 2, width: 32, norm, checkpoint_activations }
}

fn every_model() -> Vec<(ModelConfig, DataShape)> {
    vec![
        (ModelConfig::LogisticRegression, VALUES),
        (ModelConfig::Mlp { hidden: vec![33, 20] }, VALUES),
        (ModelConfig::Autoencoder { hidden: vec![20, 7] }, VALUES),
        (ModelConfig::Convnet, VALUES),
        (transformer(NormKind::Layer, false), TEXT),
        (transformer(NormKind::Rms, true), TEXT),
    ]
}

fn batch(noise: &mut Noise, data: DataShape, n: usize) -> Batch {
    match data.sample {
        Sample::Values(len) => {
            Batch { inputs: noise.values(n * len), labels: noise.ids(n, 10), n, ..Batch::default() }
        }
        Sample::Tokens { time, vocab } => Batch {
            tokens: noise.ids(n * time, vocab),
            labels: noise.ids(n * time, vocab),
            n,
            ..Batch::default()
        },
    }
}

fn on_gpu(config: &ModelConfig, data: DataShape, precision: Precision) -> Result<Box<dyn Model>> {
    Ok(config.build_on(CudaOptions { ordinal: 0, precision }, data)?)
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    let length = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
    let apart = length(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    apart / length(&mut b.iter().map(|b| f64::from(*b))).max(1e-6)
}

fn resident(model: &mut dyn Model) -> Result<&mut dyn Resident> {
    model.resident().context("a model on a GPU is resident")
}

#[test]
fn a_step_of_every_model_is_the_cpus() -> Result<()> {
    let Some(session) = Session::begin("a_step_of_every_model_is_the_cpus")? else { return Ok(()) };
    for (precision, allowed) in [(Precision::F32, 1e-4), (Precision::Bf16, 0.15), (Precision::F16, 0.05)] {
        for (config, data) in every_model() {
            session.set("SEED", "3")?;
            let (mut cpu, mut gpu) = (config.build(data)?, on_gpu(&config, data, precision)?);
            assert_eq!(cpu.tensors(), gpu.tensors());
            let len: usize = cpu.tensors().iter().map(|t| t.len()).sum();
            let mut noise = Noise(7);
            let mut params = vec![0.0; len];
            cpu.init(5, &mut params);
            // A second, smaller batch after the first: workspaces are larger than they need to be.
            for n in [5, 3] {
                let b = batch(&mut noise, data, n);
                let (mut want, mut got) = (vec![f32::NAN; len], vec![f32::NAN; len]);
                let loss = cpu.step(&params, &mut want, &b, &mut |_, _| {})?;
                let got_loss = gpu.step(&params, &mut got, &b, &mut |_, _| {})?;
                let apart = distance(&got, &want);
                ensure!(apart < allowed, "{config:?} in {precision:?}, n {n}: gradient {apart} apart");
                ensure!(
                    (loss - got_loss).abs() < 0.02 * loss.abs(),
                    "{config:?}: {got_loss}, {loss} on the CPU"
                );
                let (a, b) = (cpu.evaluate(&params, &b)?, gpu.evaluate(&params, &b)?);
                assert_eq!(a.count, b.count);
                ensure!((a.loss_sum - b.loss_sum).abs() < 0.02 * a.loss_sum.abs(), "{config:?}: {a:?} {b:?}");
                for (p, g) in params.iter_mut().zip(&want) {
                    *p -= 0.05 * g;
                }
            }
        }
    }
    Ok(())
}

/// Ten steps of plain SGD over the resident way, with buckets of 100 values; the bytes of every push.
fn ten_steps(
    config: &ModelConfig,
    data: DataShape,
    precision: Precision,
    encoding: Encoding,
) -> Result<Vec<Vec<u8>>> {
    let mut model = on_gpu(config, data, precision)?;
    let layout = Layout::new(model.tensors(), 100)?;
    let parts: Vec<Part> = layout
        .buckets()
        .iter()
        .map(|b| Part {
            range: b.range(),
            encoding: if b.kind == TensorKind::Param { encoding } else { Encoding::F32 },
        })
        .collect();
    let mut weights = vec![0.0; layout.len()];
    model.init(1, &mut weights);
    let mut noise = Noise(11);
    let mut pushed = Vec::new();
    let gpu = resident(model.as_mut())?;
    for step in 0..10 {
        // As a pull does: all of it at first, and then what changed. Every third bucket stays as it was now and then.
        let host = gpu.host_mut()?;
        let mut changed = Vec::new();
        for (i, p) in parts.iter().enumerate() {
            if step == 0 || (i + step) % 3 > 0 {
                host[p.range.clone()].copy_from_slice(&weights[p.range.clone()]);
                changed.push(p.range.clone());
            }
        }
        gpu.landed(&changed)?;
        let b = batch(&mut noise, data, 4);
        let mut order = Vec::new();
        gpu.step_resident(&b, &parts, &mut |i, bytes| {
            order.push(i);
            let bytes = bytes.as_ref().to_vec();
            if parts[i].encoding == Encoding::F32 {
                let values = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
                for (w, g) in weights[parts[i].range.clone()].iter_mut().zip(values) {
                    *w -= 0.05 * g;
                }
            }
            pushed.push(bytes);
        })?;
        assert!(order.iter().copied().eq((0..parts.len()).rev()), "each bucket once, the last one first");
        gpu.evaluate_resident(&b)?;
    }
    Ok(pushed)
}

#[test]
fn ten_steps_are_the_same_bits_in_whatever_order_the_device_works() -> Result<()> {
    let Some(session) = Session::begin("ten_steps_are_the_same_bits_in_whatever_order_the_device_works")?
    else {
        return Ok(());
    };
    for (config, data) in every_model() {
        for precision in [Precision::F32, Precision::F16] {
            let mut runs = Vec::new();
            for seed in 1..5 {
                session.set("SEED", &seed.to_string())?;
                runs.push(ten_steps(&config, data, precision, Encoding::F32)?);
            }
            let same = runs.iter().all(|r| r == &runs[0]);
            ensure!(same, "{config:?} in {precision:?} depends on the order of the device's work");
        }
    }
    Ok(())
}

/// What the device has written for the wire is what the host would have written.
#[test]
fn pushes_are_encoded_as_on_the_host() -> Result<()> {
    let Some(_session) = Session::begin("pushes_are_encoded_as_on_the_host")? else { return Ok(()) };
    let (config, data) = (ModelConfig::Mlp { hidden: vec![33] }, VALUES);
    let mut model = on_gpu(&config, data, Precision::F32)?;
    let len: usize = model.tensors().iter().map(|t| t.len()).sum();
    let mut weights = vec![0.0; len];
    model.init(1, &mut weights);
    let b = batch(&mut Noise(3), data, 6);
    let mut gradient = vec![0.0; len];
    model.step(&weights, &mut gradient, &b, &mut |_, _| {})?;
    for encoding in Encoding::ALL {
        // 2,000 values: an int8 bucket of two blocks, the last one in part.
        let parts: Vec<Part> =
            (0..len).step_by(2000).map(|at| Part { range: at..len.min(at + 2000), encoding }).collect();
        let gpu = resident(model.as_mut())?;
        gpu.host_mut()?.copy_from_slice(&weights);
        gpu.landed(&[0..len])?;
        gpu.step_resident(&b, &parts, &mut |i, bytes| {
            let mut want = Vec::new();
            encoding.encode(&gradient[parts[i].range.clone()], &mut want);
            assert_eq!(bytes.as_ref(), &want[..], "{encoding}, bucket {i}");
        })?;
    }
    Ok(())
}

/// The pinned memory of a push stays as it is while the push may have to be sent again.
#[test]
fn a_push_that_is_kept_does_not_change() -> Result<()> {
    let Some(session) = Session::begin("a_push_that_is_kept_does_not_change")? else { return Ok(()) };
    let (config, data) = (ModelConfig::Mlp { hidden: vec![33] }, VALUES);
    for seed in 1..4 {
        session.set("SEED", &seed.to_string())?;
        let mut model = on_gpu(&config, data, Precision::F32)?;
        let len: usize = model.tensors().iter().map(|t| t.len()).sum();
        let parts = [Part { range: 0..len, encoding: Encoding::F32 }];
        let mut noise = Noise(seed);
        let gpu = resident(model.as_mut())?;
        gpu.host_mut()?.copy_from_slice(&noise.values(len));
        gpu.landed(&[0..len])?;
        let mut kept = Vec::new();
        for _ in 0..4 {
            let b = batch(&mut noise, data, 3);
            gpu.step_resident(&b, &parts, &mut |_, bytes| kept.push((bytes.as_ref().to_vec(), bytes)))?;
        }
        for (i, (then, now)) in kept.iter().enumerate() {
            ensure!(then == now.as_ref(), "the push of step {i} has changed");
        }
        ensure!(kept[0].0 != kept[1].0, "different batches have different gradients");
    }
    Ok(())
}

#[test]
fn out_of_memory_in_a_step_is_an_error_and_a_smaller_batch_goes_on() -> Result<()> {
    let name = "out_of_memory_in_a_step_is_an_error_and_a_smaller_batch_goes_on";
    let Some(session) = Session::begin(name)? else { return Ok(()) };
    session.set("MEMORY", "60000000")?;
    let (config, data) = (ModelConfig::Mlp { hidden: vec![512] }, VALUES);
    let mut model = on_gpu(&config, data, Precision::F32)?;
    let len: usize = model.tensors().iter().map(|t| t.len()).sum();
    let (mut params, mut grads) = (vec![0.0; len], vec![0.0; len]);
    model.init(1, &mut params);
    let mut noise = Noise(1);
    let large = batch(&mut noise, data, 20_000);
    let error = model
        .step(&params, &mut grads, &large, &mut |_, _| {})
        .expect_err("40 MB of activations")
        .to_string();
    for part in ["out of memory", "40960000 bytes", "activations", "train.batch"] {
        ensure!(error.contains(part), "{part} is missing in: {error}");
    }
    let small = batch(&mut noise, data, 20);
    ensure!(model.step(&params, &mut grads, &small, &mut |_, _| {})?.is_finite());
    Ok(())
}

#[test]
fn a_batch_that_does_not_fit_the_model_is_refused() -> Result<()> {
    let Some(_session) = Session::begin("a_batch_that_does_not_fit_the_model_is_refused")? else {
        return Ok(());
    };
    let config = transformer(NormKind::Layer, false);
    let mut model = on_gpu(&config, TEXT, Precision::F32)?;
    let good = batch(&mut Noise(1), TEXT, 2);
    for bad in [
        Batch { n: 0, ..Batch::default() },
        Batch { tokens: good.tokens[1..].to_vec(), ..good.clone() },
        Batch { tokens: vec![37; 38], ..good.clone() },
        Batch { labels: vec![40; 38], ..good.clone() },
        Batch { labels: Vec::new(), ..good.clone() },
    ] {
        ensure!(resident(model.as_mut())?.step_resident(&bad, &[], &mut |_, _| {}).is_err(), "{bad:?}");
    }
    Ok(())
}
