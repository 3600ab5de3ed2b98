//! Steps that are begun as CUDA graphs against the same steps begun kernel by kernel: the same bits, whatever happens between.

use crate::{
    Session,
    group::{self, Meeting, resident},
};
use anyhow::{Result, ensure};
use paraft_common::{Encoding, optim::OptimizerConfig};
use paraft_models::{Batch, CudaOptions, DataShape, Model, ModelConfig, Part, Precision, Sample};
use std::sync::atomic::Ordering;

const VALUES: DataShape = DataShape { sample: Sample::Values(64), classes: Some(10) };
const TEXT: DataShape = DataShape { sample: Sample::Tokens { time: 19, vocab: 37 }, classes: Some(37) };

fn models() -> Vec<(ModelConfig, DataShape)> {
    let transformer = |checkpoint_activations| ModelConfig::Transformer {
        layers: 2,
        heads: 2,
        width: 32,
        checkpoint_activations,
    };
    vec![
        (ModelConfig::LogisticRegression, VALUES),
        (ModelConfig::Mlp { hidden: vec![33, 20] }, VALUES),
        // An odd number of buffers' turns: those of the second step are not those of the first.
        (ModelConfig::Mlp { hidden: vec![33] }, VALUES),
        (ModelConfig::Autoencoder { hidden: vec![20, 7] }, VALUES),
        (ModelConfig::Convnet, VALUES),
        (transformer(false), TEXT),
        (transformer(true), TEXT),
    ]
}

fn batch(noise: &mut group::Noise, data: DataShape, n: usize) -> Batch {
    let mut ids = |len: usize, below: usize| -> Vec<u32> {
        noise.values(len).iter().map(|v| (v * below as f32) as u32).collect()
    };
    match data.sample {
        Sample::Values(len) => {
            let labels = ids(n, 10);
            Batch { inputs: noise.values(n * len), labels, n, ..Batch::default() }
        }
        Sample::Tokens { time, vocab } => {
            let tokens = ids(n * time, vocab);
            Batch { tokens, labels: ids(n * time, vocab), n, ..Batch::default() }
        }
    }
}

fn build(config: &ModelConfig, data: DataShape, precision: Precision, eager: bool) -> Result<Box<dyn Model>> {
    Ok(config.build_on(CudaOptions { ordinal: 0, precision, eager, ..CudaOptions::default() }, data)?)
}

/// Losses and weights of steps with batches of these sizes, by the way of a worker. Zero is an evaluation, of a large batch.
fn run(model: &mut dyn Model, data: DataShape, sizes: &[usize]) -> Result<(Vec<f32>, Vec<f32>)> {
    let len: usize = model.tensors().iter().map(|t| t.len()).sum();
    let mut weights = vec![0.0; len];
    model.init(3, &mut weights);
    let mut noise = group::Noise(4);
    let parts: Vec<Part> = (0..len)
        .step_by(700)
        .map(|at| Part { range: at..len.min(at + 700), encoding: Encoding::F32 })
        .collect();
    let gpu = resident(model)?;
    gpu.host_mut()?.copy_from_slice(&weights);
    gpu.landed(std::slice::from_ref(&(0..len)))?;
    let mut losses = Vec::new();
    for (step, &n) in sizes.iter().enumerate() {
        if n == 0 {
            let evaluation = gpu.evaluate_resident(&batch(&mut noise, data, 40))?;
            losses.push(evaluation.loss_sum as f32);
            continue;
        }
        losses.push(gpu.step_resident(&batch(&mut noise, data, n), &parts, &mut |i, bytes| {
            let values = bytes.as_ref().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
            let part = &mut weights[parts[i].range.clone()];
            part.iter_mut().zip(values).for_each(|(w, g)| *w -= 0.05 * g);
        })?);
        // Not always: then the same buffer of parameters stays in front.
        if step % 4 != 2 {
            gpu.host_mut()?.copy_from_slice(&weights);
            gpu.landed(std::slice::from_ref(&(0..len)))?;
        }
    }
    Ok((losses, weights))
}

const TEN: [usize; 12] = [4, 4, 4, 4, 3, 4, 0, 3, 4, 3, 4, 4];

#[test]
fn ten_steps_of_every_model_are_the_same_bits() -> Result<()> {
    let Some(session) = Session::begin("ten_steps_of_every_model_are_the_same_bits")? else { return Ok(()) };
    for (seed, (config, data)) in (1..).zip(models()) {
        session.set("SEED", &seed.to_string())?;
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            let what = format!("{config:?} in {precision:?}");
            let before = session.fake.calls("cuGraphLaunch");
            let want = run(build(&config, data, precision, true)?.as_mut(), data, &TEN)?;
            ensure!(session.fake.calls("cuGraphLaunch") == before, "{what}: not wanted");
            let got = run(build(&config, data, precision, false)?.as_mut(), data, &TEN)?;
            ensure!(session.fake.calls("cuGraphLaunch") > before + 3, "{what}: nothing is begun as a graph");
            ensure!(got == want, "{what}: {:?} for {:?}", got.0, want.0);
        }
    }
    Ok(())
}

/// From the third step on nothing of the net is begun by itself: only what brings the batch, and the parameters, there.
#[test]
fn a_steady_step_launches_no_kernel_of_the_net() -> Result<()> {
    let Some(session) = Session::begin("a_steady_step_launches_no_kernel_of_the_net")? else { return Ok(()) };
    let kernels =
        ["softmax_xent_f32", "bias_act_f32", "act_backward_f32", "col_sum_final", "embedding_backward_f32"];
    let count = || {
        let of = |k: &&str| session.fake.calls(&format!("cuLaunchKernel {k}"));
        kernels.iter().map(of).sum::<usize>() + session.fake.calls("cublasGemmEx")
    };
    for (config, data) in models() {
        let mut model = build(&config, data, Precision::F32, false)?;
        let len: usize = model.tensors().iter().map(|t| t.len()).sum();
        let mut weights = vec![0.0; len];
        model.init(3, &mut weights);
        let gpu = resident(model.as_mut())?;
        gpu.set_state(&weights, &[])?;
        let optimizer = OptimizerConfig::adam(0.01);
        let mut noise = group::Noise(4);
        let mut counts = Vec::new();
        for t in 1..8 {
            gpu.step_local(&batch(&mut noise, data, 4))?;
            let hyper = paraft_common::optim::Hyper { lr: 0.01, t, clip_value: None };
            gpu.optimize(&optimizer, &hyper, None)?;
            counts.push(count());
        }
        // Two attempts where buffers take turns.
        ensure!(counts[0] < counts[1] && counts[3] == counts[6], "{config:?}: {counts:?}");
    }
    Ok(())
}

#[test]
fn a_step_that_cannot_be_written_down_is_begun_piece_by_piece() -> Result<()> {
    let Some(session) = Session::begin("a_step_that_cannot_be_written_down_is_begun_piece_by_piece")? else {
        return Ok(());
    };
    let (config, data) = (ModelConfig::Mlp { hidden: vec![33, 20] }, VALUES);
    let want = run(build(&config, data, Precision::F32, true)?.as_mut(), data, &[4; 8])?;
    let faults = [
        ("cuStreamBeginCapture_v2:1:801", true),
        // Half a step has been gone through: it may leave buffers in other turns, which makes room, and is tried again then.
        ("cuStreamBeginCapture_v2:2:801", false),
        ("cuStreamEndCapture:1:901", false),
        ("cuStreamEndCapture:2:901", false),
        ("cuGraphInstantiateWithFlags:1:801", false),
        ("cuGraphGetNodes:2:1", false),
        ("cuStreamEndCapture:3:901", true),
    ];
    for (fault, is_final) in faults {
        session.fake.mend();
        session.set("FAIL", fault)?;
        let (before, begun) =
            (session.fake.calls("cuGraphLaunch"), session.fake.calls("cuStreamBeginCapture_v2"));
        let mut model = build(&config, data, Precision::F32, false)?;
        let got = run(model.as_mut(), data, &[4; 8])?;
        ensure!(got == want, "{fault}: {:?} for {:?}", got.0, want.0);
        let launched = session.fake.calls("cuGraphLaunch") > before;
        ensure!(!(is_final && launched), "{fault}: it is begun as a graph");
        let tried = session.fake.calls("cuStreamBeginCapture_v2") - begun;
        ensure!((1..20).contains(&tried), "{fault}: {tried} attempts");
        // What was begun of it is given back.
        drop(model);
        session.fake.mend();
        let again = run(build(&config, data, Precision::F32, false)?.as_mut(), data, &[4; 8])?;
        ensure!(again == want && session.fake.calls("cuGraphLaunch") > before, "{fault}: it stays");
    }
    Ok(())
}

/// Norms over the ranks are collectives within the step, and are not written down; a net without them is. Ranks whose batches
/// differ in size do so at different steps.
#[test]
fn ranks_of_a_group_may_begin_graphs() -> Result<()> {
    let Some(session) = group::begin("ranks_of_a_group_may_begin_graphs")? else { return Ok(()) };
    let cases = [
        (ModelConfig::Mlp { hidden: vec![33] }, Precision::F32, OptimizerConfig::adam(0.01)),
        (ModelConfig::Convnet, Precision::F32, OptimizerConfig::adam(0.01)),
        // Its steps have the same cuts alone and in a group, and no state is to be made room for: nothing but the group says that
        // what was written down alone is another step.
        (ModelConfig::Convnet, Precision::F16, OptimizerConfig::sgd(0.01)),
    ];
    for (seed, (config, precision, optimizer)) in (1..).zip(cases) {
        session.set("SEED", &seed.to_string())?;
        let mut runs = Vec::new();
        for eager in [true, false] {
            let launched = session.fake.calls("cuGraphLaunch");
            let meeting = Meeting::new(2)?;
            let states = meeting.run(|rank| {
                let options =
                    CudaOptions { ordinal: rank as u32, precision, eager, ..CudaOptions::default() };
                let mut model = config.build_on(options, VALUES)?;
                let weights = group::weights_of(model.as_ref());
                let mut noise = group::Noise(rank as u64);
                // Alone it has been written down without the collectives.
                let gpu = resident(model.as_mut())?;
                gpu.set_state(&weights, &[])?;
                // The largest first: what is pinned and too small is given back, for which the fake waits for all devices.
                for n in [4, 4, 4, 3, 3] {
                    gpu.step_local(&batch(&mut noise, VALUES, n))?;
                }
                let alone = session.fake.calls("cuGraphLaunch");
                ensure!(eager || alone > launched, "rank {rank} begins no graph alone");
                let group = meeting.join(model.as_mut(), rank)?;
                let gpu = resident(model.as_mut())?;
                gpu.share_state(&optimizer)?;
                for t in 1..9 {
                    let n = if rank == 0 || t % 3 == 0 { 4 } else { 3 };
                    gpu.step_local(&batch(&mut noise, VALUES, n))?;
                    let hyper = paraft_common::optim::Hyper { lr: 0.01, t, clip_value: None };
                    gpu.optimize(&optimizer, &hyper, None)?;
                }
                let state = gpu.state()?;
                group.leave(&|| meeting.over.load(Ordering::Relaxed))?;
                Ok(state)
            })?;
            ensure!(states[0] == states[1], "{config:?}: the ranks differ");
            runs.push(states.into_iter().next());
        }
        ensure!(runs[0] == runs[1], "{config:?}: graphs have other bits");
    }
    Ok(())
}
