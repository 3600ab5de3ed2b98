//! The kernels' storage types.

pub use half::{bf16, f16};

/// A type as a kernel's suffix names it.
pub trait Type: Storage {
    const NAME: &'static str;
    /// Of one rounding, relative.
    const EPSILON: f64;
    /// `add_bf16`.
    fn kernel(stem: &str) -> String {
        format!("{stem}_{}", Self::NAME)
    }
}

pub trait Storage: Copy {
    fn narrow(v: f32) -> Self;
    fn wide(self) -> f64;
}

impl Storage for f32 {
    fn narrow(v: f32) -> Self {
        v
    }
    fn wide(self) -> f64 {
        self.into()
    }
}
impl Storage for f64 {
    fn narrow(v: f32) -> Self {
        v.into()
    }
    fn wide(self) -> f64 {
        self
    }
}
impl Storage for bf16 {
    fn narrow(v: f32) -> Self {
        bf16::from_f32(v)
    }
    fn wide(self) -> f64 {
        self.to_f64()
    }
}
impl Storage for f16 {
    fn narrow(v: f32) -> Self {
        f16::from_f32(v)
    }
    fn wide(self) -> f64 {
        self.to_f64()
    }
}

/// An f32 that the kernel rounds to 11 bits of significand (ties away from zero) before it multiplies.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Tf32(f32);

impl Storage for Tf32 {
    fn narrow(v: f32) -> Self {
        Self(v)
    }
    fn wide(self) -> f64 {
        let bits = self.0.to_bits();
        if self.0.is_nan() { f64::NAN } else { f32::from_bits((bits + 0x1000) & 0xffff_e000).into() }
    }
}

impl Type for Tf32 {
    const NAME: &'static str = "tf32";
    const EPSILON: f64 = 1.0 / 2048.0;
}

macro_rules! whole {
    ($($t:ty),*) => {$(
        impl Storage for $t {
            /// NaN, for poison, is all ones.
            fn narrow(v: f32) -> Self {
                if v.is_nan() { <$t>::MAX } else { v as $t }
            }
            fn wide(self) -> f64 {
                self as f64
            }
        }
    )*};
}
whole!(u8, u16, u32, u64);

impl Type for f32 {
    const NAME: &'static str = "f32";
    const EPSILON: f64 = 6e-8;
}
impl Type for bf16 {
    const NAME: &'static str = "bf16";
    const EPSILON: f64 = 1.0 / 256.0;
}
impl Type for f16 {
    const NAME: &'static str = "f16";
    const EPSILON: f64 = 1.0 / 2048.0;
}
