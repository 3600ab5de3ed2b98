//! What a model's code asks of a device: the operators, over buffers of the device's own.
//!
//! Parameters and gradients are flat vectors; operators find a tensor by its offset. Everything between is in buffers that
//! operators make as long as they need, so a model allocates nothing once it has seen its largest batch.
//!
//! ```text
//!  host       load_values, load_ids, load_images ─▶ Values, Ids, Images ─▶ operators ─▶ loss, sums, read ─▶ host
//!  params ──────────────────────────────────────────────────────▲   └──▶ grads
//! ```
//!
//! An operator may only be begun when it returns ([`crate::cuda`]); what reads its result on the host waits for it.

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
    /// Of the losses.
    pub loss: f64,
    /// Rows whose largest value is at the label.
    pub correct: u64,
}

/// Buffers of a device, and what brings values there and back.
pub trait Buffers {
    /// The flat parameters.
    type Params: ?Sized;
    /// The flat gradient.
    type Grads: ?Sized;
    /// A matrix of activations or of their gradients, in the element type in which the device computes.
    type Values: Default;
    /// What a norm or an attention keeps for its backward pass, in f32.
    type Floats: Default;
    /// Labels or tokens.
    type Ids: Default;

    /// Values from the host.
    fn load_values(&mut self, from: &[f32], to: &mut Self::Values) -> Result;
    /// Labels or tokens from the host.
    fn load_ids(&mut self, from: &[u32], to: &mut Self::Ids) -> Result;
    /// Values to the host; waits for them.
    fn read(&mut self, values: &Self::Values) -> Result<Vec<f32>>;
}

/// Linear layers and what goes with them.
pub trait Linears: Buffers {
    /// `y = act(x · weightᵀ + bias)`. With an activation whose gradient needs what it was applied to
    /// ([`Activation::Gelu`]), that goes to `before`.
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
    /// `dweight = dyᵀ · x` and `dbias = Σ dy`, over what is there.
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
    /// Turns the gradient of an activation's result into that of its argument. `saved` is the result (ReLU) or the argument
    /// (GELU).
    fn activation_backward(
        &mut self,
        activation: Activation,
        saved: &Self::Values,
        dy: &mut Self::Values,
    ) -> Result;

    /// `sum = a + b`.
    fn add(&mut self, a: &Self::Values, b: &Self::Values, sum: &mut Self::Values) -> Result;
}

/// Losses: of a step with their gradient, and sums of an evaluation.
pub trait Losses: Buffers {
    /// Mean of the cross-entropy of softmax over the batch, to be read with [`Self::loss`]; the logits, `[rows, classes]`,
    /// become its gradient.
    fn softmax_cross_entropy(
        &mut self,
        rows: usize,
        classes: usize,
        logits: &mut Self::Values,
        labels: &Self::Ids,
    ) -> Result;
    /// Mean of the squared difference over all values, to be read with [`Self::loss`]; `dy` becomes its gradient.
    fn mse(&mut self, y: &Self::Values, target: &Self::Values, dy: &mut Self::Values) -> Result;
    /// Adds the cross-entropy of each row, and whether its largest value is at the label, to [`Self::sums`].
    fn cross_entropy_sum(
        &mut self,
        rows: usize,
        classes: usize,
        logits: &Self::Values,
        labels: &Self::Ids,
    ) -> Result;
    /// Adds the squared differences of all values to the loss of [`Self::sums`].
    fn squared_difference(&mut self, y: &Self::Values, target: &Self::Values) -> Result;
    /// The loss of the step; waits for it.
    fn loss(&mut self) -> Result<f32>;
    /// The sums since they were taken last; waits for them.
    fn sums(&mut self) -> Result<Sums>;
}

/// LayerNorm and RMSNorm.
pub trait RowNorms: Buffers {
    /// Normalises rows. With `add`, of the sum of both, which goes to its second part. `stats` keeps what the backward pass
    /// needs.
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
    /// `x` is what was normalised. `dx` is the gradient of `x`, plus `add`.
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
    /// Causal attention. `qkv` is `[batch, time, 3, heads, head]`, `out` `[batch, time, heads, head]`; `stats` keeps the
    /// logarithm of each row's sum of exponentials.
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
    /// `y = tokens' table[token] + positions' table[place]`, `[batch · time, cols]`.
    fn embedding(
        &mut self,
        shape: EmbeddingShape,
        tokens: &Self::Ids,
        params: &Self::Params,
        at: EmbeddingAt,
        y: &mut Self::Values,
    ) -> Result;
    /// Before the backward pass of what was loaded: brings to the device whose gradients go where. Apart from that pass, which then
    /// needs nothing from the host.
    fn order_tokens(&mut self, _shape: EmbeddingShape, _tokens: &mut Self::Ids) -> Result {
        Ok(())
    }
    /// Adds to the gradient of the tokens' table, which has that of a tied head already, and writes that of the positions'.
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
    /// `[n, channels, height, width]`, in whatever order the device likes.
    type Images;
    /// The workspace of a convolution block, with its output and the gradient of that.
    type ConvBlock;

    /// Room for images with a border of zeros.
    fn images(&self, channels: usize, height: usize, width: usize, border: usize) -> Self::Images;
    /// `n` images from the host, `[n, channels, height, width]`.
    fn load_images(&mut self, from: &[f32], n: usize, to: &mut Self::Images) -> Result;
    /// A block's workspace.
    fn conv_block(&self, shape: ConvBlockShape, at: ConvBlockAt) -> Self::ConvBlock;
    /// The block's output.
    fn conv_block_output(block: &Self::ConvBlock) -> &Self::Images;
    /// Fills the output for `n` images. With `train` the norm uses their statistics, and otherwise the running ones.
    fn conv_block_forward(
        &mut self,
        block: &mut Self::ConvBlock,
        x: &Self::Images,
        n: usize,
        params: &Self::Params,
        train: bool,
    ) -> Result;
    /// After a forward pass with `train`: what is to be subtracted from the running statistics.
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
    /// After that: the gradient of the input, which is that of the output of the block `before`.
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
    /// Its weight's and bias's gradients, and then that of the block's output.
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

/// The operators. Matrices are row-major, `[rows, cols]`. Shapes are the caller's duty, as in all of this crate.
pub trait Device: Linears + Losses + RowNorms + Attentions + Embeddings + Convolutions {}

impl<D: Linears + Losses + RowNorms + Attentions + Embeddings + Convolutions> Device for D {}
