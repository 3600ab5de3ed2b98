//! Detects writes of a script to its weights: torch's version counter misses writes to `.data`.

use crate::memory;
use pyo3::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Tensors of at most this many bytes are hashed completely each time.
pub const WHOLE_BYTES: usize = 1024;

/// From larger tensors, samples of blocks with about this many bytes in total, which takes some microseconds of a
/// step.
const SAMPLE_BYTES: usize = 32 << 10;
const BLOCK_BYTES: usize = 512;

/// A digest of a sample of each tensor, given by address and bytes. Equal sample numbers hash the same blocks;
/// consecutive numbers cover all blocks in turn. Address 0: no tensor.
#[pyfunction]
pub fn digest(spans: Vec<(usize, usize)>, sample: usize) -> Vec<u64> {
    let every = spans.iter().map(|(_, bytes)| bytes).sum::<usize>().div_ceil(SAMPLE_BYTES).max(1);
    let of = |&(address, bytes): &(usize, usize)| {
        memory::with_bytes(address, bytes, |all| match bytes <= WHOLE_BYTES || every == 1 {
            true => xxh3_64_with_seed(all, 0),
            false => {
                let first = every - 1 - sample % every;
                let blocks = (first * BLOCK_BYTES..bytes).step_by(every * BLOCK_BYTES);
                blocks.fold(0, |h, at| {
                    xxh3_64_with_seed(all.get(at..).map_or(&[], |b| &b[..b.len().min(BLOCK_BYTES)]), h)
                })
            }
        })
    };
    spans.iter().map(|span| of(span).unwrap_or(0)).collect()
}
