//! Training samples per second of each built-in model, to compare engines and numbers of threads.
//!
//! `cargo run --release -p paraft-models --example step_speed [seconds a model] [threads, 1] [model]`

use paraft_common::layout::Layout;
use paraft_models::{Batch, DataShape, Model, ModelConfig, Sample};
use std::time::{Duration, Instant};

/// Tokens per sample of text.
const TIME: usize = 128;

/// Pseudo-random numbers in 0..1, four of five of them zero, as in a scanned digit.
fn pixels(count: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1u32 << 24) as f32
    };
    (0..count).map(|_| if next() < 0.8 { 0.0 } else { next() }).collect()
}

/// The median and the best time of a step, over about `time`.
fn measure(
    model: &mut dyn Model,
    batch: &Batch,
    time: Duration,
) -> Result<(Duration, Duration), Box<dyn std::error::Error>> {
    let len = Layout::new(model.tensors(), 1 << 18)?.len();
    let (mut params, mut grads) = (vec![0.0; len], vec![0.0; len]);
    model.init(1, &mut params);
    for _ in 0..3 {
        model.step(&params, &mut grads, batch, &mut |_, _| {})?;
    }
    let (start, mut times) = (Instant::now(), Vec::new());
    while start.elapsed() < time || times.len() < 5 {
        let t = Instant::now();
        model.step(&params, &mut grads, batch, &mut |_, _| {})?;
        times.push(t.elapsed());
        // A small step, so that the numbers change as in training.
        for (p, g) in params.iter_mut().zip(&grads) {
            *p -= 1e-4 * g;
        }
    }
    times.sort();
    Ok((times[times.len() / 2], times[0]))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let seconds: f64 = args.next().map_or(Ok(2.0), |a| a.parse())?;
    let threads: usize = args.next().map_or(Ok(1), |a| a.parse())?;
    let only = args.next();
    let transformer =
        ModelConfig::Transformer { layers: 4, heads: 4, width: 128, checkpoint_activations: false };
    let cases = [
        (ModelConfig::LogisticRegression, 64),
        (ModelConfig::Mlp { hidden: vec![256, 128] }, 64),
        (ModelConfig::Autoencoder { hidden: vec![128, 128, 128] }, 128),
        (ModelConfig::Convnet, 100),
        (transformer, 8),
    ];
    println!("instructions: {:?}, threads: {threads}", paraft_compute::Cpu::detect().isa());
    for (config, n) in cases {
        if only.as_deref().is_some_and(|o| o != config.name()) {
            continue;
        }
        let text = config.name() == "transformer";
        let sample = if text { Sample::Tokens { time: TIME, vocab: 256 } } else { Sample::Values(784) };
        let mut model =
            config.build_with(threads, DataShape { sample, classes: Some(10) }).map_err(|e| e.to_string())?;
        let ids = |count: usize, below: u32| (0..count as u32).map(|i| i * 7 % below).collect();
        let batch = match text {
            true => Batch { tokens: ids(n * TIME, 256), labels: ids(n * TIME, 251), n, ..Batch::default() },
            false => Batch { inputs: pixels(n * 784), labels: ids(n, 10), n, ..Batch::default() },
        };
        let (median, best) = measure(model.as_mut(), &batch, Duration::from_secs_f64(seconds))?;
        let rate = |t: Duration| n as f64 / t.as_secs_f64();
        println!(
            "{:20} batch {n:4}  median {:8.0} samples/s ({:7.1} us a step), best {:8.0} samples/s",
            config.name(),
            rate(median),
            median.as_secs_f64() * 1e6,
            rate(best),
        );
    }
    Ok(())
}
