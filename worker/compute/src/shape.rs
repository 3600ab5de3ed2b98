//! The operators' shapes, equal on every device, and the places of their tensors in the flat vectors.

/// A linear layer's shape and batch size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearShape {
    /// Samples.
    pub n: usize,
    /// Values of one input.
    pub inputs: usize,
    /// Values of one output.
    pub outputs: usize,
}

impl LinearShape {
    /// Values of the weight, `[outputs, inputs]`.
    pub fn weight_len(&self) -> usize {
        self.inputs * self.outputs
    }
}

/// A linear layer's place in the flat vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearAt {
    /// Offset of the weight, `[outputs, inputs]`.
    pub weight: usize,
    /// Offset of the bias, `[outputs]`, if any.
    pub bias: Option<usize>,
}

/// The function after a linear map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// Nothing.
    None,
    /// `max(0, y)`.
    Relu,
    /// `0.5 y (1 + tanh(√(2/π) (y + 0.044715 y³)))`: the approximation of GPT-2 (Hendrycks and Gimpel, 2016), PyTorch's
    /// `approximate="tanh"`.
    Gelu,
}

/// A convolution's shape: square kernel, stride 1, the same padding on all sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvShape {
    /// Channels of the input.
    pub inputs: usize,
    /// Channels of the output.
    pub outputs: usize,
    /// Side of the kernel.
    pub kernel: usize,
    /// Zeros around the input; less than `kernel`.
    pub pad: usize,
}

impl ConvShape {
    /// Values of the weight, `[outputs, inputs, kernel, kernel]`.
    pub fn weight_len(&self) -> usize {
        self.outputs * self.inputs * self.kernel * self.kernel
    }

    /// Side of the output for a side of the input; 0 if the kernel is larger.
    pub fn side(&self, input: usize) -> usize {
        (input + 2 * self.pad + 1).saturating_sub(self.kernel)
    }

    /// The convolution that computes the input's gradient from the output's.
    pub fn transposed(&self) -> Self {
        Self {
            inputs: self.outputs,
            outputs: self.inputs,
            kernel: self.kernel,
            pad: self.kernel - 1 - self.pad,
        }
    }
}

/// Convolution, BatchNorm, ReLU and 2x2 max pooling in sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvBlockShape {
    /// The convolution.
    pub conv: ConvShape,
    /// Rows of its input.
    pub height: usize,
    /// Columns of its input.
    pub width: usize,
    /// Zeros around the block's output that its reader requires.
    pub border: usize,
    /// Whether the gradient of the block's input is needed.
    pub input_gradient: bool,
}

/// A block's place in the flat vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvBlockAt {
    /// Offset of the convolution's weight; its bias, and the norm's gamma and beta, follow.
    pub params: usize,
    /// Offset of the running mean; the running variance follows.
    pub buffers: usize,
}

/// Rows to normalise, each separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormShape {
    /// Rows.
    pub rows: usize,
    /// Values of a row.
    pub cols: usize,
}

/// Where a LayerNorm's tensors (Ba et al., 2016: `gamma (x - mean) / √(var + ε) + beta`) lie in the flat vectors: gamma,
/// `[cols]`, and directly behind it beta, `[cols]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormAt {
    /// Offset of gamma.
    pub gamma: usize,
}

/// Added to a row's variance before the root, as in PyTorch's LayerNorm.
pub const NORM_EPSILON: f32 = 1e-5;

/// Causal self-attention over `batch` sequences of `time` places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Places of a sequence.
    pub time: usize,
    /// Heads.
    pub heads: usize,
    /// Values of a head: 16, 32, 64 or 128.
    pub head: usize,
}

impl AttentionShape {
    /// Values of a place over all heads.
    pub fn width(&self) -> usize {
        self.heads * self.head
    }

    /// Places of all sequences.
    pub fn rows(&self) -> usize {
        self.batch * self.time
    }

    /// The factor of the products of queries and keys: `1/√head`.
    pub fn scale(&self) -> f32 {
        1.0 / (self.head as f32).sqrt()
    }
}

/// Token and position embeddings: one table has a row per token, another one per position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingShape {
    /// Sequences.
    pub batch: usize,
    /// Places of a sequence.
    pub time: usize,
    /// Values of a row.
    pub cols: usize,
    /// Rows of the token table.
    pub vocab: usize,
    /// Rows of the position table; at least `time`.
    pub context: usize,
}

/// Offsets of the tables in the flat vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingAt {
    /// Offset of the token table, `[vocab, cols]`.
    pub tokens: usize,
    /// Offset of the position table, `[context, cols]`.
    pub positions: usize,
}
