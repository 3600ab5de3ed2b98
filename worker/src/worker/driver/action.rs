//! What the loop does next.

use paraft_common::{Share, Step};

/// The loop's next action.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum DriverAction {
    /// Continue with the minibatches after this step.
    Begin(Step),
    /// Train one minibatch at the pulled weights and push its gradient. Answer: `Driver::trained`.
    Gradient {
        /// Of this step.
        step: Step,
        /// Call `Client::ask_ahead` before the first push.
        ask_ahead: bool,
        /// The next step follows directly.
        continues: bool,
    },
    /// Train one minibatch at the worker's own weights (`Driver::local`), which change. Answer:
    /// `Driver::trained`.
    Local {
        /// Of this step.
        step: Step,
        /// Minibatches before this one.
        clock: u64,
    },
    /// Run the optimizer on the pulled mean gradient if it is `whole`; otherwise change nothing. Answer:
    /// `Driver::applied`.
    Apply { whole: bool },
    /// Evaluate this share of the held-out data. Answer: `Driver::evaluated`.
    Evaluate {
        /// Of the evaluation.
        number: u64,
        share: Share,
    },
    /// Prepare the minibatches of this chunk. Answer: `Driver::prepared`.
    Chunk {
        /// From 0.
        epoch: u64,
        /// From 0.
        chunk: u64,
    },
    /// Drop the rest of the chunk: it belongs to another worker.
    DropChunk,
    /// The weights are final: `Driver::save` them, then call `Driver::end`.
    End(End),
}

/// The end of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct End {
    /// The last step.
    pub done: Step,
    /// This worker writes the model, and the evaluation of the final weights.
    pub first: bool,
    /// The number of the evaluation in which all workers have evaluated their shares at the final weights.
    pub evaluated: Option<u64>,
}
