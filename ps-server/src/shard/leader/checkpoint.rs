//! CheckpointParts: the image of the shard that a checkpoint is written from. It holds what is replicated, and nothing of the
//! working copies.
//!
//! Leader-only: a part that vanishes with its leader is a checkpoint that is not made; the next one is. The image
//! shares the buckets until they change (copy on write), so it costs the leader memory as training goes on, at
//! most a copy of the shard; a bucket that was fetched is let go. There is one at a time: until it is fetched, no other is kept, unless the worker that was
//! to fetch it has left, or has not come for a long time.
//!
//! A worker says in its pull that a checkpoint is due. In BSP the state is exactly that of step k from the apply
//! that completes step k until the first pull of step k is answered, because nobody can push step k+1 before; so
//! the part is taken right before that answer. In SSP and ASP no such moment exists: the part is taken when the
//! member that is to write it comes to step k, and says what it holds.
//!
//! A worker may ask for one at any step between two of its own (`now`), and fetches it at once: what of a step that it has done and
//! not gone on from is, in BSP, exactly that step's, since no round of the next is complete without its push.
//!
//! With the leased sampler only the worker that is to write a checkpoint asks for its sections, between two epochs, while
//! nobody trains (`shard/chunks.rs`): then they are of one moment in every mode.

use super::messages::CheckpointImage;
use crate::shard::state::{Configured, Shard};
use paraft_common::{Mode, Step, WorkerId};
use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

/// A part that was not fetched for so long gives way to the next: longer than a worker writes the one before, as a
/// rule. (It fetches what it was told to, or lets it go; this is for the message that was lost.)
const FETCH_PATIENCE: Duration = Duration::from_secs(60);

/// The part that is kept. Once it is being fetched, only the fetching holds it.
#[derive(Debug, Default)]
pub struct Kept {
    /// Of the last one that was taken.
    step: Option<Step>,
    /// Nobody has asked for it yet.
    part: Option<Waiting>,
    fetching: Weak<CheckpointImage>,
}

#[derive(Debug)]
struct Waiting {
    part: Arc<CheckpointImage>,
    writer: Option<WorkerId>,
    since: Instant,
}

/// A part that is due, before some pulls are answered.
pub struct Due<'a> {
    /// Whose pulls, and of which steps.
    pub pulls: &'a [(WorkerId, Step)],
    /// The last step of which an update is on its way.
    pub last_proposed: Option<Step>,
    /// When it is.
    pub now: Instant,
}

/// Who writes checkpoints: the lowest worker that trains.
pub fn lowest(shard: &Shard) -> Option<WorkerId> {
    shard.read(|m| m.members.active().map(|(w, _)| w).next())
}

impl Kept {
    fn has(&self, step: Step) -> bool {
        self.step == Some(step) && (self.part.is_some() || self.fetching.strong_count() > 0)
    }

    /// Whether a part of `step` is to be taken before this worker's pull is answered; `writer` is to fetch it. What the writer has
    /// had already is not taken again for who pulls later: nobody would fetch that one, and it would stand in the way of the next.
    fn is_due(&self, step: Step, worker: WorkerId, writer: Option<WorkerId>) -> bool {
        self.step != Some(step) || Some(worker) == writer && !self.has(step)
    }

    /// Takes the part that is due, if one is.
    pub fn keep(&mut self, shard: &Shard, conf: &Arc<Configured>, due: Due<'_>) {
        let leased = conf.job.chunks.is_some();
        let (lowest, mode) = shard.read(|m| (m.members.active().map(|(w, _)| w).next(), m.in_force.mode));
        let any = leased || mode == Mode::Bsp;
        // The writer's own pull, where it is among them.
        let own = |(worker, _): &&(WorkerId, Step)| Some(*worker) == lowest;
        let wanted = due.pulls.iter().find(own).or_else(|| due.pulls.first().filter(|_| any));
        let writer = if leased { wanted.map(|(worker, _)| *worker) } else { lowest };
        let Some(&(_, step)) = wanted.filter(|(w, step)| self.is_due(*step, *w, writer)) else { return };
        self.take(shard, conf, writer, step, due.last_proposed, due.now);
    }

    /// Takes a part of `step` and hands it out, unless one is in its way that somebody fetches, or is to.
    pub fn fetch_now(
        &mut self,
        shard: &Shard,
        conf: &Arc<Configured>,
        step: Step,
        last_proposed: Option<Step>,
        now: Instant,
    ) -> Option<Arc<CheckpointImage>> {
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
        conf: &Arc<Configured>,
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
                "no part kept: the one before is not fetched yet"
            );
            return;
        }
        // While the small part is held: `apply` changes a bucket before it records whose step that was, so what is
        // recorded is in the buckets, and at most one push more; a state delta is in as a whole or not at all.
        let taken = shard.view(|current, m| {
            // Of a snapshot that was installed meanwhile the small part is not that of these buckets.
            current.filter(|current| Arc::ptr_eq(current, conf))?;
            let level = m.members.active().all(|(_, m)| m.steps().iter().all(|s| *s == step));
            Some((CheckpointImage::of(step, conf, m), level, m.in_force.mode))
        });
        let Some((part, level, mode)) = taken else { return };
        // The task that applies may be ahead of the leader: no update beyond the step may be on its way.
        if mode == Mode::Bsp && !(level && last_proposed.is_none_or(|last| last <= step)) {
            tracing::warn!(shard = id, step = step.0, "no part kept: some member is not at this step");
            return;
        }
        self.put(part, writer, now);
    }

    /// Whether a part for `writer` may take the place of the one that is kept.
    fn may_keep(&self, writer: Option<WorkerId>, now: Instant) -> bool {
        let waited_for = |w: &Waiting| {
            w.writer == writer
                && w.writer.is_some()
                && now.saturating_duration_since(w.since) < FETCH_PATIENCE
        };
        self.fetching.strong_count() == 0 && !self.part.as_ref().is_some_and(waited_for)
    }

    fn put(&mut self, part: CheckpointImage, writer: Option<WorkerId>, since: Instant) {
        let step = part.step;
        let waiting = Waiting { part: Arc::new(part), writer, since };
        *self = Self { step: Some(step), part: Some(waiting), fetching: Weak::new() };
    }

    /// Whether this worker is to write the checkpoint of `step`: the lowest that trains, if there is a part.
    pub fn is_for(&self, shard: &Shard, conf: &Configured, worker: WorkerId, step: Step) -> bool {
        // With the leased sampler nobody else asks.
        self.has(step) && (conf.job.chunks.is_some() || lowest(shard) == Some(worker))
    }

    /// Hands the part out, once: it is the fetching that keeps it from then on.
    pub fn fetch(&mut self, step: Step) -> Option<Arc<CheckpointImage>> {
        if self.step != Some(step) {
            return None;
        }
        let whole = || self.fetching.upgrade().filter(|s| s.is_whole());
        let part = self.part.take().map(|w| w.part).or_else(whole)?;
        self.fetching = Arc::downgrade(&part);
        Some(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::leader::tests::shard_of;
    use paraft_common::config::ServerJob;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Op {
        Due(u64, Option<u32>),
        Fetch(u64),
        LetGo,
        Drop,
        Passes(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (1u64..5, prop::option::weighted(0.8, 0u32..2)).prop_map(|(s, w)| Op::Due(s, w)),
            4 => (1u64..5).prop_map(Op::Fetch),
            1 => Just(Op::LetGo),
            2 => Just(Op::Drop),
            1 => (1u64..90).prop_map(Op::Passes),
        ]
    }

    #[test]
    fn what_the_writer_has_had_is_not_taken_again_for_who_pulls_later() {
        let shard = shard_of(&ServerJob::new("images", Mode::Bsp, 16, 8));
        let conf = shard.configured().expect("configured");
        let (writer, other, step) = (WorkerId(0), WorkerId(1), Step(50));
        let mut kept = Kept::default();
        assert!(kept.is_due(step, other, Some(writer)), "whoever is first");
        kept.put(shard.read(|m| CheckpointImage::of(step, &conf, m)), Some(writer), Instant::now());
        assert!(
            !kept.is_due(step, other, Some(writer)) && !kept.is_due(step, writer, Some(writer)),
            "it is there"
        );
        drop(kept.fetch(step).expect("there"));
        assert!(!kept.is_due(step, other, Some(writer)), "nobody would fetch it");
        assert!(kept.is_due(step, writer, Some(writer)), "it has come back for it");
        assert!(kept.is_due(Step(100), other, Some(writer)), "the next one");
    }

    proptest! {
        /// One image is kept at a time; it goes to who asks for its step, again only while all of it is there; and it gives way
        /// to another only where nobody fetches it, and whoever was to has left or not come for long.
        #[test]
        fn one_image_is_kept_until_it_is_fetched(ops in prop::collection::vec(op(), 1..60)) {
            let shard = shard_of(&ServerJob::new("images", Mode::Bsp, 16, 8));
            let conf = shard.configured().expect("configured");
            let mut kept = Kept::default();
            let (mut now, mut held) = (Instant::now(), Vec::<Arc<CheckpointImage>>::new());
            // Whose and of which step the one is that nobody has asked for, and since when.
            let mut waits: Option<(u64, Option<u32>, Instant)> = None;
            for op in ops {
                match op {
                    Op::Due(step, writer) => {
                        let waited_for = waits.is_some_and(|(_, w, since)| {
                            w.is_some() && w == writer && now - since < FETCH_PATIENCE
                        });
                        let may = held.is_empty() && !waited_for;
                        prop_assert_eq!(kept.may_keep(writer.map(WorkerId), now), may);
                        if may {
                            kept.put(shard.read(|m| CheckpointImage::of(Step(step), &conf, m)), writer.map(WorkerId), now);
                            waits = Some((step, writer, now));
                        }
                    }
                    Op::Fetch(step) => {
                        let first = waits.filter(|(s, ..)| *s == step).is_some();
                        let again = held.first().is_some_and(|s| s.step == Step(step) && s.is_whole());
                        let got = kept.fetch(Step(step));
                        prop_assert_eq!(got.as_ref().map(|s| s.step), (first || again).then_some(Step(step)));
                        waits = waits.filter(|_| !first);
                        held.extend(got);
                    }
                    Op::LetGo => held.iter().for_each(|s| s.let_go(0)),
                    Op::Drop => held.clear(),
                    Op::Passes(seconds) => now += Duration::from_secs(seconds),
                }
                let step = waits.map(|(s, ..)| s).or(held.first().map(|s| s.step.0));
                prop_assert!((1..5).all(|s| kept.has(Step(s)) == (step == Some(s))));
            }
        }
    }
}
