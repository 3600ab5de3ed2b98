//! What a micro-batch keeps.

use super::{TransformerShape, block::BlockActivations};
use paraft_compute::Device;

/// A micro-batch's data between its forward and backward pass.
pub(super) struct Slot<D: Device> {
    pub(super) tokens: D::Ids,
    pub(super) labels: D::Ids,
    /// On the host, if slices split the classes.
    pub(super) host_labels: Vec<u32>,
    /// The inputs of the blocks, and of the last norm.
    pub(super) inputs: Vec<D::Values>,
    /// One for each block, or one for all.
    pub(super) rooms: Vec<BlockActivations<D>>,
    pub(super) normed: D::Values,
    pub(super) stats: D::Floats,
    pub(super) logits: D::Values,
}

impl<D: Device> Slot<D> {
    pub(super) fn new(s: TransformerShape) -> Self {
        let rooms = if s.checkpoint_activations { 1 } else { s.layers };
        Self {
            tokens: Default::default(),
            labels: Default::default(),
            host_labels: Vec::new(),
            inputs: (0..=s.layers).map(|_| Default::default()).collect(),
            rooms: (0..rooms).map(|_| BlockActivations::default()).collect(),
            normed: Default::default(),
            stats: Default::default(),
            logits: Default::default(),
        }
    }

    pub(super) fn room(&self, block: usize) -> usize {
        block.min(self.rooms.len() - 1)
    }
}
