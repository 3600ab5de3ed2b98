//! Who takes part in a job, and how far each has come. Part of the replicated state.

use paraft_common::{Seq, SessionId, Step, WorkerId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Steps before the last one that was applied, of which it is known whether they were passed over: more than a worker keeps
/// to push again.
const REMEMBERED: u64 = 64;

/// A registered worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its session.
    pub session: SessionId,
    /// The highest push applied.
    pub last_seq: Seq,
    /// For each bucket of the shard, the last step applied. This is what makes a retry recognisable: a push
    /// for a step that is in already is a duplicate, whoever leads now.
    pub steps: Vec<Step>,
    /// Where rounds pass members over (empty where they do not): for each bucket, the last step of its own that was applied;
    /// up to `steps` everything after it was passed over. Then, for each bucket, which of the 64 steps before
    /// that one were: bit `k` of step `taken - 1 - k`. (In one field, since snapshots of the first release have but its
    /// first half.)
    pub taken: Vec<Step>,
    /// It has done all its steps; clocks and barriers no longer wait for it.
    pub finished: bool,
    /// It has nothing to train at present (the leased sampler has no chunk for it): clocks and barriers do not wait for
    /// it, but it is a member, has a lease, and may go on.
    pub resting: bool,
}

impl Member {
    /// The last step that the shard has fully applied.
    pub fn clock(&self) -> Step {
        self.steps.iter().copied().min().unwrap_or_default()
    }

    /// Likewise, of some of its buckets; `None`: of all.
    pub fn clock_of(&self, buckets: Option<&BTreeSet<usize>>) -> Step {
        match buckets {
            None => self.clock(),
            Some(some) => some.iter().filter_map(|b| self.steps.get(*b).copied()).min().unwrap_or_default(),
        }
    }

    /// Whether a push of this step came too late for its round, or would. Known of the steps that a worker may push again:
    /// it can have the next one in before it hears that this one was passed over.
    pub fn is_passed_over(&self, bucket: usize, step: Step) -> bool {
        let (at, taken) = (self.steps.get(bucket), self.taken.get(bucket));
        let Some((at, taken)) = at.zip(taken) else { return false };
        if *taken < step {
            return step <= *at;
        }
        let missed = self.taken.get(self.steps.len() + bucket).map_or(0, |m| m.0);
        let before = taken.0 - step.0;
        (1..=REMEMBERED).contains(&before) && missed >> (before - 1) & 1 == 1
    }

    /// A push of its own of this step is in.
    pub(super) fn take(&mut self, bucket: usize, step: Step) {
        let at = self.steps.len() + bucket;
        if at < self.taken.len() {
            let passed =
                |before: &u64| step.0 > *before && self.is_passed_over(bucket, Step(step.0 - before));
            let missed = (1..=REMEMBERED).filter(passed).fold(0, |missed, before| missed | 1 << (before - 1));
            self.taken[at] = Step(missed);
        }
        for steps in [&mut self.steps, &mut self.taken] {
            if let Some(s) = steps.get_mut(bucket) {
                *s = step;
            }
        }
    }

    /// Goes on to where `now` is, the same member as the log knows it: never back.
    pub(super) fn follow(&mut self, now: &Self) {
        let buckets = self.steps.len();
        self.steps.iter_mut().zip(&now.steps).for_each(|(s, n)| *s = (*s).max(*n));
        for bucket in 0..buckets {
            if self.taken.get(bucket) > now.taken.get(bucket) {
                continue;
            }
            for i in [bucket, buckets + bucket] {
                if let Some((t, n)) = self.taken.get_mut(i).zip(now.taken.get(i)) {
                    *t = *n;
                }
            }
        }
        (self.finished, self.resting) = (now.finished, now.resting);
    }

    fn furthest(&self) -> Step {
        self.steps.iter().copied().max().unwrap_or_default()
    }
}

/// All members, in the order of their ids.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Members {
    by_id: BTreeMap<WorkerId, Member>,
    /// The furthest step of anyone who left: when all workers die, those that come back go on from there
    /// instead of doing the whole job again on trained weights.
    left: Step,
}

impl Members {
    /// The member, if the worker is one.
    pub fn get(&self, worker: WorkerId) -> Option<&Member> {
        self.by_id.get(&worker)
    }

    /// The member, if `session` is still its own.
    pub fn in_session(&self, worker: WorkerId, session: SessionId) -> Option<&Member> {
        self.get(worker).filter(|m| m.session == session)
    }

    pub(super) fn in_session_mut(&mut self, worker: WorkerId, session: SessionId) -> Option<&mut Member> {
        self.by_id.get_mut(&worker).filter(|m| m.session == session)
    }

    pub(super) fn get_mut(&mut self, worker: WorkerId) -> Option<&mut Member> {
        self.by_id.get_mut(&worker)
    }

    /// Everyone, finished ones included.
    pub fn iter(&self) -> impl Iterator<Item = (WorkerId, &Member)> {
        self.by_id.iter().map(|(w, m)| (*w, m))
    }

    /// Those that clocks and barriers wait for: neither finished nor resting.
    pub fn active(&self) -> impl Iterator<Item = (WorkerId, &Member)> {
        self.unfinished().filter(|(_, m)| !m.resting)
    }

    /// The last step of a bucket that all active members have pushed; there is no bound where nobody is active.
    pub fn slowest_in(&self, bucket: usize) -> Step {
        let steps = self.active().filter_map(|(_, m)| m.steps.get(bucket).copied());
        steps.min().unwrap_or(Step(u64::MAX))
    }

    /// Those that have not done everything, resting ones included: they hold leases.
    pub fn unfinished(&self) -> impl Iterator<Item = (WorkerId, &Member)> {
        self.iter().filter(|(_, m)| !m.finished)
    }

    /// Nobody has been here, but `step` steps are done: those that come go on from there.
    pub(super) fn begin_at(&mut self, step: Step) {
        self.left = self.left.max(step);
    }

    /// Adds a member. It starts where the slowest of the others is, so that nobody waits longer for it than for
    /// those already there; where nobody else trains, it goes on from the furthest that anyone has come.
    pub(super) fn join(&mut self, worker: WorkerId, session: SessionId, buckets: usize, passes_over: bool) {
        self.remove(worker);
        let steps = vec![self.start(buckets); buckets];
        let mut taken = if passes_over { steps.clone() } else { Vec::new() };
        taken.resize(2 * taken.len(), Step(0));
        let member = Member { session, last_seq: Seq(0), steps, taken, finished: false, resting: false };
        self.by_id.insert(worker, member);
    }

    /// Where one begins that clocks did not wait for until now.
    fn start(&self, buckets: usize) -> Step {
        let slowest = |b: usize| self.active().filter_map(|(_, m)| m.steps.get(b).copied()).min();
        // The same step in every bucket, the latest: bucket by bucket, a worker that joins while the others are
        // between two buckets of a step would be acknowledged pushes that are never applied.
        (0..buckets).filter_map(slowest).max().unwrap_or_else(|| self.furthest())
    }

    /// The furthest step that anyone has come to, those that left included.
    fn furthest(&self) -> Step {
        self.iter().map(|(_, m)| m.furthest()).max().unwrap_or_default().max(self.left)
    }

    /// A round of `step` was closed and applied without the active members that are behind it; gives how many they are.
    pub(super) fn pass_over(&mut self, bucket: usize, step: Step) -> u64 {
        let mut passed = 0;
        for m in self.by_id.values_mut().filter(|m| !m.finished && !m.resting) {
            if let Some(s) = m.steps.get_mut(bucket).filter(|s| **s < step) {
                (*s, passed) = (step, passed + 1);
            }
        }
        passed
    }

    pub(super) fn rest(&mut self, worker: WorkerId, session: SessionId) {
        if let Some(m) = self.in_session_mut(worker, session) {
            m.resting = true;
        }
    }

    /// The member trains again: from where one that joins begins, or, `level`, from the furthest step of all. It never
    /// goes back. Gives its clock; a member that was not resting stays where it is, unless `level`.
    pub(super) fn resume(&mut self, worker: WorkerId, session: SessionId, level: bool) -> Option<Step> {
        let member = self.in_session(worker, session)?;
        let start = match (level, member.resting) {
            (true, _) => self.furthest(),
            (false, true) => self.start(member.steps.len()),
            (false, false) => Step(0),
        };
        let member = self.in_session_mut(worker, session)?;
        member.resting = false;
        member.steps.iter_mut().for_each(|s| *s = (*s).max(start));
        Some(member.clock())
    }

    /// Members of a snapshot of the first release have nothing of what was passed over before their last step.
    pub(super) fn complete(&mut self) {
        for m in self.by_id.values_mut().filter(|m| m.taken.len() == m.steps.len()) {
            m.taken.resize(2 * m.steps.len(), Step(0));
        }
    }

    fn remove(&mut self, worker: WorkerId) {
        if let Some(m) = self.by_id.remove(&worker) {
            self.left = self.left.max(m.furthest());
        }
    }

    pub(super) fn leave(&mut self, worker: WorkerId, session: SessionId) -> bool {
        let there = self.in_session(worker, session).is_some();
        if there {
            self.remove(worker);
        }
        there
    }
}
