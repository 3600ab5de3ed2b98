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
    let mut count = 0;
    each(old, new, |_, _| count += 1);
    count
}

/// The difference from `old` to `new`, which have the same length, at most [`MOST_BYTES`]. `changed` is how many bytes differ.
///
/// # Errors
/// The compressor fails: there is no memory.
pub fn encode(old: &[u8], new: &[u8], changed: usize) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::with_capacity(4 + 5 * changed);
    bytes.extend_from_slice(&(changed as u32).to_le_bytes());
    let mut values = Vec::with_capacity(changed);
    each(old, new, |at, byte| {
        bytes.extend_from_slice(&(at as u32).to_le_bytes());
        values.push(byte);
    });
    bytes.append(&mut values);
    // Frames that name their length: readers in Python need it.
    zstd::bulk::compress(&bytes, LEVEL)
        .map_err(|e| Failure::new(exit::FAILED, format!("zstd cannot compress {} bytes: {e}", bytes.len())))
}

/// Gives the place and the new value of each byte that differs. Most words are equal as a rule: one comparison for eight bytes.
fn each(old: &[u8], new: &[u8], mut found: impl FnMut(usize, u8)) {
    let ((words, rest), (new_words, new_rest)) = (old.as_chunks::<8>(), new.as_chunks::<8>());
    let mut some = |from: usize, old: &[u8], new: &[u8]| {
        for (i, (_, byte)) in old.iter().zip(new).enumerate().filter(|(_, (a, b))| a != b) {
            found(from + i, *byte);
        }
    };
    for (i, (a, b)) in words.iter().zip(new_words).enumerate() {
        if u64::from_ne_bytes(*a) != u64::from_ne_bytes(*b) {
            some(8 * i, a, b);
        }
    }
    some(8 * words.len(), rest, new_rest);
}

/// The checksum of a tensor's bytes, as hexadecimal digits.
pub fn checksum(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}
