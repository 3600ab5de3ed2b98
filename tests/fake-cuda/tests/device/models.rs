//! Whole steps of models on the device against the same steps on the CPU, in every order in which a GPU might do them; and the
//! ways of weights and gradients to and from the device.

use crate::Session;
use anyhow::{Context, Result, ensure};
use paraft_common::Encoding;
use paraft_models::{
    Batch, CudaOptions, DataShape, Model, ModelConfig, Part, Precision, Resident, Sample, selftest,
};

pub(crate) struct Noise(pub u64);

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

pub(crate) const VALUES: DataShape = DataShape { sample: Sample::Values(64), classes: Some(10) };
pub(crate) const TEXT: DataShape =
    DataShape { sample: Sample::Tokens { time: 19, vocab: 37 }, classes: Some(37) };

pub(crate) fn transformer(checkpoint_activations: bool) -> ModelConfig {
    ModelConfig::Transformer { layers: 2, heads: 2, width: 32, checkpoint_activations }
}

pub(crate) fn images(noise: &mut Noise, n: usize) -> Batch {
    Batch { inputs: noise.values(n * 64), labels: noise.ids(n, 10), n, ..Batch::default() }
}

pub(crate) fn text(noise: &mut Noise, n: usize) -> Batch {
    Batch { tokens: noise.ids(n * 19, 37), labels: noise.ids(n * 19, 37), n, ..Batch::default() }
}

pub(crate) fn on_gpu(config: &ModelConfig, data: DataShape, precision: Precision) -> Result<Box<dyn Model>> {
    Ok(config.build_on(CudaOptions { ordinal: 0, precision, ..CudaOptions::default() }, data)?)
}

fn resident(model: &mut dyn Model) -> Result<&mut dyn Resident> {
    model.resident().context("a model on a GPU is resident")
}

fn selftest(session: &Session, precision: Precision) -> Result<()> {
    session.set("SEED", "3")?;
    let cases = selftest::steps(CudaOptions { ordinal: 0, precision, ..CudaOptions::default() }, 7)?;
    let wrong: Vec<_> = cases.iter().filter(|c| !c.holds()).collect();
    ensure!(cases.len() == 7 * 8 && wrong.is_empty(), "{precision:?}: {} cases, {wrong:#?}", cases.len());
    Ok(())
}

#[test]
fn a_step_of_every_model_is_the_cpus() -> Result<()> {
    let Some(session) = Session::begin("a_step_of_every_model_is_the_cpus")? else { return Ok(()) };
    [Precision::F32, Precision::Tf32, Precision::Bf16, Precision::F16]
        .into_iter()
        .try_for_each(|p| selftest(&session, p))
}

/// The convolutional net has most operators, the transformer that recomputes has most dependencies.
#[test]
fn ten_steps_have_the_same_bits_in_every_device_order() -> Result<()> {
    let Some(session) = Session::begin("ten_steps_have_the_same_bits_in_every_device_order")? else {
        return Ok(());
    };
    let cases = [
        (ModelConfig::Mlp { hidden: vec![33, 20] }, VALUES, Precision::F32),
        (ModelConfig::Convnet, VALUES, Precision::Bf16),
        (transformer(true), TEXT, Precision::F16),
    ];
    for (config, data, precision) in cases {
        let mut runs = Vec::new();
        for seed in 1..4 {
            session.set("SEED", &seed.to_string())?;
            runs.push(selftest::ten_steps(
                CudaOptions { ordinal: 0, precision, ..CudaOptions::default() },
                &config,
                data,
                5,
            )?);
        }
        let same = runs.iter().all(|r| r == &runs[0]);
        ensure!(same, "{config:?} in {precision:?} depends on the order of the device's work");
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
    let b = images(&mut Noise(3), 6);
    let mut gradient = vec![0.0; len];
    model.step(&weights, &mut gradient, &b, &mut |_, _| {})?;
    for encoding in Encoding::DENSE {
        // 2,000 values: an int8 bucket of two blocks, the last one in part.
        let parts: Vec<Part> =
            (0..len).step_by(2000).map(|at| Part { range: at..len.min(at + 2000), encoding }).collect();
        let gpu = resident(model.as_mut())?;
        gpu.host_mut()?.copy_from_slice(&weights);
        gpu.landed(std::slice::from_ref(&(0..len)))?;
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
        gpu.landed(std::slice::from_ref(&(0..len)))?;
        let mut kept = Vec::new();
        for _ in 0..4 {
            let b = images(&mut noise, 3);
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
fn out_of_memory_is_an_error_and_a_smaller_batch_works() -> Result<()> {
    let name = "out_of_memory_is_an_error_and_a_smaller_batch_works";
    let Some(session) = Session::begin(name)? else { return Ok(()) };
    session.set("MEMORY", "60000000")?;
    let (config, data) = (ModelConfig::Mlp { hidden: vec![512] }, VALUES);
    let mut model = on_gpu(&config, data, Precision::F32)?;
    let len: usize = model.tensors().iter().map(|t| t.len()).sum();
    let (mut params, mut grads) = (vec![0.0; len], vec![0.0; len]);
    model.init(1, &mut params);
    let mut noise = Noise(1);
    let large = images(&mut noise, 20_000);
    let error = model
        .step(&params, &mut grads, &large, &mut |_, _| {})
        .expect_err("40 MB of activations")
        .to_string();
    for part in ["out of memory", "40960000 bytes", "activations", "train.batch"] {
        ensure!(error.contains(part), "{part} is missing in: {error}");
    }
    let small = images(&mut noise, 20);
    ensure!(model.step(&params, &mut grads, &small, &mut |_, _| {})?.is_finite());
    Ok(())
}

#[test]
fn a_batch_that_does_not_fit_the_model_is_refused() -> Result<()> {
    let Some(_session) = Session::begin("a_batch_that_does_not_fit_the_model_is_refused")? else {
        return Ok(());
    };
    let config = transformer(false);
    let mut model = on_gpu(&config, TEXT, Precision::F32)?;
    let good = text(&mut Noise(1), 2);
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
