//! A model of one's own, complete: a net with one hidden layer, written from scratch, that learns to tell two
//! spirals apart, on data that it makes itself.
//!
//! What a user writes is [`Net`], an implementation of [`Model`], and [`spirals`], the data. `main` hands both to
//! [`paraft_worker::cli::main`], which reads the flags of `paraft worker`, finds the servers and trains. The
//! binary is a worker: `paraft train examples/custom-model/job.toml` starts one for each rank, and it also runs
//! by hand, as `paraft worker` does.

use paraft_worker::{
    Batch, DataError, Dataset, Evaluation, Model, ModelError, Samples, Split, TensorSpec, cli,
};

/// A point of the plane in, two classes out.
const INPUTS: usize = 2;
const CLASSES: usize = 2;
const HIDDEN: usize = 32;

/// Where the tensors begin in the flat buffers; they lie one after another, in the order of [`Net::tensors`].
const W1: usize = 0; // [HIDDEN, INPUTS]
const B1: usize = W1 + HIDDEN * INPUTS;
const W2: usize = B1 + HIDDEN; // [CLASSES, HIDDEN]
const B2: usize = W2 + CLASSES * HIDDEN;

fn main() {
    // Called in every worker, so both must come out the same in each: they depend on the job alone.
    cli::main(|job| Ok((Box::new(Net), spirals(job.seed, 1000)?)))
}

/// `tanh` between two linear layers, softmax cross-entropy at the end.
struct Net;

/// What the forward pass of one sample leaves for the backward pass.
struct Pass {
    hidden: [f32; HIDDEN],
    probabilities: [f32; CLASSES],
}

impl Net {
    fn forward(&self, params: &[f32], x: &[f32]) -> Pass {
        let mut hidden = [0.0; HIDDEN];
        for (j, h) in hidden.iter_mut().enumerate() {
            let row = &params[W1 + j * INPUTS..][..INPUTS];
            *h = (params[B1 + j] + dot(row, x)).tanh();
        }
        let mut probabilities = [0.0; CLASSES];
        for (k, p) in probabilities.iter_mut().enumerate() {
            *p = params[B2 + k] + dot(&params[W2 + k * HIDDEN..][..HIDDEN], &hidden);
        }
        let top = probabilities.iter().copied().fold(f32::MIN, f32::max);
        probabilities.iter_mut().for_each(|p| *p = (*p - top).exp());
        let sum: f32 = probabilities.iter().sum();
        probabilities.iter_mut().for_each(|p| *p /= sum);
        Pass { hidden, probabilities }
    }

    /// A batch comes from outside the model: an error here ends the worker with a message, a panic without one.
    fn check(&self, batch: &Batch) -> Result<(), ModelError> {
        let fits = batch.inputs.len() == batch.n * INPUTS && batch.labels.len() == batch.n;
        if fits && batch.labels.iter().all(|l| (*l as usize) < CLASSES) {
            return Ok(());
        }
        Err(ModelError::new(format!("{INPUTS} values and a label below {CLASSES} for each sample expected")))
    }
}

impl Model for Net {
    fn tensors(&self) -> Vec<TensorSpec> {
        vec![
            TensorSpec::param("hidden.weight", &[HIDDEN, INPUTS]),
            TensorSpec::param("hidden.bias", &[HIDDEN]),
            TensorSpec::param("output.weight", &[CLASSES, HIDDEN]),
            TensorSpec::param("output.bias", &[CLASSES]),
        ]
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        let mut random = Random(seed);
        params.fill(0.0);
        // Steep and shifted, or 32 hidden values could not follow a turn and a half.
        params[W1..B1].iter_mut().for_each(|w| *w = random.between(-4.0, 4.0));
        params[B1..W2].iter_mut().for_each(|b| *b = random.between(-2.0, 2.0));
        let bound = 1.0 / (HIDDEN as f32).sqrt();
        params[W2..B2].iter_mut().for_each(|w| *w = random.between(-bound, bound));
    }

    fn step(
        &mut self,
        params: &[f32],
        grads: &mut [f32],
        batch: &Batch,
        ready: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<f32, ModelError> {
        self.check(batch)?;
        grads.fill(0.0); // the buffer still holds the last step's gradient
        let mut loss = 0.0;
        let share = 1.0 / batch.n as f32; // the loss, and so the gradient, is the mean over the batch
        let mut passes = Vec::with_capacity(batch.n);
        for (x, &label) in batch.inputs.chunks(INPUTS).zip(&batch.labels) {
            let mut pass = self.forward(params, x);
            loss -= pass.probabilities[label as usize].max(f32::MIN_POSITIVE).ln() * share;
            // Softmax and cross-entropy together: the gradient of the outputs is p - 1 at the label, p elsewhere.
            pass.probabilities[label as usize] -= 1.0;
            for (k, d) in pass.probabilities.iter().enumerate() {
                grads[B2 + k] += d * share;
                for (j, h) in pass.hidden.iter().enumerate() {
                    grads[W2 + k * HIDDEN + j] += d * h * share;
                }
            }
            passes.push(pass);
        }
        // The output layer's gradient is complete: it can leave while the hidden layer's is computed.
        ready(W2, grads);
        for (x, pass) in batch.inputs.chunks(INPUTS).zip(&passes) {
            for (j, h) in pass.hidden.iter().enumerate() {
                let back = |(k, d): (usize, &f32)| d * params[W2 + k * HIDDEN + j];
                let above: f32 = pass.probabilities.iter().enumerate().map(back).sum();
                let d = above * (1.0 - h * h) * share;
                grads[B1 + j] += d;
                for (i, x) in x.iter().enumerate() {
                    grads[W1 + j * INPUTS + i] += d * x;
                }
            }
        }
        ready(0, grads); // the last call always says 0: everything is ready
        Ok(loss)
    }

    fn evaluate(&mut self, params: &[f32], batch: &Batch) -> Result<Evaluation, ModelError> {
        self.check(batch)?;
        let mut sums = Evaluation { count: batch.n as u64, ..Evaluation::default() };
        for (x, &label) in batch.inputs.chunks(INPUTS).zip(&batch.labels) {
            let p = self.forward(params, x).probabilities;
            sums.loss_sum -= f64::from(p[label as usize].max(f32::MIN_POSITIVE).ln());
            sums.correct += u64::from(usize::from(p[1] > p[0]) == label as usize);
        }
        Ok(sums)
    }
}

/// Two spirals of `n` points each, a turn and a half long, with a little noise; every fifth point is held out.
fn spirals(seed: u64, n: usize) -> Result<Split, DataError> {
    let mut random = Random(seed ^ 0x5049_5241_4c53);
    let (mut train, mut test) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
    for i in 0..2 * n {
        let label = (i % CLASSES) as u32;
        let along = random.between(0.1, 1.0);
        let angle = along * 3.0 * std::f32::consts::PI + label as f32 * std::f32::consts::PI;
        let mut noise = || random.between(-0.03, 0.03);
        let point = [along * angle.cos() + noise(), along * angle.sin() + noise()];
        let (points, labels) = if (i / CLASSES).is_multiple_of(5) { &mut test } else { &mut train };
        points.extend(point);
        labels.push(label);
    }
    let set = |(points, labels): (Vec<f32>, Vec<u32>)| {
        Dataset::new(Samples::Floats(points), vec![INPUTS], Some((labels, CLASSES)))
    };
    Ok(Split { train: set(train)?, test: set(test)? })
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// SplitMix64 (Steele, Lea, Flood 2014): ten lines instead of a dependency.
struct Random(u64);

impl Random {
    fn between(&mut self, low: f32, high: f32) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let unit = ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32;
        low + (high - low) * unit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = B2 + CLASSES;

    /// Worth writing for every model of one's own: a wrong gradient still trains, only badly.
    #[test]
    fn the_gradient_agrees_with_finite_differences() {
        let data = spirals(1, 10).expect("made here").train;
        let (mut net, mut batch) = (Net, Batch { n: 7, ..Batch::default() });
        paraft_worker::samples::fill(&data, &[0, 1, 2, 3, 4, 5, 6], &mut batch).expect("in memory");
        let (mut params, mut grads) = (vec![0.0; LEN], vec![f32::NAN; LEN]);
        net.init(1, &mut params);
        let mut reported = Vec::new();
        net.step(&params, &mut grads, &batch, &mut |at, _| reported.push(at)).expect("a good batch");
        assert_eq!(reported, [W2, 0]);
        let mut loss = |params: &[f32]| net.evaluate(params, &batch).expect("a good batch").loss_sum / 7.0;
        for i in 0..LEN {
            let (before, h) = (params[i], 1e-2);
            params[i] = before + h;
            let up = loss(&params);
            params[i] = before - h;
            let slope = (up - loss(&params)) / f64::from(2.0 * h);
            params[i] = before;
            // The loss is computed in f32: 1e-7 of rounding over a step of 2e-2, and the third derivative.
            assert!((slope - f64::from(grads[i])).abs() < 2e-4, "parameter {i}: {slope} and {}", grads[i]);
        }
    }
}
