//! Loops over slices of any length in vectors of the machine's width, and functions for them: `exp` and the
//! logistic function.
//!
//! Sums are per lane and then over the lanes: they differ between levels in the last bits, but not between calls. A
//! NaN stays, or a diverged run would look healthy.

use crate::cpu::simd::LANES;
use fearless_simd::{Simd as Token, prelude::*};
use std::f32::consts::LOG2_E;

/// A vector's place in a slice: its start, and its number of values.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    at: usize,
    len: usize,
}

/// Calls `f` for each vector of a slice; the last may have fewer values than lanes.
#[inline(always)]
pub(crate) fn places<S: Token>(_: S, len: usize, mut f: impl FnMut(Place)) {
    let width = S::f32s::LEN;
    let whole = len / width * width;
    for at in (0..whole).step_by(width) {
        f(Place { at, len: width });
    }
    if whole < len {
        f(Place { at: whole, len: len - whole });
    }
}

/// The values at a place; lanes past the slice have `fill`.
#[inline(always)]
pub(crate) fn load<S: Token>(s: S, x: &[f32], p: Place, fill: f32) -> S::f32s {
    let x = &x[p.at..][..p.len];
    if p.len == S::f32s::LEN {
        return S::f32s::from_slice(s, x);
    }
    let mut all = [fill; LANES];
    all[..p.len].copy_from_slice(x);
    S::f32s::from_slice(s, &all[..S::f32s::LEN])
}

/// Writes the values of a place.
#[inline(always)]
pub(crate) fn store<S: Token>(_: S, v: S::f32s, x: &mut [f32], p: Place) {
    let x = &mut x[p.at..][..p.len];
    if p.len == S::f32s::LEN {
        return v.store_slice(x);
    }
    let mut all = [0.0; LANES];
    v.store_slice(&mut all[..S::f32s::LEN]);
    x.copy_from_slice(&all[..p.len]);
}

/// The largest value. If a value is NaN, the result is NaN or the largest number.
#[inline(always)]
pub(crate) fn largest<S: Token>(s: S, x: &[f32]) -> f32 {
    let mut all = S::f32s::splat(s, f32::NEG_INFINITY);
    places(
        s,
        x.len(),
        #[inline(always)]
        |p| all = load(s, x, p, f32::NEG_INFINITY).max(all),
    );
    all.reduce_max()
}

/// Below this `exp` returns 0; the exact result would be less than the smallest normal number.
const EXP_MIN: f32 = -87.3;
/// Above this `exp` returns infinity, although the exact result may still be finite: the factor 2^128 is not
/// representable.
const EXP_MAX: f32 = 88.3;

/// The exponential of each value, within 2 units in the last place (the test uses the relative error); 0 below
/// [`EXP_MIN`] and infinity above [`EXP_MAX`].
///
/// `x = n ln 2 + r` with an integer `n`; `e^r` is a polynomial with the coefficients of Cephes' `expf`, and `2^n`
/// is built from `n`'s bits.
#[inline(always)]
pub(crate) fn exp<S: Token>(s: S, x: S::f32s) -> S::f32s {
    /// Adding it leaves the integer part in the low bits.
    const ROUND: f32 = 12_582_912.0;
    /// `ln 2` in two parts. The first has few bits, so its products with integers are exact.
    const LN2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    const SERIES: [f32; 6] = [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    let (least, most) = (S::f32s::splat(s, EXP_MIN), S::f32s::splat(s, EXP_MAX));
    let within = x.max(least).min(most);
    let shifted = within.mul_add(S::f32s::splat(s, LOG2_E), S::f32s::splat(s, ROUND));
    let n = shifted - S::f32s::splat(s, ROUND);
    let r = n.mul_add(S::f32s::splat(s, -LN2[0]), within);
    let r = n.mul_add(S::f32s::splat(s, -LN2[1]), r);
    let mut sum = S::f32s::splat(s, SERIES[0]);
    for c in &SERIES[1..] {
        sum = sum.mul_add(r, S::f32s::splat(s, *c));
    }
    let fraction = sum.mul_add(r * r, r) + S::f32s::splat(s, 1.0);
    let bits: S::u32s = shifted.bitcast();
    let power: S::f32s = ((bits << 23u32) + S::u32s::splat(s, 1.0f32.to_bits())).bitcast();
    let y = fraction * power;
    let y = x.simd_lt(least).select(S::f32s::splat(s, 0.0), y);
    let y = most.simd_lt(x).select(S::f32s::splat(s, f32::INFINITY), y);
    x.simd_eq(x).select(y, x)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn logistic<S: Token>(s: S, x: S::f32s) -> S::f32s {
    let one = S::f32s::splat(s, 1.0);
    one / (one + exp(s, S::f32s::splat(s, 0.0) - x))
}

#[cfg(test)]
#[path = "vector_tests.rs"]
mod tests;
