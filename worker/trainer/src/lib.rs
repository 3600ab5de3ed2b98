//! A worker's next action, as a state machine: steps, pushes, pulls, evaluations, checkpoints, local steps,
//! streamed fragments, leased chunks.
//!
//! It computes nothing and has no I/O, clock or data. A training loop asks it for the next [`Action`], performs it,
//! and reports the result. So the real worker, the simulator and a user's own loop train by the same rules.
//!
//! ```text
//!   Pull ─▶ Begin ─▶ ┌─ Gradient ─▶ (its pushes) ─▶ Pushed ─▶ Pull ─▶ Stepped ─▶ [Evaluate] [Checkpoint] ─┐ ─▶ Trained
//!                    └──────────────────────────────────────────────────────────────────────────────────┘
//!   Trained ─▶ [Pull at the barrier ─▶ Evaluate] ─▶ Finish ─▶ Pull ─▶ End
//! ```
//!
//! ```
//! use paraft_common::{Layout, Step, TensorSpec, WorkerId, local::LocalConfig};
//! use paraft_session::Pulled;
//! use paraft_trainer::{Action, Options, Steps, Trainer};
//!
//! let layout = Layout::new(vec![TensorSpec::param("w", &[4])], 4).expect("a layout");
//! let steps = Steps::new(3, 1, 2, None).expect("some steps"); // 3 minibatches an epoch, 1 a step, 2 epochs
//! let mut trainer = Trainer::new(Options::new(WorkerId(0), steps, LocalConfig::default(), layout), Step(0));
//! let mut gradients = 0;
//! loop {
//!     match trainer.next_action() {
//!         // Ask the servers: `Client::pull`.
//!         Action::Pull(pull) => trainer.pulled(Pulled { done: pull.done, ..Pulled::default() }),
//!         // Compute a gradient at the pulled weights, and push its buckets.
//!         Action::Gradient { .. } => {
//!             gradients += 1;
//!             trainer.trained(Some((0.5, 32)));
//!         }
//!         Action::End { .. } => break,
//!         _ => {} // what is written down and evaluated
//!     }
//! }
//! assert_eq!(gradients, 6);
//! ```

mod action;
mod leased;
mod local;
mod mean;
mod options;
mod steps;
mod trainer;

pub use action::{Action, Stepped};
pub use options::Options;
pub use steps::{CheckpointSteps, EvaluationSteps, Steps};
pub use trainer::Trainer;
