//! A decoder-only transformer for text, as GPT-2 (Radford et al., 2019) and nanoGPT: pre-norm blocks, causal
//! self-attention, a GELU between two linear layers, and a head that shares the token embedding's weight.
//!
//! ```text
//!  tokens ─▶ wte + wpe ─▶ x₀
//!  block:  x ─norm─▶ c_attn ─▶ attention ─▶ c_proj ─┬+ x = mid ─norm─▶ c_fc ─gelu─▶ c_proj ─┬+ mid = next x
//!  x ─norm─▶ · wteᵀ ─▶ logits
//! ```
//!
//! Names and shapes are nanoGPT's (`transformer.h.0.attn.c_attn.weight` is `[3 width, width]`). There is no dropout.
//!
//! The backward pass uses kept activations. With `checkpoint_activations` only a block's input is kept and the
//! block is recomputed (Chen et al., 2016): a third more arithmetic for memory that does not grow with the layers.

mod block;
mod places;
mod shape;
mod slot;
mod tensors;

pub use shape::TransformerShape;

use crate::{
    Batch, Evaluation, ModelError,
    batch::{InputSpec, Sample},
    net::{Flat, Layer, Net, NetResult, Pass, Weights, WholeParams},
    slice::{NetSlice, Run, Slice, SliceMember, SliceRanks},
};
use block::{BackwardBuffers, block_backward, block_forward};
use paraft_common::layout::TensorSpec;
use paraft_compute::{
    Device,
    device::Sums,
    shape::{Activation, NormShape},
};
use places::{Places, Sizes};
use slot::Slot;
use std::sync::Arc;

/// The transformer and its workspaces.
pub struct Transformer<D: Device> {
    shape: TransformerShape,
    places: Places,
    /// At least one.
    slots: Vec<Slot<D>>,
    back: BackwardBuffers<D>,
    /// This slice, and the ranks with the others.
    among: Option<SliceMember>,
    /// In a slice: the evaluation's sums over the classes of all slices.
    sums: Sums,
    /// In a slice: the mean loss of a step's last pass.
    loss: f32,
}

impl<D: Device> Transformer<D> {
    /// Fails with the unsuitable size.
    pub fn new(shape: TransformerShape) -> Result<Self, ModelError> {
        Self::among(shape, None)
    }

    /// One slice, and the places of its values in the model's vector. Fails if it cannot be split so.
    pub fn slice(
        shape: TransformerShape,
        slice: Slice,
        ranks: Arc<dyn SliceRanks>,
    ) -> Result<(Self, Vec<Run>), ModelError> {
        if slice.of > shape.heads || slice.of > shape.vocab {
            return Err(ModelError::new(format!(
                "{} slices of a transformer with {} heads and {} tokens: each needs one at least",
                slice.of, shape.heads, shape.vocab
            )));
        }
        let net = Self::among(shape, Some(SliceMember { slice, ranks }))?;
        let runs = net.places.runs(shape, slice);
        Ok((net, runs))
    }

    fn among(shape: TransformerShape, among: Option<SliceMember>) -> Result<Self, ModelError> {
        let TransformerShape { time, vocab, layers, heads, width, .. } = shape;
        if [time, vocab, layers, heads, width].contains(&0) {
            return Err(ModelError::new(format!(
                "a transformer of {layers} layers, {heads} heads and width {width} over {time} of {vocab} tokens: none of them \
                 may be zero"
            )));
        }
        if !width.is_multiple_of(heads) || !matches!(width / heads, 16 | 32 | 64 | 128) {
            return Err(ModelError::new(format!(
                "a transformer of width {width} with {heads} heads: the width must be 16, 32, 64 or 128 times the heads"
            )));
        }
        Ok(Self {
            shape,
            places: Places::new(shape, Sizes::of(shape, among.as_ref().map(|a| a.slice))),
            among,
            sums: Sums::default(),
            loss: 0.0,
            slots: vec![Slot::new(shape)],
            back: BackwardBuffers {
                next: Default::default(),
                hidden: Default::default(),
                normed: Default::default(),
                mid: Default::default(),
                attended: Default::default(),
                qkv: Default::default(),
            },
        })
    }

    fn load_tokens(&mut self, d: &mut D, slot: usize, batch: &Batch) -> NetResult {
        while self.slots.len() <= slot {
            self.slots.push(Slot::new(self.shape));
        }
        let slot = &mut self.slots[slot];
        let Some(among) = &self.among else {
            d.load_ids(&batch.tokens, &mut slot.tokens)?;
            return d.load_ids(&batch.labels, &mut slot.labels);
        };
        let own = among.slice.part(self.shape.vocab);
        let local = |token: &u32| match own.contains(&(*token as usize)) {
            true => *token - own.start as u32,
            false => own.len() as u32,
        };
        let tokens: Vec<u32> = batch.tokens.iter().map(local).collect();
        slot.host_labels.clone_from(&batch.labels);
        d.load_ids(&tokens, &mut slot.tokens)
    }

    /// Computes the logits of the loaded batch, without a backward pass: all blocks share one block's activations.
    fn infer(&mut self, d: &mut D, weights: &mut dyn Weights<D>, n: usize) -> NetResult {
        let (s, all) = (self.shape, self.shape.layers + 1);
        let Self { places, slots, among, .. } = self;
        let slot = &mut slots[0];
        let shape = places.embedding_shape(s, n);
        d.embedding(shape, &slot.tokens, weights.params(0)?, places.embedding, &mut slot.inputs[0])?;
        for block in 0..s.layers {
            let (x, next) = slot.inputs.split_at_mut(1);
            let (x, next) = if block % 2 == 0 { (&x[0], &mut next[0]) } else { (&next[0], &mut x[0]) };
            let room = &mut slot.rooms[0];
            let of = places.block(s, block, n, among.as_ref());
            block_forward(d, of, weights.params(1 + block)?, x, room)?;
            d.add(&room.mid, &room.out, next)?;
        }
        self.head(d, weights.params(all)?, 0, s.layers % 2, n)
    }

    /// The last norm of an input, and the logits.
    fn head(&mut self, d: &mut D, params: &D::Params, slot: usize, input: usize, n: usize) -> NetResult {
        let slot = &mut self.slots[slot];
        let norm = NormShape { rows: n * self.shape.time, cols: self.shape.width };
        let Slot { inputs, normed, stats, logits, .. } = slot;
        d.norm(norm, &inputs[input], None, params, self.places.norm, normed, stats)?;
        let (shape, at) = self.places.head(self.shape, n);
        d.linear(shape, normed, params, at, Activation::None, logits, None)
    }

    /// From the layer after `pass` to its first one, as in [`Net::backward_pass`], with the gradient in place.
    fn back(&mut self, d: &mut D, flat: &mut dyn Flat<D>, pass: &Pass) -> NetResult {
        let (s, n) = (self.shape, pass.n);
        let Self { places, slots, back, among, .. } = self;
        let (slot, among) = (&mut slots[pass.slot], among.as_ref());
        if pass.layers.end == s.layers + 2 {
            let (shape, at) = places.head(s, n);
            let (params, grads) = flat.layer(1 + s.layers)?;
            d.linear_backward_weight(shape, &slot.normed, &slot.logits, at, grads)?;
            d.linear_backward_input(shape, &slot.logits, params, at, &mut back.normed)?;
            if let Some(among) = among {
                among.sum(d, &mut back.normed)?;
            }
            let norm = NormShape { rows: n * s.time, cols: s.width };
            let (x, next) = (&slot.inputs[s.layers], &mut back.next);
            d.norm_backward(norm, &back.normed, x, &slot.stats, params, places.norm, None, next, grads)?;
            flat.ready(places.norm.gamma)?;
        }
        let blocks = pass.layers.start.max(1)..pass.layers.end.min(s.layers + 1);
        let last = blocks.end;
        for layer in blocks.rev() {
            let block = layer - 1;
            let (of, room) = (places.block(s, block, n, among), slot.room(block));
            let (x, room) = (&slot.inputs[block], &mut slot.rooms[room]);
            // The shared activations still hold the last block's.
            if s.checkpoint_activations && layer + 1 < last {
                block_forward(d, of, flat.params(layer)?, x, room)?;
            }
            block_backward(d, of, (flat, layer), x, room, back)?;
        }
        if pass.layers.start == 0 {
            let shape = places.embedding_shape(s, n);
            let (_, grads) = flat.layer(0)?;
            d.embedding_backward(shape, &slot.tokens, &back.next, places.embedding, grads)?;
            flat.ready(0)?;
        }
        Ok(())
    }

    /// As in [`Net::forward_pass`], with the inputs in place; the loss is a step's.
    fn forth(&mut self, d: &mut D, weights: &mut dyn Weights<D>, pass: &Pass) -> NetResult {
        let (s, n) = (self.shape, pass.n);
        let Self { places, slots, among, .. } = self;
        let (slot, among) = (&mut slots[pass.slot], among.as_ref());
        if pass.layers.start == 0 {
            let shape = places.embedding_shape(s, n);
            let to = &mut slot.inputs[0];
            d.embedding(shape, &slot.tokens, weights.params(0)?, places.embedding, to)?;
            if let Some(among) = among {
                among.sum(d, to)?;
            }
        }
        for layer in pass.layers.start.max(1)..pass.layers.end.min(s.layers + 1) {
            let block = layer - 1;
            let room = if pass.evaluates { 0 } else { slot.room(block) };
            let (x, next) = slot.inputs.split_at_mut(layer);
            let room = &mut slot.rooms[room];
            let of = places.block(s, block, n, among);
            block_forward(d, of, weights.params(layer)?, &x[block], room)?;
            d.add(&room.mid, &room.out, &mut next[0])?;
        }
        if pass.layers.end < s.layers + 2 {
            return Ok(());
        }
        self.head(d, weights.params(s.layers + 1)?, pass.slot, s.layers, n)?;
        let slot = &mut self.slots[pass.slot];
        let rows = n * s.time;
        if let Some(among) = &self.among {
            let mut logits = d.read(&slot.logits)?;
            let of = among.cross_entropy(&mut logits, among.slice.part(s.vocab), &slot.host_labels)?;
            if !pass.evaluates {
                self.loss = (of.loss / rows.max(1) as f64) as f32;
                return d.load_values(&logits, &mut slot.logits);
            }
            self.sums.loss += of.loss;
            self.sums.correct += of.correct;
            return Ok(());
        }
        match pass.evaluates {
            true => d.cross_entropy_sum(rows, s.vocab, &slot.logits, &slot.labels),
            false => d.softmax_cross_entropy(rows, s.vocab, &mut slot.logits, &slot.labels),
        }
    }
}

impl<D: Device> Net<D> for Transformer<D>
where
    Self: Send + 'static,
{
    fn slice(&self, slice: Slice, ranks: Arc<dyn SliceRanks>) -> Result<NetSlice<D>, ModelError> {
        let (net, runs) = Self::slice(self.shape, slice, ranks)?;
        Ok((Box::new(net), runs))
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        tensors::tensors(self.shape)
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        tensors::init(self.shape, seed, params);
    }

    fn takes(&self) -> InputSpec {
        let TransformerShape { time, vocab, .. } = self.shape;
        InputSpec {
            len: self.places.len,
            sample: Sample::Tokens { time, vocab },
            classes: Some(vocab),
            targets: false,
        }
    }

    /// The embeddings, each block, and the last norm with the head, whose weight is the tokens' embedding.
    fn layers(&self) -> Vec<Layer> {
        let (Places { blocks, norm, len, .. }, s) = (&self.places, self.shape);
        let begins = blocks.iter().map(|b| b.norm1.gamma).chain([norm.gamma]);
        let ends = begins.clone().skip(1);
        let first = blocks.first().map_or(0, |b| b.norm1.gamma);
        // Multiplications and additions of matrix products; the rest is negligible.
        let Sizes { vocab, heads, inner, hidden, .. } = self.places.sizes;
        let (time, width) = (s.time as f64, s.width as f64);
        let (edge, attended, hidden) = (s.time * s.width, s.time * inner, s.time * hidden);
        let block = 4.0 * width * (2.0 * attended as f64 + hidden as f64) + 4.0 * time * attended as f64;
        let logits = 2.0 * time * width * vocab as f64;
        // In addition to its output, a block keeps [`BlockActivations`]: norms, attention, the two inner linear
        // layers. Its backward pass uses [`BackwardBuffers`].
        let room = 5 * edge + 4 * attended + 2 * hidden + s.time * (heads + 4);
        let back = 3 * edge + 4 * attended + hidden;
        let (keeps, works) = if s.checkpoint_activations { (edge, room + back) } else { (edge + room, back) };
        // Two sums forward and two backward, and two more if a block is recomputed. For the logits: maximum, sum,
        // and the label's.
        let of_slices = |values: usize| if self.among.is_some() { values } else { 0 };
        let sums = of_slices(if s.checkpoint_activations { 6 } else { 4 } * edge);
        let head = Layer {
            params: vec![self.places.table(s), norm.gamma..*len],
            cost: logits,
            outputs: 0,
            keeps: edge + s.time * vocab,
            works: back,
            sums: of_slices(edge + 3 * s.time),
        };
        let embedding = Layer { sums: of_slices(edge), ..Layer::of(0..first, time * width, edge) };
        std::iter::once(embedding)
            .chain(begins.zip(ends).map(|(begin, end)| Layer {
                keeps,
                works,
                sums,
                ..Layer::of(begin..end, block, edge)
            }))
            .chain([head])
            .collect()
    }

    fn load(&mut self, d: &mut D, slot: usize, batch: &Batch) -> NetResult {
        self.load_tokens(d, slot, batch)?;
        let shape = self.places.embedding_shape(self.shape, batch.n);
        d.order_tokens(shape, &mut self.slots[slot].tokens)
    }

    fn step(&mut self, d: &mut D, flat: &mut dyn Flat<D>, n: usize) -> NetResult {
        let all = Pass { layers: 0..self.shape.layers + 2, slot: 0, n, evaluates: false };
        self.forth(d, flat, &all)?;
        self.back(d, flat, &all)
    }

    fn forward_pass(
        &mut self,
        d: &mut D,
        weights: &mut dyn Weights<D>,
        pass: &Pass,
        input: Option<&[f32]>,
    ) -> NetResult<Option<Vec<f32>>> {
        while self.slots.len() <= pass.slot {
            self.slots.push(Slot::new(self.shape));
        }
        if let (Some(input), Some(before)) = (input, pass.layers.start.checked_sub(1)) {
            d.load_values(input, &mut self.slots[pass.slot].inputs[before])?;
        }
        self.forth(d, weights, pass)?;
        let edge = self.slots[pass.slot].inputs.get(pass.layers.end - 1);
        edge.map(|values| d.read(values)).transpose()
    }

    fn backward_pass(
        &mut self,
        d: &mut D,
        flat: &mut dyn Flat<D>,
        pass: &Pass,
        gradient: Option<&[f32]>,
    ) -> NetResult<Option<Vec<f32>>> {
        if let Some(gradient) = gradient {
            d.load_values(gradient, &mut self.back.next)?;
        }
        self.back(d, flat, pass)?;
        (pass.layers.start > 0).then(|| d.read(&self.back.next)).transpose()
    }

    /// Losses and hits are counted per token.
    fn evaluate(&mut self, d: &mut D, params: &D::Params, batch: &Batch) -> NetResult<Evaluation> {
        // As many tokens at once as in a small training batch: logits take `vocab` values per token.
        let most = (1024 / self.shape.time).max(1);
        for part in batch.parts(most) {
            self.load_tokens(d, 0, &part)?;
            self.infer(d, &mut WholeParams(params), part.n)?;
            let (rows, slot) = (part.n * self.shape.time, &self.slots[0]);
            d.cross_entropy_sum(rows, self.shape.vocab, &slot.logits, &slot.labels)?;
        }
        self.evaluated(d, batch.n)
    }

    fn loss(&mut self, d: &mut D) -> NetResult<f32> {
        match self.among {
            Some(_) => Ok(self.loss),
            None => d.loss(),
        }
    }

    fn evaluated(&mut self, d: &mut D, n: usize) -> NetResult<Evaluation> {
        let sums = match self.among {
            Some(_) => std::mem::take(&mut self.sums),
            None => d.sums()?,
        };
        Ok(Evaluation { loss_sum: sums.loss, correct: sums.correct, count: (n * self.shape.time) as u64 })
    }
}
