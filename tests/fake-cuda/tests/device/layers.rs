//! Models of which the device has some layers at a time, against the same on a device that has all: the same bits, in whatever order the
//! device works.

use crate::Session;
use crate::models::{Noise, TEXT, VALUES, images, on_gpu, text, transformer};
use anyhow::{Result, bail, ensure};
use paraft_models::{
    Batch, CpuDevice, CudaOptions, DataShape, Flat, Forward, Keep, Layer, Model, ModelConfig, NetResult,
    Pass, Precision, Weights,
};
use std::ops::Range;

/// The host's side: it has the layer that was asked for last, and nothing of any other.
struct Host<'a> {
    layers: &'a [Layer],
    weights: &'a [f32],
    edition: u64,
    here: Vec<f32>,
    gradient: Vec<f32>,
    /// What was said to be complete, as it was then.
    complete: Vec<(usize, Vec<f32>)>,
}

impl<'a> Host<'a> {
    fn new(layers: &'a [Layer], weights: &'a [f32], edition: u64) -> Self {
        let nothing = vec![f32::NAN; weights.len()];
        Self { layers, weights, edition, here: nothing.clone(), gradient: nothing, complete: Vec::new() }
    }
}

impl Weights<CpuDevice> for Host<'_> {
    fn params(&mut self, layer: usize) -> NetResult<&[f32]> {
        self.here.fill(f32::NAN);
        for part in &self.layers[layer].params {
            self.here[part.clone()].copy_from_slice(&self.weights[part.clone()]);
        }
        Ok(&self.here)
    }

    fn edition(&mut self, _: usize) -> NetResult<u64> {
        Ok(self.edition)
    }
}

impl Flat<CpuDevice> for Host<'_> {
    fn layer(&mut self, layer: usize) -> NetResult<(&[f32], &mut [f32])> {
        self.params(layer)?;
        Ok((&self.here, &mut self.gradient))
    }

    fn ready(&mut self, offset: usize) -> NetResult {
        let end = self.complete.last().map_or(self.gradient.len(), |(at, _)| *at);
        assert!(offset < end, "ready from {offset}, behind {end}");
        self.complete.push((offset, self.gradient[offset..end].to_vec()));
        Ok(())
    }
}

fn layered(
    config: &ModelConfig,
    data: DataShape,
    precision: Precision,
    keep: Keep,
) -> Result<Box<dyn Model>> {
    let options = CudaOptions { ordinal: 0, precision, ..CudaOptions::default() };
    Ok(config.build_layered(options, |_| keep, data)?)
}

fn len(model: &dyn Model) -> usize {
    model.tensors().iter().map(|t| t.len()).sum()
}

fn largest(layers: &[Layer]) -> usize {
    layers.iter().map(|l| l.params.iter().map(Range::len).sum()).max().unwrap_or(0)
}

fn same(got: &[f32], want: &[f32]) -> bool {
    got.len() == want.len() && got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn cases() -> [(ModelConfig, DataShape, Precision); 5] {
    [
        (ModelConfig::Mlp { hidden: vec![33, 20] }, VALUES, Precision::F32),
        (ModelConfig::Autoencoder { hidden: vec![20, 7] }, VALUES, Precision::Tf32),
        (transformer(false), TEXT, Precision::Bf16),
        (transformer(true), TEXT, Precision::F32),
        (ModelConfig::Convnet, VALUES, Precision::Tf32),
    ]
}

fn batch(data: DataShape, noise: &mut Noise, n: usize) -> Batch {
    if data == TEXT { text(noise, n) } else { images(noise, n) }
}

#[test]
fn steps_by_layers_have_the_bits_of_steps_with_all_of_them() -> Result<()> {
    let name = "steps_by_layers_have_the_bits_of_steps_with_all_of_them";
    let Some(session) = Session::begin(name)? else { return Ok(()) };
    for (config, data, precision) in cases() {
        for (seed, layers_kept) in [(1, 1), (2, 2), (3, 3), (4, 100)] {
            session.set("SEED", &seed.to_string())?;
            let what = format!("{config:?}, {precision:?}, {layers_kept} layers");
            let mut whole = on_gpu(&config, data, precision)?;
            let mut some = layered(&config, data, precision, Keep::Values(0))?;
            let layers = some.layers();
            some = layered(&config, data, precision, Keep::Values(layers_kept * largest(&layers)))?;
            let mut weights = vec![0.0; len(&*whole)];
            whole.init(seed, &mut weights);
            let mut noise = Noise(seed);
            // Batches of two sizes: activations lie elsewhere then.
            for (step, n) in [3, 3, 5, 3].into_iter().enumerate() {
                let b = batch(data, &mut noise, n);
                let mut gradient = vec![0.0; weights.len()];
                let loss = whole.step(&weights, &mut gradient, &b, &mut |_, _| {})?;
                let mut host = Host::new(&layers, &weights, 1 + step as u64);
                let got = some.step_by_layers(&mut host, &b)?;
                ensure!(got.to_bits() == loss.to_bits(), "{what}, step {step}: loss {got} and {loss}");
                ensure!(same(&host.gradient, &gradient), "{what}, step {step}: another gradient");
                let (mut end, complete) = (weights.len(), &host.complete);
                ensure!(complete.last().is_some_and(|(at, _)| *at == 0), "{what}: not all is ready");
                for (at, then) in complete {
                    ensure!(same(then, &gradient[*at..end]), "{what}: {at}..{end} was not complete yet");
                    end = *at;
                }
                weights.iter_mut().zip(&gradient).for_each(|(w, g)| *w -= 0.1 * g);
                let held_out = batch(data, &mut noise, 7);
                let (got, want) = (some.evaluate(&weights, &held_out)?, whole.evaluate(&weights, &held_out)?);
                let apart = (got.loss_sum - want.loss_sum).abs() / want.loss_sum;
                ensure!(
                    (got.correct, got.count) == (want.correct, want.count) && apart < 1e-6,
                    "{what}: evaluated {got:?} and {want:?}"
                );
            }
        }
    }
    Ok(())
}

/// Two stages on a device each, micro-batches in turn as 1F1B has them, and the weights of the step before in between as 2BW does.
#[test]
fn stages_have_the_bits_of_the_whole_model() -> Result<()> {
    let Some(session) = Session::begin("stages_have_the_bits_of_the_whole_model")? else { return Ok(()) };
    for (config, data, precision) in cases() {
        let mut whole = on_gpu(&config, data, precision)?;
        let n = 3;
        for seed in 1..4 {
            session.set("SEED", &seed.to_string())?;
            let what = format!("{config:?}, {precision:?}");
            let mut stages: Vec<Box<dyn Model>> = (0..2)
                .map(|_| layered(&config, data, precision, Keep::Editions(2)))
                .collect::<Result<_>>()?;
            let layers = stages[0].layers();
            if layers.len() < 3 {
                continue;
            }
            let cut = 1 + seed as usize % (layers.len() - 1);
            let mut weights = vec![0.0; len(&*whole)];
            whole.init(seed, &mut weights);
            let mut noise = Noise(seed);
            let mut before: Option<(Vec<f32>, u64)> = None;
            for step in 0..3u64 {
                let parts: Vec<Batch> = (0..2).map(|_| batch(data, &mut noise, n)).collect();
                // Forward all, one of them at the weights before; then back.
                let at = |m: usize| match &before {
                    Some((old, edition)) if m == 0 => (old.clone(), *edition),
                    _ => (weights.clone(), 1 + step),
                };
                let mut losses = Vec::new();
                for (m, part) in parts.iter().enumerate() {
                    let (weights, edition) = at(m);
                    let pass = |layers| Pass { layers, slot: m, n, evaluates: false };
                    let mut host = Host::new(&layers, &weights, edition);
                    let edge = stages[0].forward_pass(&mut host, &pass(0..cut), part, None)?;
                    let Forward::Edge(edge) = edge else { bail!("{what}: no edge") };
                    let end =
                        stages[1].forward_pass(&mut host, &pass(cut..layers.len()), part, Some(&edge))?;
                    let Forward::Loss(loss) = end else { bail!("{what}: no loss") };
                    losses.push(loss);
                }
                for (m, part) in parts.iter().enumerate() {
                    let (weights, edition) = at(m);
                    let mut gradient = vec![0.0; weights.len()];
                    let loss = whole.step(&weights, &mut gradient, part, &mut |_, _| {})?;
                    let pass = |layers| Pass { layers, slot: m, n, evaluates: false };
                    let mut last = Host::new(&layers, &weights, edition);
                    let edge = stages[1].backward_pass(&mut last, &pass(cut..layers.len()), None)?;
                    let mut first = Host::new(&layers, &weights, edition);
                    let none = stages[0].backward_pass(&mut first, &pass(0..cut), edge.as_deref())?;
                    ensure!(none.is_none() && losses[m].to_bits() == loss.to_bits(), "{what}: loss {loss}");
                    let mut sum = vec![0.0; weights.len()];
                    for (host, layers) in [(&first, &layers[..cut]), (&last, &layers[cut..])] {
                        for part in layers.iter().flat_map(|l| &l.params) {
                            let mine = &host.gradient[part.clone()];
                            // What both have (a tied embedding) is added up; neighbours of one stage name it twice.
                            let twice =
                                layers.iter().flat_map(|l| &l.params).filter(|p| p.start == part.start);
                            let share = 1.0 / twice.count() as f32;
                            sum[part.clone()].iter_mut().zip(mine).for_each(|(s, g)| *s += share * g);
                        }
                    }
                    let size = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
                    let apart: f32 = sum.iter().zip(&gradient).map(|(a, b)| (a - b) * (a - b)).sum();
                    let allowed = if precision == Precision::Bf16 { 1e-2 } else { 1e-5 };
                    ensure!(
                        apart.sqrt() <= allowed * size,
                        "{what}, cut at {cut}: {} of {size}",
                        apart.sqrt()
                    );
                }
                before = Some((weights.clone(), 1 + step));
                weights.iter_mut().for_each(|w| *w *= 0.9);
            }
        }
    }
    Ok(())
}

#[test]
fn what_breaks_off_leaves_nothing_behind() -> Result<()> {
    let Some(_session) = Session::begin("what_breaks_off_leaves_nothing_behind")? else { return Ok(()) };
    let (config, data) = (transformer(false), TEXT);
    let mut whole = on_gpu(&config, data, Precision::F32)?;
    let mut some = layered(&config, data, Precision::F32, Keep::Values(2000))?;
    let layers = some.layers();
    let mut weights = vec![0.0; len(&*whole)];
    whole.init(1, &mut weights);
    let b = text(&mut Noise(1), 3);
    /// A host that is gone when its so many-th layer is asked for.
    struct Breaks<'a>(Host<'a>, usize);
    impl Weights<CpuDevice> for Breaks<'_> {
        fn params(&mut self, layer: usize) -> NetResult<&[f32]> {
            self.1 = self
                .1
                .checked_sub(1)
                .ok_or_else(|| paraft_models::DeviceError::Unsupported("gone".into()))?;
            self.0.params(layer)
        }
    }
    impl Flat<CpuDevice> for Breaks<'_> {
        fn layer(&mut self, layer: usize) -> NetResult<(&[f32], &mut [f32])> {
            self.params(layer)?;
            self.0.layer(layer)
        }
        fn ready(&mut self, offset: usize) -> NetResult {
            self.0.ready(offset)
        }
    }
    let mut want = vec![0.0; weights.len()];
    whole.step(&weights, &mut want, &b, &mut |_, _| {})?;
    for after in 0..9 {
        let broken = some.step_by_layers(&mut Breaks(Host::new(&layers, &weights, 0), after), &b);
        ensure!(broken.is_err_and(|e| e.to_string().contains("gone")), "it breaks off at {after}");
        let mut host = Host::new(&layers, &weights, 1);
        some.step_by_layers(&mut host, &b)?;
        ensure!(same(&host.gradient, &want), "behind a step that broke off at {after}");
    }
    let error = layered(&config, data, Precision::F16, Keep::Values(1)).err().map(|e| e.to_string());
    ensure!(error.as_ref().is_some_and(|e| e.contains("bf16")), "{error:?}");
    Ok(())
}

#[test]
fn doctor_compares_them_too() -> Result<()> {
    let Some(_session) = Session::begin("doctor_compares_them_too")? else { return Ok(()) };
    let cases = paraft_models::selftest::by_layers(CudaOptions::default(), 3)?;
    let wrong: Vec<_> = cases.iter().filter(|c| !c.holds()).collect();
    ensure!(cases.len() == 7 && wrong.is_empty(), "{} cases, {wrong:#?}", cases.len());
    Ok(())
}
