//! Powers, an exponential, a logarithm and a cosine that give the same bits on every host.
//!
//! `std` calls the platform's libm for `cos` and `powf`, and those differ between systems in the last bit
//! (`powi` too: its order of multiplication is not specified). These use only `+ - * /` on `f64`, whose
//! results IEEE 754 fixes.

use std::f64::consts::{LN_2, PI, SQRT_2};

/// `base` to the power `n` by repeated squaring. The relative error grows with `n` (below `n * 2^-52`), while the
/// power of a base below 1 falls faster: for the bases here the absolute error stays below `1e-12`.
pub fn pow(base: f64, n: u64) -> f64 {
    let (mut result, mut square, mut n) = (1.0, base, n);
    while n > 0 {
        if n & 1 == 1 {
            result *= square;
        }
        square *= square;
        n >>= 1;
    }
    result
}

/// `e^x` for `x` of 0 and less (above it 1); relative error below `1e-12`.
pub fn exp(x: f64) -> f64 {
    if x <= -745.0 {
        return 0.0; // below what an `f64` can hold
    }
    // The series of a 2048th, whose size is below 0.4, squared eleven times.
    let y = x.min(0.0) / 2048.0;
    let series = (1..=14).rev().fold(1.0, |rest, k| 1.0 + y / f64::from(k) * rest);
    (0..11).fold(series, |power, _| power * power)
}

/// `ln(x)` for a normal `x` above 0; error below `1e-15` of the larger of it and of `x - 1`.
pub fn ln(x: f64) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    let bits = x.to_bits();
    // x = m * 2^e, m from the root of a half to the root of two.
    let (mut e, mut m) = ((bits >> 52) as f64 - 1023.0, f64::from_bits(bits & MANTISSA | 1f64.to_bits()));
    if m > SQRT_2 {
        (e, m) = (e + 1.0, m / 2.0);
    }
    // ln(m) = 2 artanh(s); s is below 0.172, so that twelve terms reach the last bit.
    let s = (m - 1.0) / (m + 1.0);
    let series = (0..12).rev().fold(0.0, |rest, k| 1.0 / f64::from(2 * k + 1) + s * s * rest);
    e * LN_2 + 2.0 * s * series
}

/// `cos(pi * x)` for `x` in `[0, 1]` (limited to it); error below `1e-15`.
pub fn cos_pi(x: f64) -> f64 {
    let x = x.clamp(0.0, 1.0);
    if x > 0.5 { -first_quadrant(1.0 - x) } else { first_quadrant(x) }
}

/// `cos(pi * x)` for `x` in `[0, 0.5]`. Up to a quarter by the series of the cosine, beyond it by the series of
/// the sine of the rest, so that the argument stays below 0.79 and nine terms reach the last bit.
fn first_quadrant(x: f64) -> f64 {
    let (y, sine) = if x <= 0.25 { (PI * x, false) } else { (PI * (0.5 - x), true) };
    let y2 = y * y;
    // Horner's rule from the smallest term: 1 - y2/(a(a+1)) * (1 - y2/((a+2)(a+3)) * ...).
    let start = if sine { 2.0 } else { 1.0 };
    let series = (0..9).rev().fold(1.0, |rest, k| {
        let a = start + 2.0 * f64::from(k);
        1.0 - y2 / (a * (a + 1.0)) * rest
    });
    if sine { y * series } else { series }
}

#[cfg(test)]
#[path = "exact_tests.rs"]
mod tests;
