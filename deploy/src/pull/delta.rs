//! The difference of a tensor from one version to the next, as `weight_v` folders have it: which bytes are other ones, and
//! what they are.
//!
//! ```text
//!  zstd, level 1, of:   count  u32     little-endian, as all
//!                       position u32   × count: of the byte in the tensor, rising
//!                       byte u8        × count: the new bytes
//! ```

use paraft_fleet::failure::Failure;
use paraft_worker::exit;

/// zstd's level: others take more time than they save in bytes.
const LEVEL: i32 = 1;

/// Positions in a difference end here, in bytes.
pub const MOST_BYTES: u64 = u32::MAX as u64;

/// How many bytes differ. The lengths are equal.
pub fn changed(old: &[u8], new: &[u8]) -> usize {
    old.iter().zip(new).filter(|(a, b)| a != b).count()
}

/// The difference from `old` to `new`, which have the same length, at most [`MOST_BYTES`]. `changed` is how many bytes differ.
///
/// # Errors
/// The compressor fails: there is no memory.
pub fn encode(old: &[u8], new: &[u8], changed: usize) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::with_capacity(4 + 5 * changed);
    bytes.extend_from_slice(&(changed as u32).to_le_bytes());
    let differ = || (0u32..).zip(old.iter().zip(new)).filter(|(_, (a, b))| a != b);
    differ().for_each(|(at, _)| bytes.extend_from_slice(&at.to_le_bytes()));
    bytes.extend(differ().map(|(_, (_, b))| *b));
    // Frames that name their length: readers in Python need it.
    zstd::bulk::compress(&bytes, LEVEL)
        .map_err(|e| Failure::new(exit::FAILED, format!("zstd cannot compress {} bytes: {e}", bytes.len())))
}

/// The checksum of a tensor's bytes, as hexadecimal digits.
pub fn checksum(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}
