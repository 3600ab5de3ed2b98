//! Whether a script has written to its weights: torch's own count doesn't see what goes to `.data`.

use crate::memory;
use pyo3::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A tensor of so many bytes, or fewer, is looked at whole each time.
pub const WHOLE_BYTES: usize = 1024;

/// Of larger ones every so many blocks, such that it is about this much of all together: some microseconds of a step.
const SAMPLE_BYTES: usize = 32 << 10;
const BLOCK_BYTES: usize = 512;

/// Of each tensor, by address and bytes, a digest of a sample. Samples of one number are of the same blocks, and following ones of
/// others, until all were in one. An address of 0: there is nothing to be looked at.
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
