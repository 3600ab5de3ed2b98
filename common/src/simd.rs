//! The widest vector unit of the host, for loops in plain Rust.
//!
//! [`wide`] compiles its closure once for each level (SSE2, SSE4.2, AVX2, AVX-512 on x86-64; NEON on aarch64), lets the
//! compiler vectorise each, and takes the level that `paraft-simd` has chosen for the process. What may be written in such a closure is said in
//! [`crate::optim`]: then no level changes a bit.

pub(crate) use paraft_simd::Level;

/// Runs `work` with the host's vector unit. `work` and what it calls must be `#[inline(always)]`: what is not inlined is
/// compiled for the baseline.
#[inline(always)]
pub(crate) fn wide<R>(work: impl FnOnce() -> R) -> R {
    fearless_simd::dispatch!(level(), _simd => work())
}

#[cfg(not(test))]
#[inline(always)]
fn level() -> Level {
    paraft_simd::level()
}

#[cfg(test)]
pub(crate) use forced::{at, level, levels};

#[cfg(test)]
mod forced {
    use super::Level;
    use std::cell::Cell;

    thread_local! {
        static FORCED: Cell<Option<Level>> = const { Cell::new(None) };
    }

    pub(crate) fn level() -> Level {
        FORCED.get().unwrap_or_else(paraft_simd::level)
    }

    /// Runs `work` at this level, in this thread.
    pub(crate) fn at<R>(level: Level, work: impl FnOnce() -> R) -> R {
        FORCED.set(Some(level));
        let result = work();
        FORCED.set(None);
        result
    }

    /// Every level that this host has, the lowest first.
    pub(crate) fn levels() -> Vec<Level> {
        let best = Level::new();
        #[cfg(target_arch = "x86_64")]
        {
            let all = [
                best.as_sse2().map(Level::Sse2),
                best.as_sse4_2().map(Level::Sse4_2),
                best.as_avx2().map(Level::Avx2),
                best.as_avx512().map(Level::Avx512),
            ];
            all.into_iter().flatten().collect()
        }
        #[cfg(not(target_arch = "x86_64"))]
        vec![best]
    }
}
