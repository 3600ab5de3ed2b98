//! Sixteen `f32` lanes in vectors of any width, and the dispatch of kernels to the process's instruction set.
//!
//! A kernel is written once, generic over [`Simd`], and compiled for each level: AVX-512, AVX2 with FMA, and the
//! target's baseline (SSE2 on x86-64, NEON on aarch64). The crate `fearless_simd` provides the instructions; its
//! tokens prove that the machine has them, so nothing here is unsafe.
//!
//! ```text
//!  operator --Kernel--> Cpu::run ----------> all sixteen lanes at once
//!                       Cpu::run_tiles ----> as many lanes at a time as a register holds, one part after the other
//! ```
//!
//! `run_tiles` is for kernels that keep a tile of accumulators in registers. AVX2 and the portable set have half
//! and a quarter of AVX-512's lanes in a register, and on x86-64 half as many registers ([`Simd::REGISTERS`], by
//! which a kernel chooses its tile), so a tile of whole [`Lane`]s would be spilled to the stack. It also skips
//! parts without samples.
//!
//! Results differ between levels in the last bits (fused or separate rounding); on one level the same inputs give
//! the same bits.

use fearless_simd::{Level, Simd as Token, dispatch, f32x8, f32x16, prelude::*};
pub use paraft_simd::Isa;
use std::marker::PhantomData;

/// Number of `f32` lanes of a [`Lane`].
pub const LANES: usize = 16;

/// The values of sixteen samples at one place of a plane: the innermost, vectorised axis of the blocked layout.
///
/// Aligned to a cache line, so that no load of the hot loops crosses one.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C, align(64))]
pub struct Lane(pub [f32; LANES]);

impl Lane {
    /// All lanes zero.
    pub const ZERO: Self = Self([0.0; LANES]);
}

impl Default for Lane {
    fn default() -> Self {
        Self::ZERO
    }
}

/// The operations of kernels, on all lanes of a [`Lane`] or a part of them.
pub(crate) trait Simd: Copy {
    /// Number of the processor's vector registers. A tile that uses all of them is spilled: leave one free.
    const REGISTERS: usize;

    /// The lanes in registers.
    type V: Copy;
    /// One truth value per lane.
    type M: Copy;

    /// The parts of a [`Lane`] that fit into a register, one after another. Only [`Cpu::run_tiles`] has several.
    fn parts(self) -> impl Iterator<Item = Self>;
    fn splat(self, x: f32) -> Self::V;
    fn load(self, p: &Lane) -> Self::V;
    fn store(self, p: &mut Lane, v: Self::V);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused if the machine supports it.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b`, false for NaN.
    fn gt(self, a: Self::V, b: Self::V) -> Self::M;
    /// `a == b`, false for NaN.
    fn eq(self, a: Self::V, b: Self::V) -> Self::M;
    /// `t` where `m` holds, else `f`.
    fn select(self, m: Self::M, t: Self::V, f: Self::V) -> Self::V;
    /// The sum of the lanes: repeatedly adds the upper half to the lower one, with the same bits at every level.
    fn sum(self, v: Self::V) -> f32;
}

/// Lanes in vectors `V` from `at` on, and the further parts up to `end`; `at` is a multiple of the vector's length.
#[derive(Clone, Copy)]
pub(crate) struct Lanes<S, V> {
    token: S,
    at: usize,
    end: usize,
    vectors: PhantomData<V>,
}

type Whole<S> = Lanes<S, f32x16<S>>;
type Half<S> = Lanes<S, f32x8<S>>;

impl<S: Token, V: SimdBase<S>> Lanes<S, V> {
    #[inline(always)]
    fn new(token: S, end: usize) -> Self {
        Self { token, at: 0, end, vectors: PhantomData }
    }

    /// Shows the compiler that the lanes are inside a [`Lane`].
    #[inline(always)]
    fn place(self) -> std::ops::Range<usize> {
        let at = self.at & (LANES - V::LEN);
        at..at + V::LEN
    }
}

impl<S: Token, V: SimdFloat<S, Element = f32>> Simd for Lanes<S, V> {
    const REGISTERS: usize = match S::f32s::LEN {
        LANES => 32,
        _ if cfg!(target_arch = "aarch64") => 32,
        _ => 16,
    };

    type V = V;
    type M = V::Mask;

    #[inline(always)]
    fn parts(self) -> impl Iterator<Item = Self> {
        (self.at..self.end).step_by(V::LEN).map(move |at| Self { at, ..self })
    }
    #[inline(always)]
    fn splat(self, x: f32) -> V {
        V::splat(self.token, x)
    }
    #[inline(always)]
    fn load(self, p: &Lane) -> V {
        V::from_slice(self.token, &p.0[self.place()])
    }
    #[inline(always)]
    fn store(self, p: &mut Lane, v: V) {
        v.store_slice(&mut p.0[self.place()]);
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        a + b
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        a - b
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        a * b
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        a.mul_add(b, c)
    }
    #[inline(always)]
    fn gt(self, a: V, b: V) -> V::Mask {
        a.simd_gt(b)
    }
    #[inline(always)]
    fn eq(self, a: V, b: V) -> V::Mask {
        a.simd_eq(b)
    }
    #[inline(always)]
    fn select(self, m: V::Mask, t: V, f: V) -> V {
        m.select(t, f)
    }
    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        let mut sums = [0.0f32; LANES];
        sums[..V::LEN].copy_from_slice(v.as_slice());
        let mut n = V::LEN;
        while n > 1 {
            n /= 2;
            for i in 0..n {
                sums[i] += sums[i + n];
            }
        }
        sums[0]
    }
}

/// Work to run with the machine's best instructions.
///
/// `run` must be `#[inline(always)]`, as must everything it calls, or the caller's instruction set does not apply
/// to it.
pub(crate) trait Kernel {
    fn run<S: Simd>(self, s: S);
}

/// The instructions that the operators use: a set known to be present.
///
/// ```
/// let cpu = paraft_compute::Cpu::detect();
/// assert!(paraft_compute::Cpu::with(cpu.isa()).is_some());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    level: Level,
}

impl Cpu {
    /// The set chosen for this process: the machine's best, or that of `PARAFT_SIMD`.
    pub fn detect() -> Self {
        Self { level: paraft_simd::level() }
    }

    /// A given set, or `None` if the machine lacks it. For comparisons.
    pub fn with(isa: Isa) -> Option<Self> {
        Some(Self { level: isa.level()? })
    }

    /// Every set of this machine, the smallest first.
    pub fn every() -> impl Iterator<Item = Self> {
        Isa::ALL.into_iter().filter_map(Self::with)
    }

    /// The set in use.
    pub fn isa(self) -> Isa {
        Isa::of(self.level)
    }

    /// For `dispatch!`, where vectors are not lanes of samples.
    pub(crate) fn level(self) -> Level {
        self.level
    }

    /// Runs on all sixteen lanes at once.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) {
        dispatch!(self.level, s => kernel.run(Whole::new(s, LANES)));
    }

    /// Runs on a block with samples only in its first `live` lanes. If eight lanes suffice, it reads and writes
    /// only the first eight of each [`Lane`]: the last block of a batch then costs half (a batch of 100 has four
    /// samples in it).
    #[inline]
    pub(crate) fn run_live<K: Kernel>(self, live: usize, kernel: K) {
        match live <= LANES / 2 {
            true => dispatch!(self.level, s => kernel.run(Half::new(s, LANES / 2))),
            false => self.run(kernel),
        }
    }

    /// Likewise, for a kernel with a tile in registers, which visits the [`parts`](Simd::parts) of its lanes.
    #[inline]
    pub(crate) fn run_tiles<K: Kernel>(self, live: usize, kernel: K) {
        dispatch!(self.level, s => tiles(s, live, kernel));
    }
}

#[inline(always)]
fn tiles<S: Token, K: Kernel>(s: S, live: usize, kernel: K) {
    if S::f32s::LEN > LANES / 2 && live <= LANES / 2 {
        return kernel.run(Half::new(s, LANES / 2));
    }
    kernel.run(Lanes::<S, S::f32s>::new(s, live));
}

impl Default for Cpu {
    fn default() -> Self {
        Self::detect()
    }
}

#[cfg(test)]
#[path = "simd_tests.rs"]
mod tests;
