//! Tests of `exact`.

use super::*;

#[test]
fn the_cosine_agrees_with_libm() {
    for i in 0..=10_000 {
        let x = f64::from(i) / 10_000.0;
        assert!((cos_pi(x) - (PI * x).cos()).abs() < 1e-15, "at {x}");
    }
    assert_eq!((cos_pi(0.0), cos_pi(0.5), cos_pi(1.0)), (1.0, 0.0, -1.0));
    assert_eq!((cos_pi(-3.0), cos_pi(7.0)), (1.0, -1.0));
}

#[test]
fn the_exponential_agrees_with_libm() {
    for i in 0..=70_000 {
        let x = -f64::from(i) * 0.01;
        assert!((exp(x) - x.exp()).abs() <= 1e-12 * x.exp(), "at {x}");
    }
    assert_eq!((exp(0.0), exp(-800.0), exp(f64::NEG_INFINITY), exp(2.0)), (1.0, 0.0, 0.0, 1.0));
}

#[test]
fn the_logarithm_agrees_with_libm() {
    for i in 1..=200_000 {
        for x in [f64::from(i) * 1e-5, f64::from(i), 1.0 + f64::from(i) * 1e-12, 1.5f64.powi(i % 1_700)] {
            assert!((ln(x) - x.ln()).abs() <= 1e-15 * x.ln().abs().max((x - 1.0).abs().min(1.0)), "at {x}");
        }
    }
    assert_eq!(ln(1.0), 0.0);
}

#[test]
fn the_power_agrees_with_libm() {
    for n in [0u64, 1, 2, 3, 7, 10, 100, 1_000, 12_345, 1_000_000] {
        for base in [0.9, 0.99, 0.999, 0.1, 0.0, 1.0] {
            let (ours, libm) = (pow(base, n), f64::powf(base, n as f64));
            assert!((ours - libm).abs() <= n as f64 * f64::EPSILON * libm.abs(), "{base}^{n}: {ours} {libm}");
        }
    }
}
