//! Events: what a wait returns, and when it is over.

use super::{PullState, Session, Wait};
use crate::{error::SessionError, link::LinkEvent};
use paraft_common::{BucketId, Payload, ShardId, Share, Step, WorkerId};
use paraft_proto::Weights;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

/// What a worker receives while it waits.
#[derive(Debug)]
pub enum Event {
    /// Every shard has given a session: the worker continues from this step.
    Joined(Step),
    /// Weights of one bucket.
    Weights(Arrived),
    /// At most once in a pull, if other processes of the worker hold more shards: the parts of the norm of
    /// the pulled step from this process's shards. The shards wait for the sum of all parts
    /// ([`Session::tell_norm`]).
    NormParts(Vec<(ShardId, f64)>),
    /// The pull is answered in full.
    Pulled(Pulled),
    /// Every push is acknowledged. Or the session was lost, and the worker continues from this step after a
    /// pull.
    Settled(Option<Step>),
    /// The chunk to train next.
    Chunk(Next),
    /// Every shard has ended the session.
    Left,
}

/// Weights of one bucket, as received.
#[derive(Debug)]
pub struct Arrived {
    /// The shard whose leader sent them.
    pub shard: ShardId,
    /// Everything but the values.
    pub weights: Weights,
    /// The values, little-endian f32; empty if the worker already has them.
    pub payload: Payload,
    /// When the worker asked for them.
    pub asked: Duration,
    /// When they arrived.
    pub at: Duration,
}

/// The result of a pull.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pulled {
    /// The worker's step. Later than requested if it had lost its session and joined again, or if rounds were
    /// closed without it.
    pub done: Step,
    /// The slowest member over all shards.
    pub slowest: Step,
    /// The job has stopped early.
    pub stop: bool,
    /// After a final pull: the workers that finished.
    pub finishers: Vec<WorkerId>,
    /// After a pull for a checkpoint: every shard keeps an image of this step, and this worker must write the
    /// checkpoint.
    pub checkpoint: bool,
    /// A checkpoint of the current step was requested, and this worker must write it after this step.
    pub save: bool,
    /// Only some shards keep an image: there will be no checkpoint of this step, and this worker must release
    /// the images.
    pub partial_checkpoint: bool,
    /// The session was lost; the worker has joined again and holds no chunk any more.
    pub rejoined: bool,
    /// This worker's share of the evaluation after an epoch, if shard 0 has sent it.
    pub share: Option<Share>,
    /// Buckets whose weights arrived; the others are as the last pull left them.
    pub changed: BTreeSet<BucketId>,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Train this chunk.
    Train {
        /// The epoch, from 0.
        epoch: u64,
        /// The chunk's index in the epoch, from 0.
        chunk: u64,
        /// The worker was idle and the others did not wait for it: its weights are old. It continues from
        /// this step after a pull.
        resumed: Option<Step>,
    },
    /// This many epochs are over. No worker trains before every worker has asked for a chunk of the next.
    Over {
        /// Number of finished epochs.
        epochs: u64,
        /// This worker must write the checkpoint, if the job makes any.
        write: bool,
        /// The step from which all workers continue. Pull, to receive the others' pushes.
        step: Step,
    },
    /// There is nothing more to train.
    Ended,
    /// The session was lost, and with it the chunk: the worker has joined again and continues from this step
    /// after a pull.
    Rejoined(Step),
}

impl Session {
    /// Whether [`Self::poll`] has something to return.
    pub fn has_news(&self) -> bool {
        let heard = self.out.heard.iter().any(|h| self.can_hear(h));
        heard || self.failed.is_some() || self.pending_parts().is_some() || self.knows_norm()
    }

    /// Whether an event belongs to the current wait. Weights that were asked for ahead may come from one shard before
    /// another's part of the norm: they wait for the pull.
    fn can_hear(&self, heard: &LinkEvent) -> bool {
        !matches!((&self.wait, heard), (Wait::Norm(_), LinkEvent::Weights { .. }))
    }

    fn next_heard(&mut self) -> Option<LinkEvent> {
        let at = self.out.heard.iter().position(|h| self.can_hear(h))?;
        self.out.heard.remove(at)
    }

    /// The end of a wait for a norm if the step is applied without. Not before all is heard: a push that is refused has
    /// no ack either.
    fn applied_without_norm(&mut self) -> Option<Event> {
        let Wait::Norm(step) = self.wait else { return None };
        if self.joining.is_some() || self.links.values().any(|l| l.has_pushed(step)) {
            return None;
        }
        self.wait = Wait::Nothing;
        Some(Event::Settled(None))
    }

    /// Whether the norm that is waited for is known.
    fn knows_norm(&self) -> bool {
        matches!(self.wait, Wait::Norm(step) if self.norms.parts(step).is_some())
    }

    /// The parts of the norm of the pulled step, if they still have to be returned.
    fn pending_parts(&self) -> Option<BTreeMap<ShardId, f64>> {
        let pulls = matches!(self.wait, Wait::Pull) && self.norms.is_shared();
        self.awaits_parts.filter(|_| pulls).and_then(|step| self.norms.parts(step))
    }

    /// The next event of the current wait; `None`: nothing before the next input.
    ///
    /// # Errors
    /// The session cannot continue, and every later call fails, too. One exception: after the refusal of a
    /// push that is not finite ([`WireKind::NotFinite`](paraft_proto::WireKind::NotFinite)) only one call
    /// fails, and the wait continues once the worker skips that step ([`Self::skip`]).
    pub fn poll(&mut self, now: Duration) -> Result<Option<Event>, SessionError> {
        if let Some(e) = &self.failed {
            return Err(e.clone());
        }
        loop {
            // Before the pull ends, since the other processes may need them.
            if let Some(parts) = self.pending_parts() {
                self.awaits_parts = None;
                return Ok(Some(Event::NormParts(parts.into_iter().collect())));
            }
            if let Some(event) = self.over() {
                return Ok(Some(event));
            }
            let Some(heard) = self.next_heard() else { return Ok(self.applied_without_norm()) };
            if let LinkEvent::NotFinite { bucket, step, error } = heard {
                self.refused.insert((step, bucket));
                return Err(error);
            }
            match self.hear(now, heard) {
                Ok(None) => {}
                Ok(event) => return Ok(event),
                Err(e) => {
                    self.failed = Some(e.clone());
                    return Err(e);
                }
            }
        }
    }

    fn hear(&mut self, now: Duration, heard: LinkEvent) -> Result<Option<Event>, SessionError> {
        match heard {
            LinkEvent::Weights { shard, weights, payload, asked, at } => {
                self.out.untaken -= payload.len();
                return self.arrived(Arrived { shard, weights, payload, asked, at });
            }
            LinkEvent::Opened { shard, clock, new, founding } => {
                if shard == ShardId(0) {
                    self.founding = founding;
                }
                match &mut self.joining {
                    Some(clocks) => {
                        clocks.insert(shard, clock);
                        if clocks.len() == self.links.len() {
                            return Ok(self.joined(now));
                        }
                    }
                    None if new => self.rejoin(now),
                    // A new leader: the link has sent the request again.
                    None => {}
                }
            }
            LinkEvent::SessionLost => self.rejoin(now),
            LinkEvent::Settled(shard) => match &mut self.wait {
                Wait::Settle(waiting) => drop(waiting.remove(&shard)),
                Wait::Chunk(chunks) => chunks.settled(shard),
                _ => {}
            },
            LinkEvent::Acquired(taken) => return self.taken(&taken),
            LinkEvent::Resumed(shard, clock) => {
                if let Wait::Chunk(chunks) = &mut self.wait {
                    chunks.resumed(shard, clock);
                }
            }
            LinkEvent::Left(shard) => {
                if let Wait::Leave(waiting) = &mut self.wait {
                    waiting.remove(&shard);
                }
            }
            LinkEvent::Dropped(n) => self.dropped += n,
            LinkEvent::Failed(e) => return Err(e),
            LinkEvent::NotFinite { error, .. } => return Err(error), // `poll` has handled it
        }
        Ok(None)
    }

    /// The final event of the wait, if the wait is over.
    fn over(&mut self) -> Option<Event> {
        if self.joining.is_some() {
            return None;
        }
        match &self.wait {
            Wait::Pull if self.pulling.as_ref().is_some_and(PullState::is_answered) => {
                self.wait = Wait::Nothing;
                self.pulled().map(Event::Pulled)
            }
            Wait::Norm(step) if self.norms.parts(*step).is_some() => {
                let parts = self.norms.parts(*step)?;
                self.wait = Wait::Nothing;
                Some(Event::NormParts(parts.into_iter().collect()))
            }
            Wait::Settle(waiting) if waiting.is_empty() => {
                self.wait = Wait::Nothing;
                Some(Event::Settled(None))
            }
            Wait::Leave(waiting) if waiting.is_empty() => {
                self.wait = Wait::Nothing;
                Some(Event::Left)
            }
            Wait::Chunk(_) => self.chunk(),
            _ => None,
        }
    }
}
