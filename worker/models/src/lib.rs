//! Models: the trait a model implements, and the built-in ones.
//!
//! A model sees one flat parameter buffer and one flat gradient buffer (see [`paraft_common::layout`]). It reports
//! each completed part of the gradient, last layer first, so that its push overlaps the rest of the backward pass.
//! No network, no files.
//!
//! | model | file | tensors (PyTorch's names) |
//! |---|---|---|
//! | [`Classifier::linear`] | `classifier.rs` | `weight`, `bias` |
//! | [`Classifier::mlp`] | `classifier.rs` | `0.weight`, `0.bias`, `2.weight`, ... |
//! | [`Regressor::mlp`], [`Regressor::autoencoder`] | `regressor.rs` | `0.weight`, `0.bias`, `2.weight`, ... |
//! | [`ConvNet`] | `convnet.rs` | `1.weight`, ..., `10.bias`, then the running statistics |
//! | [`Transformer`] | `transformer.rs` | `transformer.wte.weight`, ..., `transformer.ln_f.bias` (nanoGPT's) |
//!
//! [`ModelConfig`] is the job file's section; it builds the model for the data. The built-in models are [`Net`]s,
//! written once over the operators of [`paraft_compute::Device`], for all devices. [`OnCpu`], [`OnCuda`] and
//! [`Layered`] turn a net into a [`Model`]. They keep their workspaces: after the first step of a batch size they
//! allocate nothing.
//!
//! Recommenders have rows of sparse tables beside their tensors: [`SparseModel`].

mod batch;
mod classifier;
mod config;
mod convnet;
mod init;
mod layered;
mod net;
mod on_cuda;
mod regressor;
mod replay;
mod resident;
pub mod selftest;
mod slice;
mod sparse;
mod stack;
mod stages;
mod transformer;

pub use batch::{Batch, Evaluation, InputSpec, ModelError, Sample};
pub use classifier::Classifier;
pub use config::{DataShape, ModelConfig};
pub use convnet::ConvNet;
pub use layered::Layered;
pub use net::{Flat, Forward, Layer, Net, NetResult, OnCpu, Pass, Ready, Weights};
pub use on_cuda::OnCuda;
pub use paraft_compute::collective::RankSums;
pub use paraft_compute::cuda::{CudaOptions, Keep, Nccl, PinnedBytes, Precision, UniqueId};
pub use paraft_compute::{CpuDevice, DeviceError};
pub use regressor::Regressor;
pub use resident::{Part, Resident};
pub use slice::{NetSlice, Run, Slice, SliceRanks, Sliced, layers_of_slice};
pub use sparse::{
    Lookups, Predicts, SPARSE_KINDS, SparseInput, SparseModel, SparseShape, SparseTable, check_tables,
};
pub use stages::{Loan, Stages};
pub use transformer::{Transformer, TransformerShape};

use paraft_common::layout::TensorSpec;
use std::sync::Arc;

/// A model that trains on Paraft.
///
/// The flat buffers have the length of the layout made from [`Model::tensors`], buffers included.
pub trait Model: Send {
    /// The tensors, parameters first, then buffers, with PyTorch's names and shapes.
    fn tensors(&self) -> Vec<TensorSpec>;

    /// Writes the initial weights for `seed`. It must depend only on the model and the seed: every worker computes
    /// them, and the first to arrive sends them to the servers.
    fn init(&self, seed: u64, params: &mut [f32]);

    /// One training step: returns the mean loss over the batch, and writes every value of the gradient in `grads`
    /// (for a buffer, the amount to subtract from it).
    ///
    /// `ready(offset, grads)` reports that the unreported part of `grads[offset..]` is final. The model calls it
    /// with falling offsets, last layer first; the last call must pass 0. Buffers lie at the end of the vector, so
    /// they belong to the first call's part: write them before the first call.
    fn step(
        &mut self,
        params: &[f32],
        grads: &mut [f32],
        batch: &Batch,
        ready: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<f32, ModelError>;

    /// Loss and accuracy on a part of the held-out set, in inference mode.
    fn evaluate(&mut self, params: &[f32], batch: &Batch) -> Result<Evaluation, ModelError>;

    /// The layers, each computed as one unit, in forward order. Empty: the model is not divided, and a worker holds
    /// all of it.
    fn layers(&self) -> Vec<Layer> {
        Vec::new()
    }

    /// Like [`Self::step`], for a worker that holds the parameters of some layers at a time. The model asks for
    /// each layer where it uses it, forward and backward. For models with [`Self::layers`].
    ///
    /// # Errors
    /// Those of [`Self::step`], and of `flat`. The gradient is then invalid.
    fn step_by_layers(&mut self, _flat: &mut dyn Flat<CpuDevice>, _batch: &Batch) -> Result<f32, ModelError> {
        Err(ModelError::new("this model isn't divided in layers: it has no Model::step_by_layers"))
    }

    /// The forward pass of some layers, for a worker whose ranks have some layers each. It computes from the
    /// previous layer's output for these samples, or from the batch, to the next layer's input, or to the loss. The
    /// pass's slot keeps the activations for the backward pass. For models with [`Self::layers`].
    ///
    /// # Errors
    /// Those of [`Self::step`], and of `weights`; or the input does not have the previous layer's output
    /// length.
    fn forward_pass(
        &mut self,
        _weights: &mut dyn Weights<CpuDevice>,
        _pass: &Pass,
        _batch: &Batch,
        _input: Option<&[f32]>,
    ) -> Result<Forward, ModelError> {
        Err(ModelError::new("this model isn't computed layer by layer: it has no Model::forward_pass"))
    }

    /// The backward pass of [`Self::forward_pass`]: from the gradient of the pass's output, or from the loss, to
    /// the gradient of its input (`None`: the batch). The gradient of parameters shared with layers outside the
    /// pass must be zero before.
    ///
    /// # Errors
    /// Those of [`Self::forward_pass`].
    fn backward_pass(
        &mut self,
        _flat: &mut dyn Flat<CpuDevice>,
        _pass: &Pass,
        _gradient: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        Err(ModelError::new("this model isn't computed layer by layer: it has no Model::backward_pass"))
    }

    /// One tensor slice of the model, if several ranks compute each layer together, with its own flat vectors.
    /// `ranks` have the other slices.
    ///
    /// # Errors
    /// The model cannot be split into slices, or not into this many.
    fn slice(&self, _slice: Slice, _ranks: Arc<dyn SliceRanks>) -> Result<Sliced, ModelError> {
        Err(ModelError::new("this model isn't cut in tensor slices: it has no Model::slice"))
    }

    /// From now on, in training, batch statistics (BatchNorm's) cover the batches of all ranks of a group, if the
    /// model has any. All ranks call [`Self::step`] at the same time, each with its own batch. A model on its own
    /// device does so anyway.
    fn share_statistics(&mut self, _ranks: Option<Arc<dyn RankSums>>) {}

    /// Access without copies, if the model keeps parameters and gradients on its own device.
    fn resident(&mut self) -> Option<&mut dyn Resident> {
        None
    }
}
