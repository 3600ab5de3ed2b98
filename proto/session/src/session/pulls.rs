//! Pulls: which weights a worker waits for, and how they arrive.

use super::{
    Session, Wait,
    events::{Arrived, Event, Pulled},
};
use crate::{error::SessionError, link::LinkEvent};
use paraft_common::{BucketId, ShardId, Share, Step, WorkerId, placement};
use paraft_proto::Weights;
use std::{collections::BTreeSet, time::Duration};

/// A worker's request for weights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pull {
    /// The weights after this step of the worker, once the consistency rule lets it continue.
    pub done: Step,
    /// Instead: the final weights, once every member has finished.
    pub last: bool,
    /// A checkpoint is due at `done`: every shard keeps an image of it before any worker continues. Every
    /// worker of the job must request it for the same steps.
    pub checkpoint: bool,
    /// Instead of the consistency rule: once every member that has not finished is at `done`. The weights are
    /// the servers' own, even if the job's algorithm looks ahead.
    pub barrier: bool,
    /// Only these buckets, by rising id; empty: all. Requires `last`, `checkpoint` and `barrier` to be false.
    pub only: Vec<BucketId>,
    /// Of partitions of tables: for each bucket in `only` the rows that are wanted, or empty.
    pub rows: Vec<Vec<u64>>,
}

impl Pull {
    /// The weights after a step.
    pub fn of(done: Step) -> Self {
        Self { done, ..Self::default() }
    }

    /// Whether it returns the servers' own weights, whatever the job's algorithm gives workers for training.
    fn is_plain(&self) -> bool {
        self.last || self.barrier
    }
}

/// A pull in progress.
pub(super) struct PullState {
    asked: Pull,
    waiting: BTreeSet<ShardId>,
    /// Something has arrived.
    begun: bool,
    /// The smallest of the worker's own clocks.
    clock: Step,
    pulled: Pulled,
}

impl PullState {
    fn new(asked: Pull, waiting: BTreeSet<ShardId>) -> Self {
        let pulled = Pulled {
            done: asked.done,
            slowest: Step(u64::MAX),
            checkpoint: asked.checkpoint,
            ..Pulled::default()
        };
        Self { asked, waiting, begun: false, clock: Step(u64::MAX), pulled }
    }

    pub fn is_answered(&self) -> bool {
        self.waiting.is_empty()
    }

    fn takes(&mut self, shard: ShardId, w: &Weights) {
        self.begun = true;
        if !w.not_modified {
            self.pulled.changed.insert(BucketId(w.bucket));
        }
        if w.last {
            self.waiting.remove(&shard);
            self.clock = self.clock.min(Step(w.clock));
            let p = &mut self.pulled;
            p.slowest = p.slowest.min(Step(w.slowest));
            p.stop |= w.stop;
            p.checkpoint &= w.checkpoint;
            p.partial_checkpoint |= w.checkpoint;
            p.save |= w.save;
            if w.shares > 0 {
                p.share = Some(Share { place: w.share, of: w.shares });
            }
            p.finishers = w.finishers.iter().map(|w| WorkerId(*w)).collect();
        }
    }
}

fn le(ids: &[u64]) -> bytes::Bytes {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

impl Session {
    /// Requests weights before the pushes that precede them go out, so that a bucket's weights return while
    /// others are still being pushed. The same [`Self::pull`] must follow, with no other wait between.
    /// `holds`: the worker's weights are as the last pull left them, so an unchanged bucket is not sent.
    pub fn ask_ahead(&mut self, now: Duration, pull: Pull, holds: bool) {
        self.ask(now, pull, holds);
    }

    /// Whether some of the current pull has arrived.
    pub fn has_begun(&self) -> bool {
        self.pulling.as_ref().is_some_and(|p| p.begun)
    }

    /// Whether this pull was requested already.
    pub fn is_asked(&self, pull: &Pull) -> bool {
        self.pulling.as_ref().is_some_and(|p| p.asked == *pull)
    }

    /// Waits until the consistency rule lets the worker continue: [`Event::Weights`] for each bucket, then
    /// [`Event::Pulled`]. `holds` as in [`Self::ask_ahead`]; ignored if the pull was requested ahead.
    pub fn pull(&mut self, now: Duration, pull: Pull, holds: bool) {
        self.awaits_parts = Some(pull.done.0);
        if !self.is_asked(&pull) {
            self.ask(now, pull, holds);
        }
        self.wait = Wait::Pull;
    }

    fn ask(&mut self, now: Duration, pull: Pull, holds: bool) {
        // Answers to a cancelled pull of another step do not belong to this one.
        let out = &mut self.out;
        out.heard.retain(|heard| match heard {
            LinkEvent::Weights { weights, payload, .. } if weights.done != pull.done.0 => {
                out.untaken -= payload.len();
                false
            }
            _ => true,
        });
        let looks_ahead = self.job.algorithm.algorithm().looks_ahead();
        let holds = holds && (!looks_ahead || self.holds_plain == pull.is_plain());
        let mut waiting = BTreeSet::new();
        for (shard, link) in &mut self.links {
            let here = |b: &BucketId| placement::shard_of(&self.layout, *b, self.shards) == *shard;
            let only: Vec<u32> = pull.only.iter().filter(|b| here(b)).map(|b| b.0).collect();
            if only.is_empty() && !pull.only.is_empty() {
                continue;
            }
            let have = match holds && only.is_empty() && link.holds() {
                true => placement::ids_of(&self.layout, *shard, self.shards)
                    .map(|b| self.versions[b.0 as usize])
                    .collect(),
                false => Vec::new(),
            };
            let asked = paraft_proto::Pull {
                done: pull.done.0,
                r#final: pull.last,
                checkpoint: pull.checkpoint,
                barrier: pull.barrier,
                have,
                // A pull of a few buckets may leave out its shard.
                loss: if *shard == ShardId(0) { self.loss.take() } else { None },
                only,
                rows: pull
                    .only
                    .iter()
                    .zip(&pull.rows)
                    .filter(|(b, _)| here(b))
                    .map(|(_, ids)| le(ids))
                    .collect(),
            };
            link.pull(asked, now, &mut self.out);
            waiting.insert(*shard);
        }
        self.pulling = Some(PullState::new(pull, waiting));
    }

    /// The session was lost: repeats the pull for all buckets, from the step at which the worker joined.
    pub(super) fn restart_pull(&mut self, now: Duration, done: Step) {
        let before = self.pulling.take();
        let last = before.as_ref().is_some_and(|p| p.asked.last);
        // It continues from another step than the checkpoint's.
        self.ask(now, Pull { done, last, ..Pull::default() }, false);
        if let Some(pulling) = &mut self.pulling {
            pulling.pulled.rejoined = true;
            pulling.pulled.changed = before.map(|p| p.pulled.changed).unwrap_or_default();
        }
        self.wait = Wait::Pull;
    }

    /// Takes the weights of a bucket.
    pub(super) fn arrived(&mut self, arrived: Arrived) -> Result<Option<Event>, SessionError> {
        let (shard, w) = (arrived.shard, &arrived.weights);
        if self.joining.is_some() || !matches!(self.wait, Wait::Pull) {
            return Ok(None); // of the session before
        }
        let Some(pulling) = &mut self.pulling else { return Ok(None) };
        let Some(version) = self.versions.get_mut(w.bucket as usize) else {
            let what = format!("weights of bucket {}, which the model has not", w.bucket);
            return Err(SessionError::Protocol { shard, what });
        };
        if !w.not_modified {
            *version = w.version;
        }
        pulling.takes(shard, w);
        if w.last {
            // A leader of an earlier term may have known of more.
            let skipped = self.skipped.0.entry(shard).or_default();
            *skipped = w.skipped.max(*skipped);
        }
        if w.last
            // This version could not follow an unknown mode: the servers' rules apply anyway.
            && let Ok(mode) = w.mode.parse()
        {
            self.modes.hear(shard, w.mode_number, mode);
        }
        Ok(Some(Event::Weights(arrived)))
    }

    pub(super) fn pulled(&mut self) -> Option<Pulled> {
        let PullState { asked, clock, mut pulled, .. } = self.pulling.take()?;
        self.send_mode();
        if asked.only.is_empty() {
            self.holds_plain = asked.is_plain();
        }
        if self.job.round.drops_late() && !asked.last && clock < Step(u64::MAX) {
            // Rounds were closed without this worker: it continues at the step of all its shards.
            pulled.done = pulled.done.max(clock);
        }
        pulled.partial_checkpoint &= !pulled.checkpoint;
        Some(pulled)
    }
}
