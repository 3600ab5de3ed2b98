//! A rank that does not lead its group: it follows the leader's messages.

use super::{Engine, Memory, StepError, StepLoss, alone_only, step_error::blame};
use crate::{group::ControlMessage, stage::Batches, worker::WorkerError};
use paraft_common::{Share, Step};
use paraft_models::Evaluation;

/// The work of a follower.
pub(crate) trait FollowerSteps {
    /// The minibatch of a step, for one of the worker's meshes. `two`: also that of the next step, if there is one.
    fn batches(&mut self, step: Step, mesh: usize, two: bool) -> Result<Batches<'_>, WorkerError>;
    /// Reports a finished step.
    fn stepped(&mut self, step: Step, stepped: StepLoss) -> Result<(), WorkerError>;
    /// Evaluates this rank's part of the worker's share of the held-out samples.
    fn evaluate(&self, engine: &mut Engine, number: u64, part: Share) -> Result<Evaluation, WorkerError>;
}

impl Engine<'_> {
    /// Follows the group's leader. Returns true when the job is done, false when this rank becomes the leader.
    pub fn follow(&mut self, work: &mut dyn FollowerSteps) -> Result<bool, WorkerError> {
        loop {
            let followed = self.follow_one(work);
            let Some(ranks) = &mut self.ranks else { return Ok(true) };
            match followed {
                Ok(None) => continue,
                Ok(Some(true)) => {
                    ranks.leave(self.model);
                    return Ok(true);
                }
                Ok(Some(false)) => tracing::info!("the group is formed again: a rank asks for admission"),
                Err(e) => {
                    let why = blame(ranks, e)?;
                    tracing::warn!(error = %why, "the group is formed again");
                }
            }
            if !ranks.form(self.model)? {
                return Ok(true);
            }
            if let Memory::Stage(stage) = &mut self.memory {
                stage.formed(ranks);
            }
            if ranks.leads() {
                return Ok(false);
            }
        }
    }

    /// `Some(true)`: the job is done; `Some(false)`: the group is formed again.
    fn follow_one(&mut self, work: &mut dyn FollowerSteps) -> Result<Option<bool>, StepError> {
        let len = self.len();
        let Some(ranks) = &mut self.ranks else { return Ok(Some(true)) };
        match (ranks.hear(len)?, &mut self.memory) {
            (ControlMessage::Meet(step), Memory::Stage(stage)) => {
                stage.meet(ranks, self.model, step)?;
                Ok(None)
            }
            (ControlMessage::Pull(pull), Memory::Stage(stage)) => {
                stage.pull(ranks, &pull)?;
                Ok(None)
            }
            (ControlMessage::Gather, Memory::Stage(stage)) => {
                stage.gather(ranks.lines()?)?;
                Ok(None)
            }
            (said, _) => self.do_as_said(said, work),
        }
    }

    fn do_as_said(
        &mut self,
        said: ControlMessage,
        work: &mut dyn FollowerSteps,
    ) -> Result<Option<bool>, StepError> {
        match said {
            ControlMessage::Weights(ranges) => self.take_weights(&ranges)?,
            ControlMessage::State(done) => self.take_state(done)?,
            ControlMessage::Step(mut step) => loop {
                let (mesh, two) = match &self.memory {
                    Memory::Stage(stage) => (stage.meshes().0, stage.overlaps_minibatches()),
                    _ => (0, false),
                };
                let stepped = self.make_step(step, work.batches(step, mesh, two)?, None)?;
                work.stepped(step, stepped)?;
                step = step.next();
                if !matches!(&self.memory, Memory::Stage(stage) if stage.has_begun(step)) {
                    break;
                }
            },
            ControlMessage::Meet(_) | ControlMessage::Pull(_) | ControlMessage::Gather => {
                return Err(alone_only().into());
            }
            ControlMessage::Evaluate { number, share } => {
                self.sum_evaluation(share, &mut |engine: &mut Self, part| {
                    work.evaluate(engine, number, part)
                })?;
            }
            ControlMessage::Reform => return Ok(Some(false)),
            ControlMessage::Over => return Ok(Some(true)),
        }
        Ok(None)
    }
}
