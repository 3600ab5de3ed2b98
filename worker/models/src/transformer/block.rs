//! One block: its activations, forward pass and backward pass.

use super::{
    TransformerShape,
    places::{BlockAt, Sizes},
};
use crate::{
    net::{Flat, NetResult},
    slice::SliceMember,
};
use paraft_compute::{
    Device,
    shape::{Activation, AttentionShape, LinearShape, NormShape},
};

/// A block's activations, kept for its backward pass.
pub(super) struct BlockActivations<D: Device> {
    pub(super) normed1: D::Values,
    pub(super) stats1: D::Floats,
    pub(super) qkv: D::Values,
    pub(super) attended: D::Values,
    pub(super) attention: D::Floats,
    pub(super) projected: D::Values,
    pub(super) mid: D::Values,
    pub(super) normed2: D::Values,
    pub(super) stats2: D::Floats,
    pub(super) before: D::Values,
    pub(super) hidden: D::Values,
    pub(super) out: D::Values,
}

impl<D: Device> Default for BlockActivations<D> {
    fn default() -> Self {
        Self {
            normed1: Default::default(),
            stats1: Default::default(),
            qkv: Default::default(),
            attended: Default::default(),
            attention: Default::default(),
            projected: Default::default(),
            mid: Default::default(),
            normed2: Default::default(),
            stats2: Default::default(),
            before: Default::default(),
            hidden: Default::default(),
            out: Default::default(),
        }
    }
}

/// Gradients in the backward pass.
pub(super) struct BackwardBuffers<D: Device> {
    pub(super) next: D::Values,
    pub(super) hidden: D::Values,
    pub(super) normed: D::Values,
    pub(super) mid: D::Values,
    pub(super) attended: D::Values,
    pub(super) qkv: D::Values,
}

/// A block's description, for this many samples.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    pub(super) shape: TransformerShape,
    pub(super) sizes: Sizes,
    pub(super) at: BlockAt,
    pub(super) n: usize,
    pub(super) among: Option<&'a SliceMember>,
}

impl Block<'_> {
    pub(super) fn linear(&self, inputs: usize, outputs: usize) -> LinearShape {
        LinearShape { n: self.n * self.shape.time, inputs, outputs }
    }

    pub(super) fn qkv(&self) -> LinearShape {
        self.linear(self.shape.width, 3 * self.sizes.inner)
    }

    pub(super) fn out(&self) -> LinearShape {
        self.linear(self.sizes.inner, self.shape.width)
    }

    pub(super) fn up(&self) -> LinearShape {
        self.linear(self.shape.width, self.sizes.hidden)
    }

    pub(super) fn down(&self) -> LinearShape {
        self.linear(self.sizes.hidden, self.shape.width)
    }

    pub(super) fn attention(&self) -> AttentionShape {
        let s = self.shape;
        AttentionShape { batch: self.n, time: s.time, heads: self.sizes.heads, head: s.width / s.heads }
    }

    pub(super) fn norm(&self) -> NormShape {
        NormShape { rows: self.n * self.shape.time, cols: self.shape.width }
    }

    /// Sums the slices' partial sums.
    pub(super) fn sum<D: Device>(&self, d: &mut D, values: &mut D::Values) -> NetResult {
        self.among.map_or(Ok(()), |among| among.sum(d, values))
    }
}

/// Fills `room`; the block's result is the sum of its `mid` and `out`.
pub(super) fn block_forward<D: Device>(
    d: &mut D,
    b: Block,
    params: &D::Params,
    x: &D::Values,
    room: &mut BlockActivations<D>,
) -> NetResult {
    let (at, none) = (b.at, Activation::None);
    d.norm(b.norm(), x, None, params, at.norm1, &mut room.normed1, &mut room.stats1)?;
    d.linear(b.qkv(), &room.normed1, params, at.attention, none, &mut room.qkv, None)?;
    d.attention(b.attention(), &room.qkv, &mut room.attended, &mut room.attention)?;
    d.linear(b.out(), &room.attended, params, at.attention_out, none, &mut room.projected, None)?;
    b.sum(d, &mut room.projected)?;
    let add = Some((&room.projected, &mut room.mid));
    d.norm(b.norm(), x, add, params, at.norm2, &mut room.normed2, &mut room.stats2)?;
    let before = Some(&mut room.before);
    d.linear(b.up(), &room.normed2, params, at.up, Activation::Gelu, &mut room.hidden, before)?;
    d.linear(b.down(), &room.hidden, params, at.down, none, &mut room.out, None)?;
    b.sum(d, &mut room.out)
}

/// Turns `back.next`, the gradient of the block's output, into that of its input.
pub(super) fn block_backward<D: Device>(
    d: &mut D,
    b: Block,
    (flat, layer): (&mut dyn Flat<D>, usize),
    x: &D::Values,
    room: &BlockActivations<D>,
    back: &mut BackwardBuffers<D>,
) -> NetResult {
    let (at, norm) = (b.at, b.norm());
    let (params, grads) = flat.layer(layer)?;
    d.linear_backward_weight(b.down(), &room.hidden, &back.next, at.down, grads)?;
    d.linear_backward_input(b.down(), &back.next, params, at.down, &mut back.hidden)?;
    d.activation_backward(Activation::Gelu, &room.before, &mut back.hidden)?;
    flat.ready(at.down.weight)?;
    let (params, grads) = flat.layer(layer)?;
    d.linear_backward_weight(b.up(), &room.normed2, &back.hidden, at.up, grads)?;
    d.linear_backward_input(b.up(), &back.hidden, params, at.up, &mut back.normed)?;
    b.sum(d, &mut back.normed)?;
    let (dy, add) = (&back.normed, Some(&back.next));
    d.norm_backward(norm, dy, &room.mid, &room.stats2, params, at.norm2, add, &mut back.mid, grads)?;
    flat.ready(at.norm2.gamma)?;
    let (params, grads) = flat.layer(layer)?;
    d.linear_backward_weight(b.out(), &room.attended, &back.mid, at.attention_out, grads)?;
    d.linear_backward_input(b.out(), &back.mid, params, at.attention_out, &mut back.attended)?;
    let (qkv, attended) = (&room.qkv, &room.attended);
    d.attention_backward(b.attention(), qkv, attended, &room.attention, &back.attended, &mut back.qkv)?;
    d.linear_backward_weight(b.qkv(), &room.normed1, &back.qkv, at.attention, grads)?;
    d.linear_backward_input(b.qkv(), &back.qkv, params, at.attention, &mut back.normed)?;
    b.sum(d, &mut back.normed)?;
    let (dy, add) = (&back.normed, Some(&back.mid));
    d.norm_backward(norm, dy, x, &room.stats1, params, at.norm1, add, &mut back.next, grads)?;
    flat.ready(at.norm1.gamma)
}
