//! Shared by the tests: reproducible numbers, batches, and plain double-precision versions of the models.

// Each test binary uses a part of it.
#![allow(dead_code)]

use paraft_common::layout::Layout;
use paraft_compute::reference::{self as plain, Images};
use paraft_compute::shape::ConvShape;
use paraft_models::{Batch, Model};

/// Numbers in -1..1, equal to those of tools/golden/models.py.
pub struct Stream(pub u32);

impl Stream {
    pub fn fill(&mut self, count: usize, scale: f32, shift: f32) -> Vec<f32> {
        let next = |_| {
            self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let unit = f64::from(self.0 >> 8) / f64::from(1u32 << 23) - 1.0;
            (unit * f64::from(scale) + f64::from(shift)) as f32
        };
        (0..count).map(next).collect()
    }
}

/// Inputs in 0..1, labels that include all classes, and targets in 1..2.
pub fn batch(seed: u32, n: usize, inputs: usize, classes: Option<usize>) -> Batch {
    let labels = classes.map_or(Vec::new(), |c| (0..n).map(|i| (i * 7 % c) as u32).collect());
    let targets = Stream(seed.wrapping_add(1)).fill(n, 0.5, 1.5);
    Batch { inputs: Stream(seed).fill(n * inputs, 0.5, 0.5), labels, targets, n, ..Batch::default() }
}

pub fn layout(model: &dyn Model) -> Layout {
    Layout::new(model.tensors(), 1000).expect("valid tensors")
}

/// Initial weights for a seed.
pub fn params(model: &dyn Model, seed: u64) -> Vec<f32> {
    let mut p = vec![f32::NAN; layout(model).len()];
    model.init(seed, &mut p);
    p
}

/// Loss and gradient of one step. Checks that every value of the gradient is written.
pub fn step(model: &mut dyn Model, params: &[f32], batch: &Batch) -> (f32, Vec<f32>) {
    let mut grads = vec![f32::NAN; params.len()];
    let loss = model.step(params, &mut grads, batch, &mut |_, _| {}).expect("a valid step");
    assert!(grads.iter().all(|g| g.is_finite()), "a value of the gradient was not written");
    (loss, grads)
}

pub fn wide(v: &[f32]) -> Vec<f64> {
    v.iter().copied().map(f64::from).collect()
}

/// Panics if `got` differs from `want` by more than `tolerance` times the largest value of `want`, plus `floor`.
pub fn close(what: &str, got: &[f32], want: &[f64], tolerance: f64, floor: f64) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let allowed = tolerance * want.iter().fold(0.0f64, |m, v| m.max(v.abs())) + floor;
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let apart = (f64::from(*g) - w).abs();
        assert!(
            apart <= allowed,
            "{what}[{i}]: {g} instead of {w}, apart {apart:.3e}, allowed {allowed:.3e}"
        );
    }
}

/// Loss and gradient of a stack of linear layers with ReLUs. Without labels: a ReLU at the end, and the mean
/// squared error against the input.
pub fn dense(widths: &[usize], params: &[f64], inputs: &[f64], n: usize, labels: &[u32]) -> (f64, Vec<f64>) {
    let layers = widths.len() - 1;
    let (mut acts, mut places, mut at) = (vec![inputs.to_vec()], Vec::new(), 0);
    for (i, w) in widths.windows(2).enumerate() {
        let (weight, bias) = (at..at + w[0] * w[1], at + w[0] * w[1]..at + w[0] * w[1] + w[1]);
        at = bias.end;
        let mut y = plain::linear_forward(n, &acts[i], &params[weight.clone()], &params[bias.clone()]);
        if i + 1 < layers || labels.is_empty() {
            y.iter_mut().for_each(|v| *v = v.max(0.0));
        }
        acts.push(y);
        places.push((weight, bias));
    }
    let out = &acts[layers];
    let (loss, mut d) = if labels.is_empty() {
        let count = out.len() as f64;
        let d: Vec<f64> = out.iter().zip(inputs).map(|(a, b)| 2.0 * (a - b) / count).collect();
        (d.iter().map(|v| v * v).sum::<f64>() * count / 4.0, d)
    } else {
        plain::softmax_cross_entropy(out, labels)
    };
    let mut grads = vec![0.0; at];
    for (i, (weight, bias)) in places.into_iter().enumerate().rev() {
        if i + 1 < layers || labels.is_empty() {
            d.iter_mut().zip(&acts[i + 1]).for_each(|(d, y)| *d = if *y > 0.0 { *d } else { 0.0 });
        }
        let (dx, dw, db) = plain::linear_backward(n, &acts[i], &params[weight.clone()], &d);
        grads[weight].copy_from_slice(&dw);
        grads[bias].copy_from_slice(&db);
        d = dx;
    }
    (loss, grads)
}

/// Mean and variance of each channel.
pub type Stats = Vec<(f64, f64)>;

/// Loss and gradient of the convolutional net, parameters only, and each stage's channel statistics.
pub fn convnet(
    side: usize,
    classes: usize,
    params: &[f64],
    inputs: &[f64],
    labels: &[u32],
) -> (f64, Vec<f64>, Vec<Stats>) {
    let n = labels.len();
    let mut at = 0;
    let mut take = |len: usize| {
        at += len;
        at - len..at
    };
    let mut x = inputs.to_vec();
    let mut sizes = Images { n, channels: 1, height: side, width: side };
    let (mut stages, mut all_stats) = (Vec::new(), Vec::new());
    for (ins, outs) in [(1, 16), (16, 32)] {
        let shape = ConvShape { inputs: ins, outputs: outs, kernel: 5, pad: 2 };
        let [w, b, gamma, beta] = [shape.weight_len(), outs, outs, outs].map(&mut take);
        let y = plain::conv_forward(shape, sizes, &x, &params[w.clone()], &params[b.clone()]);
        let wide = sizes.after(shape);
        let stats = plain::channel_stats(wide, &y);
        let z = plain::norm(wide, &y, &stats, &params[gamma.clone()], &params[beta.clone()]);
        let (p, picked) = plain::relu_pool(wide, &z);
        all_stats.push(stats);
        stages.push((
            shape,
            sizes,
            wide,
            std::mem::replace(&mut x, p.clone()),
            y,
            p,
            picked,
            [w, b, gamma, beta],
        ));
        sizes = wide.halved();
    }
    let features = x.len() / n;
    let [weight, bias] = [features * classes, classes].map(&mut take);
    let logits = plain::linear_forward(n, &x, &params[weight.clone()], &params[bias.clone()]);
    let (loss, d) = plain::softmax_cross_entropy(&logits, labels);
    let mut grads = vec![0.0; at];
    let (mut dx, dw, db) = plain::linear_backward(n, &x, &params[weight.clone()], &d);
    grads[weight].copy_from_slice(&dw);
    grads[bias].copy_from_slice(&db);
    for (shape, sizes, wide, x, y, p, picked, [w, b, gamma, beta]) in stages.into_iter().rev() {
        let dz = plain::relu_pool_backward(y.len(), &p, &picked, &dx);
        let (dy, dgamma, dbeta) = plain::norm_backward(wide, &y, &params[gamma.clone()], &dz);
        let (next, dw, db) = plain::conv_backward(shape, sizes, &x, &params[w.clone()], &dy);
        for (range, value) in [(w, dw), (b, db), (gamma, dgamma), (beta, dbeta)] {
            grads[range].copy_from_slice(&value);
        }
        dx = next;
    }
    (loss, grads, all_stats)
}
