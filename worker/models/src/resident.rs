//! Models that keep parameters and gradient on a device of their own.

use crate::{Batch, Evaluation, ModelError};
use paraft_common::{
    Encoding,
    optim::{Hyper, OptimizerConfig},
};
use paraft_compute::cuda::{Nccl, PinnedBytes, UniqueId};
use std::{ops::Range, sync::Arc};

/// A part of the flat gradient that is pushed as one unit, and its encoding. Encodings that keep a residual
/// ([`Encoding::feeds_back`]) run on the host: such parts leave the device as f32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its range of values.
    pub range: Range<usize>,
    /// Its encoding.
    pub encoding: Encoding,
}

/// A model with parameters and gradient on a device. Pulled weights go to [`Self::host_mut`]. Gradients to push
/// arrive on the host ready for the network.
///
/// In a group several ranks, with a device each, compute one step together. All of them call [`Self::landed`] and
/// [`Self::step_resident`], in the same order and with the same ranges and parts, but different batches. Only rank
/// 0 provides parameters and pushes gradients. When a rank is gone, the others wait on their devices until another
/// thread calls [`Nccl::abort`]. Their call then ends with an error that [`ModelError::is_group`], and the model
/// can be used in another group, or alone.
///
/// In a job without servers in its steps the parameters are only on the devices: rank 0 calls [`Self::set_state`],
/// then all ranks call [`Self::share_state`], and [`Self::step_local`] and [`Self::optimize`] in turn.
pub trait Resident {
    /// The parameters of the last pull; in a group, on rank 0 only.
    fn host(&self) -> &[f32];

    /// The same memory, for the next pull to write.
    fn host_mut(&mut self) -> Result<&mut [f32], ModelError>;

    /// These parts of [`Self::host_mut`] are new. The next step or evaluation uses them. In a group all ranks
    /// receive them from rank 0's host.
    fn landed(&mut self, ranges: &[Range<usize>]) -> Result<(), ModelError>;

    /// One training step; see [`Model::step`](crate::Model::step). `parts` cover the vector, in its order. `push(i, bytes)` is called
    /// once for each, the last one first, as soon as its gradient is on the host, while the device computes the
    /// others. In a group that gradient is the ranks' mean, and only rank 0's `push` is called. The loss is this
    /// rank's.
    fn step_resident(
        &mut self,
        batch: &Batch,
        parts: &[Part],
        push: &mut dyn FnMut(usize, PinnedBytes),
    ) -> Result<f32, ModelError>;

    /// One training step whose gradient stays on the device; in a group it becomes the mean over the ranks. The
    /// loss is this rank's.
    fn step_local(&mut self, batch: &Batch) -> Result<f32, ModelError>;

    /// Applies the gradient of the last [`Self::step_local`], once. The optimizer updates the parameters, and
    /// creates missing slots; from the buffers the gradient is subtracted. With `clip_norm` the gradient is first
    /// clipped to that norm, by [`norm_factor`](paraft_common::optim::norm_factor). A gradient that is not finite is an error and changes nothing.
    fn optimize(
        &mut self,
        optimizer: &OptimizerConfig,
        hyper: &Hyper,
        clip_norm: Option<f32>,
    ) -> Result<(), ModelError>;

    /// The parameters, including buffers, and the optimizer's slots, each as long as the trained part; no slots
    /// before the first update. After a failed step it is the state before it.
    fn state(&mut self) -> Result<(Vec<f32>, Vec<Vec<f32>>), ModelError>;

    /// Sets this state on this rank only. Without slots the optimizer restarts.
    fn set_state(&mut self, weights: &[f32], slots: &[Vec<f32>]) -> Result<(), ModelError>;

    /// Copies rank 0's parameters and slots to all ranks of the group, and waits for the copy. Rank 0 needs its own
    /// parameters: from [`Self::set_state`], an earlier group without servers, or landed weights. Without a group
    /// it does nothing. After a failure rank 0 still has its state.
    fn share_state(&mut self, optimizer: &OptimizerConfig) -> Result<(), ModelError>;

    /// Loss and accuracy with the landed weights; see [`Model::evaluate`](crate::Model::evaluate). Each rank of a group evaluates by
    /// itself.
    fn evaluate_resident(&mut self, batch: &Batch) -> Result<Evaluation, ModelError>;

    /// Makes this a rank of the given group, or of none. Its work in the former group must be over: call
    /// [`Nccl::leave`] there first, or abort it. In a new group, and alone after a broken one, all parameters must
    /// land, be set or be shared before use: those on the device are invalid.
    fn join(&mut self, group: Option<Arc<Nccl>>) -> Result<(), ModelError>;

    /// Forms a group with its device ([`Nccl::form`]) and joins it.
    fn form_group(
        &mut self,
        id: &UniqueId,
        rank: usize,
        size: usize,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Arc<Nccl>, ModelError>;
}
