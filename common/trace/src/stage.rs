//! The stages.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A part of the road of one bucket of one step, from the worker's buffer to the replicated weights and back.
///
/// The first three and the last run on the worker's training thread; what is between their spans there is waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// Worker: the model computes. From the step's begin, or from where the bucket before was handed to its link, until
    /// the model reports the bucket. (Of buckets that are reported together all but the first take no time.)
    Ready,
    /// Worker: the gradient is copied into the payload as it is. Only where the bucket's encoding is f32, which needs no
    /// other pass.
    Copy,
    /// Worker: the gradient is written into the payload in the job's encoding (bf16, f16, int8), in the same pass that
    /// copies it.
    Encode,
    /// Worker: from the payload's being there until the ack. The wait for room in the push window is in it, and what is
    /// sent again after a break.
    Push,
    /// Leader: from a push's having arrived whole until the coordinator proposes its update or applies it to its working copy.
    /// In BSP that is when everyone's is in and added up; with clipping by norm, when the norm is known.
    Queue,
    /// Leader: from the proposal until the coordinator has its outcome: committed and applied here. Of a state delta: from the
    /// cut's begin until its marker's outcome.
    Replicate,
    /// Every replica: the state machine applies the entry. Entries that are applied together begin and end together.
    /// Of a leader with state deltas: the update of its working copy.
    Apply,
    /// Leader: from the moment at which the rule lets a bucket's weights go to a worker until that worker's stream takes
    /// them to send.
    Publish,
    /// Worker: from asking for the weights until the bucket's have arrived. (In BSP it asks before the step's pushes.)
    Pull,
    /// Worker: the bucket's bytes are written into the parameter buffer.
    Decode,
    /// A rank that has stages of the model (`parallel.pipeline`): a micro-batch goes through them.
    Forward,
    /// And back.
    Backward,
}

impl Stage {
    /// How many there are.
    pub const COUNT: usize = 12;

    /// All of them, in the order of the road; then those of a micro-batch.
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

    /// The word in code, metrics and traces.
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

    /// Whether it is of weights on their way back: their step is the one after which they are read.
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
