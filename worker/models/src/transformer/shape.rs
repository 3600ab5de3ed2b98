//! The transformer's shape.

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
    /// Keep only the inputs of blocks.
    pub checkpoint_activations: bool,
}
