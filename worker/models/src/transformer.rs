//! A decoder-only transformer for text, as GPT-2 (Radford et al., 2019) and nanoGPT: pre-norm blocks, causal self-attention, a
//! GELU between two linear layers, and a head that shares the token embedding's weight.
//!
//! ```text
//!  tokens ─▶ wte + wpe ─▶ x₀
//!  block:  x ─norm─▶ c_attn ─▶ attention ─▶ c_proj ─┬+ x = mid ─norm─▶ c_fc ─gelu─▶ c_proj ─┬+ mid = next x
//!  x ─norm─▶ · wteᵀ ─▶ logits
//! ```
//!
//! Names and shapes are nanoGPT's (`transformer.h.0.attn.c_attn.weight` is `[3 width, width]`). There is no dropout.
//!
//! A block's activations are kept for the backward pass; with `checkpoint_activations` only its input is, and the block is
//! computed a second time (Chen et al., 2016): a third more arithmetic for memory that does not grow with the layers.

use crate::{
    Batch, Evaluation, ModelError,
    batch::{Sample, Takes},
    init::Init,
    net::{Flat, Layer, Net, NetResult, Pass, There, Weights},
};
use paraft_common::layout::TensorSpec;
use paraft_compute::{
    Device,
    shape::{
        Activation, AttentionShape, EmbeddingAt, EmbeddingShape, LinearAt, LinearShape, NormAt, NormShape,
    },
};
use serde::{Deserialize, Serialize};

/// Which norm the blocks have.
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
    /// Tokens of a sample.
    pub time: usize,
    /// Tokens are below this.
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

/// A block's tensors in the flat vector.
#[derive(Clone, Copy, Debug)]
struct BlockAt {
    norm1: NormAt,
    attention: LinearAt,
    attention_out: LinearAt,
    norm2: NormAt,
    up: LinearAt,
    down: LinearAt,
}

/// Where everything is.
#[derive(Clone, Debug)]
struct Places {
    embedding: EmbeddingAt,
    blocks: Vec<BlockAt>,
    norm: NormAt,
    len: usize,
}

/// Hands out the places of tensors, one after another.
struct Next {
    at: usize,
    width: usize,
    norm: NormKind,
}

impl Next {
    fn tensor(&mut self, len: usize) -> usize {
        self.at += len;
        self.at - len
    }

    fn norm(&mut self) -> NormAt {
        let gamma = self.tensor(self.width);
        match self.norm {
            NormKind::Layer => NormAt::Layer { gamma, beta: self.tensor(self.width) },
            NormKind::Rms => NormAt::Rms { gamma },
        }
    }

    fn linear(&mut self, inputs: usize, outputs: usize) -> LinearAt {
        let weight = self.tensor(inputs * outputs);
        LinearAt { weight, bias: Some(self.tensor(outputs)) }
    }
}

impl Places {
    fn new(s: TransformerShape) -> Self {
        let w = s.width;
        let mut next = Next { at: 0, width: w, norm: s.norm };
        let embedding = EmbeddingAt { tokens: next.tensor(s.vocab * w), positions: next.tensor(s.time * w) };
        let blocks = (0..s.layers)
            .map(|_| BlockAt {
                norm1: next.norm(),
                attention: next.linear(w, 3 * w),
                attention_out: next.linear(w, w),
                norm2: next.norm(),
                up: next.linear(w, 4 * w),
                down: next.linear(4 * w, w),
            })
            .collect();
        let norm = next.norm();
        Self { embedding, blocks, norm, len: next.at }
    }

    fn embedding_shape(&self, s: TransformerShape, n: usize) -> EmbeddingShape {
        EmbeddingShape { batch: n, time: s.time, cols: s.width, vocab: s.vocab, context: s.time }
    }

    fn head(&self, s: TransformerShape, n: usize) -> (LinearShape, LinearAt) {
        let shape = LinearShape { n: n * s.time, inputs: s.width, outputs: s.vocab };
        (shape, LinearAt { weight: self.embedding.tokens, bias: None })
    }
}

/// What a block keeps for its backward pass.
struct Room<D: Device> {
    normed1: D::Values,
    stats1: D::Floats,
    qkv: D::Values,
    attended: D::Values,
    attention: D::Floats,
    projected: D::Values,
    mid: D::Values,
    normed2: D::Values,
    stats2: D::Floats,
    before: D::Values,
    hidden: D::Values,
    out: D::Values,
}

impl<D: Device> Default for Room<D> {
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

/// Gradients on their way back.
struct Back<D: Device> {
    next: D::Values,
    hidden: D::Values,
    normed: D::Values,
    mid: D::Values,
    attended: D::Values,
    qkv: D::Values,
}

/// What a micro-batch has between its forward and its backward pass.
struct Slot<D: Device> {
    tokens: D::Ids,
    labels: D::Ids,
    /// The inputs of the blocks, and of the last norm.
    inputs: Vec<D::Values>,
    /// One for each block, or one for all.
    rooms: Vec<Room<D>>,
    normed: D::Values,
    stats: D::Floats,
    logits: D::Values,
}

impl<D: Device> Slot<D> {
    fn new(s: TransformerShape) -> Self {
        let rooms = if s.checkpoint_activations { 1 } else { s.layers };
        Self {
            tokens: Default::default(),
            labels: Default::default(),
            inputs: (0..=s.layers).map(|_| Default::default()).collect(),
            rooms: (0..rooms).map(|_| Room::default()).collect(),
            normed: Default::default(),
            stats: Default::default(),
            logits: Default::default(),
        }
    }

    fn room(&self, block: usize) -> usize {
        block.min(self.rooms.len() - 1)
    }
}

/// The transformer and its workspaces.
pub struct Transformer<D: Device> {
    shape: TransformerShape,
    places: Places,
    /// From one.
    slots: Vec<Slot<D>>,
    back: Back<D>,
}

impl<D: Device> Transformer<D> {
    /// An error says which size does not do.
    pub fn new(shape: TransformerShape) -> Result<Self, ModelError> {
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
            places: Places::new(shape),
            slots: vec![Slot::new(shape)],
            back: Back {
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
        d.load_ids(&batch.tokens, &mut slot.tokens)?;
        d.load_ids(&batch.labels, &mut slot.labels)
    }

    /// Computes the logits of what was loaded, without what a backward pass needs: all blocks share what one of them has.
    fn infer(&mut self, d: &mut D, weights: &mut dyn Weights<D>, n: usize) -> NetResult {
        let (s, all) = (self.shape, self.shape.layers + 1);
        let slot = &mut self.slots[0];
        let shape = self.places.embedding_shape(s, n);
        d.embedding(shape, &slot.tokens, weights.params(0)?, self.places.embedding, &mut slot.inputs[0])?;
        for block in 0..s.layers {
            let (x, next) = slot.inputs.split_at_mut(1);
            let (x, next) = if block % 2 == 0 { (&x[0], &mut next[0]) } else { (&next[0], &mut x[0]) };
            let room = &mut slot.rooms[0];
            block_forward(d, s, n, weights.params(1 + block)?, self.places.blocks[block], x, room)?;
            d.add(&room.mid, &room.out, next)?;
        }
        self.head(d, weights.params(all)?, 0, s.layers % 2, n)
    }

    /// The last norm of an input and the logits.
    fn head(&mut self, d: &mut D, params: &D::Params, slot: usize, input: usize, n: usize) -> NetResult {
        let slot = &mut self.slots[slot];
        let norm = NormShape { rows: n * self.shape.time, cols: self.shape.width };
        let Slot { inputs, normed, stats, logits, .. } = slot;
        d.norm(norm, &inputs[input], None, params, self.places.norm, normed, stats)?;
        let (shape, at) = self.places.head(self.shape, n);
        d.linear(shape, normed, params, at, Activation::None, logits, None)
    }

    /// From the layer behind `pass` to its first one: what [`Net::backward_pass`] does, with the gradient where it belongs.
    fn back(&mut self, d: &mut D, flat: &mut dyn Flat<D>, pass: &Pass) -> NetResult {
        let (s, n) = (self.shape, pass.n);
        let Self { places, slots, back, .. } = self;
        let slot = &mut slots[pass.slot];
        if pass.layers.end == s.layers + 2 {
            let (shape, at) = places.head(s, n);
            let (params, grads) = flat.layer(1 + s.layers)?;
            d.linear_backward_weight(shape, &slot.normed, &slot.logits, at, grads)?;
            d.linear_backward_input(shape, &slot.logits, params, at, &mut back.normed)?;
            let norm = NormShape { rows: n * s.time, cols: s.width };
            let (x, next) = (&slot.inputs[s.layers], &mut back.next);
            d.norm_backward(norm, &back.normed, x, &slot.stats, params, places.norm, None, next, grads)?;
            flat.ready(places.norm.gamma())?;
        }
        let blocks = pass.layers.start.max(1)..pass.layers.end.min(s.layers + 1);
        let last = blocks.end;
        for layer in blocks.rev() {
            let block = layer - 1;
            let (at, room) = (places.blocks[block], slot.room(block));
            let (x, room) = (&slot.inputs[block], &mut slot.rooms[room]);
            // What the last block has left in the common room is its own.
            if s.checkpoint_activations && layer + 1 < last {
                block_forward(d, s, n, flat.params(layer)?, at, x, room)?;
            }
            block_backward(d, s, n, (flat, layer), at, x, room, back)?;
        }
        if pass.layers.start == 0 {
            let shape = places.embedding_shape(s, n);
            let (_, grads) = flat.layer(0)?;
            d.embedding_backward(shape, &slot.tokens, &back.next, places.embedding, grads)?;
            flat.ready(0)?;
        }
        Ok(())
    }

    /// What [`Net::forward_pass`] does, with the inputs where they belong; the loss is the step's.
    fn forth(&mut self, d: &mut D, weights: &mut dyn Weights<D>, pass: &Pass) -> NetResult {
        let (s, n) = (self.shape, pass.n);
        let slot = &mut self.slots[pass.slot];
        if pass.layers.start == 0 {
            let shape = self.places.embedding_shape(s, n);
            let to = &mut slot.inputs[0];
            d.embedding(shape, &slot.tokens, weights.params(0)?, self.places.embedding, to)?;
        }
        for layer in pass.layers.start.max(1)..pass.layers.end.min(s.layers + 1) {
            let block = layer - 1;
            let room = if pass.evaluates { 0 } else { slot.room(block) };
            let (x, next) = slot.inputs.split_at_mut(layer);
            let room = &mut slot.rooms[room];
            block_forward(d, s, n, weights.params(layer)?, self.places.blocks[block], &x[block], room)?;
            d.add(&room.mid, &room.out, &mut next[0])?;
        }
        if pass.layers.end < s.layers + 2 {
            return Ok(());
        }
        self.head(d, weights.params(s.layers + 1)?, pass.slot, s.layers, n)?;
        let slot = &mut self.slots[pass.slot];
        let rows = n * s.time;
        match pass.evaluates {
            true => d.cross_entropy_sum(rows, s.vocab, &slot.logits, &slot.labels),
            false => d.softmax_cross_entropy(rows, s.vocab, &mut slot.logits, &slot.labels),
        }
    }
}

/// A linear layer's shape in a block.
fn linear(s: TransformerShape, n: usize, inputs: usize, outputs: usize) -> LinearShape {
    LinearShape { n: n * s.time, inputs: inputs * s.width, outputs: outputs * s.width }
}

fn attention(s: TransformerShape, n: usize) -> AttentionShape {
    AttentionShape { batch: n, time: s.time, heads: s.heads, head: s.width / s.heads }
}

/// Fills `room`; the block's result is the sum of its `mid` and `out`.
fn block_forward<D: Device>(
    d: &mut D,
    s: TransformerShape,
    n: usize,
    params: &D::Params,
    at: BlockAt,
    x: &D::Values,
    room: &mut Room<D>,
) -> NetResult {
    let norm = NormShape { rows: n * s.time, cols: s.width };
    d.norm(norm, x, None, params, at.norm1, &mut room.normed1, &mut room.stats1)?;
    let none = Activation::None;
    d.linear(linear(s, n, 1, 3), &room.normed1, params, at.attention, none, &mut room.qkv, None)?;
    d.attention(attention(s, n), &room.qkv, &mut room.attended, &mut room.attention)?;
    d.linear(linear(s, n, 1, 1), &room.attended, params, at.attention_out, none, &mut room.projected, None)?;
    let add = Some((&room.projected, &mut room.mid));
    d.norm(norm, x, add, params, at.norm2, &mut room.normed2, &mut room.stats2)?;
    let before = Some(&mut room.before);
    d.linear(linear(s, n, 1, 4), &room.normed2, params, at.up, Activation::Gelu, &mut room.hidden, before)?;
    d.linear(linear(s, n, 4, 1), &room.hidden, params, at.down, none, &mut room.out, None)
}

/// Turns `back.next`, the gradient of the block's result, into that of its input.
#[expect(clippy::too_many_arguments, reason = "what a block has and what it changes")]
fn block_backward<D: Device>(
    d: &mut D,
    s: TransformerShape,
    n: usize,
    (flat, layer): (&mut dyn Flat<D>, usize),
    at: BlockAt,
    x: &D::Values,
    room: &Room<D>,
    back: &mut Back<D>,
) -> NetResult {
    let (params, grads) = flat.layer(layer)?;
    let norm = NormShape { rows: n * s.time, cols: s.width };
    let down = linear(s, n, 4, 1);
    d.linear_backward_weight(down, &room.hidden, &back.next, at.down, grads)?;
    d.linear_backward_input(down, &back.next, params, at.down, &mut back.hidden)?;
    d.activation_backward(Activation::Gelu, &room.before, &mut back.hidden)?;
    flat.ready(at.down.weight)?;
    let (params, grads) = flat.layer(layer)?;
    let up = linear(s, n, 1, 4);
    d.linear_backward_weight(up, &room.normed2, &back.hidden, at.up, grads)?;
    d.linear_backward_input(up, &back.hidden, params, at.up, &mut back.normed)?;
    let next = Some(&back.next);
    d.norm_backward(
        norm,
        &back.normed,
        &room.mid,
        &room.stats2,
        params,
        at.norm2,
        next,
        &mut back.mid,
        grads,
    )?;
    flat.ready(at.norm2.gamma())?;
    let (params, grads) = flat.layer(layer)?;
    let out = linear(s, n, 1, 1);
    d.linear_backward_weight(out, &room.attended, &back.mid, at.attention_out, grads)?;
    d.linear_backward_input(out, &back.mid, params, at.attention_out, &mut back.attended)?;
    let (qkv, attended) = (&room.qkv, &room.attended);
    d.attention_backward(attention(s, n), qkv, attended, &room.attention, &back.attended, &mut back.qkv)?;
    let into = linear(s, n, 1, 3);
    d.linear_backward_weight(into, &room.normed1, &back.qkv, at.attention, grads)?;
    d.linear_backward_input(into, &back.qkv, params, at.attention, &mut back.normed)?;
    let mid = Some(&back.mid);
    d.norm_backward(norm, &back.normed, x, &room.stats1, params, at.norm1, mid, &mut back.next, grads)?;
    flat.ready(at.norm1.gamma())
}

impl<D: Device> Net<D> for Transformer<D>
where
    Self: Send,
{
    fn tensors(&self) -> Vec<TensorSpec> {
        let s = self.shape;
        let mut all = vec![
            TensorSpec::param("transformer.wte.weight", &[s.vocab, s.width]),
            TensorSpec::param("transformer.wpe.weight", &[s.time, s.width]),
        ];
        let norm = |name: String| {
            let mut both = vec![TensorSpec::param(format!("{name}.weight"), &[s.width])];
            if s.norm == NormKind::Layer {
                both.push(TensorSpec::param(format!("{name}.bias"), &[s.width]));
            }
            both
        };
        let linear = |name: String, inputs: usize, outputs: usize| {
            vec![
                TensorSpec::param(format!("{name}.weight"), &[outputs * s.width, inputs * s.width]),
                TensorSpec::param(format!("{name}.bias"), &[outputs * s.width]),
            ]
        };
        for i in 0..s.layers {
            let p = format!("transformer.h.{i}");
            all.extend(norm(format!("{p}.ln_1")));
            all.extend(linear(format!("{p}.attn.c_attn"), 1, 3));
            all.extend(linear(format!("{p}.attn.c_proj"), 1, 1));
            all.extend(norm(format!("{p}.ln_2")));
            all.extend(linear(format!("{p}.mlp.c_fc"), 1, 4));
            all.extend(linear(format!("{p}.mlp.c_proj"), 4, 1));
        }
        all.extend(norm("transformer.ln_f".into()));
        all
    }

    /// As GPT-2: normal with a deviation of 0.02, that of what is added to the residual stream divided by √(2 layers); biases
    /// zero; norms the identity.
    fn init(&self, seed: u64, params: &mut [f32]) {
        const DEVIATION: f32 = 0.02;
        let residual = DEVIATION / ((2 * self.shape.layers) as f32).sqrt();
        let mut init = Init::new(seed);
        let mut at = 0;
        for t in Net::<D>::tensors(self) {
            let tensor = &mut params[at..at + t.len()];
            at += t.len();
            match t.shape.len() {
                1 if t.name.contains("ln_") && t.name.ends_with("weight") => tensor.fill(1.0),
                1 => tensor.fill(0.0),
                _ if t.name.ends_with("c_proj.weight") => init.normal(residual, tensor),
                _ => init.normal(DEVIATION, tensor),
            }
        }
    }

    fn takes(&self) -> Takes {
        let TransformerShape { time, vocab, .. } = self.shape;
        Takes { len: self.places.len, sample: Sample::Tokens { time, vocab }, classes: Some(vocab) }
    }

    /// The embeddings, each block, and the last norm with the head, whose weight is the tokens' embedding.
    fn layers(&self) -> Vec<Layer> {
        let (Places { embedding, blocks, norm, len }, s) = (&self.places, self.shape);
        let begins = blocks.iter().map(|b| b.norm1.gamma()).chain([norm.gamma()]);
        let ends = begins.clone().skip(1);
        let first = blocks.first().map_or(0, |b| b.norm1.gamma());
        // Multiplications and additions of products of matrices; what is beside them is little.
        let (time, width) = (s.time as f64, s.width as f64);
        let edge = s.time * s.width;
        let block = time * (24.0 * width * width + 4.0 * time * width);
        let logits = 2.0 * time * width * s.vocab as f64;
        // Beside its result, a block keeps what [`Room`] has: norms, attention, the two inner linear layers; on its way back it uses [`Back`].
        let (room, back) = (17 * edge + s.time * (s.heads + 4), 11 * edge);
        let (keeps, works) = if s.checkpoint_activations { (edge, room + back) } else { (edge + room, back) };
        let head = Layer {
            params: vec![embedding.tokens..embedding.positions, norm.gamma()..*len],
            cost: logits,
            outputs: 0,
            keeps: edge + s.time * s.vocab,
            works: back,
        };
        std::iter::once(Layer::of(0..first, time * width, edge))
            .chain(begins.zip(ends).map(|(begin, end)| Layer {
                keeps,
                works,
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

    /// Losses and hits are counted by token.
    fn evaluate(&mut self, d: &mut D, params: &D::Params, batch: &Batch) -> NetResult<Evaluation> {
        // As many tokens at once as a small training batch has: logits take `vocab` values for each.
        let most = (1024 / self.shape.time).max(1);
        for part in batch.parts(most) {
            self.load_tokens(d, 0, &part)?;
            self.infer(d, &mut There(params), part.n)?;
            let (rows, slot) = (part.n * self.shape.time, &self.slots[0]);
            d.cross_entropy_sum(rows, self.shape.vocab, &slot.logits, &slot.labels)?;
        }
        self.evaluated(d, batch.n)
    }

    fn evaluated(&mut self, d: &mut D, n: usize) -> NetResult<Evaluation> {
        let sums = d.sums()?;
        Ok(Evaluation { loss_sum: sums.loss, correct: sums.correct, count: (n * self.shape.time) as u64 })
    }
}
