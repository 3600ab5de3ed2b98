//! ReLU's gradient, and GELU, over slices.

use crate::cpu::{
    threads::Threads,
    vector::{load, logistic, places, store},
};
use fearless_simd::{Simd as Token, dispatch, prelude::*};
use std::f32::consts::FRAC_2_SQRT_PI;

/// Values per thread and task.
const VALUES: usize = 1 << 14;

/// Zeroes the gradient where the ReLU's output is zero. `y` and `dy` have one length.
pub fn relu_backward(threads: &Threads, y: &[f32], dy: &mut [f32]) {
    assert_eq!(y.len(), dy.len(), "relu: lengths");
    let level = threads.cpu().level();
    threads.each(y.chunks(VALUES).zip(dy.chunks_mut(VALUES)), |(y, dy)| {
        dispatch!(level, s => relu_backward_in(s, y, dy));
    });
}

#[inline(always)]
fn relu_backward_in<S: Token>(s: S, y: &[f32], dy: &mut [f32]) {
    let (zero, none, all) = (S::f32s::splat(s, 0.0), S::u32s::splat(s, 0), S::u32s::splat(s, u32::MAX));
    places(
        s,
        y.len(),
        #[inline(always)]
        |p| {
            // Use a mask, not a choice between `dy` and zero: for the latter, compilers emit AVX2's masked store,
            // which is as slow as a dozen others on AMD processors.
            let open = zero.simd_lt(load(s, y, p, 0.0)).select(all, none);
            let bits: S::u32s = load(s, dy, p, 0.0).bitcast();
            store(s, bits.min(open).bitcast(), dy, p);
        },
    );
}

/// `√(2/π)`.
const ROOT: f32 = FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
const CUBE: f32 = 0.044_715;

/// GELU by the tanh approximation ([`Gelu`](crate::shape::Activation::Gelu)) of each value, into `y`.
pub fn gelu(threads: &Threads, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "gelu: lengths");
    let level = threads.cpu().level();
    threads.each(x.chunks(VALUES).zip(y.chunks_mut(VALUES)), |(x, y)| {
        dispatch!(level, s => gelu_in(s, x, y));
    });
}

#[inline(always)]
fn gelu_in<S: Token>(s: S, x: &[f32], y: &mut [f32]) {
    places(
        s,
        x.len(),
        #[inline(always)]
        |p| {
            let x = load(s, x, p, 0.0);
            store(s, x * share(s, x), y, p);
        },
    );
}

/// `0.5 (1 + tanh u)` for the `u` of the approximation, which is the logistic function of `2u`.
#[inline(always)]
fn share<S: Token>(s: S, x: S::f32s) -> S::f32s {
    let cube = (x * x).mul_add(S::f32s::splat(s, 2.0 * ROOT * CUBE), S::f32s::splat(s, 2.0 * ROOT));
    logistic(s, x * cube)
}

/// Multiplies each `dy` by GELU's derivative at `x`.
pub fn gelu_backward(threads: &Threads, x: &[f32], dy: &mut [f32]) {
    assert_eq!(x.len(), dy.len(), "gelu: lengths");
    let level = threads.cpu().level();
    threads.each(x.chunks(VALUES).zip(dy.chunks_mut(VALUES)), |(x, dy)| {
        dispatch!(level, s => gelu_backward_in(s, x, dy));
    });
}

#[inline(always)]
fn gelu_backward_in<S: Token>(s: S, x: &[f32], dy: &mut [f32]) {
    let one = S::f32s::splat(s, 1.0);
    places(
        s,
        x.len(),
        #[inline(always)]
        |p| {
            let x = load(s, x, p, 0.0);
            let share = share(s, x);
            let inner = (x * x).mul_add(S::f32s::splat(s, 6.0 * ROOT * CUBE), S::f32s::splat(s, 2.0 * ROOT));
            // d/dx of x · share, whose derivative is share (1 - share) times that of 2u.
            let slope = (x * inner * share).mul_add(one - share, share);
            store(s, load(s, dy, p, 0.0) * slope, dy, p);
        },
    );
}
