//! Whether the next minibatch overlaps the current one: the leader decides, and tells the other ranks.

use super::{Stage, messages::CONTINUES};
use crate::engine::StepError;
use paraft_compute::collective::{Lines, Tag};
use paraft_models::{Batch, ModelError};

/// Whether the next minibatch overlaps this one.
pub(super) enum Lookahead<'b> {
    Known(Option<&'b Batch>),
    /// As the leader decides.
    Maybe(Option<&'b Batch>),
}

impl<'b> Lookahead<'b> {
    /// The next minibatch, if it is known to overlap.
    pub fn known(&self) -> Option<&'b Batch> {
        match self {
            Self::Known(next) => *next,
            Self::Maybe(_) => None,
        }
    }

    /// The next minibatch, if it overlaps. Waits for the leader's decision if this rank does not know it yet.
    pub fn decide(
        &mut self,
        of: &Stage<'_>,
        lines: &mut Lines,
        round: u64,
    ) -> Result<Option<&'b Batch>, StepError> {
        if let Self::Maybe(next) = self {
            let continues = of.schedule.overlaps_minibatches()
                && lines
                    .receive(0, Tag { kind: CONTINUES, number: round })?
                    .first()
                    .is_some_and(|v| *v > 0.0);
            if continues && next.is_none() {
                return Err(ModelError::new("this rank's data ends before its leader's").into());
            }
            *self = Self::Known(next.filter(|_| continues));
        }
        Ok(self.known())
    }
}

impl Stage<'_> {
    /// The leader's decision whether the next minibatch overlaps this one, sent to the other ranks.
    pub(super) fn announce_next<'b>(
        &self,
        lines: &mut Lines,
        round: u64,
        next: Option<&'b Batch>,
    ) -> Result<Option<&'b Batch>, StepError> {
        if self.schedule.overlaps_minibatches() {
            for place in 1..self.here.ranks() {
                let continues = f32::from(u8::from(next.is_some()));
                lines.send(place, Tag { kind: CONTINUES, number: round }, vec![continues])?;
            }
        }
        Ok(next)
    }
}
