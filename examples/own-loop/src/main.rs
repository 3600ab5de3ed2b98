//! A training loop of one's own: softmax regression on three clouds of points, written as a plain loop over [`Run`].
//!
//! [`Run`] says which samples to train and when to evaluate, and it has the weights; model, data and everything between are
//! this program's. `paraft train examples/own-loop/job.toml` starts one for each rank; it also runs by hand, with the flags of
//! `paraft worker`.

use paraft_worker::{Evaluation, Job, LoopAction, Run, Setup, TensorSpec, WorkerError, WorkerOptions, cli};

const CLASSES: usize = 3;
const INPUTS: usize = 2;
const TRAIN: usize = 3_000;
const HELD_OUT: usize = 600;

fn main() {
    cli::main_of_loop(train)
}

fn train(job: &Job, options: &WorkerOptions) -> Result<(), WorkerError> {
    let tensors =
        vec![TensorSpec::param("weight", &[CLASSES, INPUTS]), TensorSpec::param("bias", &[CLASSES])];
    let setup = Setup {
        classifies: true,
        held_out: HELD_OUT,
        data: format!("clouds {}", job.seed),
        ..Setup::new(tensors, TRAIN, |_, weights| weights.fill(0.0))
    };
    let point = |i: usize| point(job.seed, i);
    let mut run = Run::join(job, options, setup)?;
    loop {
        match run.next()? {
            LoopAction::Train(minibatch) => {
                let (mut weight, mut bias, mut loss) = ([0.0; CLASSES * INPUTS], [0.0; CLASSES], 0.0);
                let share = 1.0 / minibatch.samples.len() as f32;
                for &i in &minibatch.samples {
                    let (x, label) = point(i as usize);
                    let p = probabilities(run.weights(), x);
                    loss -= p[label].max(f32::MIN_POSITIVE).ln() * share;
                    for class in 0..CLASSES {
                        let d = (p[class] - f32::from(u8::from(class == label))) * share;
                        bias[class] += d;
                        weight[class * INPUTS] += d * x[0];
                        weight[class * INPUTS + 1] += d * x[1];
                    }
                }
                run.ready(1, &bias)?; // last layer first: it is pushed while the others are computed
                run.ready(0, &weight)?;
                run.trained(loss)?;
            }
            LoopAction::Evaluate { samples } => {
                let mut sums = Evaluation::default();
                for i in samples {
                    let (x, label) = point(TRAIN + i);
                    let p = probabilities(run.weights(), x);
                    sums.loss_sum -= f64::from(p[label].max(f32::MIN_POSITIVE).ln());
                    sums.correct += u64::from((0..CLASSES).all(|c| p[c] <= p[label]));
                    sums.count += 1;
                }
                run.evaluated(sums)?;
            }
            LoopAction::Over => break,
        }
    }
    let report = run.finish()?;
    if let Some(e) = report.evaluation {
        eprintln!("{} of {} held-out points are in the right cloud", e.correct, e.count);
    }
    Ok(())
}

/// Softmax of `weight x + bias`; the weights are as [`Setup::tensors`] lays them out.
fn probabilities(weights: &[f32], x: [f32; INPUTS]) -> [f32; CLASSES] {
    let (weight, bias) = weights.split_at(CLASSES * INPUTS);
    let score = |c: usize| weight[c * INPUTS] * x[0] + weight[c * INPUTS + 1] * x[1] + bias[c];
    let top = (0..CLASSES).map(score).fold(f32::MIN, f32::max);
    let mut p: [f32; CLASSES] = std::array::from_fn(|c| (score(c) - top).exp());
    let sum: f32 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= sum);
    p
}

/// Point `i` and its cloud: three clouds around a circle.
fn point(seed: u64, i: usize) -> ([f32; INPUTS], usize) {
    let label = i % CLASSES;
    let angle = label as f32 * std::f32::consts::TAU / CLASSES as f32;
    let noise = |k: u64| {
        // SplitMix64 (Steele, Lea, Flood 2014), of the point's number.
        let mut z = (seed ^ (2 * i as u64 + k)).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 2.4
    };
    ([angle.cos() + noise(0), angle.sin() + noise(1)], label)
}
