//! Plain operators in double precision over `[n, channels, height, width]`: slow and simple, the reference for the
//! fast ones.

use crate::shape::{AttentionShape, ConvShape};

/// Sizes of a batch of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Images {
    /// Samples.
    pub n: usize,
    /// Channels.
    pub channels: usize,
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

impl Images {
    fn at(&self, n: usize, c: usize, y: usize, x: usize) -> usize {
        ((n * self.channels + c) * self.height + y) * self.width + x
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.n * self.channels * self.height * self.width
    }

    /// Whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sizes after a convolution.
    pub fn after(&self, s: ConvShape) -> Self {
        let side = |v: usize| v + 2 * s.pad + 1 - s.kernel;
        Self { n: self.n, channels: s.outputs, height: side(self.height), width: side(self.width) }
    }

    /// Sizes after 2x2 pooling.
    pub fn halved(&self) -> Self {
        Self { height: self.height / 2, width: self.width / 2, ..*self }
    }
}

/// Calls `f(output place, input place, weight place)` for every product of a convolution.
fn conv_products(s: ConvShape, x: Images, mut f: impl FnMut(usize, usize, usize)) {
    let y = x.after(s);
    for n in 0..x.n {
        for o in 0..s.outputs {
            for (r, c) in (0..y.height).flat_map(|r| (0..y.width).map(move |c| (r, c))) {
                for i in 0..s.inputs {
                    for (ky, kx) in (0..s.kernel).flat_map(|a| (0..s.kernel).map(move |b| (a, b))) {
                        let (yy, xx) = (r + ky, c + kx);
                        if yy < s.pad || xx < s.pad || yy - s.pad >= x.height || xx - s.pad >= x.width {
                            continue;
                        }
                        let w = ((o * s.inputs + i) * s.kernel + ky) * s.kernel + kx;
                        f(y.at(n, o, r, c), x.at(n, i, yy - s.pad, xx - s.pad), w);
                    }
                }
            }
        }
    }
}

/// `conv(x) + bias`.
pub fn conv_forward(s: ConvShape, sizes: Images, x: &[f64], weight: &[f64], bias: &[f64]) -> Vec<f64> {
    let out = sizes.after(s);
    let plane = out.height * out.width;
    let mut y: Vec<f64> = (0..out.len()).map(|i| bias[i / plane % s.outputs]).collect();
    conv_products(s, sizes, |o, i, w| y[o] += x[i] * weight[w]);
    y
}

/// The gradients of a convolution's input, weight and bias.
pub fn conv_backward(
    s: ConvShape,
    sizes: Images,
    x: &[f64],
    weight: &[f64],
    dy: &[f64],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; weight.len()], vec![0.0; s.outputs]);
    conv_products(s, sizes, |o, i, w| {
        dx[i] += dy[o] * weight[w];
        dw[w] += dy[o] * x[i];
    });
    let out = sizes.after(s);
    for (i, d) in dy.iter().enumerate() {
        db[i / (out.height * out.width) % s.outputs] += d;
    }
    (dx, dw, db)
}

/// Mean and biased variance of each channel.
pub fn channel_stats(sizes: Images, x: &[f64]) -> Vec<(f64, f64)> {
    let plane = sizes.height * sizes.width;
    let count = (sizes.n * plane) as f64;
    (0..sizes.channels)
        .map(|c| {
            let values =
                || x.iter().enumerate().filter(|(i, _)| i / plane % sizes.channels == c).map(|(_, v)| *v);
            let mean = values().sum::<f64>() / count;
            (mean, values().map(|v| (v - mean) * (v - mean)).sum::<f64>() / count)
        })
        .collect()
}

/// `gamma * (x - mean) / sqrt(var + eps) + beta` for each channel.
pub fn norm(sizes: Images, x: &[f64], stats: &[(f64, f64)], gamma: &[f64], beta: &[f64]) -> Vec<f64> {
    let plane = sizes.height * sizes.width;
    let channel = |i: usize| i / plane % sizes.channels;
    let eps = f64::from(crate::cpu::norm::EPSILON);
    x.iter()
        .enumerate()
        .map(|(i, v)| {
            let c = channel(i);
            gamma[c] * (v - stats[c].0) / (stats[c].1 + eps).sqrt() + beta[c]
        })
        .collect()
}

/// The gradients of a training-mode norm's input, gamma and beta.
pub fn norm_backward(sizes: Images, x: &[f64], gamma: &[f64], dz: &[f64]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let plane = sizes.height * sizes.width;
    let channel = |i: usize| i / plane % sizes.channels;
    let count = (sizes.n * plane) as f64;
    let stats = channel_stats(sizes, x);
    let inv: Vec<f64> =
        stats.iter().map(|s| 1.0 / (s.1 + f64::from(crate::cpu::norm::EPSILON)).sqrt()).collect();
    let hat = |i: usize| (x[i] - stats[channel(i)].0) * inv[channel(i)];
    let (mut dgamma, mut dbeta) = (vec![0.0; sizes.channels], vec![0.0; sizes.channels]);
    for (i, d) in dz.iter().enumerate() {
        dgamma[channel(i)] += d * hat(i);
        dbeta[channel(i)] += d;
    }
    let dx = (0..x.len())
        .map(|i| {
            let c = channel(i);
            gamma[c] * inv[c] * (dz[i] - dbeta[c] / count - hat(i) * dgamma[c] / count)
        })
        .collect();
    (dx, dgamma, dbeta)
}

/// ReLU and 2x2 max pooling: the result, and the place of each maximum (the first of equals).
pub fn relu_pool(sizes: Images, z: &[f64]) -> (Vec<f64>, Vec<usize>) {
    let half = sizes.halved();
    let (mut p, mut places) = (vec![0.0; half.len()], vec![0; half.len()]);
    for n in 0..half.n {
        for c in 0..half.channels {
            for (r, x) in (0..half.height).flat_map(|r| (0..half.width).map(move |x| (r, x))) {
                let four =
                    [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(a, b)| sizes.at(n, c, 2 * r + a, 2 * x + b));
                let best =
                    four.iter().copied().reduce(|a, b| if z[b] > z[a] { b } else { a }).unwrap_or(four[0]);
                p[half.at(n, c, r, x)] = z[best].max(0.0);
                places[half.at(n, c, r, x)] = best;
            }
        }
    }
    (p, places)
}

/// The gradient of `z` from that of the pooled result `p`.
pub fn relu_pool_backward(len: usize, p: &[f64], places: &[usize], dp: &[f64]) -> Vec<f64> {
    let mut dz = vec![0.0; len];
    for ((p, &place), d) in p.iter().zip(places).zip(dp) {
        if *p > 0.0 {
            dz[place] += d;
        }
    }
    dz
}

/// `x · weightᵀ + bias` for `n` samples.
pub fn linear_forward(n: usize, x: &[f64], weight: &[f64], bias: &[f64]) -> Vec<f64> {
    let inputs = x.len() / n;
    (0..n * bias.len())
        .map(|i| {
            let (s, o) = (i / bias.len(), i % bias.len());
            let row = &weight[o * inputs..][..inputs];
            bias[o] + row.iter().zip(&x[s * inputs..][..inputs]).map(|(a, b)| a * b).sum::<f64>()
        })
        .collect()
}

/// The gradients of a linear layer's input, weight and bias.
pub fn linear_backward(n: usize, x: &[f64], weight: &[f64], dy: &[f64]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (inputs, outputs) = (x.len() / n, dy.len() / n);
    let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; weight.len()], vec![0.0; outputs]);
    for s in 0..n {
        for o in 0..outputs {
            let d = dy[s * outputs + o];
            db[o] += d;
            for i in 0..inputs {
                dx[s * inputs + i] += d * weight[o * inputs + i];
                dw[o * inputs + i] += d * x[s * inputs + i];
            }
        }
    }
    (dx, dw, db)
}

/// Mean cross-entropy of the softmax and its gradient.
pub fn softmax_cross_entropy(logits: &[f64], labels: &[u32]) -> (f64, Vec<f64>) {
    let (n, classes) = (labels.len(), logits.len() / labels.len());
    let (mut loss, mut d) = (0.0, Vec::with_capacity(logits.len()));
    for (row, &label) in logits.chunks_exact(classes).zip(labels) {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|v| (v - max).exp()).sum();
        loss += sum.ln() + max - row[label as usize];
        for (i, v) in row.iter().enumerate() {
            let hit = if i == label as usize { 1.0 } else { 0.0 };
            d.push(((v - max).exp() / sum - hit) / n as f64);
        }
    }
    (loss / n as f64, d)
}

/// Cross-entropy of softmax, and whether the first largest value is at the label, summed over the rows.
pub fn cross_entropy_sum(logits: &[f64], labels: &[u32]) -> (f64, u64) {
    let classes = logits.len() / labels.len().max(1);
    let (mut loss, mut correct) = (0.0, 0);
    for (row, &label) in logits.chunks_exact(classes.max(1)).zip(labels) {
        let mut best = 0;
        for (i, v) in row.iter().enumerate() {
            if *v > row[best] {
                best = i;
            }
        }
        let sum: f64 = row.iter().map(|v| (v - row[best]).exp()).sum();
        loss += sum.ln() - (row[label as usize] - row[best]);
        correct += u64::from(best == label as usize);
    }
    (loss, correct)
}

/// GELU by the tanh approximation, and its derivative.
pub fn gelu(x: f64) -> (f64, f64) {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let t = (root * (x + 0.044_715 * x * x * x)).tanh();
    let inner = root * (1.0 + 3.0 * 0.044_715 * x * x);
    (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner)
}

/// A LayerNorm over rows of `gamma.len()` values: the result, the values before gamma and beta, and the factor of each row.
pub fn row_norm(x: &[f64], gamma: &[f64], beta: &[f64]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let cols = gamma.len();
    let (mut y, mut hats, mut inverses) = (Vec::new(), Vec::new(), Vec::new());
    for row in x.chunks_exact(cols) {
        let mean = row.iter().sum::<f64>() / cols as f64;
        let spread = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / cols as f64;
        let inverse = 1.0 / (spread + f64::from(crate::shape::NORM_EPSILON)).sqrt();
        inverses.push(inverse);
        for (i, v) in row.iter().enumerate() {
            let hat = (v - mean) * inverse;
            hats.push(hat);
            y.push(hat * gamma[i] + beta[i]);
        }
    }
    (y, hats, inverses)
}

/// The gradients of a row norm's input, gamma and beta.
pub fn row_norm_backward(
    x: &[f64],
    gamma: &[f64],
    beta: &[f64],
    dy: &[f64],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let cols = gamma.len();
    let (_, hats, inverses) = row_norm(x, gamma, beta);
    let (mut dx, mut dgamma, mut dbeta) = (Vec::new(), vec![0.0; cols], vec![0.0; cols]);
    for ((dy, hat), inverse) in dy.chunks_exact(cols).zip(hats.chunks_exact(cols)).zip(inverses) {
        let mean = |f: &dyn Fn(usize) -> f64| (0..cols).map(f).sum::<f64>() / cols as f64;
        let of_dy = mean(&|i| dy[i] * gamma[i]);
        let of_both = mean(&|i| dy[i] * gamma[i] * hat[i]);
        for i in 0..cols {
            dx.push(inverse * (dy[i] * gamma[i] - of_dy - hat[i] * of_both));
            dgamma[i] += dy[i] * hat[i];
            dbeta[i] += dy[i];
        }
    }
    (dx, dgamma, dbeta)
}

/// Causal attention, `qkv` as `[batch, time, 3, heads, head]`: the result, and with `dout` the gradient of `qkv`.
pub fn attention(s: AttentionShape, qkv: &[f64], dout: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (t, w) = (s.time, s.width());
    let at = |b: usize, i: usize, part: usize, h: usize| ((b * t + i) * 3 + part) * w + h * s.head;
    let (mut out, mut dqkv) = (vec![0.0; s.rows() * w], vec![0.0; qkv.len()]);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let scale = 1.0 / (s.head as f64).sqrt();
    for (b, h, i) in (0..s.batch).flat_map(|b| (0..s.heads).flat_map(move |h| (0..t).map(move |i| (b, h, i))))
    {
        let part = |i, which| &qkv[at(b, i, which, h)..][..s.head];
        let scores: Vec<f64> = (0..=i).map(|j| dot(part(i, 0), part(j, 1)) * scale).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|v| (v - largest).exp()).sum();
        let weights: Vec<f64> = scores.iter().map(|v| (v - largest).exp() / sum).collect();
        let place = (b * t + i) * w + h * s.head;
        for (j, p) in weights.iter().enumerate() {
            for c in 0..s.head {
                out[place + c] += p * part(j, 2)[c];
            }
        }
        if dout.is_empty() {
            continue;
        }
        let dout = &dout[place..place + s.head];
        let delta: f64 = dot(dout, &out[place..place + s.head]);
        for (j, p) in weights.iter().enumerate() {
            let ds = p * (dot(dout, part(j, 2)) - delta) * scale;
            for c in 0..s.head {
                dqkv[at(b, i, 0, h) + c] += ds * part(j, 1)[c];
                dqkv[at(b, j, 1, h) + c] += ds * part(i, 0)[c];
                dqkv[at(b, j, 2, h) + c] += p * dout[c];
            }
        }
    }
    (out, dqkv)
}
