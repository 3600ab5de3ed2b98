//! The vector instructions of this process: the machine's best, or those that `PARAFT_SIMD` names.
//!
//! The choice is made once per process. Loops over parameters (`paraft-common`) and the operators of
//! models (`paraft-compute`) use [`level`]. A program calls [`choice`] at its start and reports the
//! error; [`level`] is for later code.

use std::{ffi::OsStr, fmt, sync::OnceLock};

pub use fearless_simd::Level;

/// The environment variable that forces an instruction set.
pub const VARIABLE: &str = "PARAFT_SIMD";

/// A set of vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// The baseline of the target: SSE2 on x86-64, NEON on aarch64.
    Portable,
    /// AVX2 and FMA (x86-64-v3).
    Avx2,
    /// AVX-512 of Intel Ice Lake, AMD Zen 4 and later. Older processors with AVX-512 use [`Isa::Avx2`].
    Avx512,
}

impl Isa {
    /// In ascending order.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// The name in `PARAFT_SIMD`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// The instruction set of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|isa| isa.name() == name)
    }

    /// The instruction set of a level. SSE4.2, which the machine may have beyond SSE2, adds nothing for
    /// floats.
    pub fn of(level: Level) -> Self {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => Self::Avx512,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => Self::Avx2,
            _ => Self::Portable,
        }
    }

    /// The proof that this machine supports it, if it does.
    pub fn level(self) -> Option<Level> {
        match self {
            Self::Portable => Some(Level::baseline()),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Level::new().as_avx2().map(Level::Avx2),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Level::new().as_avx512().map(Level::Avx512),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => None,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why the value of `PARAFT_SIMD` is not usable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// No instruction set has this name.
    #[error("PARAFT_SIMD={0}: not a set of vector instructions (avx512, avx2 or portable)")]
    Unknown(String),
    /// The machine does not support it.
    #[error("PARAFT_SIMD={0}: this machine doesn't have it, its best is {best}", best = Isa::of(Level::new()))]
    Missing(Isa),
}

/// The instructions that this process uses.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// The level for kernels.
    pub level: Level,
    /// Whether `PARAFT_SIMD` forced it.
    pub forced: bool,
}

impl Choice {
    /// The instruction set.
    pub fn isa(self) -> Isa {
        Isa::of(self.level)
    }

    fn by(value: Option<&OsStr>) -> Result<Self, Refused> {
        let Some(value) = value.filter(|v| !v.is_empty()) else {
            return Ok(Self { level: Level::new(), forced: false });
        };
        let value = value.to_string_lossy();
        let isa = Isa::named(&value).ok_or_else(|| Refused::Unknown(value.to_string()))?;
        let level = isa.level().ok_or(Refused::Missing(isa))?;
        Ok(Self { level, forced: true })
    }
}

/// The choice of this process, which never changes; or the error in `PARAFT_SIMD`.
pub fn choice() -> Result<Choice, Refused> {
    static CHOICE: OnceLock<Result<Choice, Refused>> = OnceLock::new();
    CHOICE.get_or_init(|| Choice::by(std::env::var_os(VARIABLE).as_deref())).clone()
}

/// The level of this process.
///
/// # Panics
///
/// If `PARAFT_SIMD` is not usable and the program has not called [`choice`] at its start: with other
/// instructions than requested, a test or measurement would be wrong.
#[inline]
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| match choice() {
        Ok(choice) => choice.level,
        Err(refused) => panic!("{refused}"),
    })
}

#[cfg(test)]
mod tests;
