//! The input of a user's own training loop, and the actions that it receives.

use super::{WorkerError, WorkerOptions};
use crate::{
    job::{Exchange, Job},
    start::Init,
};
use paraft_client::Initial;
use paraft_common::{
    BucketSpec, Layout, ParamGroup, Step, TableSpec, TensorKind, TensorSpec, config::ServerJob,
};

/// A model that a user's own loop trains.
pub struct Setup<'a> {
    /// The model's tensors, parameters before buffers, in the order in which their values lie in the flat vector.
    pub tensors: Vec<TensorSpec>,
    /// Number of training samples, the same on every worker. Minibatches are lists of indices below it.
    pub samples: usize,
    /// Identifies the data, for example by its digest. A worker with another value is refused. It must not have a
    /// comma.
    pub data: String,
    /// Whether evaluations count correct predictions.
    pub classifies: bool,
    /// Number of held-out samples, the same on every worker; 0: no evaluations.
    pub held_out: usize,
    /// Writes the job's initial weights from its seed, the same on every worker. `None`: another worker supplies
    /// them, and this one waits for it.
    pub init: Option<Box<Init<'a>>>,
    /// Parameter groups with their own rate and decay, in the tensors' order. Empty: all parameters use the
    /// optimizer's.
    pub groups: Vec<ParamGroup>,
    /// The optimizer's state from steps made elsewhere; it accompanies [`Self::init`]'s weights.
    pub state: Option<OptimizerState>,
    /// This loop's description in the job's checkpoints, as free text.
    pub note: String,
    /// Sparse tables beside the tensors. Only [`OpenRun`](super::OpenRun) reads and changes their rows.
    pub tables: Vec<TableSpec>,
}

/// An optimizer's state after some steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimizerState {
    /// The state vectors, in the order of
    /// [`OptimizerConfig::slot_names`](paraft_common::optim::OptimizerConfig::slot_names), each as long as the
    /// parameters.
    pub vectors: Vec<Vec<f32>>,
    /// The number of steps of each parameter group (one without groups).
    pub updates: Vec<u64>,
}

impl OptimizerState {
    /// Adds this state to a job's initial weights.
    pub(super) fn bring(
        self,
        job: &ServerJob,
        layout: &Layout,
        initial: &mut Initial,
    ) -> Result<(), WorkerError> {
        let own = job.slots() - job.keeps().slots.len();
        if self.vectors.len() != own || self.vectors.iter().any(|v| v.len() != layout.params_len()) {
            let (name, brought) = (&job.name, self.vectors.len());
            return Err(WorkerError::Job(format!(
                "the optimizer brings {brought} state vectors, and the servers of `{name}` keep {own} for it, of {} values each",
                layout.params_len()
            )));
        }
        let mut slots = self.vectors;
        // The vectors of the job's algorithm follow, and start at zero.
        slots.resize_with(job.slots(), || vec![0.0; layout.params_len()]);
        initial.slots = slots.into_iter().map(Into::into).collect();
        let most = self.updates.iter().copied().max().unwrap_or_default();
        let stamp = |bucket: &BucketSpec| {
            let of_group = self.updates.get(usize::from(bucket.group)).copied();
            (if bucket.kind == TensorKind::Param { of_group.unwrap_or(most) } else { most }, most as f64)
        };
        initial.stamps = layout.buckets().iter().map(stamp).collect();
        Ok(())
    }
}

impl<'a> Setup<'a> {
    /// For these tensors and this many samples without a data name; `init` writes the first weights.
    pub fn new(tensors: Vec<TensorSpec>, samples: usize, init: impl FnMut(u64, &mut [f32]) + 'a) -> Self {
        let data = format!("{samples} samples");
        Self {
            tensors,
            samples,
            data,
            classifies: false,
            held_out: 0,
            init: Some(Box::new(init)),
            groups: Vec::new(),
            state: None,
            note: String::new(),
            tables: Vec::new(),
        }
    }
}

impl Setup<'_> {
    /// Checks that a user's own loop can train this in the job.
    pub(super) fn check(&self, job: &Job, options: &WorkerOptions) -> Result<(), WorkerError> {
        let Self { tensors, data, .. } = self;
        if job.train.group_size > 1 || job.train.exchange == Exchange::AllReduce {
            let why = "train.group_size and train.exchange = \"all-reduce\" are for Paraft's own training loop; take them out";
            return Err(WorkerError::Job(why.into()));
        }
        if job.parallel.is_cut() {
            let why = "[parallel] is for models of Paraft's own training loop; take it out";
            return Err(WorkerError::Job(why.into()));
        }
        if options.rank >= job.train.workers {
            let (rank, workers) = (options.rank, job.train.workers);
            return Err(WorkerError::Job(format!(
                "rank {rank} in a job of {workers} workers (they are 0 to {})",
                workers - 1
            )));
        }
        if !job.tables.is_empty() && self.tables != job.tables_of_model() {
            let why = "the [[table]] entries of the job file are for its built-in model; name a loop's tables in its Setup, and take \
                       them out of the job file";
            return Err(WorkerError::Job(why.into()));
        }
        for (i, t) in tensors.iter().enumerate() {
            if t.is_empty() || tensors[..i].iter().any(|other| other.name == t.name) {
                let name = &t.name;
                return Err(WorkerError::Job(format!(
                    "tensor {i}, `{name}`, has no values, or another has its name"
                )));
            }
        }
        if data.contains(',') || data.is_empty() {
            return Err(WorkerError::Job(format!(
                "the data's name is `{data}`; give it a name without commas"
            )));
        }
        Ok(())
    }
}

/// The loop's next action.
#[derive(Clone, Debug, PartialEq)]
pub enum LoopAction {
    /// Compute a minibatch's gradient at [`Run::weights`](super::Run::weights), hand it over by
    /// [`Run::ready`](super::Run::ready), then call [`Run::trained`](super::Run::trained).
    Train(Minibatch),
    /// Evaluate this worker's share of the held-out samples at [`Run::weights`](super::Run::weights), then call
    /// [`Run::evaluated`](super::Run::evaluated).
    Evaluate {
        /// Sample indices, each below [`Setup::held_out`].
        samples: Vec<usize>,
    },
    /// The job is done, and [`Run::weights`](super::Run::weights) are its final weights: call
    /// [`Run::finish`](super::Run::finish).
    Over,
}

/// Samples to train on.
#[derive(Clone, Debug, PartialEq)]
pub struct Minibatch {
    /// The worker's step of this minibatch, from 1.
    pub step: Step,
    /// Sample indices, each below [`Setup::samples`], from the job's sampler, seed and batch.
    pub samples: Vec<u32>,
}
