//! A gradient as it arrives: little-endian bytes at any alignment, and a factor not yet applied.

use super::clip;
use crate::codec::F32_BYTES;

/// A gradient payload for one bucket.
#[derive(Clone, Copy, Debug)]
pub struct Gradient<'a> {
    /// Little-endian `f32` values, at any alignment; four bytes for each weight.
    pub le: &'a [u8],
    /// Multiplies every value: `1 / contributions` for a sum of pushes, times the factor of clipping by norm.
    pub scale: f32,
}

/// Subtracts the pushed value from a buffer tensor (BatchNorm's running statistics): no rate, no decay, no
/// clipping, no state.
///
/// # Panics
/// When the lengths differ, as [`super::OptimizerConfig::apply`].
pub fn apply_buffer(values: &mut [f32], grad: Gradient<'_>) {
    super::sgd::plain(values, Prepared::new(grad, values.len(), None, 0.0), 1.0);
}

/// The stages before the rule, with what they need as plain numbers so that the loops have no branch.
#[derive(Clone, Copy)]
pub(super) struct Prepared<'a> {
    words: &'a [[u8; F32_BYTES]],
    scale: f32,
    limit: f32,
    decay: f32,
}

impl<'a> Prepared<'a> {
    pub(super) fn new(grad: Gradient<'a>, len: usize, clip_value: Option<f32>, decay: f32) -> Self {
        let (words, rest) = grad.le.as_chunks::<F32_BYTES>();
        assert!(words.len() == len && rest.is_empty(), "payload and bucket differ in length");
        // No limit is an infinite limit: clipping to it changes no finite value.
        Self { words, scale: grad.scale, limit: clip_value.unwrap_or(f32::INFINITY), decay }
    }

    /// The raw words, to be zipped with the weights and given to [`Self::value`].
    pub(super) fn words(&self) -> &'a [[u8; F32_BYTES]] {
        self.words
    }

    /// Scale, clip, decay, in this order.
    #[inline(always)]
    pub(super) fn value(&self, word: &[u8; F32_BYTES], weight: f32) -> f32 {
        clip::by_value(f32::from_le_bytes(*word) * self.scale, self.limit) + self.decay * weight
    }
}
