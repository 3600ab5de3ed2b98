//! Ranks with one pipeline stage each: every rank pulls its own stages.

use super::{Engine, Memory, StepError, alone_only};
use crate::{group::ControlMessage, stage::further, worker::WorkerError};
use paraft_client::{Client, Pull, Pulled};

impl Engine<'_> {
    /// All ranks pull their stages.
    pub(super) fn pull_stages(&mut self, client: &mut Client, pull: &Pull) -> Result<Pulled, WorkerError> {
        let (mut pull, mut rejoined) = (pull.clone(), false);
        loop {
            let pulled = match self.pull_behind(client, &pull) {
                Ok(Some(pulled)) if pulled.done == pull.done && !pulled.stop => return Ok(pulled),
                Ok(Some(pulled)) => {
                    (pull.done, rejoined) = (pulled.done, rejoined || pulled.rejoined);
                    self.pull_together(client, &pull)
                }
                Ok(None) => self.pull_together(client, &pull),
                Err(e) => Err(e),
            };
            match pulled {
                Ok(pulled) => return Ok(Pulled { rejoined: rejoined || pulled.rejoined, ..pulled }),
                Err(e) => self.recover(e)?,
            }
        }
    }

    /// Pulls after a step when another step is in progress: each rank pulls on its own, and so does this one.
    /// `None`: no step is in progress.
    fn pull_behind(&mut self, client: &mut Client, pull: &Pull) -> Result<Option<Pulled>, StepError> {
        let (Memory::Stage(stage), Some(ranks)) = (&mut self.memory, &mut self.ranks) else {
            return Ok(None);
        };
        if !stage.has_begun(pull.done.next()) {
            return Ok(None);
        }
        let pulled = stage.pull_by(client, pull.clone())?;
        stage.is_at(&Pull { done: pulled.done, ..pull.clone() });
        stage.landed(ranks.lines()?)?;
        Ok(Some(pulled))
    }

    fn pull_together(&mut self, client: &mut Client, pull: &Pull) -> Result<Pulled, StepError> {
        self.is_between_steps()?;
        let (Memory::Stage(stage), Some(ranks)) = (&mut self.memory, &mut self.ranks) else {
            return Err(alone_only().into());
        };
        ranks.say(&ControlMessage::Pull(pull.clone()))?;
        let lost = stage.is_lost();
        if lost {
            client.advance_to(pull.done);
        }
        let mut pulled = stage.pull_sharing(client, pull.clone(), ranks.lines()?)?;
        pulled.rejoined |= lost;
        // A rank that had lost its session was moved to the other workers' step; the other ranks follow.
        while let Some(done) = stage.level(ranks, pulled.done, pull)? {
            if pulled.done < done {
                client.advance_to(done);
                pulled = stage.pull_by(client, further(pull, done))?;
                pulled.rejoined = true;
            }
        }
        stage.agree(ranks, pull, &mut pulled)?;
        stage.is_at(&Pull { done: pulled.done, ..pull.clone() });
        stage.landed(ranks.lines()?)?;
        Ok(pulled)
    }

    /// The leader's other messages are allowed only if no next step is in progress; otherwise this fails.
    pub(super) fn is_between_steps(&self) -> Result<(), StepError> {
        match (&self.memory, &self.ranks) {
            (Memory::Stage(stage), Some(ranks)) if stage.has_begun_next() => {
                Err(ranks.break_up("its leader does something else than the next step").into())
            }
            _ => Ok(()),
        }
    }

    /// Collects the final weights of all ranks on this one.
    pub fn gather(&mut self) -> Result<(), WorkerError> {
        loop {
            let (Memory::Stage(stage), Some(ranks)) = (&mut self.memory, &mut self.ranks) else {
                return Ok(());
            };
            let gathered = ranks.say(&ControlMessage::Gather).map_err(StepError::from);
            match gathered.and_then(|()| stage.gather(ranks.lines()?)) {
                Ok(()) => return Ok(()),
                Err(e) => self.recover(e)?,
            }
        }
    }

    /// Whether the next step's minibatch starts during this step's, if nothing else comes between.
    pub fn overlaps_minibatches(&self) -> bool {
        matches!(&self.memory, Memory::Stage(stage) if stage.overlaps_minibatches())
            && !self.ranks.as_ref().is_some_and(|r| r.newcomers())
    }
}
