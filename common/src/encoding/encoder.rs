//! The worker's side of an encoding: its state for a bucket between pushes.
//!
//! ```text
//!  p = gradient + residual        send C(p)        residual = p - decoded(C(p))
//! ```
//!
//! If an encoding leaves out most of a gradient ([`Encoding::feeds_back`]), the rest is the *residual*,
//! which a later push sends (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014;
//! Karimireddy et al., ICML 2019). All sent values plus the residual equal all computed gradients, up
//! to the rounding of the two sums.
//!
//! For powersgd it also keeps the factor Q of each matrix as the warm start of the next push. One power
//! iteration per push then suffices (Vogels et al., 2019, section 3).
//!
//! This state is not replicated: it is lost with its worker. docs/consistency.md describes the cost.

use super::{
    BadPayload, Encoding, Rank, Values,
    low_rank::{self, Stretch},
    sparse,
};
use crate::{
    codec::put_f32_le,
    draws::{between, draw},
    id::Step,
    payload::Payload,
    simd::wide,
};
use bytes::Bytes;

/// Encodes the pushes of one bucket.
#[derive(Clone, Debug)]
pub struct Encoder {
    encoding: Encoding,
    /// The seed of the random factors.
    seed: u64,
    /// Values of the bucket.
    len: usize,
    /// The unsent rest, if the encoding feeds back; as long as the bucket after the first push.
    residual: Option<Vec<f32>>,
    stretches: Vec<Stretch>,
    /// The factor Q of each stretch, column by column; empty before its first push, and for a stretch
    /// that is no matrix.
    warm: Vec<Vec<f32>>,
    /// Scratch memory.
    order: Vec<u32>,
    factor: Vec<f32>,
}

impl Encoder {
    /// An encoder for a bucket of `len` values. `stretches` are its matrices for powersgd: together
    /// `len` values, or none. Each worker and bucket should have its own `seed`.
    ///
    /// # Panics
    ///
    /// If the lengths of the stretches do not add up to the bucket.
    pub fn new(encoding: Encoding, len: usize, stretches: Vec<Stretch>, seed: u64) -> Self {
        let stretches = match (stretches.is_empty(), len) {
            (true, 1..) => vec![Stretch::Plain(len)],
            _ => stretches,
        };
        let values: usize = stretches.iter().map(|s| s.values()).sum();
        assert_eq!(values, len, "a bucket's stretches are the whole bucket");
        let warm = vec![Vec::new(); stretches.len()];
        Self {
            encoding,
            seed,
            len,
            residual: encoding.feeds_back().then(Vec::new),
            stretches,
            warm,
            order: Vec::new(),
            factor: Vec::new(),
        }
    }

    /// Its encoding.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Bytes of each push.
    pub fn encoded_len(&self) -> usize {
        match self.encoding {
            Encoding::PowerSgd(rank) => self.stretches.iter().map(|s| s.bytes(rank)).sum(),
            encoding => encoding.encoded_len(self.len),
        }
    }

    /// The residual; empty before the first push, and without error feedback.
    pub fn residual(&self) -> &[f32] {
        self.residual.as_deref().unwrap_or_default()
    }

    /// Clears the state, as for a worker that restarts.
    pub fn forget(&mut self) {
        if let Some(residual) = &mut self.residual {
            residual.clear();
        }
        self.warm.iter_mut().for_each(Vec::clear);
    }

    /// Appends the push of a step to `out`: [`Self::encoded_len`] bytes.
    ///
    /// # Panics
    ///
    /// If `gradient` is not as long as the bucket.
    pub fn encode(&mut self, step: Step, gradient: &[f32], out: &mut Vec<u8>) {
        assert_eq!(gradient.len(), self.len, "gradient and bucket differ in length");
        let Some(mut residual) = self.residual.take() else {
            return self.write(step, gradient, out);
        };
        residual.resize(self.len, 0.0);
        wide(
            #[inline(always)]
            || residual.iter_mut().zip(gradient).for_each(|(e, g)| *e += g),
        );
        let from = out.len();
        self.write(step, &residual, out);
        // Decode as the servers do. The payload borrows the bytes for this.
        let sent = Bytes::from(std::mem::take(out));
        let subtracted = subtract(&sent.slice(from..).into(), self.encoding, &mut residual);
        *out = Vec::from(sent);
        subtracted.expect("what was written can be read");
        self.residual = Some(residual);
    }

    fn write(&mut self, step: Step, values: &[f32], out: &mut Vec<u8>) {
        match self.encoding {
            Encoding::TopK(kept) => sparse::put_largest(values, kept.of(self.len), &mut self.order, out),
            Encoding::PowerSgd(rank) => self.write_stretches(rank, step, values, out),
            encoding => encoding.encode(values, out),
        }
    }

    fn write_stretches(&mut self, rank: Rank, step: Step, values: &[f32], out: &mut Vec<u8>) {
        let mut rest = values;
        for (i, (stretch, warm)) in self.stretches.iter().zip(&mut self.warm).enumerate() {
            let (now, later) = rest.split_at(stretch.values());
            rest = later;
            low_rank::put_head(*stretch, out);
            match *stretch {
                Stretch::Plain(_) => put_f32_le(now, out),
                Stretch::Matrix { rows, columns } => {
                    let seed = draw(self.seed, (step.0 << 32) + i as u64);
                    iterate(now, (rows, columns), rank.columns(), seed, (&mut self.factor, warm));
                    put_f32_le(&self.factor, out);
                    put_f32_le(warm, out);
                    begin(warm, columns, seed);
                }
            }
        }
    }
}

fn subtract(sent: &Payload, encoding: Encoding, from: &mut [f32]) -> Result<(), BadPayload> {
    let (values, why) = (from.len(), "it is too short");
    let short = |_| BadPayload::Form { encoding, values, why };
    Values::new(sent, encoding, values)?.subtract_from(from).map_err(short)
}

/// One power iteration: P = M Q with orthonormal columns, Q = Mᵀ P. `q` is that of the last push, or
/// empty.
fn iterate(
    m: &[f32],
    (rows, columns): (usize, usize),
    rank: usize,
    seed: u64,
    (p, q): (&mut Vec<f32>, &mut Vec<f32>),
) {
    if q.is_empty() {
        q.resize(rank * columns, 0.0);
        begin(q, columns, seed);
    }
    p.clear();
    for q in q.chunks(columns) {
        p.extend(m.chunks(columns).map(|row| {
            wide(
                #[inline(always)]
                || dot(row, q),
            ) as f32
        }));
    }
    orthonormal(p, rows);
    q.fill(0.0);
    for (q, p) in q.chunks_mut(columns).zip(p.chunks(rows)) {
        for (row, p) in m.chunks(columns).zip(p) {
            wide(
                #[inline(always)]
                || q.iter_mut().zip(row).for_each(|(q, m)| *q += p * m),
            );
        }
    }
}

/// Replaces columns of zeros by random ones: an iteration would keep them at zero.
fn begin(q: &mut [f32], columns: usize, seed: u64) {
    for (i, column) in (0u64..).zip(q.chunks_mut(columns)) {
        if column.iter().all(|v| *v == 0.0) {
            let seed = draw(seed, i);
            (0u64..).zip(column).for_each(|(k, v)| *v = between(seed, k));
        }
    }
}

/// Gram-Schmidt, each column twice ("twice is enough": the second pass removes the rounding errors of
/// the first). A matrix of a lower rank gives columns of rounding noise, which are orthogonal to the
/// others and harmless. Values that are not finite stay so, since 0 times them is NaN.
fn orthonormal(p: &mut [f32], rows: usize) {
    for i in 0..p.len() / rows {
        let (before, rest) = p.split_at_mut(i * rows);
        let column = &mut rest[..rows];
        for _ in 0..2 {
            for other in before.chunks(rows) {
                let along = dot(column, other);
                column
                    .iter_mut()
                    .zip(other)
                    .for_each(|(c, o)| *c = (f64::from(*c) - along * f64::from(*o)) as f32);
            }
        }
        let length = dot(column, column).sqrt();
        let scale = if length > 0.0 { 1.0 / length } else { 0.0 };
        column.iter_mut().for_each(|c| *c = (f64::from(*c) * scale) as f32);
    }
}

/// Eight running sums of doubles: a product of two f32 is exact in a double.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let (a8, a_rest) = a.as_chunks::<8>();
    let (b8, b_rest) = b.as_chunks::<8>();
    let mut sums = [0f64; 8];
    for (a, b) in a8.iter().zip(b8) {
        for i in 0..8 {
            sums[i] += f64::from(a[i]) * f64::from(b[i]);
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a warm start, one power iteration per push converges to the best approximation of a
    /// constant matrix; cold starts keep the error of one iteration. (Vogels et al., 2019, 4.2.)
    #[test]
    fn a_warm_start_comes_nearer_with_every_push() {
        let (rows, columns) = (30, 50);
        // Slowly decaying singular values.
        let m: Vec<f32> = (0..rows * columns).map(|i| between(1, i as u64)).collect();
        let (mut p, mut q, mut off) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..30 {
            iterate(&m, (rows, columns), 4, 3, (&mut p, &mut q));
            let back = |i: usize| -> f32 {
                p.chunks(rows).zip(q.chunks(columns)).map(|(p, q)| p[i / columns] * q[i % columns]).sum()
            };
            off.push((0..m.len()).map(|i| f64::from(m[i] - back(i)).powi(2)).sum::<f64>());
        }
        assert!(off.windows(2).all(|w| w[1] <= w[0] * (1.0 + 1e-6)), "{off:?}");
        assert!(off[29] < off[0] * 0.9, "{off:?}");
    }
}
