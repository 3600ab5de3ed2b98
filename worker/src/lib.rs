//! The worker: a training loop around a model, and everything a user's own model needs.
//!
//! - [`job`]: the job file, `paraft-job`.
//! - [`worker`]: [`run`], the training loop.
//! - [`cli`]: the flags of `paraft worker`, for binaries with a model of their own.
//! - [`device`]: selects a worker's device. `engine`: the model with its parameters and gradient, wherever they
//!   are.
//! - `exchange`: pushes gradients. `group`: ranks that act as one worker.
//! - `local`: the optimizer on a rank, for steps without servers. (A job's `[local]` section, with a worker's own
//!   weights, is in `paraft_trainer`.)
//! - [`samples`]: from data sets to batches.
//! - [`start`]: a job's initial state: the seed's weights, a model file, a checkpoint.
//! - [`checkpoints`]: when a checkpoint is due, and the thread that writes it.
//! - `recorder`: `metrics.jsonl`, TensorBoard, Prometheus.
//! - [`exit`]: exit codes, one table for all binaries.
//!
//! A model of your own implements [`Model`] and calls [`run`] (or [`cli::main`], which also reads the flags);
//! `examples/custom-model` in the repository is a complete one.

pub mod checkpoints;
pub mod cli;
pub mod device;
mod engine;
mod exchange;
pub mod exit;
mod group;
mod local;
mod metrics;
mod recorder;
pub mod samples;
pub mod slow;
mod stage;
pub mod start;
mod streamed;
pub mod worker;

pub use paraft_client::{Counters, Interrupt, Pulled};
pub use paraft_client::{Transport, reader};
pub use paraft_common::{Layout, ParamGroup, optim::Overrides};
pub use paraft_common::{TensorKind, TensorSpec};
pub use paraft_data::{self as data, DataError, Dataset, Samples, Split};
pub use paraft_job::{self as job, Job, JobError};
pub use paraft_models::{Batch, Evaluation, Model, ModelConfig, ModelError, SPARSE_KINDS, Stages};
pub use recorder::described;
pub use worker::{
    ErrorKind, LoopAction, Minibatch, OpenRun, OptimizerState, Run, Setup, StepOutcome, WeightBuffer,
    WorkerError, WorkerOptions, WorkerReport, run, run_sparse,
};
