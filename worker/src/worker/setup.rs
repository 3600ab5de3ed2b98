//! What a training loop of your own brings to a job, and what it is told.

use paraft_common::{Step, TensorSpec};

/// Writes the weights of a seed.
pub type Init<'a> = Box<dyn FnMut(u64, &mut [f32]) + 'a>;

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
    /// Writes the weights that the job begins with, from its seed: the same on every worker.
    pub init: Init<'a>,
}

impl<'a> Setup<'a> {
    /// Of these tensors, for `samples` samples that have no name; `init` writes the first weights.
    pub fn new(tensors: Vec<TensorSpec>, samples: usize, init: impl FnMut(u64, &mut [f32]) + 'a) -> Self {
        let data = format!("{samples} samples");
        Self { tensors, samples, data, classifies: false, held_out: 0, init: Box::new(init) }
    }
}

/// What your loop does next.
#[derive(Clone, Debug, PartialEq)]
pub enum Turn {
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
