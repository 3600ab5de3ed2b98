//! The same test cases on every device: each operator, forward and backward, against its plain version in double
//! precision.
//!
//! `paraft doctor --selftest` runs them on a user's machine; the tests run them on the CPU and on test doubles of
//! CUDA's libraries.
//!
//! The error is the largest difference divided by the largest value of the plain result; the tolerance depends on
//! the device's numbers ([`tolerance`]). Gradients are NaN before an operator writes them, which reveals skipped
//! values. The seed determines the inputs.

mod bench;
mod convolutions;

pub use bench::Bench;

use crate::{
    cuda::Precision,
    error::Result,
    reference as plain,
    shape::{
        Activation, AttentionShape, EmbeddingAt, EmbeddingShape, LinearAt, LinearShape, NormAt, NormShape,
    },
};

/// The result of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// The operator and its result's name.
    pub what: String,
    /// Largest difference over largest value.
    pub error: f64,
    /// The tolerance.
    pub allowed: f64,
}

impl Case {
    /// Whether the error is within the tolerance; false for NaN.
    pub fn holds(&self) -> bool {
        self.error <= self.allowed
    }
}

/// The tolerance for a device's numbers, relative to the largest value: some thousand roundings in f32; a few in
/// TF32, bf16 and f16, whose significands have 11, 8 and 11 bits.
pub fn tolerance(precision: Option<Precision>) -> f64 {
    match precision {
        None | Some(Precision::F32) => 2e-5,
        Some(Precision::Tf32) => 3e-3,
        Some(Precision::Bf16) => 3e-2,
        Some(Precision::F16) => 4e-3,
    }
}

struct Suite<'a, D: Bench> {
    d: &'a mut D,
    state: u64,
    allowed: f64,
    cases: Vec<Case>,
}

fn wide(v: &[f32]) -> Vec<f64> {
    v.iter().copied().map(f64::from).collect()
}

impl<D: Bench> Suite<'_, D> {
    /// Values in -1..1.
    fn noise(&mut self, len: usize) -> Vec<f32> {
        let mut next = || {
            self.state =
                self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((self.state >> 40) as f32) / (1u32 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    fn ids(&mut self, len: usize, below: usize) -> Vec<u32> {
        self.noise(len)
            .iter()
            .map(|v| (((v + 1.0) / 2.0 * below as f32) as u32).min(below as u32 - 1))
            .collect()
    }

    fn values(&mut self, of: &[f32]) -> Result<D::Values> {
        let mut to = D::Values::default();
        self.d.load_values(of, &mut to)?;
        Ok(to)
    }

    fn check(&mut self, what: String, got: &[f32], want: &[f64]) {
        let largest = want.iter().fold(1e-3f64, |m, v| m.max(v.abs()));
        let apart = |(g, w): (&f32, &f64)| (f64::from(*g) - w).abs();
        // Not `max`, which would lose a NaN.
        let error = got.iter().zip(want).map(apart).fold(0.0, |m, v| if v > m || v.is_nan() { v } else { m });
        let error = if got.len() == want.len() { error / largest } else { f64::INFINITY };
        self.cases.push(Case { what, error, allowed: self.allowed });
    }

    /// For values behind a maximum: in 16 bits two values may become equal, and another one is picked. Of `n`
    /// values, about `n` times the tolerance differ, each by its full size. So the error is relative to the whole
    /// vector's length, and its square is proportional to the tolerance. In f32 the error is that of several
    /// consecutive operators.
    fn check_behind_maxima(&mut self, what: String, got: &[f32], want: &[f64]) {
        let length = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
        let apart = length(&mut got.iter().zip(want).map(|(g, w)| f64::from(*g) - w));
        let error = apart / length(&mut want.iter().copied()).max(1e-3);
        let error = if got.len() == want.len() { error } else { f64::INFINITY };
        let allowed = if self.allowed < 1e-3 { 10.0 * self.allowed } else { 2.0 * self.allowed.sqrt() };
        self.cases.push(Case { what, error, allowed });
    }

    fn check_values(&mut self, what: String, got: &D::Values, want: &[f64]) -> Result {
        let got = self.d.read(got)?;
        self.check(what, &got, want);
        Ok(())
    }

    fn linear(&mut self, n: usize, inputs: usize, outputs: usize, bias: bool) -> Result {
        let shape = LinearShape { n, inputs, outputs };
        let name = format!("linear [{n}, {inputs}] to {outputs}{}", if bias { "" } else { " without bias" });
        // An odd offset: tensors may start anywhere in the flat vector.
        let weight = 3;
        let len = weight + shape.weight_len();
        let at = LinearAt { weight, bias: bias.then_some(len) };
        let p = self.noise(len + outputs);
        let held = self.d.hold(&p)?;
        let (x, dy) = (self.noise(n * inputs), self.noise(n * outputs));
        let (xv, dyv) = (self.values(&x)?, self.values(&dy)?);
        let (w, b) = (wide(&p[weight..len]), if bias { wide(&p[len..]) } else { vec![0.0; outputs] });
        let z = if n == 0 { Vec::new() } else { plain::linear_forward(n, &wide(&x), &w, &b) };
        for (activation, f) in [
            (Activation::None, (|v| v) as fn(f64) -> f64),
            (Activation::Relu, |v| v.max(0.0)),
            (Activation::Gelu, |v| plain::gelu(v).0),
        ] {
            let (mut y, mut before) = (D::Values::default(), D::Values::default());
            self.d.linear(shape, &xv, D::params(&held), at, activation, &mut y, Some(&mut before))?;
            let want: Vec<f64> = z.iter().copied().map(f).collect();
            self.check_values(format!("{name}, {activation:?}"), &y, &want)?;
        }
        if n == 0 {
            return Ok(());
        }
        let (dx, dw, db) = plain::linear_backward(n, &wide(&x), &w, &wide(&dy));
        let mut gradient = self.d.poisoned(p.len())?;
        self.d.linear_backward_weight(shape, &xv, &dyv, at, D::grads(&mut gradient))?;
        let got = self.d.read_grads(&gradient)?;
        self.check(format!("{name}, gradient of the weight"), &got[weight..len], &dw);
        if bias {
            self.check(format!("{name}, gradient of the bias"), &got[len..], &db);
        }
        let mut dxv = D::Values::default();
        self.d.linear_backward_input(shape, &dyv, D::params(&held), at, &mut dxv)?;
        self.check_values(format!("{name}, gradient of the input"), &dxv, &dx)
    }

    fn activations(&mut self, len: usize) -> Result {
        let (saved, dy) = (self.noise(len), self.noise(len));
        let relu: fn(f64) -> f64 = |v| if v > 0.0 { 1.0 } else { 0.0 };
        for (activation, f) in [(Activation::Relu, relu), (Activation::Gelu, |v| plain::gelu(v).1)] {
            let (savedv, mut dyv) = (self.values(&saved)?, self.values(&dy)?);
            self.d.activation_backward(activation, &savedv, &mut dyv)?;
            let want: Vec<f64> = saved.iter().zip(&dy).map(|(s, d)| f64::from(*d) * f((*s).into())).collect();
            self.check_values(format!("{activation:?} backward, {len} values"), &dyv, &want)?;
        }
        let (a, b) = (self.noise(len), self.noise(len));
        let (av, bv) = (self.values(&a)?, self.values(&b)?);
        let mut sum = D::Values::default();
        self.d.add(&av, &bv, &mut sum)?;
        let want: Vec<f64> = a.iter().zip(&b).map(|(a, b)| f64::from(*a) + f64::from(*b)).collect();
        self.check_values(format!("add, {len} values"), &sum, &want)
    }

    fn losses(&mut self, rows: usize, classes: usize) -> Result {
        let name = format!("cross-entropy [{rows}, {classes}]");
        let logits: Vec<f32> = self.noise(rows * classes).iter().map(|v| v * 8.0).collect();
        let labels = self.ids(rows, classes);
        let mut ids = D::Ids::default();
        self.d.load_ids(&labels, &mut ids)?;
        let mut v = self.values(&logits)?;
        // The device's own rounded input: a logit's rounding is not the operator's error.
        let given = wide(&self.d.read(&v)?);
        self.d.cross_entropy_sum(rows, classes, &v, &ids)?;
        self.d.cross_entropy_sum(rows, classes, &v, &ids)?;
        let sums = self.d.sums()?;
        let (loss, correct) = plain::cross_entropy_sum(&given, &labels);
        self.check(format!("{name}, sums of two parts"), &[sums.loss as f32], &[2.0 * loss]);
        self.check(format!("{name}, hits"), &[sums.correct as f32], &[2.0 * correct as f64]);
        let (loss, d) = plain::softmax_cross_entropy(&given, &labels);
        self.d.softmax_cross_entropy(rows, classes, &mut v, &ids)?;
        let got = self.d.loss()?;
        self.check(format!("{name}, loss"), &[got], &[loss]);
        self.check_values(format!("{name}, gradient"), &v, &d)?;

        let (y, target) = (self.noise(rows * classes), self.noise(rows * classes));
        let (yv, tv, mut dv) = (self.values(&y)?, self.values(&target)?, D::Values::default());
        let (y, t) = (wide(&self.d.read(&yv)?), wide(&self.d.read(&tv)?));
        let n = y.len() as f64;
        let apart: Vec<f64> = y.iter().zip(&t).map(|(y, t)| y - t).collect();
        let squares: f64 = apart.iter().map(|v| v * v).sum();
        self.d.mse(&yv, &tv, &mut dv)?;
        let got = self.d.loss()?;
        self.check(format!("squared error, {n} values, loss"), &[got], &[squares / n]);
        let want: Vec<f64> = apart.iter().map(|v| v * 2.0 / n).collect();
        self.check_values(format!("squared error, {n} values, gradient"), &dv, &want)?;
        self.d.squared_difference(&yv, &tv)?;
        let sums = self.d.sums()?;
        self.check(format!("squared error, {n} values, sum"), &[sums.loss as f32], &[squares]);
        Ok(())
    }

    /// A layer without bias and the cross-entropy over it, like the end of a language model: the device chooses the
    /// logits' layout.
    fn logits(&mut self, n: usize, inputs: usize, classes: usize) -> Result {
        let name = format!("logits [{n}, {inputs}] to {classes}");
        let (shape, at) = (LinearShape { n, inputs, outputs: classes }, LinearAt { weight: 8, bias: None });
        let p: Vec<f32> = self.noise(8 + shape.weight_len());
        let held = self.d.hold(&p)?;
        let (x, labels) = (self.noise(n * inputs), self.ids(n, classes));
        let (xv, mut ids, mut v) = (self.values(&x)?, D::Ids::default(), D::Values::default());
        self.d.load_ids(&labels, &mut ids)?;
        let w = wide(&p[8..]);
        self.d.linear(shape, &xv, D::params(&held), at, Activation::None, &mut v, None)?;
        let want = plain::linear_forward(n, &wide(&x), &w, &vec![0.0; classes]);
        self.check_values(name.clone(), &v, &want)?;
        let given = wide(&self.d.read(&v)?);
        self.d.cross_entropy_sum(n, classes, &v, &ids)?;
        let sums = self.d.sums()?;
        let (loss, correct) = plain::cross_entropy_sum(&given, &labels);
        self.check(format!("{name}, sum"), &[sums.loss as f32], &[loss]);
        self.check(format!("{name}, hits"), &[sums.correct as f32], &[correct as f64]);
        let (loss, d) = plain::softmax_cross_entropy(&given, &labels);
        self.d.softmax_cross_entropy(n, classes, &mut v, &ids)?;
        let got = self.d.loss()?;
        self.check(format!("{name}, loss"), &[got], &[loss]);
        self.check_values(format!("{name}, gradient"), &v, &d)?;
        let d = wide(&self.d.read(&v)?);
        let (dx, dw, _) = plain::linear_backward(n, &wide(&x), &w, &d);
        let mut gradient = self.d.poisoned(p.len())?;
        self.d.linear_backward_weight(shape, &xv, &v, at, D::grads(&mut gradient))?;
        let got = self.d.read_grads(&gradient)?;
        self.check(format!("{name}, gradient of the weight"), &got[8..], &dw);
        let mut dxv = D::Values::default();
        self.d.linear_backward_input(shape, &v, D::params(&held), at, &mut dxv)?;
        self.check_values(format!("{name}, gradient of the input"), &dxv, &dx)
    }

    fn norms(&mut self, rows: usize, cols: usize) -> Result {
        let shape = NormShape { rows, cols };
        let p: Vec<f32> = self.noise(2 * cols + 1).iter().map(|v| v + 0.5).collect();
        let held = self.d.hold(&p)?;
        let (gamma, beta) = (wide(&p[1..=cols]), wide(&p[cols + 1..]));
        let (x, other, dy) = (self.noise(rows * cols), self.noise(rows * cols), self.noise(rows * cols));
        let (at, name) = (NormAt { gamma: 1 }, format!("LayerNorm [{rows}, {cols}]"));
        let (xv, ov) = (self.values(&x)?, self.values(&other)?);
        let (mut sum, mut y) = (D::Values::default(), D::Values::default());
        let mut stats = D::Floats::default();
        self.d.norm(shape, &xv, None, D::params(&held), at, &mut y, &mut stats)?;
        self.check_values(name.clone(), &y, &plain::row_norm(&wide(&x), &gamma, &beta).0)?;
        let add = Some((&ov, &mut sum));
        self.d.norm(shape, &xv, add, D::params(&held), at, &mut y, &mut stats)?;
        let both: Vec<f64> = x.iter().zip(&other).map(|(a, b)| f64::from(*a) + f64::from(*b)).collect();
        self.check_values(format!("{name}, of a sum"), &y, &plain::row_norm(&both, &gamma, &beta).0)?;
        self.check_values(format!("{name}, the sum"), &sum, &both)?;
        let (want, dgamma, dbeta) = plain::row_norm_backward(&both, &gamma, &beta, &wide(&dy));
        let (dyv, mut dx) = (self.values(&dy)?, D::Values::default());
        let mut gradient = self.d.poisoned(p.len())?;
        let (params, grads) = (D::params(&held), D::grads(&mut gradient));
        self.d.norm_backward(shape, &dyv, &sum, &stats, params, at, Some(&ov), &mut dx, grads)?;
        let want: Vec<f64> = want.iter().zip(&other).map(|(a, b)| a + f64::from(*b)).collect();
        self.check_values(format!("{name}, gradient of the input and another"), &dx, &want)?;
        let got = self.d.read_grads(&gradient)?;
        self.check(format!("{name}, gradient of gamma"), &got[1..=cols], &dgamma);
        self.check(format!("{name}, gradient of beta"), &got[cols + 1..], &dbeta);
        Ok(())
    }

    fn attention(&mut self, s: AttentionShape) -> Result {
        let name = format!("attention, {} x {} places, {} heads of {}", s.batch, s.time, s.heads, s.head);
        let (qkv, dout) = (self.noise(3 * s.rows() * s.width()), self.noise(s.rows() * s.width()));
        let (qkv_v, dout_v) = (self.values(&qkv)?, self.values(&dout)?);
        let (mut out, mut stats, mut dqkv) =
            (D::Values::default(), D::Floats::default(), D::Values::default());
        self.d.attention(s, &qkv_v, &mut out, &mut stats)?;
        let (want, dwant) = plain::attention(s, &wide(&qkv), &wide(&dout));
        self.check_values(name.clone(), &out, &want)?;
        self.d.attention_backward(s, &qkv_v, &out, &stats, &dout_v, &mut dqkv)?;
        self.check_values(format!("{name}, gradient"), &dqkv, &dwant)
    }

    fn embedding(&mut self, s: EmbeddingShape) -> Result {
        let rows = s.batch * s.time;
        let name = format!("embedding of {rows} places, {} of {} tokens", s.cols, s.vocab);
        let p = self.noise((s.vocab + s.context) * s.cols);
        let at = EmbeddingAt { tokens: 0, positions: s.vocab * s.cols };
        let held = self.d.hold(&p)?;
        let tokens = self.ids(rows, s.vocab);
        let mut ids = D::Ids::default();
        self.d.load_ids(&tokens, &mut ids)?;
        let mut y = D::Values::default();
        self.d.embedding(s, &ids, D::params(&held), at, &mut y)?;
        let dy = self.noise(rows * s.cols);
        let (mut want, mut dwant) = (Vec::new(), vec![0.0f64; p.len()]);
        // A tied head's gradient is already there.
        let before = self.noise(p.len());
        for (i, &token) in tokens.iter().enumerate() {
            for c in 0..s.cols {
                let (a, b) = (token as usize * s.cols + c, at.positions + i % s.time * s.cols + c);
                want.push(f64::from(p[a]) + f64::from(p[b]));
                dwant[a] += f64::from(dy[i * s.cols + c]);
                dwant[b] += f64::from(dy[i * s.cols + c]);
            }
        }
        self.check_values(name.clone(), &y, &want)?;
        let mut gradient = self.d.poisoned(p.len())?;
        // The table's gradient as a product would leave it: x of [1, 1] is 1.
        let one = self.values(&[1.0])?;
        let head = self.values(&before[..s.vocab * s.cols])?;
        let given = wide(&self.d.read(&head)?);
        let shape = LinearShape { n: 1, inputs: 1, outputs: s.vocab * s.cols };
        let place = LinearAt { weight: 0, bias: None };
        self.d.linear_backward_weight(shape, &one, &head, place, D::grads(&mut gradient))?;
        dwant.iter_mut().zip(&given).for_each(|(d, v)| *d += v);
        let dyv = self.values(&dy)?;
        self.d.order_tokens(s, &mut ids)?;
        self.d.embedding_backward(s, &ids, &dyv, at, D::grads(&mut gradient))?;
        let got = self.d.read_grads(&gradient)?;
        self.check(format!("{name}, gradient of the tables"), &got, &dwant);
        Ok(())
    }
}

/// Runs every case. An error means that the device cannot do a request; a wrong result is a [`Case`].
pub fn operators<D: Bench>(device: &mut D, precision: Option<Precision>, seed: u64) -> Result<Vec<Case>> {
    let allowed = tolerance(precision);
    let mut s = Suite { d: device, state: seed, allowed, cases: Vec::new() };
    for (n, inputs, outputs) in [(0, 3, 2), (1, 1, 1), (7, 33, 5), (64, 100, 10), (3, 5, 130), (130, 64, 257)]
    {
        s.linear(n, inputs, outputs, true)?;
        s.linear(n, inputs, outputs, false)?;
    }
    for len in [1, 255, 4097] {
        s.activations(len)?;
    }
    for (rows, classes) in [(1, 2), (6, 5), (33, 10), (3, 1025), (2, 9001)] {
        s.losses(rows, classes)?;
    }
    for (n, inputs, classes) in [(5, 16, 1024), (3, 24, 1025), (130, 16, 1031)] {
        s.logits(n, inputs, classes)?;
    }
    for (rows, cols) in [(1, 2), (3, 5), (70, 64), (9, 1025)] {
        s.norms(rows, cols)?;
    }
    for (batch, time, heads, head) in
        [(1, 1, 1, 16), (2, 37, 3, 16), (1, 64, 2, 32), (1, 70, 1, 64), (1, 33, 2, 128)]
    {
        s.attention(AttentionShape { batch, time, heads, head })?;
    }
    for (batch, time, cols, vocab, context) in [(1, 1, 1, 1, 1), (3, 7, 33, 11, 9), (2, 20, 300, 50, 20)] {
        s.embedding(EmbeddingShape { batch, time, cols, vocab, context })?;
    }
    for (n, side, channels) in [(2, 8, [3, 5]), (9, 12, [16, 32]), (33, 4, [2, 3])] {
        s.convolutions(n, side, channels)?;
    }
    // More rows than one partial sum has. Last, because other inputs could place the convolutions' values at a
    // ReLU's or pooling's boundary, where narrow precisions round to the other side.
    s.norms(270, 40)?;
    Ok(s.cases)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cpu, CpuDevice, Threads};

    #[test]
    fn cpu_meets_all_cases_with_each_isa_on_one_and_three_threads() {
        for cpu in Cpu::every() {
            for (seed, count) in [(1, 1), (2, 3)] {
                let mut device = CpuDevice::with(Threads::new(cpu, count).expect("starts"));
                let cases = operators(&mut device, None, seed).expect("the CPU can do everything");
                assert!(cases.len() > 150, "{} cases", cases.len());
                let wrong: Vec<&Case> = cases.iter().filter(|c| !c.holds()).collect();
                assert!(wrong.is_empty(), "{:?}, {count} threads: {wrong:#?}", cpu.isa());
            }
        }
    }
}
