//! The shapes that operators take, the same on every device, and where their tensors lie in the flat vectors.

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

/// Where a linear layer lies in the flat vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearAt {
    /// Of the weight, `[outputs, inputs]`.
    pub weight: usize,
    /// Of the bias, `[outputs]`, where there is one.
    pub bias: Option<usize>,
}

/// What follows a linear map.
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

    /// Side of the output for a side of the input; 0 where the kernel is larger than that.
    pub fn side(&self, input: usize) -> usize {
        (input + 2 * self.pad + 1).saturating_sub(self.kernel)
    }

    /// The convolution that takes the output's gradient to the input's.
    pub fn transposed(&self) -> Self {
        Self {
            inputs: self.outputs,
            outputs: self.inputs,
            kernel: self.kernel,
            pad: self.kernel - 1 - self.pad,
        }
    }
}

/// Convolution, BatchNorm, ReLU and 2x2 max pooling, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvBlockShape {
    /// The convolution.
    pub conv: ConvShape,
    /// Rows of its input.
    pub height: usize,
    /// Columns of its input.
    pub width: usize,
    /// Zeros that whoever reads the block's output wants around it.
    pub border: usize,
    /// Whether the gradient of the block's input will be asked for.
    pub input_gradient: bool,
}

/// Where a block lies in the flat vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvBlockAt {
    /// Of the convolution's weight; its bias, and gamma and beta of the norm, follow.
    pub params: usize,
    /// Of the running mean; the running variance follows.
    pub buffers: usize,
}

/// Rows that are normalised, each on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormShape {
    /// Rows.
    pub rows: usize,
    /// Values of a row.
    pub cols: usize,
}

/// Which norm, and where its tensors, `[cols]`, lie in the flat vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormAt {
    /// LayerNorm (Ba et al., 2016): `gamma (x - mean) / √(var + ε) + beta`.
    Layer {
        /// Of gamma.
        gamma: usize,
        /// Of beta.
        beta: usize,
    },
    /// RMSNorm (Zhang and Sennrich, 2019): `gamma x / √(mean(x²) + ε)`.
    Rms {
        /// Of gamma.
        gamma: usize,
    },
}

impl NormAt {
    /// Of gamma.
    pub fn gamma(&self) -> usize {
        match *self {
            Self::Layer { gamma, .. } | Self::Rms { gamma } => gamma,
        }
    }

    /// Of beta, where there is one.
    pub fn beta(&self) -> Option<usize> {
        match *self {
            Self::Layer { beta, .. } => Some(beta),
            Self::Rms { .. } => None,
        }
    }
}

/// Added to a row's variance, or to its mean square, before the root; as PyTorch's LayerNorm.
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

    /// What products of queries and keys are multiplied by: `1/√head`.
    pub fn scale(&self) -> f32 {
        1.0 / (self.head as f32).sqrt()
    }
}

/// Token and position embeddings: each place's token has a row of one table, its position one of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingShape {
    /// Sequences.
    pub batch: usize,
    /// Places of a sequence.
    pub time: usize,
    /// Values of a row.
    pub cols: usize,
    /// Rows of the tokens' table.
    pub vocab: usize,
    /// Rows of the positions' table; at least `time`.
    pub context: usize,
}

/// Where the tables lie in the flat vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingAt {
    /// Of the tokens' table, `[vocab, cols]`.
    pub tokens: usize,
    /// Of the positions' table, `[context, cols]`.
    pub positions: usize,
}
