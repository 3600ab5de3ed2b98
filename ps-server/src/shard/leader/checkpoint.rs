//! The shard's part of a checkpoint: when it is cut, and who fetches it. It holds replicated state, and nothing of the
//! working copies.
//!
//! Leader-only: if a part is lost with its leader, this checkpoint is not made, and the next one is. A part costs the
//! leader at most a copy of the shard as training continues. A fetched bucket is released. There is one part at a time:
//! the next one waits until it is fetched, unless the worker that must fetch it has left or has been silent for a long
//! time.
//!
//! A worker's pull says that a checkpoint is due. In BSP the state is exactly that of step k from the apply that
//! completes step k until the first pull of step k is answered, because no worker can push step k+1 earlier. So the
//! leader takes the part right before that answer. In SSP and ASP no such moment exists: the leader takes the part
//! when the member that writes it reaches step k, and the part records what it holds.
//!
//! A worker may also request a part at any step between two of its own (`now`), and fetches it at once. In BSP the
//! part of its last finished step is exactly that step's, because no round of the next step is complete without its
//! push. Once all workers have finished nothing changes any more, and the part is of the end, whatever step they say: a
//! stopped job's workers may end a step apart.
//!
//! With the leased sampler only the worker that writes a checkpoint requests its sections, between two epochs,
//! while no worker trains (`shard/chunks.rs`). So they are of one moment in every mode.

use crate::shard::{
    cut::Cut,
    state::{Meta, Shard, ShardConfig},
};
use paraft_common::{Mode, Step, WorkerId};
use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

/// A part that was not fetched for this long gives way to the next. It is usually longer than writing the previous
/// part takes. (A worker fetches or cancels each part that it was asked to write; the timeout is for a lost
/// message.)
const FETCH_TIMEOUT: Duration = Duration::from_secs(60);

/// The slot of the kept part. Once a worker fetches the part, only the transfer holds it.
#[derive(Debug, Default)]
pub struct CheckpointSlot {
    /// The step of the last part that was taken.
    step: Option<Step>,
    /// The part that was not requested yet.
    part: Option<Waiting>,
    fetching: Weak<()>,
}

/// What a checkpoint stores of a shard.
#[derive(Debug)]
pub struct CheckpointPart {
    /// The requested step. In BSP the state is that of this step.
    pub step: Step,
    /// The configuration of the buckets.
    pub conf: Arc<ShardConfig>,
    /// The state. In SSP and ASP a bucket may hold one push more than the members' clocks say.
    pub cut: Cut,
    /// Exists while the part is fetched: until then the shard is not cut again.
    pub fetching: Arc<()>,
}

impl CheckpointPart {
    /// Cuts a shard that is at `step`; `meta` belongs to `conf`.
    fn of(step: Step, conf: &Arc<ShardConfig>, meta: &Meta) -> Self {
        Self { step, conf: conf.clone(), cut: Cut::of(Some(conf), meta), fetching: Arc::default() }
    }
}

#[derive(Debug)]
struct Waiting {
    part: CheckpointPart,
    writer: Option<WorkerId>,
    since: Instant,
}

/// The inputs of a part that may be due, before some pulls are answered.
pub struct PartRequest<'a> {
    /// The workers and steps of the pulls.
    pub pulls: &'a [(WorkerId, Step)],
    /// The last step with an update in flight.
    pub last_proposed: Option<Step>,
    /// The current time.
    pub now: Instant,
}

/// The worker that writes checkpoints: the lowest that trains.
pub fn lowest(shard: &Shard) -> Option<WorkerId> {
    shard.read(|m| m.members.active().map(|(w, _)| w).next())
}

impl CheckpointSlot {
    fn has(&self, step: Step) -> bool {
        self.step == Some(step) && (self.part.is_some() || self.fetching.strong_count() > 0)
    }

    /// Whether a part of `step` must be taken before this worker's pull is answered; `writer` fetches it. A step
    /// that the writer already got is not taken again for a later pull: that part would never be fetched, and would
    /// block the next.
    fn is_due(&self, step: Step, worker: WorkerId, writer: Option<WorkerId>) -> bool {
        self.step != Some(step) || Some(worker) == writer && !self.has(step)
    }

    /// Takes a part, if one is due.
    pub fn keep(&mut self, shard: &Shard, conf: &Arc<ShardConfig>, due: PartRequest<'_>) {
        let leased = conf.job.chunks.is_some();
        let (lowest, mode) = shard.read(|m| (m.members.active().map(|(w, _)| w).next(), m.in_force.mode));
        let any = leased || mode == Mode::Bsp;
        // The writer's own pull, if it is among them.
        let own = |(worker, _): &&(WorkerId, Step)| Some(*worker) == lowest;
        let wanted = due.pulls.iter().find(own).or_else(|| due.pulls.first().filter(|_| any));
        let writer = if leased { wanted.map(|(worker, _)| *worker) } else { lowest };
        let Some(&(_, step)) = wanted.filter(|(w, step)| self.is_due(*step, *w, writer)) else { return };
        self.take(shard, conf, writer, step, due.last_proposed, due.now);
    }

    /// Takes a part of `step` and returns it, unless another part waits to be fetched.
    pub fn fetch_now(
        &mut self,
        shard: &Shard,
        conf: &Arc<ShardConfig>,
        step: Step,
        last_proposed: Option<Step>,
        now: Instant,
    ) -> Option<Box<CheckpointPart>> {
        let lowest = shard.read(|m| m.members.active().map(|(w, _)| w).next());
        if !self.may_keep(lowest, now) {
            return None;
        }
        self.take(shard, conf, lowest, step, last_proposed, now);
        self.fetch(step)
    }

    fn take(
        &mut self,
        shard: &Shard,
        conf: &Arc<ShardConfig>,
        writer: Option<WorkerId>,
        step: Step,
        last_proposed: Option<Step>,
        now: Instant,
    ) {
        let id = shard.id().0;
        if !self.may_keep(writer, now) {
            let before = self.step.unwrap_or_default().0;
            tracing::info!(
                shard = id,
                step = step.0,
                before,
                "no part taken: the previous part is not fetched yet"
            );
            return;
        }
        // The state's lock is held. A state delta is contained as a whole or not at all.
        let taken = shard.view(|current, m| {
            // After a snapshot was installed meanwhile, the recorded state does not belong to these buckets.
            current.filter(|current| Arc::ptr_eq(current, conf))?;
            let level = m.members.active().all(|(_, m)| m.steps().iter().all(|s| *s == step));
            let over = m.members.unfinished().next().is_none();
            Some((CheckpointPart::of(step, conf, m), level, over, m.in_force.mode))
        });
        let Some((part, level, over, mode)) = taken else { return };
        // The apply task may be ahead of the leader: no update beyond the step may be in flight.
        if mode == Mode::Bsp && !over && !(level && last_proposed.is_none_or(|last| last <= step)) {
            tracing::warn!(shard = id, step = step.0, "no part taken: a member is not at this step");
            return;
        }
        self.put(part, writer, now);
    }

    /// Whether a part for `writer` may replace the kept one.
    fn may_keep(&self, writer: Option<WorkerId>, now: Instant) -> bool {
        let waited_for = |w: &Waiting| {
            w.writer == writer && w.writer.is_some() && now.saturating_duration_since(w.since) < FETCH_TIMEOUT
        };
        self.fetching.strong_count() == 0 && !self.part.as_ref().is_some_and(waited_for)
    }

    fn put(&mut self, part: CheckpointPart, writer: Option<WorkerId>, since: Instant) {
        let step = part.step;
        let waiting = Waiting { part, writer, since };
        *self = Self { step: Some(step), part: Some(waiting), fetching: Weak::new() };
    }

    /// Whether this worker must write the checkpoint of `step`: the lowest that trains, if there is a part.
    pub fn is_for(&self, shard: &Shard, conf: &ShardConfig, worker: WorkerId, step: Step) -> bool {
        // With the leased sampler no other worker asks.
        self.has(step) && (conf.job.chunks.is_some() || lowest(shard) == Some(worker))
    }

    /// Hands the part out, once. From then on the transfer holds it.
    pub fn fetch(&mut self, step: Step) -> Option<Box<CheckpointPart>> {
        let Waiting { part, .. } = self.part.take_if(|waiting| waiting.part.step == step)?;
        self.fetching = Arc::downgrade(&part.fetching);
        Some(Box::new(part))
    }
}

#[cfg(test)]
#[path = "checkpoint_tests.rs"]
mod tests;
