//! Forms the group again after a failure or to admit a rank, and gives every rank what it needs to continue.

use super::{Engine, Memory, StepError, step_error::blame};
use crate::{group::ControlMessage, worker::WorkerError};

impl Engine<'_> {
    /// If the group caused the failure, forms it again, with the ranks that are there. Afterwards every rank has
    /// this rank's weights.
    pub(super) fn recover(&mut self, why: StepError) -> Result<(), WorkerError> {
        let Some(ranks) = &mut self.ranks else {
            return Err(match why {
                StepError::Other(e) => e,
                StepError::Group(e) => WorkerError::Job(e.to_string()),
            });
        };
        let why = blame(ranks, why)?;
        tracing::warn!(error = %why, "the group is formed again");
        self.reform()
    }

    /// Leaves the group and joins the next one. Returns false if the job is done.
    pub fn form(&mut self) -> Result<bool, WorkerError> {
        self.ranks.as_mut().map_or(Ok(false), |r| r.form(self.model))
    }

    pub(super) fn reform(&mut self) -> Result<(), WorkerError> {
        loop {
            let Some(ranks) = &mut self.ranks else { return Ok(()) };
            if !ranks.form(self.model)? || !ranks.leads() {
                return Err(WorkerError::Deposed);
            }
            match self.regroup() {
                Ok(()) => return Ok(()),
                Err(e) => {
                    let Some(ranks) = &self.ranks else { return Ok(()) };
                    let why = blame(ranks, e)?;
                    tracing::warn!(error = %why, "the group is formed again");
                }
            }
        }
    }

    /// In a new group that this rank leads, gives every rank what it needs to continue.
    fn regroup(&mut self) -> Result<(), StepError> {
        let (Memory::Stage(stage), Some(ranks)) = (&mut self.memory, &mut self.ranks) else {
            let all = 0..self.len();
            return self.share(std::slice::from_ref(&all));
        };
        if !stage.stays(ranks) {
            return Err(WorkerError::Regrouped.into());
        }
        let pull = stage.behind();
        ranks.say(&ControlMessage::Meet(pull.done))?;
        if stage.meet(ranks, self.model, pull.done)? > pull.done {
            // A reopened session has advanced.
            return Err(WorkerError::Regrouped.into());
        }
        ranks.say(&ControlMessage::Pull(pull.clone()))?;
        stage.shares_nothing(ranks.lines()?)?;
        stage.deal()?;
        while let Some(done) = stage.level(ranks, pull.done, &pull)? {
            if done > pull.done {
                // The other ranks take part in this pull, and this rank cannot join it with the weights that it
                // computes with.
                return Err(ranks.break_up("a rank's session was lost, and it is further on").into());
            }
        }
        stage.landed(ranks.lines()?)
    }
}
