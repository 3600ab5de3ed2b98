//! The values of a row before its first update: a pure function of seed, id and position, so any server answers for any id,
//! and a worker, too. Whole numbers and exact steps only, so every host computes the same bits.

use super::hash_id;
use serde::{Deserialize, Serialize};

/// How rows begin.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum RowInit {
    /// All values 0.
    Zeros,
    /// Evenly from `-range` up to `range`.
    Uniform {
        /// 0 or more.
        range: f32,
    },
    /// Close to a normal distribution of mean 0: the sum of twelve uniform numbers, less six, times `std`. So no value is
    /// beyond six times `std`.
    Normal {
        /// The standard deviation, 0 or more.
        std: f32,
    },
}

impl Default for RowInit {
    fn default() -> Self {
        Self::Uniform { range: 0.05 }
    }
}

/// The `i`th number of a row: SplitMix64 (Steele, Lea, Flood 2014), counted from the row's key.
#[inline(always)]
fn draw(key: u64, i: u64) -> u64 {
    hash_id(key.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

impl RowInit {
    pub(super) fn validate(&self) -> Result<(), String> {
        let (name, size) = match self {
            Self::Zeros => return Ok(()),
            Self::Uniform { range } => ("range", *range),
            Self::Normal { std } => ("std", *std),
        };
        let fine = size.is_finite() && size >= 0.0;
        if fine { Ok(()) } else { Err(format!("init.{name} {size} is no finite number from 0")) }
    }

    /// The largest value that a row may have.
    pub(super) fn size(&self) -> f32 {
        match self {
            Self::Zeros => 0.0,
            Self::Uniform { range } => *range,
            Self::Normal { std } => 6.0 * std,
        }
    }

    /// Writes the values of a row.
    pub(super) fn fill(&self, seed: u64, id: u64, values: &mut [f32]) {
        let key = hash_id(hash_id(seed) ^ id);
        match self {
            Self::Zeros => values.fill(0.0),
            Self::Uniform { range } => (0..).zip(values).for_each(|(i, v)| {
                // 24 bits are exact in an f32.
                *v = ((draw(key, i) >> 40) as f32 / (1u32 << 23) as f32 - 1.0) * range;
            }),
            Self::Normal { std } => (0..).zip(values).for_each(|(i, v)| {
                let sixteens = |word: u64| (0..4).map(|k| (word >> (16 * k)) & 0xffff).sum::<u64>();
                let sum: u64 = (0..3).map(|k| sixteens(draw(key, 3 * i + k))).sum();
                // Twelve whole numbers of 16 bits, each half a step below its middle.
                *v = ((sum as f64 + 6.0) / 65_536.0 - 6.0) as f32 * std;
            }),
        }
    }
}
