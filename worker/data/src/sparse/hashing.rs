//! The hashing trick: ids of several fields in one space, so that fields can share a table.

use crate::DataError;
use paraft_common::draws::draw;

/// Ids as numbers of `bits`, other ones in each field. (Weinberger, Dasgupta, Langford, Smola, Attenberg, "Feature
/// Hashing for Large Scale Multitask Learning", ICML 2009, without its sign.)
///
/// With 64 bits no two ids of a field meet, and those of two fields do so with a probability of 2^-64. With fewer the
/// table has at most 2^bits rows, and ids share them.
///
/// ```
/// use paraft_data::Hashing;
/// let hashing = Hashing::new(18)?;
/// assert!(hashing.id(0, 42) < 1 << 18);
/// assert_ne!(hashing.id(0, 42), hashing.id(1, 42), "each field is salted");
/// # Ok::<(), paraft_data::DataError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hashing {
    bits: u32,
}

impl Hashing {
    /// Of 1 to 64 bits.
    ///
    /// # Errors
    /// [`DataError::Option`] of `hash_bits`.
    pub fn new(bits: u32) -> Result<Self, DataError> {
        if (1..=64).contains(&bits) {
            return Ok(Self { bits });
        }
        Err(DataError::Option { key: "hash_bits", why: format!("{bits} is not from 1 to 64") })
    }

    /// Of how many bits ids are.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// The id in the common space.
    pub fn id(&self, field: usize, id: u64) -> u64 {
        // `draw` is a permutation for each seed.
        draw(draw(0, field as u64), id) >> (64 - self.bits)
    }
}

#[cfg(test)]
#[path = "hashing_tests.rs"]
mod tests;
