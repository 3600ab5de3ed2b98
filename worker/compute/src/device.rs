//! A device's interface for model code: operators over the device's own buffers.
//!
//! Parameters and gradients are flat vectors; operators find a tensor by its offset. All other values are in
//! buffers that operators enlarge as needed, so a model allocates nothing after its largest batch.
//!
//! ```text
//!  host       load_values, load_ids, load_images ─▶ Values, Ids, Images ─▶ operators ─▶ loss, sums, read ─▶ host
//!  params ──────────────────────────────────────────────────────▲   └──▶ grads
//! ```
//!
//! An operator may only be started when it returns ([`crate::cuda`]); reading its result on the host waits for it.

use crate::{
    error::Result,
    shape::{
        Activation, AttentionShape, ConvBlockAt, ConvBlockShape, EmbeddingAt, EmbeddingShape, LinearAt,
        LinearShape, NormAt, NormShape,
    },
};

/// Sums of an evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// Sum of the losses.
    pub loss: f64,
    /// Rows with the largest value at the label.
    pub correct: u64,
}

/// A device's buffers, and their transfers.
pub trait Buffers {
    /// The flat parameters.
    type Params: ?Sized;
    /// The flat gradient.
    type Grads: ?Sized;
    /// A matrix of activations or their gradients, in the device's element type.
    type Values: Default;
    /// Values that a norm or an attention keeps for its backward pass, in f32.
    type Floats: Default;
    /// Labels or tokens.
    type Ids: Default;

    /// Copies values from the host.
    fn load_values(&mut self, from: &[f32], to: &mut Self::Values) -> Result;
    /// Copies labels or tokens from the host.
    fn load_ids(&mut self, from: &[u32], to: &mut Self::Ids) -> Result;
    /// Copies values to the host; waits for them.
    fn read(&mut self, values: &Self::Values) -> Result<Vec<f32>>;
}

/// Linear layers and their epilogues.
pub trait Linears: Buffers {
    /// `y = act(x · weightᵀ + bias)`. If the activation's gradient needs its argument ([`Activation::Gelu`]), the
    /// argument is stored in `before`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the operator")]
    fn linear(
        &mut self,
        shape: LinearShape,
        x: &Self::Values,
        params: &Self::Params,
        at: LinearAt,
        activation: Activation,
        y: &mut Self::Values,
        before: Option<&mut Self::Values>,
    ) -> Result;
    /// Overwrites `dweight = dyᵀ · x` and `dbias = Σ dy`.
    fn linear_backward_weight(
        &mut self,
        shape: LinearShape,
        x: &Self::Values,
        dy: &Self::Values,
        at: LinearAt,
        grads: &mut Self::Grads,
    ) -> Result;
    /// `dx = dy · weight`.
    fn linear_backward_input(
        &mut self,
        shape: LinearShape,
        dy: &Self::Values,
        params: &Self::Params,
        at: LinearAt,
        dx: &mut Self::Values,
    ) -> Result;
    /// Turns the gradient of an activation's result into that of its argument. `saved` is the result (ReLU) or the
    /// argument (GELU).
    fn activation_backward(
        &mut self,
        activation: Activation,
        saved: &Self::Values,
        dy: &mut Self::Values,
    ) -> Result;

    /// `sum = a + b`.
    fn add(&mut self, a: &Self::Values, b: &Self::Values, sum: &mut Self::Values) -> Result;
}

/// Losses: a step's loss with its gradient, and an evaluation's sums.
pub trait Losses: Buffers {
    /// Mean cross-entropy of the softmax over the batch; read it with [`Self::loss`]. The logits, `[rows,
    /// classes]`, become its gradient.
    fn softmax_cross_entropy(
        &mut self,
        rows: usize,
        classes: usize,
        logits: &mut Self::Values,
        labels: &Self::Ids,
    ) -> Result;
    /// Mean of the squared difference over all values; read it with [`Self::loss`]. `dy` becomes its gradient.
    fn mse(&mut self, y: &Self::Values, target: &Self::Values, dy: &mut Self::Values) -> Result;
    /// Adds each row's cross-entropy, and whether its largest value is at the label, to [`Self::sums`].
    fn cross_entropy_sum(
        &mut self,
        rows: usize,
        classes: usize,
        logits: &Self::Values,
        labels: &Self::Ids,
    ) -> Result;
    /// Adds the squared differences of all values to the loss of [`Self::sums`].
    fn squared_difference(&mut self, y: &Self::Values, target: &Self::Values) -> Result;
    /// The step's loss; waits for it.
    fn loss(&mut self) -> Result<f32>;
    /// The sums since the last call; waits for them.
    fn sums(&mut self) -> Result<Sums>;
}

/// LayerNorm.
pub trait RowNorms: Buffers {
    /// Normalises rows. With `add` it normalises the sum of both, which it stores in the second part of `add`.
    /// `stats` keeps values for the backward pass.
    #[expect(clippy::too_many_arguments, reason = "the operands of the operator")]
    fn norm(
        &mut self,
        shape: NormShape,
        x: &Self::Values,
        add: Option<(&Self::Values, &mut Self::Values)>,
        params: &Self::Params,
        at: NormAt,
        y: &mut Self::Values,
        stats: &mut Self::Floats,
    ) -> Result;
    /// `x` is the normalised input. `dx` is the gradient of `x`, plus `add`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the operator")]
    fn norm_backward(
        &mut self,
        shape: NormShape,
        dy: &Self::Values,
        x: &Self::Values,
        stats: &Self::Floats,
        params: &Self::Params,
        at: NormAt,
        add: Option<&Self::Values>,
        dx: &mut Self::Values,
        grads: &mut Self::Grads,
    ) -> Result;
}

/// Causal self-attention.
pub trait Attentions: Buffers {
    /// Causal attention. `qkv` is `[batch, time, 3, heads, head]`, `out` `[batch, time, heads, head]`; `stats`
    /// keeps the logarithm of each row's sum of exponentials.
    fn attention(
        &mut self,
        shape: AttentionShape,
        qkv: &Self::Values,
        out: &mut Self::Values,
        stats: &mut Self::Floats,
    ) -> Result;
    /// The gradient of `qkv`.
    fn attention_backward(
        &mut self,
        shape: AttentionShape,
        qkv: &Self::Values,
        out: &Self::Values,
        stats: &Self::Floats,
        dout: &Self::Values,
        dqkv: &mut Self::Values,
    ) -> Result;
}

/// Token and position embeddings.
pub trait Embeddings: Buffers {
    /// `y = token table[token] + position table[place]`, `[batch · time, cols]`.
    fn embedding(
        &mut self,
        shape: EmbeddingShape,
        tokens: &Self::Ids,
        params: &Self::Params,
        at: EmbeddingAt,
        y: &mut Self::Values,
    ) -> Result;
    /// Precedes the backward pass of the loaded tokens: uploads which rows receive gradients. It is separate, so
    /// that the backward pass needs nothing from the host.
    fn order_tokens(&mut self, _shape: EmbeddingShape, _tokens: &mut Self::Ids) -> Result {
        Ok(())
    }
    /// Adds to the gradient of the token table, which already has that of a tied head, and overwrites that of the
    /// position table.
    fn embedding_backward(
        &mut self,
        shape: EmbeddingShape,
        tokens: &Self::Ids,
        dy: &Self::Values,
        at: EmbeddingAt,
        grads: &mut Self::Grads,
    ) -> Result;
}

/// Convolution blocks, and linear layers over their output.
pub trait Convolutions: Buffers {
    /// `[n, channels, height, width]`, in the device's own order.
    type Images;
    /// The workspace of a convolution block, including its output and the output's gradient.
    type ConvBlock;

    /// Allocates images with a border of zeros.
    fn images(&self, channels: usize, height: usize, width: usize, border: usize) -> Self::Images;
    /// `n` images from the host, `[n, channels, height, width]`.
    fn load_images(&mut self, from: &[f32], n: usize, to: &mut Self::Images) -> Result;
    /// A block's workspace.
    fn conv_block(&self, shape: ConvBlockShape, at: ConvBlockAt) -> Self::ConvBlock;
    /// The block's output.
    fn conv_block_output(block: &Self::ConvBlock) -> &Self::Images;
    /// Computes the output for `n` images. With `train` the norm uses their statistics, otherwise the running ones.
    fn conv_block_forward(
        &mut self,
        block: &mut Self::ConvBlock,
        x: &Self::Images,
        n: usize,
        params: &Self::Params,
        train: bool,
    ) -> Result;
    /// After a forward pass with `train`: the amounts to subtract from the running statistics.
    fn conv_block_buffers(
        &mut self,
        block: &Self::ConvBlock,
        params: &Self::Params,
        grads: &mut Self::Grads,
    ) -> Result;
    /// From the output's gradient: the gradients of gamma and beta.
    fn conv_block_backward_norm(
        &mut self,
        block: &mut Self::ConvBlock,
        n: usize,
        params: &Self::Params,
        grads: &mut Self::Grads,
    ) -> Result;
    /// After that: the gradients of the convolution's weight and bias. `x` was the input.
    fn conv_block_backward_weight(
        &mut self,
        block: &mut Self::ConvBlock,
        x: &Self::Images,
        n: usize,
        params: &Self::Params,
        grads: &mut Self::Grads,
    ) -> Result;
    /// After that: the gradient of the input, which is the output gradient of the block `before`.
    fn conv_block_backward_input(
        &mut self,
        block: &mut Self::ConvBlock,
        n: usize,
        params: &Self::Params,
        before: &mut Self::ConvBlock,
    ) -> Result;
    /// A linear layer over a block's output: `y = x · weightᵀ + bias`.
    fn image_linear(
        &mut self,
        shape: LinearShape,
        x: &Self::ConvBlock,
        params: &Self::Params,
        at: LinearAt,
        y: &mut Self::Values,
    ) -> Result;
    /// The gradients of its weight and bias; then that of the block's output.
    fn image_linear_backward_weight(
        &mut self,
        shape: LinearShape,
        x: &Self::ConvBlock,
        dy: &Self::Values,
        at: LinearAt,
        grads: &mut Self::Grads,
    ) -> Result;
    /// The gradient of the block's output.
    fn image_linear_backward_input(
        &mut self,
        shape: LinearShape,
        dy: &Self::Values,
        params: &Self::Params,
        at: LinearAt,
        x: &mut Self::ConvBlock,
    ) -> Result;
}

/// All operators. Matrices are row-major, `[rows, cols]`. The caller guarantees the shapes, as in all of this
/// crate.
pub trait Device: Linears + Losses + RowNorms + Attentions + Embeddings + Convolutions {}

impl<D: Linears + Losses + RowNorms + Attentions + Embeddings + Convolutions> Device for D {}
