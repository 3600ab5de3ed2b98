//! What a training loop of your own brings to a job, and what it is told.

use super::{WorkerError, WorkerOptions};
use crate::{
    job::{Exchange, Job},
    start::Init,
};
use paraft_client::Initial;
use paraft_common::{Layout, ParamGroup, Step, TensorSpec, config::ServerJob};

/// What is trained by a loop of your own.
pub struct Setup<'a> {
    /// The model's tensors, parameters before buffers, in the order in which their values lie in the flat vector.
    pub tensors: Vec<TensorSpec>,
    /// Samples of the training data, the same on every worker: minibatches are lists of numbers below it.
    pub samples: usize,
    /// Names the data, for example by its digest: a worker with another name is refused. No comma.
    pub data: String,
    /// Evaluations count correct predictions.
    pub classifies: bool,
    /// Held-out samples, the same on every worker; 0: nothing is evaluated.
    pub held_out: usize,
    /// Writes the weights that the job begins with, from its seed: the same on every worker. `None`: another worker brings them, and
    /// this one waits for it.
    pub init: Option<Box<Init<'a>>>,
    /// Parameters with a rate and a decay of their own, as many values each as follow each other in the tensors; none: all have the
    /// optimizer's.
    pub groups: Vec<ParamGroup>,
    /// What the optimizer knows of steps that it has made elsewhere; it comes with [`Self::init`]'s weights.
    pub state: Option<OptimizerState>,
    /// What the job's checkpoints say of this loop, in words of its own.
    pub note: String,
}

/// What an optimizer knows of its steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimizerState {
    /// Its state vectors, in the order of [`OptimizerConfig::slot_names`](paraft_common::optim::OptimizerConfig::slot_names), each as
    /// long as the parameters.
    pub vectors: Vec<Vec<f32>>,
    /// The steps.
    pub updates: u64,
}

impl OptimizerState {
    /// Puts it to the weights that a job begins with.
    pub(super) fn bring(
        self,
        job: &ServerJob,
        layout: &Layout,
        initial: &mut Initial,
    ) -> Result<(), WorkerError> {
        let mut slots = job.new_slots(layout.params_len());
        let own = slots.len() - job.keeps().slots.len();
        if self.vectors.len() != own || self.vectors.iter().any(|v| v.len() != layout.params_len()) {
            let (name, brought) = (&job.name, self.vectors.len());
            return Err(WorkerError::Job(format!(
                "the optimizer brings {brought} state vectors, and the servers of `{name}` keep {own} for it, of {} values each",
                layout.params_len()
            )));
        }
        // Behind them come those of the job's algorithm, which begin anew.
        slots.iter_mut().zip(self.vectors).for_each(|(slot, v)| *slot = v);
        initial.slots = slots.into_iter().map(Into::into).collect();
        initial.stamps = vec![(self.updates, self.updates as f64); layout.buckets().len()];
        Ok(())
    }
}

impl<'a> Setup<'a> {
    /// Of these tensors, for `samples` samples that have no name; `init` writes the first weights.
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
        }
    }
}

impl Setup<'_> {
    /// Whether a loop of one's own can train it in this job.
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

/// What your loop does next.
#[derive(Clone, Debug, PartialEq)]
pub enum LoopAction {
    /// Compute the gradient of a minibatch at [`Run::weights`](super::Run::weights); hand it over by [`Run::ready`](super::Run::ready), then call [`Run::trained`](super::Run::trained).
    Train(Minibatch),
    /// Evaluate [`Run::weights`](super::Run::weights) on this worker's share of the held-out samples, then call [`Run::evaluated`](super::Run::evaluated).
    Evaluate {
        /// Their numbers, each below [`Setup::held_out`].
        samples: Vec<usize>,
    },
    /// The job is done, and [`Run::weights`](super::Run::weights) are its final ones: call [`Run::finish`](super::Run::finish).
    Over,
}

/// Samples to train on.
#[derive(Clone, Debug, PartialEq)]
pub struct Minibatch {
    /// The worker's step that it is part of, from 1.
    pub step: Step,
    /// Numbers of the samples, each below [`Setup::samples`], by the job's sampler, seed and batch.
    pub samples: Vec<u32>,
}
