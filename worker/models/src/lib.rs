//! Models: the trait a model implements, and the built-in ones.
//!
//! A model sees one flat parameter buffer and one flat gradient buffer (see [`paraft_common::layout`]), and
//! says when a part of the gradient is ready, last layer first, so that its push overlaps the rest of the
//! backward pass. No network, no files.
//!
//! | model | file | tensors (PyTorch's names) |
//! |---|---|---|
//! | [`Classifier::linear`] | `classifier.rs` | `weight`, `bias` |
//! | [`Classifier::mlp`] | `classifier.rs` | `0.weight`, `0.bias`, `2.weight`, ... |
//! | [`Autoencoder`] | `autoencoder.rs` | `0.weight`, `0.bias`, `2.weight`, ... |
//! | [`ConvNet`] | `convnet.rs` | `1.weight`, ..., `10.bias`, then the running statistics |
//! | [`Transformer`] | `transformer.rs` | `transformer.wte.weight`, ..., `transformer.ln_f.bias` (nanoGPT's) |
//!
//! [`ModelConfig`] is what a job file says; it builds the model for the data at hand. The built-in models are [`Net`]s:
//! written once over the operators of [`paraft_compute::Device`], for all devices; [`OnCpu`], [`OnCuda`] and [`Layered`] make a [`Model`] of one. They
//! keep their workspaces: after the first step of a batch size nothing is allocated.

mod autoencoder;
mod batch;
mod classifier;
mod config;
mod convnet;
mod init;
mod layered;
mod net;
mod on_cuda;
mod replay;
pub mod selftest;
mod slice;
mod stack;
mod stages;
mod transformer;

pub use autoencoder::Autoencoder;
pub use batch::{Batch, Evaluation, InputSpec, ModelError, Sample};
pub use classifier::Classifier;
pub use config::{DataShape, ModelConfig};
pub use convnet::ConvNet;
pub use layered::Layered;
pub use net::{Flat, Forward, Layer, Net, NetResult, OnCpu, Pass, Ready, Weights};
pub use on_cuda::{OnCuda, Part, Resident};
pub use paraft_compute::collective::RankSums;
pub use paraft_compute::cuda::{CudaOptions, Keep, Nccl, PinnedBytes, Precision, UniqueId};
pub use paraft_compute::{CpuDevice, DeviceError};
pub use slice::{NetSlice, Run, Slice, SliceRanks, Sliced, layers_of_slice};
pub use stages::{Loan, Stages};
pub use transformer::{NormKind, Transformer, TransformerShape};

use paraft_common::layout::TensorSpec;
use std::sync::Arc;

/// A model that trains on Paraft.
///
/// The flat buffers have the length of the layout made from [`Model::tensors`], buffers included.
pub trait Model: Send {
    /// The tensors, parameters first, then buffers, with PyTorch's names and shapes.
    fn tensors(&self) -> Vec<TensorSpec>;

    /// Writes the initial weights for `seed`. Must depend on nothing but the model and the seed: every worker
    /// computes them, and the first to arrive gives them to the servers.
    fn init(&self, seed: u64, params: &mut [f32]);

    /// One training step: the mean loss over the batch, its gradient in `grads` (every value is written; for a
    /// buffer, the amount to subtract from it).
    ///
    /// `ready(offset, grads)` says that `grads[offset..]` of what was not yet reported will not change any
    /// more. It is called with falling offsets, last layer first; the last call must pass 0. Buffers lie at
    /// the end of the vector, so they belong to the first call's part: write them before the first call, or
    /// make the first call only when they are written.
    fn step(
        &mut self,
        params: &[f32],
        grads: &mut [f32],
        batch: &Batch,
        ready: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<f32, ModelError>;

    /// Loss and accuracy on a part of the held-out set, in inference mode.
    fn evaluate(&mut self, params: &[f32], batch: &Batch) -> Result<Evaluation, ModelError>;

    /// What is computed at once, in the order of the forward pass. Empty: the model isn't divided, and a worker holds all of it.
    fn layers(&self) -> Vec<Layer> {
        Vec::new()
    }

    /// As [`Self::step`], for a worker that has the parameters of some layers at a time: each is asked for where it is used, forward
    /// and backward. For models with [`Self::layers`].
    ///
    /// # Errors
    /// As of [`Self::step`], and what `flat` says. The gradient is of no use then.
    fn step_by_layers(&mut self, _flat: &mut dyn Flat<CpuDevice>, _batch: &Batch) -> Result<f32, ModelError> {
        Err(ModelError::new("this model isn't divided in layers: it has no Model::step_by_layers"))
    }

    /// A pass of some layers forward, for a worker whose ranks have some layers each: from what the layer before gave for these samples, or
    /// from the batch, to what the next one takes, or to the loss. What it keeps for the way back lies in the pass's slot. For models with
    /// [`Self::layers`].
    ///
    /// # Errors
    /// As of [`Self::step`], and what `weights` says; the input is not as long as the layer before says.
    fn forward_pass(
        &mut self,
        _weights: &mut dyn Weights<CpuDevice>,
        _pass: &Pass,
        _batch: &Batch,
        _input: Option<&[f32]>,
    ) -> Result<Forward, ModelError> {
        Err(ModelError::new("this model isn't computed layer by layer: it has no Model::forward_pass"))
    }

    /// The way back of [`Self::forward_pass`]: from the gradient of what the pass gave, or from the loss, to that of what it took (`None`: the
    /// batch). What its layers share with others that are not in it is zero in the gradient before.
    ///
    /// # Errors
    /// As there.
    fn backward_pass(
        &mut self,
        _flat: &mut dyn Flat<CpuDevice>,
        _pass: &Pass,
        _gradient: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        Err(ModelError::new("this model isn't computed layer by layer: it has no Model::backward_pass"))
    }

    /// One slice of it, where several ranks compute each layer together: over flat vectors of its own. `ranks` are those with the others.
    ///
    /// # Errors
    /// It can't be cut in slices, or not in so many.
    fn slice(&self, _slice: Slice, _ranks: Arc<dyn SliceRanks>) -> Result<Sliced, ModelError> {
        Err(ModelError::new("this model isn't cut in tensor slices: it has no Model::slice"))
    }

    /// From now on, in training, statistics of a batch (BatchNorm's) are those of the batches of all ranks of a group, if the model
    /// has any. Ranks call [`Self::step`] at the same time, with batches of their own. On a device of its own it does so anyway.
    fn share_statistics(&mut self, _ranks: Option<Arc<dyn RankSums>>) {}

    /// Where the model keeps parameters and gradients on a device of its own, the way to them that spares copies.
    fn resident(&mut self) -> Option<&mut dyn Resident> {
        None
    }
}
