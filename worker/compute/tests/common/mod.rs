//! Test inputs and tolerances.

/// Numbers in [-1, 1), determined by the seed.
pub fn noise(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

/// In f64.
pub fn wide(v: &[f32]) -> Vec<f64> {
    v.iter().copied().map(f64::from).collect()
}

/// Compares to within 1e-5 of the largest value.
pub fn close(what: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let allowed = 1e-5 * want.iter().fold(0.01f64, |m, v| m.max(v.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(
            (f64::from(*g) - w).abs() <= allowed,
            "{what}[{i}]: {g} instead of {w}, allowed {allowed:.1e}"
        );
    }
}
