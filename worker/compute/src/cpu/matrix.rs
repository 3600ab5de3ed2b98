//! Matrix products over parts of slices, with strides: nothing is transposed by copying.

/// `c = a · b + keep · c` for `a` of `[m, k]` and `b` of `[k, n]`, each with its row and column stride. `keep` is 0 (then
/// `c` is not read) or 1. The rows of `c` may not overlap.
pub(crate) fn product(
    [m, k, n]: [usize; 3],
    (a, [ra, ca]): (&[f32], [usize; 2]),
    (b, [rb, cb]): (&[f32], [usize; 2]),
    (c, [rc, cc]): (&mut [f32], [usize; 2]),
    keep: f32,
) {
    if m == 0 || n == 0 {
        return;
    }
    let end = |rows: usize, cols: usize, r: usize, s: usize| {
        if rows == 0 || cols == 0 { 0 } else { (rows - 1) * r + (cols - 1) * s + 1 }
    };
    assert!(end(m, k, ra, ca) <= a.len(), "matrix product: left");
    assert!(end(k, n, rb, cb) <= b.len(), "matrix product: right");
    assert!(end(m, n, rc, cc) <= c.len(), "matrix product: result");
    assert!((cc == 1 && rc >= n) || (rc == 1 && cc >= m), "matrix product: strides of the result");
    let stride = |s: usize| s as isize;
    // SAFETY: every index i*r + j*s was just checked to lie inside its slice; by the strides of `c`, distinct (i, j) are
    // distinct places in it; and no other slice overlaps a mutable one.
    unsafe {
        matrixmultiply::sgemm(
            m,
            k,
            n,
            1.0,
            a.as_ptr(),
            stride(ra),
            stride(ca),
            b.as_ptr(),
            stride(rb),
            stride(cb),
            keep,
            c.as_mut_ptr(),
            stride(rc),
            stride(cc),
        );
    }
}
