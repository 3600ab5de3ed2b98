//! How a worker trains.

use crate::steps::{CheckpointSteps, EvaluationSteps, Steps};
use paraft_common::{Layout, Share, WorkerId, config::ChunkPlan, local::LocalConfig};

/// How a worker trains.
#[derive(Clone, Debug)]
pub struct Options {
    /// This worker's rank.
    pub worker: WorkerId,
    /// The job's steps.
    pub steps: Steps,
    /// The work between two pushes.
    pub local: LocalConfig,
    /// The job's buckets.
    pub layout: Layout,
    /// Samples per minibatch, if all have the same number.
    pub batch: usize,
    /// The steps after which the worker evaluates a share of the held-out data.
    pub evaluates: EvaluationSteps,
    /// The share, where the servers do not assign one.
    pub share: Share,
    /// The steps with checkpoints, if the job makes any.
    pub due: Option<CheckpointSteps>,
    /// The chunks of the leased sampler.
    pub leased: Option<ChunkPlan>,
    /// Epochs that were done at the job's start.
    pub begun: u64,
}

impl Options {
    /// Without evaluations or checkpoints, over a static share of the data.
    pub fn new(worker: WorkerId, steps: Steps, local: LocalConfig, layout: Layout) -> Self {
        Self {
            worker,
            steps,
            local,
            layout,
            batch: 1,
            evaluates: EvaluationSteps::default(),
            share: Share::ALL,
            due: None,
            leased: None,
            begun: 0,
        }
    }
}
