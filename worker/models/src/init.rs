//! Initial weights, distributed as PyTorch's `nn.Linear` and `nn.Conv2d` draw theirs.
//!
//! Kaiming-uniform with a = sqrt(5) comes down to U(-1/sqrt(fan_in), 1/sqrt(fan_in)), for the weight and for
//! the bias. The stream is our own (ChaCha8, tensor by tensor), so the values are not PyTorch's for one seed.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Draws tensors one after another.
pub(crate) struct Init(ChaCha8Rng);

impl Init {
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Fills a weight or a bias of a layer whose outputs each see `fan_in` values.
    pub fn uniform(&mut self, fan_in: usize, tensor: &mut [f32]) {
        let bound = 1.0 / (fan_in as f32).sqrt();
        for v in tensor {
            *v = (2.0 * self.unit() - 1.0) * bound;
        }
    }

    /// Fills a tensor from the normal distribution of mean 0 (Box and Muller, 1958).
    pub fn normal(&mut self, deviation: f32, tensor: &mut [f32]) {
        for pair in tensor.chunks_mut(2) {
            // Above 0, or there is no logarithm.
            let (a, b) = (1.0 - f64::from(self.unit()), f64::from(self.unit()));
            let radius = (-2.0 * a.ln()).sqrt() * f64::from(deviation);
            let (sin, cos) = (b * std::f64::consts::TAU).sin_cos();
            for (v, part) in pair.iter_mut().zip([cos, sin]) {
                *v = (radius * part) as f32;
            }
        }
    }

    /// From 0 to 1, without 1. 24 bits: every value is exact, and none depends on how a library makes floats.
    fn unit(&mut self) -> f32 {
        (self.0.next_u32() >> 8) as f32 / (1u32 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_values_have_their_moments() {
        let mut v = vec![0.0; 100_001];
        Init::new(3).normal(0.02, &mut v);
        let n = v.len() as f32;
        let mean = v.iter().sum::<f32>() / n;
        let moment = |p: i32| v.iter().map(|x| (x / 0.02).powi(p)).sum::<f32>() / n;
        // Of the standard normal distribution: 1 and 3; the deviation of the means is 0.0045 and 0.03.
        assert!(mean.abs() < 3e-4 && (moment(2) - 1.0).abs() < 0.02 && (moment(4) - 3.0).abs() < 0.15);
    }

    #[test]
    fn values_fill_the_interval_and_depend_on_the_seed_only() {
        let draw = |seed| {
            let mut v = vec![0.0; 10_000];
            Init::new(seed).uniform(25, &mut v);
            v
        };
        let v = draw(7);
        assert_eq!(v, draw(7));
        assert_ne!(v, draw(8));
        assert!(v.iter().all(|x| x.abs() <= 0.2));
        let mean = v.iter().sum::<f32>() / v.len() as f32;
        let var = v.iter().map(|x| x * x).sum::<f32>() / v.len() as f32;
        // A uniform variable's variance is width² / 12; ten thousand draws are within a few percent.
        assert!(mean.abs() < 0.005 && (var - 0.04 / 3.0).abs() < 0.0005, "mean {mean}, variance {var}");
    }
}
