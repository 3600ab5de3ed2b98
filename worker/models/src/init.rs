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
            // 24 bits: every value is exact, and none depends on how a library makes floats.
            let unit = (self.0.next_u32() >> 8) as f32 / (1u32 << 24) as f32;
            *v = (2.0 * unit - 1.0) * bound;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
