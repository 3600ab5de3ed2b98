//! The version for every machine: plain arrays, which the compiler turns into what the target has.

use super::{LANES, Lane, Simd};

#[derive(Clone, Copy)]
pub(crate) struct Baseline;

macro_rules! lanewise {
    (|$i:ident| $e:expr) => {{
        let mut out = [0.0f32; LANES];
        for $i in 0..LANES {
            out[$i] = $e;
        }
        out
    }};
}

impl Simd for Baseline {
    type V = [f32; LANES];
    type M = [bool; LANES];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, p: &Lane) -> Self::V {
        p.0
    }
    #[inline(always)]
    fn store(self, p: &mut Lane, v: Self::V) {
        p.0 = v;
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Where the target has no fused instruction, `mul_add` is a slow library call.
        if cfg!(target_arch = "aarch64") {
            lanewise!(|i| a[i].mul_add(b[i], c[i]))
        } else {
            lanewise!(|i| a[i] * b[i] + c[i])
        }
    }
    #[inline(always)]
    fn gt(self, a: Self::V, b: Self::V) -> Self::M {
        let mut m = [false; LANES];
        for i in 0..LANES {
            m[i] = a[i] > b[i];
        }
        m
    }
    #[inline(always)]
    fn eq(self, a: Self::V, b: Self::V) -> Self::M {
        let mut m = [false; LANES];
        for i in 0..LANES {
            m[i] = a[i] == b[i];
        }
        m
    }
    #[inline(always)]
    fn select(self, m: Self::M, t: Self::V, f: Self::V) -> Self::V {
        lanewise!(|i| if m[i] { t[i] } else { f[i] })
    }
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let mut eight = [0.0f32; 8];
        for i in 0..8 {
            eight[i] = v[i] + v[i + 8];
        }
        let four = [eight[0] + eight[4], eight[1] + eight[5], eight[2] + eight[6], eight[3] + eight[7]];
        (four[0] + four[2]) + (four[1] + four[3])
    }
}
