//! Tests of `vector`.

use super::*;
use crate::cpu::simd::{Cpu, Isa};
use fearless_simd::dispatch;

/// `exp` and the logistic function of all values, with every instruction set.
fn each(x: &[f32], check: impl Fn(Isa, f32, f32, f32)) {
    for cpu in Cpu::every() {
        let (mut powers, mut shares) = (x.to_vec(), x.to_vec());
        dispatch!(cpu.level(), s => both(s, &mut powers, &mut shares));
        for i in 0..x.len() {
            check(cpu.isa(), x[i], powers[i], shares[i]);
        }
    }
}

#[inline(always)]
fn both<S: Token>(s: S, powers: &mut [f32], shares: &mut [f32]) {
    places(
        s,
        powers.len(),
        #[inline(always)]
        |p| {
            store(s, exp(s, load(s, powers, p, 0.0)), powers, p);
            store(s, logistic(s, load(s, shares, p, 0.0)), shares, p);
        },
    );
}

#[test]
fn exp_and_logistic_are_accurate_to_a_few_ulps() {
    let x: Vec<f32> = (-87_300..=88_300).map(|i| i as f32 * 1e-3).collect();
    each(&x, |isa, x, power, share| {
        let (p, l) = (f64::from(x).exp(), 1.0 / (1.0 + (-f64::from(x)).exp()));
        let apart = |got: f32, want: f64| (f64::from(got) - want).abs() / want;
        assert!(apart(power, p) < 2.4e-7, "{isa:?}: e^{x} is {power}, not {p:e}");
        assert!(apart(share, l) < 3e-7, "{isa:?}: the logistic function at {x} is {share}, not {l:e}");
    });
}

#[test]
fn exp_beyond_limits_is_zero_or_infinity_and_keeps_nan() {
    each(&[-87.4, -1e30, f32::NEG_INFINITY], |_, x, power, share| {
        assert_eq!((power, share), (0.0, if x > -88.0 { share } else { 0.0 }), "{x}");
    });
    each(&[88.4, 1e30, f32::INFINITY], |_, x, power, share| {
        assert_eq!((power, share), (f32::INFINITY, 1.0), "{x}")
    });
    each(&[0.0; 3], |_, _, power, share| assert_eq!((power, share), (1.0, 0.5)));
    each(&[f32::NAN; 19], |_, _, power, share| assert!(power.is_nan() && share.is_nan()));
}

#[test]
fn vectors_cover_slice_and_write_nothing_beyond() {
    for len in 0..40 {
        let x: Vec<f32> = (0..len).map(|i| i as f32).collect();
        for cpu in Cpu::every() {
            let (mut y, mut top) = (vec![0.0; len], 0.0);
            dispatch!(cpu.level(), s => copy(s, &x, &mut y, &mut top));
            assert_eq!(y, x, "{:?}", cpu.isa());
            assert_eq!(top, len as f32 - 1.0 + if len == 0 { f32::NEG_INFINITY } else { 0.0 });
        }
    }
}

#[inline(always)]
fn copy<S: Token>(s: S, x: &[f32], y: &mut [f32], top: &mut f32) {
    *top = largest(s, x);
    places(
        s,
        x.len(),
        #[inline(always)]
        |p| store(s, load(s, x, p, 9e9), y, p),
    );
}
