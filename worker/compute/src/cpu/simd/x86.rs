//! AVX-512 and AVX2: the same sixteen lanes in one register or in two, or the first eight of them in one.
//!
//! `Avx512`, `Avx2` and `Half` have a private field and are made only in the `run_` functions, whose callers
//! vouch for the instructions. That is why the methods below may use them: SAFETY comments say "token".

use super::{Kernel, Lane, Simd};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

/// The first eight lanes only.
#[derive(Clone, Copy)]
pub(crate) struct Half(());

/// Runs the kernel with AVX-512F instructions.
///
/// # Safety
/// The machine must have AVX-512F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn run_avx512<K: Kernel>(kernel: K) {
    kernel.run(Avx512(()));
}

/// Runs the kernel with AVX2 and FMA instructions.
///
/// # Safety
/// The machine must have AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn run_avx2<K: Kernel>(kernel: K) {
    kernel.run(Avx2(()));
}

/// Runs the kernel on the first eight lanes, with the thirty-two registers of AVX-512.
///
/// # Safety
/// The machine must have AVX-512F, AVX-512VL, AVX2 and FMA.
#[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
pub(super) unsafe fn run_half_avx512<K: Kernel>(kernel: K) {
    kernel.run(Half(()));
}

/// Runs the kernel on the first eight lanes.
///
/// # Safety
/// The machine must have AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn run_half_avx2<K: Kernel>(kernel: K) {
    kernel.run(Half(()));
}

impl Simd for Avx512 {
    type V = __m512;
    type M = __mmask16;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: token.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn load(self, p: &Lane) -> __m512 {
        // SAFETY: token; a `Lane` is 64 bytes, aligned to 64.
        unsafe { _mm512_load_ps(p.0.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, p: &mut Lane, v: __m512) {
        // SAFETY: token; a `Lane` is 64 bytes, aligned to 64.
        unsafe { _mm512_store_ps(p.0.as_mut_ptr(), v) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: token.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: token.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: token.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: token.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn gt(self, a: __m512, b: __m512) -> __mmask16 {
        // SAFETY: token.
        unsafe { _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b) }
    }
    #[inline(always)]
    fn eq(self, a: __m512, b: __m512) -> __mmask16 {
        // SAFETY: token.
        unsafe { _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b) }
    }
    #[inline(always)]
    fn select(self, m: __mmask16, t: __m512, f: __m512) -> __m512 {
        // SAFETY: token.
        unsafe { _mm512_mask_blend_ps(m, f, t) }
    }
    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        // SAFETY: token.
        unsafe { _mm512_reduce_add_ps(v) }
    }
}

/// Both halves of the same operation.
macro_rules! halves {
    ($f:ident($($a:expr),*)) => {
        // SAFETY: token.
        unsafe { [$f($($a[0]),*), $f($($a[1]),*)] }
    };
}

impl Simd for Avx2 {
    type V = [__m256; 2];
    type M = [__m256; 2];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        // SAFETY: token.
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn load(self, p: &Lane) -> Self::V {
        let p = p.0.as_ptr();
        // SAFETY: token; a `Lane` is 64 bytes, aligned to 64, so both halves are inside and aligned to 32.
        unsafe { [_mm256_load_ps(p), _mm256_load_ps(p.add(8))] }
    }
    #[inline(always)]
    fn store(self, p: &mut Lane, v: Self::V) {
        let p = p.0.as_mut_ptr();
        // SAFETY: token; a `Lane` is 64 bytes, aligned to 64, so both halves are inside and aligned to 32.
        unsafe {
            _mm256_store_ps(p, v[0]);
            _mm256_store_ps(p.add(8), v[1]);
        }
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        halves!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        halves!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        halves!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        halves!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn gt(self, a: Self::V, b: Self::V) -> Self::M {
        // SAFETY: token.
        unsafe { [_mm256_cmp_ps::<_CMP_GT_OQ>(a[0], b[0]), _mm256_cmp_ps::<_CMP_GT_OQ>(a[1], b[1])] }
    }
    #[inline(always)]
    fn eq(self, a: Self::V, b: Self::V) -> Self::M {
        // SAFETY: token.
        unsafe { [_mm256_cmp_ps::<_CMP_EQ_OQ>(a[0], b[0]), _mm256_cmp_ps::<_CMP_EQ_OQ>(a[1], b[1])] }
    }
    #[inline(always)]
    fn select(self, m: Self::M, t: Self::V, f: Self::V) -> Self::V {
        halves!(_mm256_blendv_ps(f, t, m))
    }
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        // SAFETY: token.
        unsafe { sum_of_eight(_mm256_add_ps(v[0], v[1])) }
    }
}

/// # Safety
/// The machine must have AVX.
#[inline(always)]
unsafe fn sum_of_eight(eight: __m256) -> f32 {
    // SAFETY: the caller's token.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

impl Simd for Half {
    type V = __m256;
    type M = __m256;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: token.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    fn load(self, p: &Lane) -> __m256 {
        // SAFETY: token; a `Lane` is 64 bytes, aligned to 64.
        unsafe { _mm256_load_ps(p.0.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, p: &mut Lane, v: __m256) {
        // SAFETY: token; a `Lane` is 64 bytes, aligned to 64.
        unsafe { _mm256_store_ps(p.0.as_mut_ptr(), v) }
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: token.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: token.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: token.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: token.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn gt(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: token.
        unsafe { _mm256_cmp_ps::<_CMP_GT_OQ>(a, b) }
    }
    #[inline(always)]
    fn eq(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: token.
        unsafe { _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b) }
    }
    #[inline(always)]
    fn select(self, m: __m256, t: __m256, f: __m256) -> __m256 {
        // SAFETY: token.
        unsafe { _mm256_blendv_ps(f, t, m) }
    }
    #[inline(always)]
    fn sum(self, v: __m256) -> f32 {
        // SAFETY: token.
        unsafe { sum_of_eight(v) }
    }
}
