//! Groups of ranks, each with a device and a thread of its own: what they compute together is what one of them would have
//! computed alone, and a rank that is missing ends in an error that says so, never in a result.

use crate::Session;
use anyhow::{Context, Result, bail, ensure};
use paraft_common::Encoding;
use paraft_compute::{
    DeviceError,
    cuda::{CudaDevice, CudaOptions, Gradient, Inbox, Nccl, Outbox, Precision, UniqueId, Wire},
    device::{Buffers, Linears},
    shape::{Activation, LinearAt, LinearShape},
};
use paraft_models::{Batch, DataShape, Model, ModelConfig, Part, Resident, Sample};
use std::{
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

pub(crate) const DATA: DataShape = DataShape { sample: Sample::Values(64), classes: Some(10) };

/// Ranks wait for each other, so their work has to go on while nobody calls.
pub(crate) fn begin(test: &str) -> Result<Option<Session>> {
    let session = Session::begin(test)?;
    if let Some(session) = &session {
        session.set("BACKGROUND", "1")?;
    }
    Ok(session)
}

/// A group that is to be formed. When one of its ranks fails the others do not wait for it for ever.
pub(crate) struct Meeting {
    id: UniqueId,
    size: usize,
    pub(crate) over: AtomicBool,
    formed: Mutex<Vec<Arc<Nccl>>>,
}

impl Meeting {
    pub(crate) fn new(size: usize) -> Result<Self> {
        Ok(Self { id: UniqueId::new()?, size, over: AtomicBool::new(false), formed: Mutex::default() })
    }

    fn form(&self, device: &mut CudaDevice, rank: usize) -> Result<Arc<Nccl>> {
        let group =
            Nccl::form(device.context(), &self.id, rank, self.size, &|| self.over.load(Ordering::Relaxed))?;
        device.join(Some(group.clone()));
        self.note(&group);
        Ok(group)
    }

    pub(crate) fn join(&self, model: &mut dyn Model, rank: usize) -> Result<Arc<Nccl>> {
        let give_up = || self.over.load(Ordering::Relaxed);
        let group = resident(model)?.form_group(&self.id, rank, self.size, &give_up)?;
        self.note(&group);
        Ok(group)
    }

    fn note(&self, group: &Arc<Nccl>) {
        self.formed.lock().expect("no panic").push(group.clone());
        if self.over.load(Ordering::Relaxed) {
            group.abort();
        }
    }

    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
        self.formed.lock().expect("no panic").iter().for_each(|g| g.abort());
    }

    /// To be declared behind whatever waits for the device when it is dropped: an error ends the group before that.
    fn ends_unless_done(&self) -> EndsUnlessDone<'_> {
        EndsUnlessDone { meeting: self, done: false }
    }

    /// Runs all ranks, each in a thread.
    pub(crate) fn run<T: Send>(&self, rank: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
        let results: Vec<Result<T>> = std::thread::scope(|s| {
            let started: Vec<_> = (0..self.size)
                .map(|r| {
                    let rank = &rank;
                    s.spawn(move || {
                        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| rank(r)));
                        let done = done.unwrap_or_else(|_| bail!("rank {r} has panicked"));
                        if done.is_err() {
                            self.end();
                        }
                        done.with_context(|| format!("rank {r}"))
                    })
                })
                .collect();
            started.into_iter().map(|t| t.join().expect("caught")).collect()
        });
        // The error of a group is a consequence; the other one is the reason.
        if results.iter().any(Result::is_err) {
            bail!("{:#?}", results.into_iter().filter_map(Result::err).collect::<Vec<_>>());
        }
        results.into_iter().collect()
    }
}

struct EndsUnlessDone<'a> {
    meeting: &'a Meeting,
    done: bool,
}

impl Drop for EndsUnlessDone<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.meeting.end();
        }
    }
}

pub(crate) struct Noise(pub u64);

impl Noise {
    pub(crate) fn values(&mut self, len: usize) -> Vec<f32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1u32 << 24) as f32
        };
        (0..len).map(|_| next()).collect()
    }

    pub(crate) fn images(&mut self, n: usize) -> Batch {
        let labels = self.values(n).iter().map(|v| (v * 10.0) as u32).collect();
        Batch { inputs: self.values(n * 64), labels, n, ..Batch::default() }
    }
}

pub(crate) fn samples(of: &Batch, range: Range<usize>) -> Batch {
    Batch {
        inputs: of.inputs[range.start * 64..range.end * 64].to_vec(),
        labels: of.labels[range.clone()].to_vec(),
        n: range.len(),
        ..Batch::default()
    }
}

pub(crate) fn on_gpu(config: &ModelConfig, ordinal: usize, precision: Precision) -> Result<Box<dyn Model>> {
    Ok(config.build_on(CudaOptions { ordinal: ordinal as u32, precision, ..CudaOptions::default() }, DATA)?)
}

pub(crate) fn resident(model: &mut dyn Model) -> Result<&mut dyn Resident> {
    model.resident().context("a model on a GPU is resident")
}

pub(crate) fn len_of(model: &dyn Model) -> usize {
    model.tensors().iter().map(|t| t.len()).sum()
}

pub(crate) fn weights_of(model: &dyn Model) -> Vec<f32> {
    let mut weights = vec![0.0; len_of(model)];
    model.init(1, &mut weights);
    weights
}

fn in_parts(len: usize) -> Vec<Part> {
    let part = |at: usize| Part { range: at..len.min(at + 300), encoding: Encoding::F32 };
    (0..len).step_by(300).map(part).collect()
}

/// One step as a worker makes it: loss and, where there is something to be pushed, the gradient.
fn step(
    model: &mut dyn Model,
    pulled: Option<&[f32]>,
    batch: &Batch,
) -> Result<(f32, Option<Vec<f32>>), paraft_models::ModelError> {
    let len = len_of(model);
    let parts = in_parts(len);
    let gpu = model.resident().expect("a model on a GPU is resident");
    if let Some(weights) = pulled {
        gpu.host_mut()?.copy_from_slice(weights);
    }
    gpu.landed(std::slice::from_ref(&(0..len)))?;
    let mut gradient = None;
    let loss = gpu.step_resident(batch, &parts, &mut |i, bytes| {
        let values = bytes.as_ref().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
        let all = gradient.get_or_insert_with(|| vec![f32::NAN; len]);
        all[parts[i].range.clone()].iter_mut().zip(values).for_each(|(to, v)| *to = v);
    })?;
    Ok((loss, gradient))
}

/// One step of a fresh group with these batches: the loss of each rank, and the gradient that rank 0 pushes.
fn group_step(
    config: &ModelConfig,
    precision: Precision,
    weights: &[f32],
    batches: &[Batch],
) -> Result<(Vec<f32>, Vec<f32>)> {
    let meeting = Meeting::new(batches.len())?;
    let mut all = meeting.run(|rank| {
        let mut model = on_gpu(config, rank, precision)?;
        let group = meeting.join(model.as_mut(), rank)?;
        let result = step(model.as_mut(), (rank == 0).then_some(weights), &batches[rank])?;
        group.leave(&|| meeting.over.load(Ordering::Relaxed))?;
        Ok(result)
    })?;
    ensure!(all.iter().skip(1).all(|(_, g)| g.is_none()), "only rank 0 pushes");
    let gradient = all[0].1.take().context("rank 0 pushes")?;
    Ok((all.into_iter().map(|(loss, _)| loss).collect(), gradient))
}

pub(crate) fn distance(a: &[f32], b: &[f32]) -> f64 {
    let length = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
    let apart = length(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    apart / length(&mut b.iter().map(|b| f64::from(*b))).max(1e-6)
}

/// Gradients are computed one over the other while they are reduced and sent.
#[test]
fn what_rank_0_sends_is_the_mean_over_the_ranks() -> Result<()> {
    const LEN: usize = 64;
    let Some(session) = begin("what_rank_0_sends_is_the_mean_over_the_ranks")? else { return Ok(()) };
    for seed in 1..7usize {
        session.set("SEED", &seed.to_string())?;
        for wire in [Wire::F32, Wire::Bf16] {
            let meeting = Meeting::new(2)?;
            let sent = meeting.run(|rank| {
                let ordinal = rank as u32;
                let mut device = CudaDevice::new(CudaOptions {
                    ordinal,
                    precision: Precision::F32,
                    ..CudaOptions::default()
                })?;
                let group = meeting.form(&mut device, rank)?;
                let mut outbox = Outbox::new(&device)?;
                let mut gradient = Gradient::new(&device, LEN)?;
                let mut parcels = Vec::new();
                let mut end = meeting.ends_unless_done();
                // What is not finite is counted on all ranks together.
                device.fill(&gradient, if rank == 0 { f32::INFINITY } else { 1.0 })?;
                ensure!(device.unscale(&mut gradient, LEN, 0.5)? == LEN as u64, "rank {rank}");
                for step in 0..6 {
                    let stream = device.stream().clone();
                    outbox.begin(&stream)?;
                    device.fill(&gradient, (4 * step + 2 * rank) as f32)?;
                    outbox.mark(&stream)?;
                    for from in [32, 0] {
                        outbox.reduce(&gradient, from..from + 32, &group)?;
                        if rank == 0 {
                            parcels.push(outbox.send(&gradient, from..from + 32, wire)?);
                        }
                    }
                }
                let mut sent = Vec::new();
                for parcel in parcels {
                    sent.push(parcel.wait()?.as_ref().to_vec());
                    group.check()?;
                }
                outbox.begin(&device.stream().clone())?;
                // Every rank has the mean. (To be asked last: it frees pinned memory, for which the fake waits for all devices.)
                ensure!(device.read_gradient(&gradient)? == [21.0; LEN], "rank {rank}");
                end.done = true;
                Ok(sent)
            })?;
            for (i, bytes) in sent[0].iter().enumerate() {
                let mean = ((4 * (i / 2) + 1) as f32).to_le_bytes();
                // The upper half of an f32 is a bf16.
                let want = if wire == Wire::F32 { &mean[..] } else { &mean[2..] };
                let same = bytes.chunks(want.len()).all(|v| v == want);
                ensure!(same, "seed {seed}, {wire:?}: step {} was sent as {bytes:?}", i / 2);
            }
        }
    }
    Ok(())
}

/// Weights land in part, and after each swap every rank has what rank 0's host has, in both of its buffers.
#[test]
fn what_lands_on_rank_0_is_on_all_ranks() -> Result<()> {
    const LEN: usize = 64;
    let Some(session) = begin("what_lands_on_rank_0_is_on_all_ranks")? else { return Ok(()) };
    let part = |i: usize| i * 16..(i + 1) * 16;
    for seed in 1..7usize {
        session.set("SEED", &seed.to_string())?;
        for precision in [Precision::F32, Precision::Bf16] {
            let meeting = Meeting::new(2)?;
            meeting.run(|rank| {
                let mut device = CudaDevice::new(CudaOptions {
                    ordinal: rank as u32,
                    precision,
                    ..CudaOptions::default()
                })?;
                let group = meeting.form(&mut device, rank)?;
                let mut inbox = Inbox::new(&device, LEN)?;
                let mut end = meeting.ends_unless_done();
                inbox.host_mut()?.fill(-7.0);
                let at = LinearAt { weight: 0, bias: None };
                let shape = LinearShape { n: 1, inputs: 1, outputs: LEN };
                let mut one = Default::default();
                device.load_values(&[1.0], &mut one)?;
                let (mut seen, mut now, mut want) = (Vec::new(), vec![0.0; LEN], Vec::new());
                for step in 0..7usize {
                    let host = inbox.host_mut()?;
                    // Not every part each time, but everything at first.
                    let comes: Vec<_> =
                        (0..4).filter(|p| step == 0 || !(p + step + seed).is_multiple_of(3)).collect();
                    for p in &comes {
                        let value = (step * 4 + p + 1) as f32;
                        now[part(*p)].fill(value);
                        if rank == 0 {
                            host[part(*p)].fill(value);
                        }
                    }
                    want.push(now.clone());
                    for p in comes {
                        inbox.landed(&device, part(p), Some(&group))?;
                    }
                    let params = inbox.swap(&device)?;
                    let mut y = Default::default();
                    device.linear(shape, &one, params, at, Activation::None, &mut y, None)?;
                    seen.push(y);
                }
                for (step, (y, want)) in seen.iter().zip(&want).enumerate() {
                    let got = device.read(y)?;
                    ensure!(&got == want, "seed {seed}, {precision:?}, step {step}: {got:?} for {want:?}");
                }
                group.check()?;
                end.done = true;
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// The norms are over the whole batch, so the convolutional net's step is the same; its gradient of a norm's parameters and of
/// its running statistics too.
#[test]
fn a_step_in_two_halves_equals_the_step_with_the_whole_batch() -> Result<()> {
    let Some(session) = begin("a_step_in_two_halves_equals_the_step_with_the_whole_batch")? else {
        return Ok(());
    };
    let cases = [
        (ModelConfig::Convnet, Precision::F32, 1e-4),
        (ModelConfig::Convnet, Precision::Bf16, 0.15),
        (ModelConfig::Convnet, Precision::F16, 0.12),
        (ModelConfig::Mlp { hidden: vec![33] }, Precision::F32, 1e-5),
        (ModelConfig::Mlp { hidden: vec![33] }, Precision::F16, 0.02),
    ];
    for (seed, (config, precision, allowed)) in (1..).zip(cases) {
        session.set("SEED", &seed.to_string())?;
        let batch = Noise(seed).images(8);
        let mut alone = on_gpu(&config, 0, precision)?;
        let weights = weights_of(alone.as_ref());
        let (loss, gradient) = step(alone.as_mut(), Some(&weights), &batch)?;
        let want = gradient.context("it pushes")?;
        let (losses, got) =
            group_step(&config, precision, &weights, &[samples(&batch, 0..4), samples(&batch, 4..8)])?;
        let what = format!("{config:?} in {precision:?}");
        // Each tensor by itself: the running statistics are small beside the rest. A convolution's bias before a norm has no
        // gradient but rounding.
        let mut at = 0;
        for tensor in alone.tensors() {
            let range = at..at + tensor.len();
            at = range.end;
            if want[range.clone()].iter().all(|v| v.abs() < 1e-3) && tensor.name.ends_with("bias") {
                continue;
            }
            let apart = distance(&got[range.clone()], &want[range]);
            ensure!(apart <= allowed, "{what}: {} is {apart:e} apart", tensor.name);
        }
        let mean = (losses[0] + losses[1]) / 2.0;
        ensure!(
            losses[0] != losses[1] && (mean - loss).abs() <= allowed.min(0.02) as f32,
            "{what}: {losses:?}, {loss}"
        );
    }
    Ok(())
}

/// The statistics are over all samples, each with the same weight, and the gradient is that of the mean of the ranks' losses: it
/// says how that changes along a direction.
#[test]
fn batches_may_differ_in_size() -> Result<()> {
    let Some(_session) = begin("batches_may_differ_in_size")? else { return Ok(()) };
    let config = ModelConfig::Convnet;
    let batch = Noise(5).images(7);
    let mut alone = on_gpu(&config, 0, Precision::F32)?;
    let weights = weights_of(alone.as_ref());
    let whole = step(alone.as_mut(), Some(&weights), &batch)?.1.context("it pushes")?;
    let ranks = [samples(&batch, 0..2), samples(&batch, 2..7)];
    let (_, gradient) = group_step(&config, Precision::F32, &weights, &ranks)?;
    let buffers: usize =
        alone.tensors().iter().filter(|t| t.kind == paraft_common::TensorKind::Buffer).map(|t| t.len()).sum();
    let params = weights.len() - buffers;
    let apart = distance(&gradient[params..], &whole[params..]);
    ensure!(apart < 1e-4, "running statistics are {apart:e} apart");

    // Along the gradient itself, where the change is largest: of everything, and of what lies before a norm.
    let head = params - 10 - 1280;
    for (part, far, allowed) in [(0..params, 2e-3, 0.02), (0..head, 4e-3, 0.05)] {
        let length = gradient[part.clone()].iter().map(|g| f64::from(*g).powi(2)).sum::<f64>();
        let far = far / length.sqrt();
        let mut losses = Vec::new();
        for side in [1.0, -1.0] {
            let mut moved = weights.clone();
            let along = moved[part.clone()].iter_mut().zip(&gradient[part.clone()]);
            along.for_each(|(w, g)| *w += (side * far * f64::from(*g)) as f32);
            let (of, _) = group_step(&config, Precision::F32, &moved, &ranks)?;
            losses.push((f64::from(of[0]) + f64::from(of[1])) / 2.0);
        }
        let slope = (losses[0] - losses[1]) / (2.0 * far);
        let apart = (slope / length - 1.0).abs();
        ensure!(apart < allowed, "{part:?}: the loss rises by {slope}, the gradient says {length}");
    }
    // With the whole batch's gradient, whose samples all weigh the same, it would not be so.
    let length = gradient[..params].iter().map(|g| f64::from(*g).powi(2)).sum::<f64>();
    let other: f64 = gradient[..params].iter().zip(&whole).map(|(a, b)| f64::from(a * b)).sum();
    ensure!((other / length - 1.0).abs() > 0.05, "the test tells nothing: {other}, {length}");
    Ok(())
}

/// Where one rank's gradient overflows f16 all of them make the step again.
#[test]
fn ranks_agree_on_what_overflows() -> Result<()> {
    let Some(session) = begin("ranks_agree_on_what_overflows")? else { return Ok(()) };
    let config = ModelConfig::Convnet;
    let batch = Noise(6).images(17);
    let ranks = [samples(&batch, 0..1), samples(&batch, 1..17)];
    let mut weights = weights_of(on_gpu(&config, 0, Precision::F16)?.as_ref());
    // A sample alone has a large gradient, and the head makes it larger.
    let head = weights.len() - 96 - 10 - 1280;
    weights[head..head + 1280].iter_mut().for_each(|w| *w *= 30.0);
    let (_, want) = group_step(&config, Precision::F32, &weights, &ranks)?;
    let (_, got) = group_step(&config, Precision::F16, &weights, &ranks)?;
    let apart = distance(&got, &want);
    ensure!(apart < 0.12, "{apart:e} apart");

    // One that has learned a smaller scale by itself begins with the others' in a group.
    weights[head..head + 1280].iter_mut().for_each(|w| *w /= 30.0);
    let (_, want) = group_step(&config, Precision::F32, &weights, &ranks)?;
    let meeting = Meeting::new(2)?;
    let mut results = meeting.run(|rank| {
        let mut model = on_gpu(&config, rank, Precision::F16)?;
        if rank == 0 {
            let mut large = weights.clone();
            large[head..head + 1280].iter_mut().for_each(|w| *w *= 300.0);
            let before = session.fake.calls("cuLaunchKernel unscale");
            step(model.as_mut(), Some(&large), &ranks[0])?;
            let times = session.fake.calls("cuLaunchKernel unscale") - before;
            ensure!(times > 2, "it does not overflow: {times}");
        }
        let group = meeting.join(model.as_mut(), rank)?;
        let result = step(model.as_mut(), (rank == 0).then_some(&weights[..]), &ranks[rank])?;
        group.leave(&|| meeting.over.load(Ordering::Relaxed))?;
        Ok(result.1)
    })?;
    let got = results[0].take().context("rank 0 pushes")?;
    let apart = distance(&got, &want);
    ensure!(apart < 0.12, "{apart:e} apart with one that has trained before");
    Ok(())
}

#[test]
fn a_group_of_one_is_no_group_bit_for_bit() -> Result<()> {
    let Some(_session) = begin("a_group_of_one_is_no_group_bit_for_bit")? else { return Ok(()) };
    for precision in [Precision::F32, Precision::F16] {
        let batch = Noise(9).images(5);
        let mut alone = on_gpu(&ModelConfig::Convnet, 0, precision)?;
        let weights = weights_of(alone.as_ref());
        let (loss, gradient) = step(alone.as_mut(), Some(&weights), &batch)?;
        let (losses, in_group) = group_step(&ModelConfig::Convnet, precision, &weights, &[batch])?;
        ensure!(losses == [loss], "{precision:?}: {losses:?} and {loss}");
        ensure!(gradient == Some(in_group), "{precision:?}: the gradients differ");
    }
    Ok(())
}

/// The other rank has formed the group and does not take part: it has died, say. Nothing of the step is believed, and the model
/// trains on alone and in another group as if it were new.
#[test]
fn an_abort_ends_a_step_that_waits_for_a_missing_rank() -> Result<()> {
    let Some(session) = begin("an_abort_ends_a_step_that_waits_for_a_missing_rank")? else { return Ok(()) };
    let mlp = ModelConfig::Mlp { hidden: vec![33] };
    for (seed, (config, survives)) in
        (1..).zip([(ModelConfig::Convnet, 0), (mlp.clone(), 0), (ModelConfig::Convnet, 1), (mlp, 1)])
    {
        session.set("SEED", &seed.to_string())?;
        let batch = Noise(seed).images(6);
        let halves = [samples(&batch, 0..3), samples(&batch, 3..6)];
        let precision = Precision::Bf16;
        let mut survivor = on_gpu(&config, survives, precision)?;
        let weights = weights_of(survivor.as_ref());
        let want_alone = step(survivor.as_mut(), Some(&weights), &batch)?;

        let broken = Meeting::new(2)?;
        let (group, dead, dead_group) = std::thread::scope(|s| {
            let other = s.spawn(|| {
                let mut model = on_gpu(&config, 1 - survives, precision)?;
                let group = broken.join(model.as_mut(), 1 - survives)?;
                Ok::<_, anyhow::Error>((model, group))
            });
            let group = broken.join(survivor.as_mut(), survives)?;
            let (dead, dead_group) = other.join().expect("no panic")?;
            Ok::<_, anyhow::Error>((group, dead, dead_group))
        })?;
        let begun = Instant::now();
        let monitor = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            group.abort();
            group.abort();
        });
        let all = in_parts(weights.len());
        let gpu = resident(survivor.as_mut())?;
        gpu.host_mut()?.copy_from_slice(&weights);
        gpu.landed(std::slice::from_ref(&(0..weights.len())))?;
        let mut pushed = 0;
        let result = gpu.step_resident(&halves[survives], &all, &mut |_, _| pushed += 1);
        monitor.join().expect("no panic");
        ensure!(pushed == 0, "{pushed} parts are pushed that nobody has reduced");
        let waited = begun.elapsed() >= Duration::from_millis(100);
        let error = result.err().context("half a step is not a step")?;
        ensure!(error.is_group() && waited, "{error}");
        // The other rank is told as well, in time.
        while dead_group.check().is_ok() {
            ensure!(begun.elapsed() < Duration::from_secs(30), "it does not see that the survivor is gone");
            std::thread::sleep(Duration::from_millis(5));
        }
        let error = dead_group.check().expect_err("just seen");
        ensure!(matches!(error, DeviceError::Group(_)), "{error}");
        drop((dead, dead_group));

        // Still in the group: every step fails.
        let error = step(survivor.as_mut(), None, &batch).err().context("the group is aborted")?;
        ensure!(error.is_group(), "{error}");
        let gpu = resident(survivor.as_mut())?;
        gpu.join(None)?;
        let error = gpu.step_resident(&batch, &all, &mut |_, _| {}).expect_err("weights may be anything");
        ensure!(!error.is_group() && error.to_string().contains("have not landed"), "{error}");
        let alone = step(survivor.as_mut(), Some(&weights), &batch)?;
        ensure!(alone == want_alone, "{config:?}: alone it is not what it was before");

        let (losses, want) = group_step(&config, precision, &weights, &halves)?;
        let again = Meeting::new(2)?;
        let survivor = Mutex::new(survivor);
        let mut results = again.run(|rank| {
            let mut fresh = None;
            let mut survivor = (rank == survives).then(|| survivor.lock().expect("one rank's alone"));
            let model = match &mut survivor {
                Some(model) => model.as_mut(),
                None => fresh.insert(on_gpu(&config, rank, precision)?).as_mut(),
            };
            let group = again.join(model, rank)?;
            let result = step(model, (rank == 0).then_some(&weights[..]), &halves[rank])?;
            group.leave(&|| again.over.load(Ordering::Relaxed))?;
            Ok(result)
        })?;
        ensure!(results[0].0 == losses[0] && results[1].0 == losses[1], "{config:?}: {results:?}");
        ensure!(results[0].1.take() == Some(want), "{config:?}: the new group's gradient is another");
    }
    Ok(())
}

/// A model that goes away in the middle of a collective does not wait for the others.
#[test]
fn a_model_that_is_dropped_in_a_group_waits_for_nobody() -> Result<()> {
    let Some(_session) = begin("a_model_that_is_dropped_in_a_group_waits_for_nobody")? else { return Ok(()) };
    let meeting = Meeting::new(2)?;
    let flags = [(); 2].map(|()| AtomicBool::new(false));
    let [formed, gone] = &flags;
    let wait_for = |flag: &AtomicBool| {
        let begun = Instant::now();
        while !flag.load(Ordering::Relaxed) && begun.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(1));
        }
        flag.load(Ordering::Relaxed)
    };
    meeting.run(|rank| {
        let mut model = on_gpu(&ModelConfig::Convnet, rank, Precision::F32)?;
        let len = len_of(model.as_ref());
        meeting.join(model.as_mut(), rank)?;
        if rank == 0 {
            formed.store(true, Ordering::Relaxed);
            ensure!(wait_for(gone), "rank 1 waits for what rank 0 will never broadcast");
            return Ok(());
        }
        ensure!(wait_for(formed), "rank 0 is not there");
        resident(model.as_mut())?.landed(std::slice::from_ref(&(0..len)))?;
        drop(model);
        gone.store(true, Ordering::Relaxed);
        Ok(())
    })?;
    Ok(())
}

/// What has landed before an orderly end is still there after it; evaluating needs nobody else.
#[test]
fn a_rank_that_has_left_goes_on_with_what_it_has() -> Result<()> {
    let Some(session) = begin("a_rank_that_has_left_goes_on_with_what_it_has")? else { return Ok(()) };
    let batch = Noise(3).images(6);
    let mut alone = on_gpu(&ModelConfig::Convnet, 0, Precision::F32)?;
    let weights = weights_of(alone.as_ref());
    let want = alone.evaluate(&weights, &batch)?;
    let meeting = Meeting::new(2)?;
    let reduced = session.fake.calls("ncclAllReduce");
    meeting.run(|rank| {
        let mut model = on_gpu(&ModelConfig::Convnet, rank, Precision::F32)?;
        let group = meeting.join(model.as_mut(), rank)?;
        let gpu = resident(model.as_mut())?;
        if rank == 0 {
            gpu.host_mut()?.copy_from_slice(&weights);
        }
        gpu.landed(std::slice::from_ref(&(0..weights.len())))?;
        ensure!(gpu.evaluate_resident(&batch)? == want, "rank {rank} evaluates other weights");
        group.leave(&|| false)?;
        ensure!(group.has_left() && matches!(group.check(), Err(DeviceError::Group(_))), "{group:?}");
        gpu.join(None)?;
        ensure!(gpu.evaluate_resident(&batch)? == want, "rank {rank} has other weights now");
        Ok(())
    })?;
    ensure!(session.fake.calls("ncclAllReduce") == reduced, "evaluations use the running statistics");
    Ok(())
}

/// With parameters of the host's the gradient is the mean as well.
#[test]
fn a_step_with_parameters_of_the_hosts_is_the_groups() -> Result<()> {
    let Some(_session) = begin("a_step_with_parameters_of_the_hosts_is_the_groups")? else { return Ok(()) };
    let batch = Noise(4).images(6);
    let halves = [samples(&batch, 0..3), samples(&batch, 3..6)];
    let weights = weights_of(on_gpu(&ModelConfig::Convnet, 0, Precision::F32)?.as_ref());
    let (_, want) = group_step(&ModelConfig::Convnet, Precision::F32, &weights, &halves)?;
    let meeting = Meeting::new(2)?;
    let gradients = meeting.run(|rank| {
        let mut model = on_gpu(&ModelConfig::Convnet, rank, Precision::F32)?;
        let group = meeting.join(model.as_mut(), rank)?;
        let mut gradient = vec![f32::NAN; weights.len()];
        model.step(&weights, &mut gradient, &halves[rank], &mut |_, _| {})?;
        group.leave(&|| meeting.over.load(Ordering::Relaxed))?;
        Ok(gradient)
    })?;
    ensure!(gradients[0] == want && gradients[1] == want, "it is not what is pushed");
    Ok(())
}

#[test]
fn a_group_that_cannot_be_formed_says_why() -> Result<()> {
    let Some(_session) = begin("a_group_that_cannot_be_formed_says_why")? else { return Ok(()) };
    let options = CudaOptions { ordinal: 0, precision: Precision::F32, ..CudaOptions::default() };
    // Nobody else comes.
    let (device, begun) = (CudaDevice::new(options)?, Instant::now());
    let late = || begun.elapsed() > Duration::from_millis(50);
    let error =
        Nccl::form(device.context(), &UniqueId::new()?, 0, 2, &late).expect_err("rank 1 does not come");
    ensure!(matches!(&error, DeviceError::Group(text) if text.contains("rank 0 of 2")), "{error}");
    // Two ranks have the same device.
    let id = UniqueId::new()?;
    let errors: Vec<_> = std::thread::scope(|s| {
        let form =
            |rank| Nccl::form(CudaDevice::new(options)?.context(), &id, rank, 2, &|| false).map(|_| ());
        [0, 1]
            .map(|rank| s.spawn(move || form(rank)))
            .into_iter()
            .map(|t| t.join().expect("no panic"))
            .collect()
    });
    for error in errors {
        let error = error.expect_err("one device").to_string();
        ensure!(error.contains("cuda:0") && error.contains("a GPU of its own"), "{error}");
    }
    let error = Nccl::form(device.context(), &id, 2, 2, &|| false).expect_err("there are two").to_string();
    ensure!(error.contains("rank 2 of a group of 2"), "{error}");
    Ok(())
}
