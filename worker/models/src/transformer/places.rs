//! The places of a transformer's tensors in the flat vector of the model or a slice.

use super::{TransformerShape, block::Block};
use crate::slice::{Run, Runs, Slice, SliceMember};
use paraft_compute::shape::{EmbeddingAt, EmbeddingShape, LinearAt, LinearShape, NormAt};
use std::ops::Range;

/// A block's tensors in the flat vector.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockAt {
    pub(super) norm1: NormAt,
    pub(super) attention: LinearAt,
    pub(super) attention_out: LinearAt,
    pub(super) norm2: NormAt,
    pub(super) up: LinearAt,
    pub(super) down: LinearAt,
}

/// All places.
#[derive(Clone, Debug)]
pub(super) struct Places {
    pub(super) embedding: EmbeddingAt,
    pub(super) blocks: Vec<BlockAt>,
    pub(super) norm: NormAt,
    pub(super) len: usize,
    pub(super) sizes: Sizes,
}

/// Assigns consecutive places to tensors.
pub(super) struct Next {
    pub(super) at: usize,
    pub(super) width: usize,
}

impl Next {
    pub(super) fn tensor(&mut self, len: usize) -> usize {
        self.at += len;
        self.at - len
    }

    pub(super) fn norm(&mut self) -> NormAt {
        NormAt { gamma: self.tensor(2 * self.width) }
    }

    pub(super) fn linear(&mut self, inputs: usize, outputs: usize) -> LinearAt {
        let weight = self.tensor(inputs * outputs);
        LinearAt { weight, bias: Some(self.tensor(outputs)) }
    }
}

/// The size of a block's inner layers: whole, or a slice's part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Rows of the tokens' table, and of logits.
    pub(super) vocab: usize,
    /// A row for the tokens of other slices.
    pub(super) others: usize,
    pub(super) heads: usize,
    /// Values of all heads.
    pub(super) inner: usize,
    /// Values between the two linear layers at a block's end.
    pub(super) hidden: usize,
}

impl Sizes {
    pub(super) fn of(s: TransformerShape, slice: Option<Slice>) -> Self {
        let slice = slice.unwrap_or(Slice { at: 0, of: 1 });
        let heads = slice.part(s.heads).len();
        Self {
            vocab: slice.part(s.vocab).len(),
            others: usize::from(slice.of > 1),
            heads,
            inner: heads * (s.width / s.heads),
            hidden: slice.part(4 * s.width).len(),
        }
    }
}

impl Places {
    pub(super) fn new(s: TransformerShape, sizes: Sizes) -> Self {
        let w = s.width;
        let mut next = Next { at: 0, width: w };
        let tokens = next.tensor((sizes.vocab + sizes.others) * w);
        let embedding = EmbeddingAt { tokens, positions: next.tensor(s.time * w) };
        let blocks = (0..s.layers)
            .map(|_| BlockAt {
                norm1: next.norm(),
                attention: next.linear(w, 3 * sizes.inner),
                attention_out: next.linear(sizes.inner, w),
                norm2: next.norm(),
                up: next.linear(w, sizes.hidden),
                down: next.linear(sizes.hidden, w),
            })
            .collect();
        let norm = next.norm();
        Self { embedding, blocks, norm, len: next.at, sizes }
    }

    pub(super) fn embedding_shape(&self, s: TransformerShape, n: usize) -> EmbeddingShape {
        let vocab = self.sizes.vocab + self.sizes.others;
        EmbeddingShape { batch: n, time: s.time, cols: s.width, vocab, context: s.time }
    }

    pub(super) fn head(&self, s: TransformerShape, n: usize) -> (LinearShape, LinearAt) {
        let shape = LinearShape { n: n * s.time, inputs: s.width, outputs: self.sizes.vocab };
        (shape, LinearAt { weight: self.embedding.tokens, bias: None })
    }

    pub(super) fn block<'a>(
        &self,
        shape: TransformerShape,
        block: usize,
        n: usize,
        among: Option<&'a SliceMember>,
    ) -> Block<'a> {
        Block { shape, sizes: self.sizes, at: self.blocks[block], n, among }
    }

    /// The token embedding's range, without the row for other tokens.
    pub(super) fn table(&self, s: TransformerShape) -> Range<usize> {
        self.embedding.tokens..self.embedding.tokens + self.sizes.vocab * s.width
    }

    /// The places of a slice's values in the model's flat vector.
    pub(super) fn runs(&self, s: TransformerShape, slice: Slice) -> Vec<Run> {
        let (whole, mut runs, w) = (Self::new(s, Sizes::of(s, None)), Runs::default(), s.width);
        let head = w / s.heads;
        let (tokens, inner) = (slice.part(s.vocab), slice.part(s.heads).start * head);
        let (hidden, sizes) = (slice.part(4 * w).start, self.sizes);
        let norm = |runs: &mut Runs, from: NormAt, to: NormAt| runs.shared(from.gamma, to.gamma, 2 * w);
        // Addends of a sum over all slices belong to the first slice.
        let once = |runs: &mut Runs, from: Option<usize>, to: Option<usize>, len: usize| {
            if let (Some(from), Some(to), true) = (from, to, slice.is_first()) {
                runs.part(from, to, len);
            }
        };
        runs.part(whole.embedding.tokens + tokens.start * w, self.embedding.tokens, tokens.len() * w);
        once(&mut runs, Some(whole.embedding.positions), Some(self.embedding.positions), s.time * w);
        for (from, to) in whole.blocks.iter().zip(&self.blocks) {
            norm(&mut runs, from.norm1, to.norm1);
            let weight = (from.attention.weight + inner * w, w * w);
            runs.rows(weight, to.attention.weight, 3, sizes.inner * w);
            if let (Some(from), Some(to)) = (from.attention.bias, to.attention.bias) {
                runs.rows((from + inner, w), to, 3, sizes.inner);
            }
            let out = (from.attention_out.weight + inner, w);
            runs.rows(out, to.attention_out.weight, w, sizes.inner);
            once(&mut runs, from.attention_out.bias, to.attention_out.bias, w);
            norm(&mut runs, from.norm2, to.norm2);
            runs.part(from.up.weight + hidden * w, to.up.weight, sizes.hidden * w);
            if let (Some(from), Some(to)) = (from.up.bias, to.up.bias) {
                runs.part(from + hidden, to, sizes.hidden);
            }
            runs.rows((from.down.weight + hidden, 4 * w), to.down.weight, w, sizes.hidden);
            once(&mut runs, from.down.bias, to.down.bias, w);
        }
        norm(&mut runs, whole.norm, self.norm);
        runs.0
    }
}
