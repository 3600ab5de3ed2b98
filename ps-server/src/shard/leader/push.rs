//! A push as its worker sent it.

use super::messages::ConnId;
use crate::shard::{command::Contribution, round::RoundPush};
use paraft_common::{Payload, optim::Overrides};
use paraft_trace::Moment;

/// A push as its worker sent it.
#[derive(Clone, Debug)]
pub struct Push {
    /// The stream that it came on.
    pub conn: ConnId,
    /// The worker, sequence number and step, and the version that the worker pulled.
    pub contribution: Contribution,
    /// The unit.
    pub unit: usize,
    /// Squared norm of the whole gradient, as the worker reports it.
    pub sum_of_squares: f64,
    /// In the encoding that the job has for the unit.
    pub payload: Payload,
    /// What the worker sets in place of the job's options.
    pub overrides: Overrides,
    /// The push has no gradient.
    pub skip: bool,
    /// The script clips the step by its norm.
    pub clipped: bool,
    /// When the push had arrived completely.
    pub arrived: Moment,
    /// The push came before this leader sent weights to its worker.
    pub precedes_weights: bool,
}

impl Push {
    /// The part of the push that a round needs.
    pub fn round_push(self) -> RoundPush {
        let Push { contribution, payload, overrides, skip, clipped, .. } = self;
        RoundPush { contribution, payload, overrides, skip, clipped }
    }
}
