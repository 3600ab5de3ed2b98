//! The members of a job, and the progress of each. Part of the replicated state.
//!
//! Steps are counted for units: the parts of the shard that are pushed and pulled by themselves, by their numbers in the
//! shard, from 0. Each bucket is a unit.
//!
//! The leader asks after every push for a member's clock, the slowest in a unit, and the number of members
//! behind. `progress` and each member keep these counts as steps change, so that the cost does not grow with
//! members and units.

use super::progress::{Lowest, Progress};
use paraft_common::{Seq, SessionId, Step, WorkerId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Number of steps before the last applied one for which dropped pushes are remembered: more than a worker keeps to
/// resend.
const DROP_HISTORY_STEPS: u64 = 64;

/// A registered worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its session.
    pub session: SessionId,
    /// The highest push applied.
    pub last_seq: Seq,
    /// For each unit of the shard, the last step applied. It identifies retries: a push of an earlier or equal
    /// step is a duplicate, under any leader.
    steps: Vec<Step>,
    /// Only if rounds pass members over, else empty. For each unit, the last step of its own that was applied;
    /// everything from there to `steps` was dropped. Then, for each unit, which of the 64 steps before that one
    /// were applied: bit `k` is step `taken - 1 - k`.
    taken: Vec<Step>,
    /// It has done all its steps; clocks and barriers no longer wait for it.
    pub finished: bool,
    /// It has nothing to train at present (the leased sampler has no chunk for it). Clocks and barriers do not wait
    /// for it, but it is a member, has a lease, and may resume.
    pub idle: bool,
    /// The lowest of `steps`.
    #[serde(skip)]
    lowest: Lowest,
}

impl Member {
    /// A member that starts at `steps`. `taken`: as the field, if rounds may pass it over.
    pub(super) fn new(session: SessionId, steps: Vec<Step>, taken: Vec<Step>) -> Self {
        let lowest = Lowest::of(&steps);
        Self { session, last_seq: Seq(0), steps, taken, finished: false, idle: false, lowest }
    }

    /// For each unit of the shard, the last step applied.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The last step applied of a unit, if the shard has it.
    pub fn step(&self, unit: usize) -> Option<Step> {
        self.steps.get(unit).copied()
    }

    /// The last step that the shard has fully applied.
    pub fn clock(&self) -> Step {
        self.lowest.step()
    }

    /// Whether clocks and barriers wait for it.
    pub fn is_active(&self) -> bool {
        !self.finished && !self.idle
    }

    /// The number of its `taken` entries.
    pub(super) fn remembered(&self) -> usize {
        self.taken.len()
    }

    fn set(&mut self, unit: usize, step: Step) {
        if let Some(at) = self.steps.get_mut(unit) {
            let before = std::mem::replace(at, step);
            self.lowest.moved(before, step, &self.steps);
        }
    }

    /// The last step fully applied in some of its units; `None`: in all.
    pub fn clock_of(&self, units: Option<&BTreeSet<usize>>) -> Step {
        match units {
            None => self.clock(),
            Some(some) => some.iter().filter_map(|b| self.steps.get(*b).copied()).min().unwrap_or_default(),
        }
    }

    /// Whether a push of this step came too late for its round, or would. Known for the steps that a worker may
    /// resend: its next step can be applied before it learns that this one was dropped.
    pub fn is_dropped(&self, unit: usize, step: Step) -> bool {
        let (at, taken) = (self.steps.get(unit), self.taken.get(unit));
        let Some((at, taken)) = at.zip(taken) else { return false };
        if *taken < step {
            return step <= *at;
        }
        let missed = self.taken.get(self.steps.len() + unit).map_or(0, |m| m.0);
        let before = taken.0 - step.0;
        (1..=DROP_HISTORY_STEPS).contains(&before) && missed >> (before - 1) & 1 == 1
    }

    /// Records that its push of this step is applied.
    pub(super) fn take(&mut self, unit: usize, step: Step) {
        let at = self.steps.len() + unit;
        if at < self.taken.len() {
            let passed = |before: &u64| step.0 > *before && self.is_dropped(unit, Step(step.0 - before));
            let missed =
                (1..=DROP_HISTORY_STEPS).filter(passed).fold(0, |missed, before| missed | 1 << (before - 1));
            self.taken[at] = Step(missed);
        }
        self.set(unit, step);
        if let Some(s) = self.taken.get_mut(unit) {
            *s = step;
        }
    }

    /// Advances to `now`, the same member in the log; never goes back.
    pub(super) fn follow(&mut self, now: &Self) {
        let units = self.steps.len();
        self.steps.iter_mut().zip(&now.steps).for_each(|(s, n)| *s = (*s).max(*n));
        self.lowest = Lowest::of(&self.steps);
        for unit in 0..units {
            if self.taken.get(unit) > now.taken.get(unit) {
                continue;
            }
            for i in [unit, units + unit] {
                if let Some((t, n)) = self.taken.get_mut(i).zip(now.taken.get(i)) {
                    *t = *n;
                }
            }
        }
        (self.finished, self.idle) = (now.finished, now.idle);
    }

    fn raise(&mut self, step: Step) {
        self.steps.iter_mut().for_each(|s| *s = (*s).max(step));
        self.lowest = Lowest::of(&self.steps);
    }

    fn furthest(&self) -> Step {
        self.steps.iter().copied().max().unwrap_or_default()
    }
}

/// All members, in the order of their ids.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "StoredMembers")]
pub struct Members {
    by_id: BTreeMap<WorkerId, Member>,
    /// The furthest step of any member that left. If all workers die, new ones continue from there instead of
    /// repeating the whole job on trained weights.
    left: Step,
    /// The progress of the active members.
    #[serde(skip)]
    progress: Progress,
}

/// The members in a snapshot.
#[derive(Deserialize)]
struct StoredMembers {
    by_id: BTreeMap<WorkerId, Member>,
    left: Step,
}

impl From<StoredMembers> for Members {
    fn from(stored: StoredMembers) -> Self {
        let StoredMembers { mut by_id, left } = stored;
        by_id.values_mut().for_each(|m| m.lowest = Lowest::of(&m.steps));
        let mut progress = Progress::default();
        by_id.values().filter(|m| m.is_active()).for_each(|m| progress.add(&m.steps, m.clock()));
        Self { by_id, left, progress }
    }
}

impl Members {
    /// The member, if the worker is one.
    pub fn get(&self, worker: WorkerId) -> Option<&Member> {
        self.by_id.get(&worker)
    }

    /// The member, if `session` is its current one.
    pub fn in_session(&self, worker: WorkerId, session: SessionId) -> Option<&Member> {
        self.get(worker).filter(|m| m.session == session)
    }

    /// All members, including finished ones.
    pub fn iter(&self) -> impl Iterator<Item = (WorkerId, &Member)> + Clone {
        self.by_id.iter().map(|(w, m)| (*w, m))
    }

    /// Those that clocks and barriers wait for: neither finished nor idle.
    pub fn active(&self) -> impl Iterator<Item = (WorkerId, &Member)> {
        self.iter().filter(|(_, m)| m.is_active())
    }

    /// The number of active members.
    pub fn active_count(&self) -> usize {
        self.progress.members()
    }

    /// The lowest clock of an active member; without active members there is no bound.
    pub fn slowest(&self) -> Step {
        self.progress.slowest().unwrap_or(Step(u64::MAX))
    }

    /// The step that no active member is behind; without active members, the furthest.
    pub(super) fn version_step(&self) -> Step {
        let done = || self.iter().map(|(_, m)| m.clock()).max().unwrap_or_default().max(self.left);
        self.progress.slowest().unwrap_or_else(done)
    }

    /// Likewise, and whether nothing beyond that step was pushed.
    pub(super) fn version(&self) -> (Step, bool) {
        let step = self.version_step();
        (step, self.furthest() == step)
    }

    /// The last step of a unit that all active members have pushed; without active members there is no bound.
    pub fn slowest_in(&self, unit: usize) -> Step {
        self.progress.slowest_in(unit).unwrap_or(Step(u64::MAX))
    }

    /// How many active members have not pushed `step` of a unit.
    pub fn behind(&self, unit: usize, step: Step) -> usize {
        self.progress.behind(unit, step)
    }

    /// Members that have not finished, including idle ones: they hold leases.
    pub fn unfinished(&self) -> impl Iterator<Item = (WorkerId, &Member)> {
        self.iter().filter(|(_, m)| !m.finished)
    }

    /// Sets the start of the first members: `step` steps are done.
    pub(super) fn begin_at(&mut self, step: Step) {
        self.left = self.left.max(step);
    }

    /// Adds a member. It starts at the slowest of the others, so that no member waits longer for it than for them.
    /// If no other trains, it continues from the furthest step of any member.
    pub(super) fn join(&mut self, worker: WorkerId, session: SessionId, units: usize, drops_late: bool) {
        self.remove(worker);
        let steps = vec![self.start(units); units];
        let mut taken = if drops_late { steps.clone() } else { Vec::new() };
        taken.resize(2 * taken.len(), Step(0));
        let member = Member::new(session, steps, taken);
        self.progress.add(&member.steps, member.clock());
        self.by_id.insert(worker, member);
    }

    /// The start of a member that clocks did not wait for until now.
    fn start(&self, units: usize) -> Step {
        // The same step in every unit, the latest. With a start per unit, a worker that joins while the others
        // are between two units of a step would get acks for pushes that are never applied.
        let slowest = (0..units).filter_map(|b| self.progress.slowest_in(b)).max();
        slowest.unwrap_or_else(|| self.furthest())
    }

    /// The furthest step of any member, including those that left.
    fn furthest(&self) -> Step {
        self.iter().map(|(_, m)| m.furthest()).max().unwrap_or_default().max(self.left)
    }

    /// Records that a push of this session is applied.
    pub(super) fn pushed(&mut self, worker: WorkerId, session: SessionId, seq: Seq, unit: usize, step: Step) {
        let Self { by_id, progress, .. } = self;
        let Some(m) = by_id.get_mut(&worker) else { return };
        let own = m.session == session;
        // The worker came back between its round's closing and now. Its predecessor's push still counts as its
        // step. Without the record the worker would wait forever for a push that the leader took for a retry, or be
        // asked for the step again.
        if own || m.step(unit).is_some_and(|s| s.next() == step) {
            progress.changes(m, unit, |m| m.take(unit, step));
        }
        if own {
            m.last_seq = m.last_seq.max(seq);
        }
    }

    /// Records that all pushes of this session up to `seq` are applied.
    pub(super) fn has_pushed(&mut self, worker: WorkerId, session: SessionId, seq: Seq) {
        if let Some(m) = self.by_id.get_mut(&worker).filter(|m| m.session == session) {
            m.last_seq = m.last_seq.max(seq);
        }
    }

    /// Counts `step` of a unit as done by every active member, after one of them has written its result.
    pub(super) fn is_written(&mut self, unit: usize, step: Step) {
        let Self { by_id, progress, .. } = self;
        for m in by_id.values_mut().filter(|m| m.is_active()) {
            if m.step(unit).is_some_and(|s| s < step) {
                progress.changes(m, unit, |m| m.take(unit, step));
            }
        }
    }

    /// Passes over the active members behind `step`, after a round of it was applied without them; returns their
    /// number.
    pub(super) fn drop_late(&mut self, unit: usize, step: Step) -> u64 {
        let Self { by_id, progress, .. } = self;
        let mut passed = 0;
        for m in by_id.values_mut().filter(|m| m.is_active()) {
            if m.step(unit).is_some_and(|s| s < step) {
                progress.changes(m, unit, |m| m.set(unit, step));
                passed += 1;
            }
        }
        passed
    }

    /// Marks everything up to `step` as done by the member, in every unit.
    pub(super) fn advance(&mut self, worker: WorkerId, session: SessionId, step: Step) {
        self.change(worker, session, |m| m.raise(step));
    }

    /// Marks the member as finished. Returns false if the session is not its own.
    pub(super) fn finish(&mut self, worker: WorkerId, session: SessionId) -> bool {
        self.change(worker, session, |m| m.finished = true).is_some()
    }

    pub(super) fn pause(&mut self, worker: WorkerId, session: SessionId) {
        self.change(worker, session, |m| m.idle = true);
    }

    /// Makes an idle member train again, starting where a new member would, or, with `level`, at the furthest step
    /// of all. It never goes back. Returns its clock; a member that was not idle does not move unless `level`.
    pub(super) fn resume(&mut self, worker: WorkerId, session: SessionId, level: bool) -> Option<Step> {
        let member = self.in_session(worker, session)?;
        let start = match (level, member.idle) {
            (true, _) => self.furthest(),
            (false, true) => self.start(member.steps.len()),
            (false, false) => Step(0),
        };
        self.change(worker, session, |m| {
            m.idle = false;
            m.raise(start);
            m.clock()
        })
    }

    /// Changes a member and updates the progress counts.
    fn change<T>(
        &mut self,
        worker: WorkerId,
        session: SessionId,
        f: impl FnOnce(&mut Member) -> T,
    ) -> Option<T> {
        let m = self.by_id.get_mut(&worker).filter(|m| m.session == session)?;
        if m.is_active() {
            self.progress.remove(&m.steps, m.clock());
        }
        let got = f(m);
        if m.is_active() {
            self.progress.add(&m.steps, m.clock());
        }
        Some(got)
    }

    fn remove(&mut self, worker: WorkerId) {
        if let Some(m) = self.by_id.remove(&worker) {
            if m.is_active() {
                self.progress.remove(&m.steps, m.clock());
            }
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
