//! `f32` values to and from little-endian bytes. Nothing here reads a payload by casting: payloads arrive at
//! any alignment.

/// Bytes of one value on the wire.
pub const F32_BYTES: usize = 4;

/// Appends `values` to `out` as little-endian bytes.
pub fn put_f32_le(values: &[f32], out: &mut Vec<u8>) {
    if cfg!(target_endian = "little") {
        // The values' own bytes, in one copy. (Any f32 is four valid bytes; it is the way back, bytes of the
        // network to f32, that would need an alignment.)
        out.extend_from_slice(bytemuck::cast_slice(values));
    } else {
        out.reserve(values.len() * F32_BYTES);
        values.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
    }
}

/// Reads little-endian bytes into `out`. The lengths must agree: `le.len() == out.len() * 4`.
///
/// # Panics
/// When they do not; callers have checked the length of what came from outside.
pub fn get_f32_le(le: &[u8], out: &mut [f32]) {
    assert_eq!(le.len(), out.len() * F32_BYTES, "payload and bucket differ in length");
    for (o, b) in out.iter_mut().zip(le.as_chunks::<F32_BYTES>().0) {
        *o = f32::from_le_bytes(*b);
    }
}

/// `out[i] += le[i]`, reading little-endian bytes. Same contract as [`get_f32_le`].
pub fn add_f32_le(le: &[u8], out: &mut [f32]) {
    assert_eq!(le.len(), out.len() * F32_BYTES, "payload and bucket differ in length");
    for (o, b) in out.iter_mut().zip(le.as_chunks::<F32_BYTES>().0) {
        *o += f32::from_le_bytes(*b);
    }
}

/// Whether every value is finite (no NaN, no infinity). Works on whole words, without branches per value.
pub fn all_finite_le(le: &[u8]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    let (words, rest) = le.as_chunks::<F32_BYTES>();
    rest.is_empty()
        && words
            .chunks(1024)
            .all(|c| !c.iter().fold(false, |bad, b| bad | (u32::from_le_bytes(*b) & EXPONENT == EXPONENT)))
}

/// Sum of squares in `f64`, in the order of the vector: the same number on every host.
pub fn sum_of_squares_le(le: &[u8]) -> f64 {
    // Eight running sums break the dependency chain; their order of addition is fixed.
    let (words, _) = le.as_chunks::<F32_BYTES>();
    let (blocks, tail) = words.as_chunks::<8>();
    let mut sums = [0f64; 8];
    for block in blocks {
        for (s, b) in sums.iter_mut().zip(block) {
            let v = f64::from(f32::from_le_bytes(*b));
            *s += v * v;
        }
    }
    let head: f64 = sums.iter().sum();
    head + tail.iter().map(|b| f64::from(f32::from_le_bytes(*b)).powi(2)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_the_round_trip_at_any_alignment() {
        let v: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0) * 0.37).collect();
        let mut le = vec![0u8; 3];
        put_f32_le(&v, &mut le);
        let mut back = vec![0f32; 1000];
        get_f32_le(&le[3..], &mut back);
        assert_eq!(v, back);
        add_f32_le(&le[3..], &mut back);
        assert!(v.iter().zip(&back).all(|(a, b)| 2.0 * a == *b));
        let direct: f64 = v.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        assert!((sum_of_squares_le(&le[3..]) - direct).abs() < 1e-9 * direct);
    }

    #[test]
    fn one_bad_value_is_found_anywhere() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
            for at in [0, 1, 1023, 1024, 2999] {
                let mut v = vec![f32::MAX; 3000];
                v[0] = f32::MIN_POSITIVE / 2.0;
                let mut le = Vec::new();
                put_f32_le(&v, &mut le);
                assert!(all_finite_le(&le));
                le[at * 4..at * 4 + 4].copy_from_slice(&bad.to_le_bytes());
                assert!(!all_finite_le(&le), "{bad} at {at}");
            }
        }
        assert!(!all_finite_le(&[0, 0, 0]));
    }
}
