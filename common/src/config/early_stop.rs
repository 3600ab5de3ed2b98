//! Early stopping: its rule and its state.

use serde::{Deserialize, Serialize};

/// Stops the job after the held-out loss has not fallen for some evaluations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EarlyStop {
    /// Evaluations without improvement before stopping, from 1.
    pub patience: u32,
    /// An improvement is a fall of the mean held-out loss by more than this, from 0.
    #[serde(default)]
    pub min_delta: f64,
}

/// The state of a job's early stopping, and its latest complete evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stopping {
    /// The best mean held-out loss so far; infinity before the first.
    pub best_loss: f64,
    /// Evaluations since the best loss.
    pub bad: u32,
    /// The rule has fired.
    pub stop: bool,
    /// The latest complete evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluated: Option<LastEvaluation>,
}

impl Default for Stopping {
    fn default() -> Self {
        Self { best_loss: f64::INFINITY, bad: 0, stop: false, evaluated: None }
    }
}

/// A complete held-out evaluation, as sums over the samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LastEvaluation {
    /// The epoch; in a job that evaluates within epochs, the step. Texts have it as `epoch`.
    #[serde(rename = "epoch")]
    pub number: u64,
    /// Sum of the loss.
    pub loss_sum: f64,
    /// Samples classified correctly.
    pub correct: u64,
    /// Samples seen.
    pub count: u64,
}
