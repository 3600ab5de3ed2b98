//! Training without servers: gradients stay on the device, and the optimizer changes the parameters there. The oracle is the
//! servers' own optimizers on the CPU, with the gradients of another model on a device.

use crate::{
    Session,
    group::{self, Meeting, Noise, distance, len_of, on_gpu, resident, samples, weights_of},
};
use anyhow::{Context, Result, ensure};
use paraft_common::{
    Encoding, Payload, TensorKind,
    codec::put_f32_le,
    optim::{
        Adagrad, Adam, AdamW, Gradient, Hyper, Momentum, Nesterov, OptimizerConfig, RmsProp, Sgd,
        apply_buffer, norm_factor,
    },
};
use paraft_models::{Batch, Model, ModelConfig, Precision};
use std::{sync::atomic::Ordering, time::Duration};

type State = (Vec<f32>, Vec<Vec<f32>>);

fn optimizers() -> Vec<OptimizerConfig> {
    let rms = |centered, momentum| {
        OptimizerConfig::RmsProp(RmsProp {
            centered,
            momentum,
            weight_decay: 0.01,
            eps: 1e-3,
            ..RmsProp::default()
        })
    };
    vec![
        OptimizerConfig::Sgd(Sgd { lr: 0.1, weight_decay: 0.01 }),
        OptimizerConfig::Momentum(Momentum { lr: 0.1, momentum: 0.9, dampening: 0.3, weight_decay: 0.01 }),
        OptimizerConfig::Nesterov(Nesterov { lr: 0.1, momentum: 0.9, weight_decay: 0.01 }),
        OptimizerConfig::Adagrad(Adagrad { initial_accumulator: 0.5, lr_decay: 0.1, ..Adagrad::default() }),
        rms(false, 0.0),
        rms(false, 0.9),
        rms(true, 0.0),
        rms(true, 0.9),
        OptimizerConfig::Adam(Adam { weight_decay: 0.01, eps: 1e-3, ..Adam::default() }),
        OptimizerConfig::AdamW(AdamW { weight_decay: 0.1, eps: 1e-3, ..AdamW::default() }),
    ]
}

fn hyper(optimizer: &OptimizerConfig, t: u64, clip_value: Option<f32>) -> Hyper {
    Hyper { lr: optimizer.lr() as f32, t, clip_value }
}

fn trained(model: &dyn Model) -> usize {
    model.tensors().iter().filter(|t| t.kind == TensorKind::Param).map(|t| t.len()).sum()
}

fn fresh(model: &dyn Model, optimizer: &OptimizerConfig) -> State {
    (weights_of(model), optimizer.new_slots(trained(model)))
}

/// What a server does, to a job of one bucket of parameters and one of buffers.
fn on_cpu(
    optimizer: &OptimizerConfig,
    hyper: &Hyper,
    norm: Option<f32>,
    state: &mut State,
    gradient: &[f32],
    trained: usize,
) {
    let (params, buffers) = gradient.split_at(trained);
    let payload = |values: &[f32]| -> Payload {
        let mut bytes = Vec::new();
        put_f32_le(values, &mut bytes);
        bytes.into()
    };
    let squares: f64 = params.iter().map(|g| f64::from(*g).powi(2)).sum();
    let scale = norm.map_or(1.0, |most| norm_factor(most, squares));
    let (weights, statistics) = state.0.split_at_mut(trained);
    let (payload, rest) = (payload(params), payload(buffers));
    optimizer.apply(
        hyper,
        weights,
        &mut state.1,
        Gradient { payload: &payload, encoding: Encoding::F32, scale },
    );
    apply_buffer(statistics, Gradient { payload: &rest, encoding: Encoding::F32, scale: 1.0 });
}

fn bits(state: &State) -> Vec<Vec<u32>> {
    std::iter::once(&state.0).chain(&state.1).map(|v| v.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Steps on the device beside the same on the CPU. They are the same bits, but for the norm's factor: its sum of squares is
/// added up in another order, which may change its last bit.
fn compare(
    config: &ModelConfig,
    precision: Precision,
    optimizer: &OptimizerConfig,
    (value, norm): (Option<f32>, Option<f32>),
) -> Result<()> {
    let what = format!("{config:?} in {precision:?} with {optimizer:?}, clipped to {value:?}, {norm:?}");
    let (mut local, mut other) = (on_gpu(config, 0, precision)?, on_gpu(config, 0, precision)?);
    let (len, params) = (len_of(local.as_ref()), trained(local.as_ref()));
    let mut want = fresh(local.as_ref(), optimizer);
    let gpu = resident(local.as_mut())?;
    gpu.set_state(&want.0, &[])?;
    let mut noise = Noise(5);
    for t in 1..5 {
        let batch = noise.images(if t == 3 { 3 } else { 6 });
        let mut gradient = vec![f32::NAN; len];
        // Of the parameters that the device has: what they are in 16 bits there shows in the loss.
        let loss = other.step(&want.0, &mut gradient, &batch, &mut |_, _| {})?;
        let hyper = hyper(optimizer, t, value);
        ensure!(gpu.step_local(&batch)? == loss, "{what}: the loss of step {t}");
        gpu.optimize(optimizer, &hyper, norm)?;
        on_cpu(optimizer, &hyper, norm, &mut want, &gradient, params);
        let got = gpu.state()?;
        if norm.is_none() {
            ensure!(bits(&got) == bits(&want), "{what}: step {t} has other bits");
        } else {
            let apart = |(a, b): (&Vec<f32>, &Vec<f32>)| distance(a, b);
            let apart = got.1.iter().zip(&want.1).map(apart).fold(distance(&got.0, &want.0), f64::max);
            ensure!(got.1.len() == want.1.len() && apart < 1e-6, "{what}: step {t} is {apart:e} apart");
            // From there on with the same.
            want = got;
        }
    }
    Ok(())
}

#[test]
fn every_optimizer_is_the_servers() -> Result<()> {
    let Some(session) = Session::begin("every_optimizer_is_the_servers")? else { return Ok(()) };
    let mlp = ModelConfig::Mlp { hidden: vec![33] };
    for (seed, optimizer) in (1u64..).zip(optimizers()) {
        session.set("SEED", &seed.to_string())?;
        for clip in [(None, None), (Some(0.01), None), (None, Some(0.1)), (Some(0.02), Some(0.3))] {
            compare(&mlp, Precision::F32, &optimizer, clip)?;
        }
        // With running statistics.
        compare(&ModelConfig::Convnet, Precision::F32, &optimizer, (None, None))?;
    }
    Ok(())
}

#[test]
fn parameters_in_16_bits_follow_the_optimizer() -> Result<()> {
    let Some(session) = Session::begin("parameters_in_16_bits_follow_the_optimizer")? else { return Ok(()) };
    for seed in 1..4 {
        session.set("SEED", &seed.to_string())?;
        for precision in [Precision::Bf16, Precision::F16, Precision::Tf32] {
            for optimizer in [OptimizerConfig::sgd(0.3), OptimizerConfig::adam(0.05)] {
                compare(&ModelConfig::Mlp { hidden: vec![33] }, precision, &optimizer, (None, None))?;
                compare(&ModelConfig::Convnet, precision, &optimizer, (None, Some(0.5)))?;
            }
        }
    }
    Ok(())
}

fn train(
    model: &mut dyn Model,
    optimizer: &OptimizerConfig,
    steps: std::ops::Range<u64>,
    noise: &mut Noise,
) -> Result<()> {
    let gpu = resident(model)?;
    for t in steps {
        gpu.step_local(&noise.images(4))?;
        gpu.optimize(optimizer, &hyper(optimizer, t, None), Some(1.0))?;
    }
    Ok(())
}

#[test]
fn a_state_goes_to_the_host_and_back() -> Result<()> {
    let Some(_session) = Session::begin("a_state_goes_to_the_host_and_back")? else { return Ok(()) };
    for optimizer in optimizers() {
        let config = ModelConfig::Convnet;
        let (mut one, mut two) = (on_gpu(&config, 0, Precision::Bf16)?, on_gpu(&config, 0, Precision::Bf16)?);
        let first = weights_of(one.as_ref());
        resident(one.as_mut())?.set_state(&first, &[])?;
        let mut noise = Noise(9);
        train(one.as_mut(), &optimizer, 1..3, &mut noise)?;
        let (weights, slots) = resident(one.as_mut())?.state()?;
        ensure!(slots.len() == optimizer.slots(), "{optimizer:?}");
        let mut again = Noise(noise.0);
        // The other one has been somewhere else.
        resident(two.as_mut())?.set_state(&first, &[])?;
        train(two.as_mut(), &optimizer, 1..2, &mut Noise(1))?;
        resident(two.as_mut())?.set_state(&weights, &slots)?;
        train(one.as_mut(), &optimizer, 3..5, &mut noise)?;
        train(two.as_mut(), &optimizer, 3..5, &mut again)?;
        let (one, two) = (resident(one.as_mut())?.state()?, resident(two.as_mut())?.state()?);
        ensure!(bits(&one) == bits(&two), "{optimizer:?}: what continues is another");
    }
    Ok(())
}

/// What lands in part comes over what the optimizer has done, in both buffers.
#[test]
fn what_lands_after_an_update_leaves_the_rest() -> Result<()> {
    let Some(session) = Session::begin("what_lands_after_an_update_leaves_the_rest")? else { return Ok(()) };
    let optimizer = OptimizerConfig::sgd(0.1);
    for seed in 1..9 {
        session.set("SEED", &seed.to_string())?;
        for precision in [Precision::F32, Precision::Bf16] {
            let config = ModelConfig::Mlp { hidden: vec![33] };
            let (mut model, mut other) = (on_gpu(&config, 0, precision)?, on_gpu(&config, 0, precision)?);
            let (len, mut want) = (len_of(model.as_ref()), fresh(model.as_ref(), &optimizer));
            let gpu = resident(model.as_mut())?;
            gpu.set_state(&want.0, &[])?;
            let mut noise = Noise(seed);
            for t in 1..5 {
                let batch = noise.images(3);
                let mut gradient = vec![0.0; len];
                let loss = other.step(&want.0, &mut gradient, &batch, &mut |_, _| {})?;
                ensure!(gpu.step_local(&batch)? == loss, "seed {seed}, {precision:?}, step {t}");
                // Nobody waits for the update before the next parameters land.
                gpu.optimize(&optimizer, &hyper(&optimizer, t, None), None)?;
                on_cpu(&optimizer, &hyper(&optimizer, t, None), None, &mut want, &gradient, len);
                let part = (t as usize * 100)..(t as usize * 100 + 300);
                let new = noise.values(part.len());
                gpu.host_mut()?[part.clone()].copy_from_slice(&new);
                want.0[part.clone()].copy_from_slice(&new);
                gpu.landed(std::slice::from_ref(&part))?;
            }
            let got = gpu.state()?;
            ensure!(bits(&got) == bits(&want), "seed {seed}, {precision:?}");
        }
    }
    Ok(())
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() -> Result<()> {
    let Some(_session) = Session::begin("a_gradient_that_is_not_finite_changes_nothing")? else {
        return Ok(());
    };
    for precision in [Precision::F32, Precision::F16] {
        for config in [ModelConfig::Mlp { hidden: vec![33] }, ModelConfig::Convnet] {
            let mut model = on_gpu(&config, 0, precision)?;
            let weights = weights_of(model.as_ref());
            let gpu = resident(model.as_mut())?;
            let optimizer = OptimizerConfig::adam(0.1);
            let missing = gpu.optimize(&optimizer, &hyper(&optimizer, 1, None), None);
            ensure!(missing.is_err(), "there was no step");
            gpu.set_state(&weights, &[])?;
            let mut noise = Noise(2);
            let (good, mut bad) = (noise.images(4), noise.images(4));
            gpu.step_local(&good)?;
            gpu.optimize(&optimizer, &hyper(&optimizer, 1, None), Some(0.5))?;
            let twice = gpu.optimize(&optimizer, &hyper(&optimizer, 2, None), None);
            ensure!(twice.is_err(), "a gradient is applied once");
            let before = gpu.state()?;
            bad.inputs[5] = f32::NAN;
            gpu.step_local(&bad)?;
            let error = gpu.optimize(&optimizer, &hyper(&optimizer, 2, None), Some(0.5));
            let error = error.err().context("it is not finite")?.to_string();
            ensure!(error.contains("cuda:0") && error.contains("not finite"), "{error}");
            ensure!(bits(&gpu.state()?) == bits(&before), "{config:?} in {precision:?} is changed");
            let other = gpu.optimize(&OptimizerConfig::sgd(0.1), &hyper(&optimizer, 2, None), None);
            ensure!(other.is_err(), "it is not finite yet");
            gpu.step_local(&good)?;
            let other = gpu.optimize(&OptimizerConfig::sgd(0.1), &hyper(&optimizer, 2, None), None);
            let error = other.err().context("the slots are Adam's")?.to_string();
            ensure!(error.contains("sgd has 0 state vectors"), "{error}");
            gpu.optimize(&optimizer, &hyper(&optimizer, 2, None), None)?;
        }
    }
    let mut model = on_gpu(&ModelConfig::Convnet, 0, Precision::F32)?;
    let weights = weights_of(model.as_ref());
    let gpu = resident(model.as_mut())?;
    ensure!(gpu.set_state(&weights[1..], &[]).is_err(), "a weight is missing");
    ensure!(gpu.set_state(&weights, std::slice::from_ref(&weights)).is_err(), "buffers have no slots");
    Ok(())
}

/// Rank 1 begins with nothing, or with something else. Then both do the same, and it is what one device does with the mean of
/// the gradients.
#[test]
fn ranks_have_the_same_bits() -> Result<()> {
    let Some(session) = group::begin("ranks_have_the_same_bits")? else { return Ok(()) };
    let adagrad = OptimizerConfig::Adagrad(Adagrad { initial_accumulator: 0.3, ..Adagrad::default() });
    let mlp = ModelConfig::Mlp { hidden: vec![33] };
    let cases = [
        (mlp.clone(), Precision::F32, OptimizerConfig::adam(0.02), None),
        (ModelConfig::Convnet, Precision::Bf16, adagrad, Some(0.5)),
        (ModelConfig::Convnet, Precision::F16, OptimizerConfig::sgd(0.1), Some(0.2)),
        (mlp, Precision::F16, OptimizerConfig::adam(0.02), Some(0.2)),
    ];
    for (seed, (config, precision, optimizer, norm)) in (1u64..).zip(cases) {
        session.set("SEED", &seed.to_string())?;
        let meeting = Meeting::new(2)?;
        let states = meeting.run(|rank| {
            let mut model = on_gpu(&config, rank, precision)?;
            let weights = weights_of(model.as_ref());
            if rank == 0 {
                // It has trained alone before.
                resident(model.as_mut())?.set_state(&weights, &[])?;
                train(model.as_mut(), &optimizer, 1..3, &mut Noise(seed))?;
            } else if seed == 2 {
                resident(model.as_mut())?.set_state(&weights, &[])?;
                train(model.as_mut(), &optimizer, 1..2, &mut Noise(99))?;
            }
            let before = resident(model.as_mut())?.state()?;
            let group = meeting.join(model.as_mut(), rank)?;
            let gpu = resident(model.as_mut())?;
            let early = gpu.step_local(&Noise(1).images(2));
            ensure!(early.is_err(), "rank {rank} trains with parameters that nobody has shared");
            gpu.share_state(&optimizer)?;
            let mut states = vec![gpu.state()?];
            ensure!(rank > 0 || bits(&states[0]) == bits(&before), "sharing changes rank 0's");
            let mut noise = Noise(7);
            for t in 3..7 {
                let batch = noise.images(7);
                let own = samples(&batch, if rank == 0 { 0..3 } else { 3..7 });
                gpu.step_local(&own)?;
                gpu.optimize(&optimizer, &hyper(&optimizer, t, None), norm)?;
                states.push(gpu.state()?);
            }
            let evaluation = gpu.evaluate_resident(&noise.images(4))?;
            group.leave(&|| meeting.over.load(Ordering::Relaxed))?;
            gpu.join(None)?;
            ensure!(bits(&gpu.state()?) == bits(&states[4]), "leaving changes something");
            // Alone it goes on with what it has.
            gpu.step_local(&noise.images(2))?;
            Ok((states, evaluation))
        })?;
        let what = format!("{config:?} in {precision:?} with {}", optimizer.kind());
        for step in 0..5 {
            ensure!(bits(&states[0].0[step]) == bits(&states[1].0[step]), "{what}: step {step} differs");
        }
        ensure!(states[0].1 == states[1].1, "{what}: the evaluations differ");

        // Where no statistics are over the batch, the mean of two gradients is easily had.
        if matches!(config, ModelConfig::Convnet) {
            continue;
        }
        let mut other = on_gpu(&config, 0, precision)?;
        let (len, mut want) = (len_of(other.as_ref()), states[0].0[0].clone());
        let mut noise = Noise(7);
        for t in 3..7 {
            let batch = noise.images(7);
            let mut both = [vec![0.0; len], vec![0.0; len]];
            for (gradient, part) in both.iter_mut().zip([0..3, 3..7]) {
                other.step(&want.0, gradient, &samples(&batch, part), &mut |_, _| {})?;
            }
            let mean: Vec<f32> = both[0].iter().zip(&both[1]).map(|(a, b)| (a + b) / 2.0).collect();
            on_cpu(&optimizer, &hyper(&optimizer, t, None), norm, &mut want, &mean, len);
            let got = &states[0].0[t as usize - 2];
            let apart = distance(&got.0, &want.0).max(distance(&got.1[0], &want.1[0]));
            ensure!(apart < 1e-5, "{what}: step {t} is {apart:e} apart from the mean's");
            want = got.clone();
        }
    }
    Ok(())
}

/// Gradients of more values than are reduced at once leave in several collectives, while the backward pass goes on.
#[test]
fn a_gradient_that_is_reduced_in_pieces_is_the_whole_mean() -> Result<()> {
    let Some(_session) = group::begin("a_gradient_that_is_reduced_in_pieces_is_the_whole_mean")? else {
        return Ok(());
    };
    let config = ModelConfig::Mlp { hidden: vec![1500, 1500] };
    let batch = Noise(3).images(2);
    let optimizer = OptimizerConfig::sgd(1.0);
    let mut alone = on_gpu(&config, 0, Precision::F32)?;
    let weights = weights_of(alone.as_ref());
    let mut gradient = vec![0.0; weights.len()];
    alone.step(&weights, &mut gradient, &batch, &mut |_, _| {})?;
    drop(alone);
    let meeting = Meeting::new(2)?;
    let states = meeting.run(|rank| {
        let mut model = on_gpu(&config, rank, Precision::F32)?;
        let group = meeting.join(model.as_mut(), rank)?;
        let gpu = resident(model.as_mut())?;
        if rank == 0 {
            gpu.set_state(&weights, &[])?;
        }
        gpu.share_state(&optimizer)?;
        gpu.step_local(&samples(&batch, rank..rank + 1))?;
        gpu.optimize(&optimizer, &hyper(&optimizer, 1, None), None)?;
        let state = gpu.state()?;
        group.leave(&|| meeting.over.load(Ordering::Relaxed))?;
        Ok(state)
    })?;
    let want: Vec<f32> = weights.iter().zip(&gradient).map(|(w, g)| w - g).collect();
    ensure!(bits(&states[0]) == bits(&states[1]), "the ranks differ");
    let apart = distance(&states[0].0, &want);
    ensure!(apart < 1e-5, "{apart:e}");
    Ok(())
}

/// Rank 1 dies while rank 0 waits for it: rank 0 has the state of before the step, and goes on alone and in another group.
#[test]
fn a_rank_that_is_left_has_what_it_had() -> Result<()> {
    let Some(_session) = group::begin("a_rank_that_is_left_has_what_it_had")? else { return Ok(()) };
    let optimizer = OptimizerConfig::adam(0.02);
    for sharing in [false, true] {
        let broken = Meeting::new(2)?;
        let config = ModelConfig::Convnet;
        let mut survivor = on_gpu(&config, 0, Precision::Bf16)?;
        let weights = weights_of(survivor.as_ref());
        std::thread::scope(|s| {
            let other = s.spawn(|| -> Result<()> {
                let mut model = on_gpu(&config, 1, Precision::Bf16)?;
                let group = broken.join(model.as_mut(), 1)?;
                if !sharing {
                    resident(model.as_mut())?.share_state(&optimizer)?;
                }
                // Long enough for the other one to wait for it, most of the time; in any case it is not there.
                std::thread::sleep(Duration::from_millis(100));
                group.abort();
                Ok(())
            });
            let group = broken.join(survivor.as_mut(), 0)?;
            let gpu = resident(survivor.as_mut())?;
            gpu.set_state(&weights, &[])?;
            let watch = s.spawn(move || {
                std::thread::sleep(Duration::from_millis(200));
                group.abort();
            });
            let result = if sharing {
                gpu.share_state(&optimizer)
            } else {
                gpu.share_state(&optimizer)?;
                gpu.step_local(&Noise(1).images(3)).map(|_| ())
            };
            // A broadcast may be over for the one that gives before it has come to the others.
            let error = result.err();
            ensure!(sharing || error.as_ref().is_some_and(|e| e.is_group()), "{error:?}");
            other.join().expect("no panic")?;
            watch.join().expect("no panic");
            Ok(())
        })?;
        let gpu = resident(survivor.as_mut())?;
        let before = gpu.state()?;
        ensure!(before.0 == weights, "the parameters are not those of before the step");
        ensure!(gpu.optimize(&optimizer, &hyper(&optimizer, 1, None), None).is_err(), "there is no gradient");
        gpu.join(None)?;
        train(survivor.as_mut(), &optimizer, 1..3, &mut Noise(4))?;
        let mut alone = on_gpu(&config, 0, Precision::Bf16)?;
        resident(alone.as_mut())?.set_state(&weights, &[])?;
        train(alone.as_mut(), &optimizer, 1..3, &mut Noise(4))?;
        let (got, want) = (resident(survivor.as_mut())?.state()?, resident(alone.as_mut())?.state()?);
        ensure!(bits(&got) == bits(&want), "alone it is not what it would have been");
    }
    Ok(())
}

#[test]
fn a_batch_that_does_not_fit_is_refused() -> Result<()> {
    let Some(_session) = Session::begin("a_batch_that_does_not_fit_is_refused")? else { return Ok(()) };
    let mut model = on_gpu(&ModelConfig::Convnet, 0, Precision::F32)?;
    let gpu = resident(model.as_mut())?;
    ensure!(gpu.step_local(&Batch::default()).is_err(), "no samples");
    // Alone there is nobody to share with.
    gpu.share_state(&OptimizerConfig::sgd(0.1))?;
    Ok(())
}
