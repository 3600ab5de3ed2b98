//! The assignment of samples to workers: a new order in every epoch, split into disjoint shares.
//!
//! The arithmetic is that of PyTorch's `torch.utils.data.DistributedSampler`: shuffle all indices, make their
//! number a multiple of `world`, give rank `r` the indices `r, r + world, r + 2 * world, ...`. So all shares are
//! equally long, which BSP needs: a worker with one batch less would leave the others at the barrier.
//!
//! The order depends only on the seed and the epoch, never on rank or world. So workers compute it independently
//! and agree, even after one joined or left. The shuffle is Fisher-Yates from the back with ChaCha8 and our own
//! reduction to a range, so neither the platform nor an update of `rand` changes it (a test pins it).

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Computes each worker's share of the samples, epoch by epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampler {
    /// Number of samples.
    pub len: u32,
    /// Seed of the order.
    pub seed: u64,
    /// Whether to shuffle; otherwise every epoch has the data's order. Default true.
    pub shuffle: bool,
    /// How to make the shares equal if `world` does not divide the samples. False (default): pad from the front of
    /// the epoch's order, so that up to `world - 1` samples are seen twice. True: omit up to `world - 1` samples
    /// from its end (others in the next epoch).
    pub drop_last: bool,
    /// Whether an incomplete last batch is omitted (true) or short (false, default).
    pub drop_last_batch: bool,
}

impl Sampler {
    /// A shuffling sampler that pads and keeps the short last batch.
    ///
    /// # Panics
    /// If `len` exceeds a 32-bit index; a [`crate::Dataset`] is never that long.
    pub fn new(len: usize, seed: u64) -> Self {
        let len = u32::try_from(len).expect("a data set has fewer than 2^32 samples");
        Self { len, seed, shuffle: true, drop_last: false, drop_last_batch: false }
    }

    /// Length of every rank's share.
    pub fn share_len(&self, world: usize) -> usize {
        let (len, world) = (self.len as usize, world.max(1));
        if self.drop_last { len / world } else { len.div_ceil(world) }
    }

    /// Number of batches per rank and epoch.
    pub fn steps(&self, world: usize, batch: usize) -> usize {
        let (share, batch) = (self.share_len(world), batch.max(1));
        if self.drop_last_batch { share / batch } else { share.div_ceil(batch) }
    }

    /// The indices of all samples in the order of `epoch`.
    pub fn order(&self, epoch: u64) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.len).collect();
        if self.shuffle {
            let mut key = [0u8; 32];
            key[..8].copy_from_slice(&self.seed.to_le_bytes());
            key[8..16].copy_from_slice(&epoch.to_le_bytes());
            let mut rng = ChaCha8Rng::from_seed(key);
            for i in (1..self.len).rev() {
                order.swap(i as usize, below(&mut rng, i + 1) as usize);
            }
        }
        order
    }

    /// The indices of one rank for one epoch, [`Self::share_len`] of them.
    ///
    /// # Panics
    /// If `rank` is not below `world`.
    pub fn share(&self, epoch: u64, rank: usize, world: usize) -> Vec<u32> {
        assert!(rank < world, "rank {rank} of {world}");
        let order = self.order(epoch);
        let total = self.share_len(world) * world;
        // `cycle` is the padding: past the end it starts over, as often as a world larger than the data needs.
        order.iter().copied().cycle().take(total).skip(rank).step_by(world).collect()
    }

    /// Number of chunks of `size` samples (0 is read as 1) in an epoch; the last may be short. Chunks omit and pad
    /// nothing: [`Self::drop_last`] concerns shares.
    pub fn chunks(&self, size: usize) -> u64 {
        u64::from(self.len).div_ceil(size.max(1) as u64)
    }

    /// One rank's share of one epoch in batches of `batch` indices (0 is read as 1).
    ///
    /// # Panics
    /// If `rank` is not below `world`.
    pub fn batches(&self, epoch: u64, rank: usize, world: usize, batch: usize) -> Batches {
        let left = self.steps(world, batch);
        Batches { share: self.share(epoch, rank, world), at: 0, batch: batch.max(1), left }
    }
}

/// Chunk `chunk` (from 0) of an epoch's order, in batches of `batch` indices (0 is read as 1); the last may be short.
/// Empty past the end.
pub fn chunk_of(order: &[u32], chunk: u64, size: usize, batch: usize) -> impl Iterator<Item = Vec<u32>> {
    let at = usize::try_from(chunk).ok().and_then(|c| c.checked_mul(size.max(1))).unwrap_or(order.len());
    let rest = order.get(at..).unwrap_or_default();
    rest[..size.max(1).min(rest.len())].chunks(batch.max(1)).map(<[u32]>::to_vec)
}

/// A uniform number below `n` (1 or more), by Lemire's method: multiply, keep the high half, reject the few low
/// halves that would bias the result.
fn below(rng: &mut ChaCha8Rng, n: u32) -> u32 {
    let reject = n.wrapping_neg() % n;
    loop {
        let wide = u64::from(rng.next_u32()) * u64::from(n);
        if wide as u32 >= reject {
            return (wide >> 32) as u32;
        }
    }
}

/// The batches of one rank and epoch, as lists of indices.
#[derive(Clone, Debug)]
pub struct Batches {
    share: Vec<u32>,
    at: usize,
    batch: usize,
    left: usize,
}

impl Iterator for Batches {
    type Item = Vec<u32>;

    fn next(&mut self) -> Option<Vec<u32>> {
        self.left = self.left.checked_sub(1)?;
        let end = (self.at + self.batch).min(self.share.len());
        let indices = self.share[self.at..end].to_vec();
        self.at = end;
        Some(indices)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Batches {}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
