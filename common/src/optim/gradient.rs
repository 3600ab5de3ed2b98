//! A gradient as it arrives: encoded, in pieces, and with a factor not yet applied.

use super::clip;
use crate::{
    codec::Word,
    encoding::{Encoding, Values},
    payload::Payload,
};

/// A gradient payload for one bucket.
#[derive(Clone, Copy, Debug)]
pub struct Gradient<'a> {
    /// One value for each weight.
    pub payload: &'a Payload,
    /// How they are written.
    pub encoding: Encoding,
    /// Multiplies every value: `1 / contributions` for a sum of pushes, times the factor of clipping by norm.
    pub scale: f32,
}

/// The stages before the rule, as plain numbers so that the loops have no branch.
#[derive(Clone, Copy)]
pub(super) struct Stages {
    pub scale: f32,
    /// No limit is an infinite limit: clipping to it changes no finite value.
    pub limit: f32,
    pub decay: f32,
}

/// Values of a gradient that lie together, with the stages before the rule.
#[derive(Clone, Copy)]
pub(super) struct Prepared<'a> {
    words: &'a [Word],
    stages: Stages,
}

/// Hands each run of the gradient to `each`, with the weights that it belongs to.
pub(super) fn runs(
    grad: Gradient<'_>,
    len: usize,
    stages: Stages,
    mut each: impl FnMut(std::ops::Range<usize>, Prepared<'_>),
) {
    let mut values =
        Values::new(grad.payload, grad.encoding, len).expect("payload and bucket differ in length");
    let mut at = 0;
    // Cannot fail: the length is checked.
    let _ = values.runs(len, |words| {
        let from = at;
        at += words.len();
        each(from..at, Prepared { words, stages });
    });
}

impl<'a> Prepared<'a> {
    /// The raw words, to be zipped with the weights and given to [`Self::value`].
    #[inline(always)]
    pub(super) fn words(&self) -> &'a [Word] {
        self.words
    }

    /// Scale, clip, decay, in this order.
    #[inline(always)]
    pub(super) fn value(&self, word: &Word, weight: f32) -> f32 {
        let Stages { scale, limit, decay } = self.stages;
        clip::by_value(f32::from_le_bytes(*word) * scale, limit) + decay * weight
    }
}
