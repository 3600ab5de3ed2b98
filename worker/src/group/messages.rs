//! The leader's messages to the other ranks.

use super::{Bound, GroupResult, Ranks};
use paraft_client::Pull;
use paraft_common::{Share, Step};
use paraft_compute::collective::GroupError;
use std::ops::Range;

/// A message of the leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ControlMessage {
    /// These parts of the weights follow.
    Weights(Vec<Range<usize>>),
    /// All weights and the optimizer's state follow, as of this step.
    State(Step),
    /// Compute this step's minibatch.
    Step(Step),
    /// A group of ranks with stages starts or restarts at this step.
    Meet(Step),
    /// Each rank pulls the weights of its stages.
    Pull(Pull),
    /// Send the final weights of all stages to the leader.
    Gather,
    /// Evaluate a share of the held-out data.
    Evaluate {
        /// Of the evaluation.
        number: u64,
        /// The worker's share.
        share: Share,
    },
    /// The group forms again to admit a rank.
    Reform,
    /// The job is done.
    Over,
}

const WEIGHTS: u64 = 1;
const STEP: u64 = 2;
const REFORM: u64 = 4;
const OVER: u64 = 5;
const STATE: u64 = 6;
const MEET: u64 = 7;
const PULL: u64 = 8;
const GATHER: u64 = 9;
// The former number 3 had no share.
const EVALUATE: u64 = 10;

/// Flags of a pull, in one word with its step. No job has enough steps to overflow it.
const BARRIER: u64 = 1;
const LAST: u64 = 2;
const CHECKPOINT: u64 = 4;

impl Ranks {
    /// Sends a message of the leader.
    pub fn say(&self, message: &ControlMessage) -> GroupResult {
        let Bound { group, .. } = self.bound()?;
        let mut head = match message {
            ControlMessage::Weights(ranges) => [WEIGHTS, ranges.len() as u64],
            ControlMessage::State(done) => [STATE, done.0],
            ControlMessage::Step(step) => [STEP, step.0],
            ControlMessage::Evaluate { number, .. } => [EVALUATE, *number],
            ControlMessage::Meet(step) => [MEET, step.0],
            ControlMessage::Pull(pull) => {
                let kinds = [(pull.barrier, BARRIER), (pull.last, LAST), (pull.checkpoint, CHECKPOINT)];
                [PULL, (pull.done.0 << 3) + kinds.map(|(is, kind)| u64::from(is) * kind).iter().sum::<u64>()]
            }
            ControlMessage::Gather => [GATHER, 0],
            ControlMessage::Reform => [REFORM, 0],
            ControlMessage::Over => [OVER, 0],
        };
        group.words(&mut head)?;
        if let ControlMessage::Weights(ranges) = message {
            let mut ends: Vec<u64> = ranges.iter().flat_map(|r| [r.start as u64, r.end as u64]).collect();
            group.words(&mut ends)?;
        }
        if let ControlMessage::Evaluate { share, .. } = message {
            group.words(&mut [share.place.into(), share.of.into()])?;
        }
        Ok(())
    }

    /// Waits for the leader's next message. `len`: the length of the weights.
    pub fn hear(&self, len: usize) -> GroupResult<ControlMessage> {
        let group = &self.bound()?.group;
        let mut head = [0; 2];
        group.words(&mut head)?;
        let nonsense = || GroupError::Broken(format!("its leader says {head:?}"));
        Ok(match head {
            [WEIGHTS, n] if n <= len as u64 => {
                let mut ends = vec![0; 2 * n as usize];
                group.words(&mut ends)?;
                let ranges = ends.chunks_exact(2).map(|e| e[0] as usize..e[1] as usize).collect::<Vec<_>>();
                if ranges.iter().any(|r| r.start > r.end || r.end > len) {
                    return Err(nonsense());
                }
                ControlMessage::Weights(ranges)
            }
            [STATE, done] => ControlMessage::State(Step(done)),
            [STEP, step] => ControlMessage::Step(Step(step)),
            [EVALUATE, number] => {
                let mut words = [0; 2];
                group.words(&mut words)?;
                let [Ok(place), Ok(of)] = words.map(u32::try_from) else { return Err(nonsense()) };
                ControlMessage::Evaluate { number, share: Share { place, of } }
            }
            [MEET, step] => ControlMessage::Meet(Step(step)),
            [PULL, word] => {
                let is = |kind: u64| word & kind != 0;
                let (barrier, last, checkpoint) = (is(BARRIER), is(LAST), is(CHECKPOINT));
                ControlMessage::Pull(Pull {
                    done: Step(word >> 3),
                    barrier,
                    last,
                    checkpoint,
                    ..Pull::default()
                })
            }
            [GATHER, _] => ControlMessage::Gather,
            [REFORM, _] => ControlMessage::Reform,
            [OVER, _] => ControlMessage::Over,
            _ => return Err(nonsense()),
        })
    }
}
