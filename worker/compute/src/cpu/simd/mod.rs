//! Sixteen `f32` lanes, in three widths of instruction, and the switch between them.
//!
//! A kernel is written once, generic over [`Simd`], and compiled three times: for AVX-512, for AVX2+FMA and
//! for the baseline of the target (SSE2 on x86-64, NEON on aarch64). [`Cpu`] remembers what the machine can
//! do and runs a [`Kernel`] in the right version. This folder holds all the `unsafe` of the CPU operators.
//!
//! ```text
//!  operator --Kernel--> Cpu::run --+--> run_avx512 (#[target_feature]) --> Kernel::run::<Avx512>
//!                                  +--> run_avx2   (#[target_feature]) --> Kernel::run::<Avx2>
//!                                  +--> Kernel::run::<Baseline>
//! ```
//!
//! Results differ between the versions in the last bits (fused or separate rounding, order of the lane sum);
//! on one version the same inputs give the same bits.

mod baseline;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use baseline::Baseline;

/// Number of `f32` lanes of a [`Lane`].
pub const LANES: usize = 16;

/// Sixteen samples' value at one place of a plane: the innermost, vectorised axis of the blocked layout.
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

/// The operations that kernels are made of.
///
/// A value of an implementing type is a proof that the machine has the instructions: the x86 ones are only
/// made inside this folder, after detection.
pub(crate) trait Simd: Copy {
    /// The lanes in registers: sixteen, or the first eight where the others are dead.
    type V: Copy;
    /// One truth value a lane.
    type M: Copy;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, p: &Lane) -> Self::V;
    fn store(self, p: &mut Lane, v: Self::V);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused where the machine can.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b`, false for NaN.
    fn gt(self, a: Self::V, b: Self::V) -> Self::M;
    /// `a == b`, false for NaN.
    fn eq(self, a: Self::V, b: Self::V) -> Self::M;
    /// `t` where `m` holds, else `f`.
    fn select(self, m: Self::M, t: Self::V, f: Self::V) -> Self::V;
    /// The sum of the lanes.
    fn sum(self, v: Self::V) -> f32;
}

/// Work to be run with the machine's best instructions.
///
/// `run` must be `#[inline(always)]`, and so must all that it calls, or the instructions of the caller do not
/// reach it.
pub(crate) trait Kernel {
    fn run<S: Simd>(self, s: S);
}

/// A set of vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What every machine of the target has.
    Baseline,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512F and VL.
    Avx512,
}

/// The instructions that the operators use: a set known to be present.
///
/// ```
/// let cpu = paraft_compute::Cpu::detect();
/// assert!(paraft_compute::Cpu::with(cpu.isa()).is_some());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    // Invariant: `Cpu::has(isa)`.
    isa: Isa,
}

impl Cpu {
    /// The best set that this machine has.
    pub fn detect() -> Self {
        let isa = [Isa::Avx512, Isa::Avx2].into_iter().find(|&isa| Self::has(isa));
        Self { isa: isa.unwrap_or(Isa::Baseline) }
    }

    /// A certain set, or `None` where the machine lacks it. For comparisons.
    pub fn with(isa: Isa) -> Option<Self> {
        Self::has(isa).then_some(Self { isa })
    }

    /// The set in use.
    pub fn isa(self) -> Isa {
        self.isa
    }

    #[cfg(target_arch = "x86_64")]
    fn has(isa: Isa) -> bool {
        match isa {
            Isa::Baseline => true,
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            // Half vectors need VL, and the kernels of `Half` AVX2 and FMA. Only the Xeon Phi has F alone.
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512vl")
                    && Self::has(Isa::Avx2)
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn has(isa: Isa) -> bool {
        isa == Isa::Baseline
    }

    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) {
        match self.isa {
            // SAFETY: by the invariant of `Cpu` the machine has AVX-512F.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { x86::run_avx512(kernel) },
            // SAFETY: by the invariant of `Cpu` the machine has AVX2 and FMA.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { x86::run_avx2(kernel) },
            _ => kernel.run(Baseline),
        }
    }

    /// Like `run`, for a block of which only the first `live` lanes hold samples.
    ///
    /// Where eight lanes are enough, only the first eight of each [`Lane`] are read and written: the last block
    /// of a batch then costs half (a batch of 100 has four samples in it).
    #[inline]
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    pub(crate) fn run_live<K: Kernel>(self, live: usize, kernel: K) {
        match self.isa {
            // SAFETY: by the invariant of `Cpu` the machine has AVX-512F, AVX-512VL, AVX2 and FMA.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if live <= LANES / 2 => unsafe { x86::run_half_avx512(kernel) },
            // SAFETY: by the invariant of `Cpu` the machine has AVX2 and FMA.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if live <= LANES / 2 => unsafe { x86::run_half_avx2(kernel) },
            _ => self.run(kernel),
        }
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::detect()
    }
}
