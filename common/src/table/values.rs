//! The form of a row's weights in memory. A narrow weight is rounded after each update, up or down by chance in proportion
//! to the distance (Gupta, Agrawal, Gopalakrishnan, Narayanan 2015, "Deep Learning with Limited Numerical Precision"), so
//! many updates that are each too small for the narrow form still add up. The chance is a function of the id, the number of
//! the row's update and the position: all replicas round alike.

use super::hash_id;
use crate::encoding::narrow::{from_bf16, from_f16, to_bf16, to_f16};
use serde::{Deserialize, Serialize};

/// The form of a row's weights in memory. The optimizer's state is f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RowType {
    /// 4 bytes.
    #[default]
    F32,
    /// 2 bytes: f32's range, 8 bits of precision.
    Bf16,
    /// 2 bytes: up to 65504, 11 bits of precision.
    F16,
}

impl RowType {
    /// Words of 4 bytes that so many weights take; of narrow ones an even number.
    pub fn words(self, dim: usize) -> usize {
        match self {
            Self::F32 => dim,
            Self::Bf16 | Self::F16 => dim / 2,
        }
    }

    /// Its name, as a job has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// Rounds to the nearest value of the form; f32 stays as it is.
    pub(super) fn nearest(self, values: &mut [f32]) {
        match self {
            Self::F32 => {}
            Self::Bf16 => values.iter_mut().for_each(|v| *v = from_bf16(to_bf16(*v))),
            Self::F16 => values.iter_mut().for_each(|v| *v = from_f16(to_f16(*v))),
        }
    }

    /// Reads weights.
    ///
    /// # Panics
    /// If there are not [`Self::words`] words.
    pub fn get(self, words: &[f32], values: &mut [f32]) {
        assert_eq!(words.len(), self.words(values.len()));
        let wide = |from: fn(u16) -> f32, values: &mut [f32]| {
            for (pair, word) in values.chunks_exact_mut(2).zip(words) {
                let bits = word.to_bits();
                (pair[0], pair[1]) = (from(bits as u16), from((bits >> 16) as u16));
            }
        };
        match self {
            Self::F32 => values.copy_from_slice(words),
            Self::Bf16 => wide(from_bf16, values),
            Self::F16 => wide(from_f16, values),
        }
    }

    /// Writes weights; narrow ones are rounded by the chance that `key` gives: [`rounding_key`].
    ///
    /// # Panics
    /// If there are not [`Self::words`] words.
    pub fn put(self, key: u64, values: &[f32], words: &mut [f32]) {
        assert_eq!(words.len(), self.words(values.len()));
        let narrow = |to: fn(f32, u16) -> u16, words: &mut [f32]| {
            let mut chance = 0;
            for (i, (pair, word)) in (0u64..).zip(values.chunks_exact(2).zip(words)) {
                // One draw has the chances of four values.
                chance = if i % 2 == 0 { hash_id(key.wrapping_add(i)) } else { chance >> 32 };
                let (low, high) = (to(pair[0], chance as u16), to(pair[1], (chance >> 16) as u16));
                *word = f32::from_bits(u32::from(low) | u32::from(high) << 16);
            }
        };
        match self {
            Self::F32 => words.copy_from_slice(values),
            Self::Bf16 => narrow(chance_bf16, words),
            Self::F16 => narrow(chance_f16, words),
        }
    }
}

/// What decides how the weights of a row are rounded in its `updates`th update.
pub fn rounding_key(id: u64, updates: u32) -> u64 {
    hash_id(hash_id(id) ^ u64::from(updates))
}

/// Rounds up if the part that is cut off, of 2^16, and the chance together reach 2^16. A finite value stays finite.
fn chance_bf16(v: f32, chance: u16) -> u16 {
    let bits = v.to_bits();
    let rounded = bits.wrapping_add(u32::from(chance));
    let is_finite = |bits: u32| bits & 0x7f80_0000 != 0x7f80_0000;
    if !is_finite(bits) || !is_finite(rounded) {
        to_bf16(f32::from_bits(bits & !0xffff))
    } else {
        (rounded >> 16) as u16
    }
}

/// As [`chance_bf16`]; a value beyond 65504 becomes that.
fn chance_f16(v: f32, chance: u16) -> u16 {
    let (bits, size) = (v.to_bits(), v.abs());
    if !v.is_finite() || size >= 65_504.0 {
        return to_f16(v);
    }
    let sign = (bits >> 16) as u16 & 0x8000;
    // Below the smallest normal f16, 2^-14, the last place is 2^-24; the product is exact.
    if size < 1.0 / 16_384.0 {
        let steps = size * 16_777_216.0;
        let below = steps.floor();
        let up = (steps - below) * 65_536.0 + f32::from(chance) >= 65_536.0;
        return sign | (below as u16 + u16::from(up));
    }
    let cut = bits.wrapping_add(u32::from(chance >> 3)) & !0x1fff;
    to_f16(f32::from_bits(cut))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NARROW: [(RowType, f32); 2] = [(RowType::Bf16, 1.0 / 128.0), (RowType::F16, 1.0 / 1024.0)];

    #[test]
    fn what_the_form_holds_is_never_rounded() {
        for (form, _) in NARROW {
            let from = if form == RowType::Bf16 { from_bf16 } else { from_f16 };
            for half in 0..=u16::MAX {
                let v = from(half);
                if !v.is_finite() {
                    continue;
                }
                for chance in [0, 1, 0x7fff, 0xffff] {
                    let to = if form == RowType::Bf16 { chance_bf16 } else { chance_f16 };
                    assert_eq!(from(to(v, chance)).to_bits(), v.to_bits(), "{form:?} {v} by {chance}");
                }
            }
        }
    }

    #[test]
    fn values_are_rounded_up_in_proportion_to_the_distance() {
        for (form, ulp) in NARROW {
            for (size, ulp) in [
                (1.0f32, ulp),
                (2f32.powi(-20), if form == RowType::F16 { 2f32.powi(-24) } else { ulp * 2f32.powi(-20) }),
            ] {
                for sign in [1.0, -1.0] {
                    let value = sign * (size + 0.25 * ulp);
                    let mut up = 0;
                    for id in 0..10_000 {
                        let (mut word, mut back) = ([0.0], [0.0; 2]);
                        form.put(rounding_key(id, 7), &[value, value], &mut word);
                        form.get(&word, &mut back);
                        for v in back {
                            assert!(v == sign * size || v == sign * (size + ulp), "{form:?}: {v} of {value}");
                            up += u32::from(v != sign * size);
                        }
                    }
                    assert!(
                        (4_700..5_300).contains(&up),
                        "{form:?} {value}: {up} of 20,000 went up, a quarter is right"
                    );
                }
            }
        }
    }

    #[test]
    fn a_finite_weight_stays_finite() {
        for (form, _) in NARROW {
            let values = [f32::MAX, -f32::MAX, 65_519.0, -70_000.0];
            for id in 0..100 {
                let (mut words, mut back) = ([0.0; 2], [0.0; 4]);
                form.put(rounding_key(id, 1), &values, &mut words);
                form.get(&words, &mut back);
                assert!(back.iter().all(|v| v.is_finite()), "{form:?}: {back:?}");
            }
        }
    }
}
