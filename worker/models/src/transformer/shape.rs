//! The transformer's shape.

use serde::{Deserialize, Serialize};

/// The norm of the blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NormKind {
    /// LayerNorm.
    #[default]
    Layer,
    /// RMSNorm.
    Rms,
}

/// The transformer's sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransformerShape {
    /// Tokens per sample.
    pub time: usize,
    /// All tokens are below this number.
    pub vocab: usize,
    /// Blocks.
    pub layers: usize,
    /// Heads of each attention.
    pub heads: usize,
    /// Values of a token between blocks.
    pub width: usize,
    /// Which norm.
    pub norm: NormKind,
    /// Keep only the inputs of blocks.
    pub checkpoint_activations: bool,
}
