//! Initial weights, distributed like those of PyTorch's `nn.Linear` and `nn.Conv2d`.
//!
//! Kaiming-uniform with a = sqrt(5) is U(-1/sqrt(fan_in), 1/sqrt(fan_in)), for the weight and the bias. The random
//! stream is our own (ChaCha8, tensor by tensor), so the values differ from PyTorch's for the same seed.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::thread;

/// The minimum number of values per thread; even, because normal values come in pairs.
const PART: usize = 1 << 20;

/// Draws tensors one after another.
pub(crate) struct Init(ChaCha8Rng);

impl Init {
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Fills a weight or bias of a layer with `fan_in` inputs per output.
    pub fn uniform(&mut self, fan_in: usize, tensor: &mut [f32]) {
        let bound = 1.0 / (fan_in as f32).sqrt();
        self.draw(tensor, |stream, part| {
            for v in part {
                *v = (2.0 * unit(stream) - 1.0) * bound;
            }
        });
    }

    /// Fills a tensor from the normal distribution of mean 0 (Box and Muller, 1958).
    pub fn normal(&mut self, deviation: f32, tensor: &mut [f32]) {
        self.draw(tensor, |stream, part| {
            for pair in part.chunks_mut(2) {
                // Above 0, because of the logarithm.
                let (a, b) = (1.0 - f64::from(unit(stream)), f64::from(unit(stream)));
                let radius = (-2.0 * a.ln()).sqrt() * f64::from(deviation);
                let (sin, cos) = (b * std::f64::consts::TAU).sin_cos();
                for (v, part) in pair.iter_mut().zip([cos, sin]) {
                    *v = (radius * part) as f32;
                }
            }
        });
    }

    /// Each value, or pair, consumes the same number of random numbers. So threads that start at their own
    /// positions draw the values of one thread.
    fn draw(&mut self, tensor: &mut [f32], fill: impl Fn(&mut ChaCha8Rng, &mut [f32]) + Sync) {
        let threads = thread::available_parallelism().map_or(1, usize::from).min(tensor.len() / PART);
        if threads < 2 {
            return fill(&mut self.0, tensor);
        }
        let each = tensor.len().div_ceil(threads).next_multiple_of(2);
        let (begin, fill) = (self.0.get_word_pos(), &fill);
        self.0 = thread::scope(|scope| {
            let mut parts: Vec<_> = tensor
                .chunks_mut(each)
                .enumerate()
                .map(|(i, part)| {
                    let mut stream = self.0.clone();
                    stream.set_word_pos(begin + (i * each) as u128);
                    scope.spawn(move || {
                        fill(&mut stream, part);
                        stream
                    })
                })
                .collect();
            let last = parts.pop().map(|last| last.join());
            match last {
                Some(Ok(stream)) => stream,
                Some(Err(panic)) => std::panic::resume_unwind(panic),
                None => self.0.clone(),
            }
        });
    }
}

/// From 0 to 1, without 1. With 24 bits every value is exact, independent of a library's float conversion.
fn unit(stream: &mut ChaCha8Rng) -> f32 {
    (stream.next_u32() >> 8) as f32 / (1u32 << 24) as f32
}

#[cfg(test)]
#[path = "init_tests.rs"]
mod tests;
