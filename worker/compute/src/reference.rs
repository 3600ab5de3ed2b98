//! Plain operators in double precision over `[n, channels, height, width]`: slow, obvious, and the oracle for
//! the fast ones.

use crate::shape::ConvShape;

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
    let inv: Vec<f64> = stats.iter().map(|s| 1.0 / (s.1 + f64::from(crate::cpu::norm::EPSILON)).sqrt()).collect();
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

/// ReLU and 2x2 max pooling: the result, and for each result the place of its maximum (the first of equals).
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
