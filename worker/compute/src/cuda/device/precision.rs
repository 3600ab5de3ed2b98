//! The numbers in which a GPU computes.

use serde::{Deserialize, Serialize};

/// The numbers in which a GPU computes. Parameters and gradients are always f32, and so are the sums of matrix
/// products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// f32 throughout.
    F32,
    /// Activations in f32; matrix products round their operands to 10 bits of significand (NVIDIA's TF32).
    #[default]
    Tf32,
    /// Activations and the operands of matrix products in bf16.
    Bf16,
    /// The same in f16. Gradients of activations are scaled, because f16 cannot represent small numbers.
    F16,
}

/// The type of a product's values in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F32,
    Bf16,
    F16,
}

impl Precision {
    /// The kernel that converts parameters to the type of matrix operands.
    pub(in crate::cuda) fn cast(self) -> Option<&'static str> {
        match self {
            Self::F32 | Self::Tf32 => None,
            Self::Bf16 => Some("cast_f32_to_bf16"),
            Self::F16 => Some("cast_f32_to_f16"),
        }
    }

    pub(in crate::cuda) fn element(self) -> Element {
        match self {
            Self::F32 | Self::Tf32 => Element::F32,
            Self::Bf16 => Element::Bf16,
            Self::F16 => Element::F16,
        }
    }

    pub(super) fn suffix(self) -> &'static str {
        match self {
            Self::F32 | Self::Tf32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// The compiler's definition of the element type.
    pub(super) fn define(self) -> &'static str {
        match self {
            Self::F32 | Self::Tf32 => "-DPARAFT_F32",
            Self::Bf16 => "-DPARAFT_BF16",
            Self::F16 => "-DPARAFT_F16",
        }
    }

    /// Bytes of an activation.
    pub(super) fn bytes(self) -> usize {
        if self.cast().is_some() { 2 } else { 4 }
    }
}
