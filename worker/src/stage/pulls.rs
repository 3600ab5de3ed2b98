//! Pulls of a rank's stages, and the step that all ranks reach by them.

use super::{Stage, slices::SharedPull};
use crate::{engine::StepError, group::Ranks};
use paraft_client::{Client, Places, Pull, Pulled, Shares, address};
use paraft_common::{BucketId, Step};
use paraft_compute::collective::Lines;

impl Stage<'_> {
    /// Pulls the weights of this rank's stages and sends them to the ranks with the same stages.
    pub fn pull_by(&mut self, client: &mut Client, pull: Pull) -> Result<Pulled, StepError> {
        self.pull_with(client, pull, None)
    }

    /// Likewise; `shares` exchanges the parts of a norm.
    pub(super) fn pull_with(
        &mut self,
        client: &mut Client,
        pull: Pull,
        shares: Option<&mut Shares<'_>>,
    ) -> Result<Pulled, StepError> {
        let buffer = address(&self.weights);
        let weights = (&self.buckets[..], &mut self.weights.values[..]);
        let mut dealing = SharedPull::new(self.alike.as_mut(), weights);
        let pulled = client.pull_parts(pull, buffer, &mut dealing, shares)?;
        match dealing.broken {
            Some(broken) => Err(broken.into()),
            None => Ok(pulled),
        }
    }

    /// Accepts the last pull's weights and sends them to ranks with other stages that borrow them.
    pub fn landed(&mut self, lines: &mut Lines) -> Result<(), StepError> {
        self.editions += 1;
        self.weights.edition = self.editions;
        let own = self.own_buckets();
        if let Some(alike) = &mut self.alike {
            alike.landed(own, &mut self.weights.values)?;
        }
        self.lend(lines)
    }

    /// The leader sends its weights to the ranks with the same stages.
    pub fn deal(&mut self) -> Result<(), StepError> {
        let own = self.own_buckets();
        let Some(alike) = &mut self.alike else { return Ok(()) };
        let mut dealing = SharedPull::new(Some(alike), (&self.buckets, &mut self.weights.values));
        own.for_each(|bucket| dealing.placed(BucketId(bucket as u32), true));
        dealing.broken.map_or(Ok(()), |broken| Err(broken.into()))
    }

    /// Records that the leader has completed this pull.
    pub fn is_at(&mut self, pull: &Pull) {
        (self.done, self.pulled, self.lost) = (pull.done, pull.clone(), false);
    }

    /// After a pull brought this rank to a step: the step that all ranks must reach instead. `None`: they agree, or
    /// it was the last pull.
    pub fn level(&self, ranks: &Ranks, at: Step, pull: &Pull) -> Result<Option<Step>, StepError> {
        if pull.last {
            return Ok(None);
        }
        let (least, most) = self.clocks(ranks, at)?;
        Ok((least != most).then_some(most))
    }

    /// The pull that a new rank must make to reach the leader's state.
    pub fn behind(&self) -> Pull {
        let done = match self.clips {
            // The leader does not take part in it, and may still owe its part of the norm of the step behind. All
            // ranks pull that step together later.
            true => self.pulled.done,
            false => self.done.max(self.pulled.done),
        };
        further(&self.pulled, done)
    }

    /// Whether the session was reopened in a failed pull. The new session has pushed nothing.
    pub fn is_lost(&self) -> bool {
        self.lost
    }

    /// After the leader's pull message: a follower pulls its own stages.
    pub fn pull(&mut self, ranks: &mut Ranks, pull: &Pull) -> Result<(), StepError> {
        let mut pulled = Pulled { done: pull.done, ..Pulled::default() };
        let lost = self.is_lost();
        if let Some(client) = &mut self.client {
            // Shards reach a completely pushed step by themselves.
            if lost || self.done < pull.done && self.pushed != Some((pull.done, 0)) {
                client.advance_to(pull.done);
            }
            if pull.last {
                client.finish();
            }
        }
        let lines = ranks.lines()?.clone();
        let shared = self.by_own_client(|this, client| this.pull_sharing(client, pull.clone(), &lines))?;
        if let Some(of_own) = shared {
            pulled = of_own;
            pulled.rejoined |= lost;
        }
        let own = self.own_buckets();
        if let Some(alike) = self.alike.as_mut().filter(|_| !self.here.speaks()) {
            // Read it as it arrives, so that it does not wait in memory.
            alike.have(own, &mut self.weights.values)?;
        }
        while let Some(done) = self.level(ranks, pulled.done, pull)? {
            if let Some(client) = self.client.as_mut().filter(|_| pulled.done < done) {
                client.advance_to(done);
                let rejoined = pulled.rejoined;
                pulled = self.pull_own(further(pull, done))?.unwrap_or_default();
                pulled.rejoined |= rejoined;
            }
        }
        (self.done, self.lost) = (pulled.done, false);
        self.has_moved(&pulled);
        self.agree(ranks, pull, &mut pulled)?;
        self.landed(ranks.lines()?)
    }

    /// Pulls its stages, if it speaks with their shards.
    pub(super) fn pull_own(&mut self, pull: Pull) -> Result<Option<Pulled>, StepError> {
        self.by_own_client(|this, client| this.pull_by(client, pull))
    }

    fn by_own_client<T>(
        &mut self,
        ask: impl FnOnce(&mut Self, &mut Client) -> Result<T, StepError>,
    ) -> Result<Option<T>, StepError> {
        let mut client = self.client.take();
        let asked = client.as_mut().map(|client| ask(self, client)).transpose();
        self.client = client;
        asked
    }

    /// Whether a pull reopened the session. Pushes of the former session may be lost.
    pub(super) fn has_moved(&mut self, pulled: &Pulled) -> bool {
        if pulled.rejoined {
            (self.pushed, self.moved) = (None, true);
        }
        pulled.rejoined
    }

    /// This worker writes the checkpoint if the shards of all its stages say so.
    pub fn agree(&self, ranks: &Ranks, pull: &Pull, pulled: &mut Pulled) -> Result<(), StepError> {
        if !pull.checkpoint {
            return Ok(());
        }
        let number = |is: bool| f64::from(u8::from(is));
        let mut said = [number(pulled.checkpoint), number(pulled.partial_checkpoint)];
        ranks.sum(&mut said)?;
        pulled.checkpoint = said[0] == self.here.of.min(ranks.place().1) as f64;
        pulled.partial_checkpoint = !pulled.checkpoint && said.iter().sum::<f64>() > 0.0;
        Ok(())
    }
}

/// A pull of the same kind at a later step that the workers have not agreed on, so no checkpoint is due there.
pub(crate) fn further(pull: &Pull, done: Step) -> Pull {
    Pull { done, checkpoint: false, ..pull.clone() }
}
