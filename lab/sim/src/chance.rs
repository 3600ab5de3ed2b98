//! Random numbers of a run: a stream for each thing that draws them, so that one that draws more shifts no other.

use crate::clock;
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

/// Who draws.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Draws {
    /// How long a worker computes.
    Compute(u32),
    /// How fast a worker is as a whole.
    Worker(u32),
    /// The latency of a worker's messages.
    Sends(u32),
    /// What a worker is sent, likewise.
    Receives(u32),
    /// When a worker fails.
    Fails(u32),
    /// How long a worker waits before it tries a server again.
    Retries(u32),
    /// How long a shard's entries take to a majority, and its elections.
    Replicates(u32),
    /// When a server fails.
    ServerFails(u32),
}

impl Draws {
    fn stream(self) -> u64 {
        let (kind, index) = match self {
            Self::Compute(i) => (0, i),
            Self::Worker(i) => (1, i),
            Self::Sends(i) => (2, i),
            Self::Receives(i) => (3, i),
            Self::Fails(i) => (4, i),
            Self::Retries(i) => (5, i),
            Self::Replicates(i) => (6, i),
            Self::ServerFails(i) => (7, i),
        };
        (kind << 32) | u64::from(index)
    }
}

/// A stream of random numbers.
pub(crate) struct Chance(ChaCha8Rng);

impl Chance {
    /// One stream of a seed.
    pub fn new(seed: u64, draws: Draws) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(draws.stream());
        Self(rng)
    }

    /// Uniform, from 0 and below 1.
    pub fn uniform(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform among the numbers below `n`, which is 1 or more.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.uniform() * n as f64) as usize).min(n.saturating_sub(1))
    }

    /// Normal with mean 0 and deviation 1 (Box and Muller, 1958).
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Log-normal with this mean; `spread` is the deviation over the mean. The mean itself where there is no spread.
    pub fn log_normal(&mut self, mean: f64, spread: f64) -> f64 {
        if spread <= 0.0 {
            return mean;
        }
        let variance = (1.0 + spread * spread).ln();
        mean * (variance.sqrt() * self.normal() - variance / 2.0).exp()
    }

    /// Exponential with this mean in seconds, as nanoseconds.
    pub fn exponential(&mut self, mean: f64) -> u64 {
        clock::nanos(-mean * (1.0 - self.uniform()).ln())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_normal_has_the_requested_mean_and_spread() {
        let mut chance = Chance::new(3, Draws::Compute(7));
        let drawn: Vec<f64> = (0..200_000).map(|_| chance.log_normal(4.0, 0.5)).collect();
        let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
        let variance = drawn.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / drawn.len() as f64;
        assert!((mean - 4.0).abs() < 0.03, "{mean}");
        assert!((variance.sqrt() - 2.0).abs() < 0.05, "{}", variance.sqrt());
        assert_eq!(chance.log_normal(4.0, 0.0), 4.0);
        let mean = (0..100_000).map(|_| clock::seconds(chance.exponential(2.0))).sum::<f64>() / 1e5;
        assert!((mean - 2.0).abs() < 0.03, "{mean}");
    }

    #[test]
    fn streams_of_a_seed_differ_and_come_again() {
        let first = |seed, draws| Chance::new(seed, draws).uniform();
        assert_eq!(first(1, Draws::Compute(0)), first(1, Draws::Compute(0)));
        assert_ne!(first(1, Draws::Compute(0)), first(2, Draws::Compute(0)));
        assert_ne!(first(1, Draws::Compute(0)), first(1, Draws::Compute(1)));
        assert_ne!(first(1, Draws::Compute(1)), first(1, Draws::Worker(1)));
    }
}
