//! A worker's next action.

use paraft_common::{Share, Step};
use paraft_session::{Pull, Pulled};
use std::{ops::Range, time::Duration};

/// A finished step, for the record.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stepped {
    /// The worker's last step.
    pub done: Step,
    /// The epoch of that step, from 1.
    pub epoch: u64,
    /// Mean loss of the step's samples.
    pub loss: f32,
    /// Whether the step ends an epoch or the job, or an evaluation follows.
    pub ends: bool,
}

/// A worker's next action. Its documentation names the method that takes the answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Pull into the weights. Answer: [`Trainer::pulled`](crate::Trainer::pulled).
    Pull(Pull),
    /// Report the trained chunk and ask for the next one. Answer: [`Trainer::chunk`](crate::Trainer::chunk).
    TakeChunk {
        /// The epoch that the worker is ready for, from 0.
        epoch: u64,
        /// The chunk that is trained.
        done: Option<u64>,
    },
    /// Continue with the minibatches after this step. The worker's own weights are the pulled ones.
    Begin(Step),
    /// Train one minibatch at the pulled weights; push each bucket of its gradient as soon as it is complete.
    /// Answer: [`Trainer::trained`](crate::Trainer::trained).
    Gradient {
        /// Of this step.
        step: Step,
        /// Whether the loop may ask for the following weights before the pushes.
        ask_ahead: bool,
        /// Whether, as far as is known, the next step directly follows this one's pull. Its minibatch may then
        /// start before this gradient is complete.
        continues: bool,
    },
    /// The mean gradient of this step is pulled: run the optimizer on it, unless a round of the step was skipped.
    /// Answer: [`Trainer::applied`](crate::Trainer::applied).
    Apply(Step),
    /// Write this worker's share of the step's results: of weights and the optimizer's state.
    WriteResults {
        /// Of this step.
        step: Step,
        /// The share.
        share: Share,
    },
    /// Train one minibatch at the worker's own weights, which change. Answer:
    /// [`Trainer::trained`](crate::Trainer::trained).
    Local {
        /// Of this step.
        step: Step,
        /// Minibatches before this one.
        clock: u64,
    },
    /// Push the result of the worker's own weights, in all buckets.
    Push {
        /// As this step.
        step: Step,
        /// Number of samples behind it.
        samples: usize,
        /// As in [`Action::Gradient`].
        ask_ahead: bool,
    },
    /// Likewise for these buckets, last first.
    PushFragment {
        /// As this step.
        step: Step,
        /// Which buckets.
        buckets: Range<usize>,
        /// Number of samples behind it.
        samples: usize,
    },
    /// The worker's own weights of these buckets take the pulled values.
    TakeOver(Range<usize>),
    /// The step is pushed completely.
    Pushed {
        /// Which step.
        step: Step,
        /// Mean loss of its samples.
        loss: f32,
        /// Number of samples.
        samples: u64,
    },
    /// Record the worker's progress.
    Stepped(Stepped),
    /// Evaluate this share of the held-out data and report it with this number. A job's last evaluation uses its
    /// final weights.
    Evaluate {
        /// See [`EvaluationSteps::number`](crate::EvaluationSteps::number).
        number: u64,
        /// The share that shard 0 has assigned.
        share: Share,
    },
    /// A checkpoint was due at this pull.
    Checkpoint(Pulled),
    /// Prepare the minibatches of this chunk. Answer: [`Trainer::prepared`](crate::Trainer::prepared).
    Chunk {
        /// From 0.
        epoch: u64,
        /// From 0.
        chunk: u64,
    },
    /// Drop the rest of the chunk: it belongs to another worker.
    DropChunk,
    /// The chunk is trained.
    ChunkDone {
        /// From 0.
        epoch: u64,
        /// From 0.
        chunk: u64,
    },
    /// This many epochs are over at this step, and this worker writes their checkpoint.
    WriteAfter {
        /// Which step.
        step: Step,
        /// Epochs of the job.
        epochs: u64,
        /// The job's last checkpoint, which is always made: no earlier write of this worker may block it.
        last: bool,
    },
    /// This many epochs are over at this step.
    EpochOver {
        /// Epochs of the job.
        epochs: u64,
        /// Which step.
        done: Step,
    },
    /// The session was lost, or rounds were closed without this worker. It continues from `done` instead of `step`.
    Moved {
        /// The worker's step before.
        step: Step,
        /// The step from which it continues.
        done: Step,
        /// The session was lost.
        rejoined: bool,
    },
    /// Do nothing for this long.
    Wait(Duration),
    /// Everything is trained: later time is not training time. [`Action::Begin`] may still follow if the session is
    /// lost.
    Trained,
    /// Tell the servers that everything is trained.
    Finish(Step),
    /// The job is over; the weights are final.
    End {
        /// The last step.
        done: Step,
        /// This worker writes the model, and the evaluation of the final weights.
        first: bool,
        /// The number of the evaluation in which all workers have evaluated their shares at the final weights, so the
        /// sum is the final evaluation. `None`: no worker has.
        evaluated: Option<u64>,
    },
}

impl Action {
    /// Whether the trainer continues only after the loop reports this action's result.
    pub fn has_answer(&self) -> bool {
        matches!(
            self,
            Self::Pull(_)
                | Self::TakeChunk { .. }
                | Self::Chunk { .. }
                | Self::Gradient { .. }
                | Self::Local { .. }
                | Self::Apply(_)
        )
    }
}
