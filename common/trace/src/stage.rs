//! The stages.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A stage in the path of one bucket of one step, from the worker's buffer to the replicated weights
/// and back.
///
/// The first three and the last run on the worker's training thread; gaps between their spans are
/// waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// Worker: the model computes. From the start of the step, or from the hand-over of the previous
    /// bucket to its link, until the model reports the bucket. (If buckets are reported together, all
    /// but the first take no time.)
    Ready,
    /// Worker: the gradient is copied into the payload. Only for the encoding f32, which needs no other
    /// pass.
    Copy,
    /// Worker: the gradient is written into the payload in the job's encoding (bf16, f16, int8), in the
    /// pass that copies it.
    Encode,
    /// Worker: from the complete payload until the acknowledgement. Includes the wait for the push
    /// window, and a retransmission after a broken connection.
    Push,
    /// Leader: from the complete arrival of a push until the coordinator proposes its update or applies
    /// it to its working copy. In BSP it ends when all pushes are in and summed; with clipping by norm,
    /// when the norm is known.
    Queue,
    /// Leader: from the proposal until the coordinator has its outcome (committed and applied here).
    /// For a state delta: from the start of the cut until its marker's outcome.
    Replicate,
    /// Every replica: the state machine applies the entry. Entries of one batch share their start and
    /// end. For a leader with state deltas: the update of its working copy.
    Apply,
    /// Leader: from the moment the rule releases a bucket's weights for a worker until that worker's
    /// stream takes them to send.
    Publish,
    /// Worker: from the request for weights until the bucket's have arrived. (In BSP the request
    /// precedes the step's pushes.)
    Pull,
    /// Worker: the bucket's bytes are written into the parameter buffer.
    Decode,
    /// A rank with pipeline stages (`parallel.pipeline`): the forward pass of a micro-batch.
    Forward,
    /// Its backward pass.
    Backward,
}

impl Stage {
    /// The number of stages.
    pub const COUNT: usize = 12;

    /// All stages in the order of the path, then those of a micro-batch.
    pub const ALL: [Stage; Self::COUNT] = [
        Stage::Ready,
        Stage::Copy,
        Stage::Encode,
        Stage::Push,
        Stage::Queue,
        Stage::Replicate,
        Stage::Apply,
        Stage::Publish,
        Stage::Pull,
        Stage::Decode,
        Stage::Forward,
        Stage::Backward,
    ];

    /// The name in code, metrics and traces.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Ready => "ready",
            Stage::Copy => "copy",
            Stage::Encode => "encode",
            Stage::Push => "push",
            Stage::Queue => "queue",
            Stage::Replicate => "replicate",
            Stage::Apply => "apply",
            Stage::Publish => "publish",
            Stage::Pull => "pull",
            Stage::Decode => "decode",
            Stage::Forward => "forward",
            Stage::Backward => "backward",
        }
    }

    /// Whether it concerns weights on the path back: its step is the one after which they are read.
    pub(crate) fn is_of_weights(self) -> bool {
        matches!(self, Stage::Publish | Stage::Pull | Stage::Decode)
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_has_one_name_everywhere_and_a_place_of_its_own() {
        for (i, stage) in Stage::ALL.into_iter().enumerate() {
            assert_eq!(stage as usize, i);
            assert_eq!(serde_json::to_value(stage).unwrap(), stage.name());
        }
    }
}
