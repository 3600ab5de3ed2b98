//! BSP's open rounds: which workers have pushed a step of a unit, and which rounds close. `pending` holds the
//! pushes.
//!
//! A push costs the same with any number of rounds: only rounds that changed since the last check are checked
//! ([`Rounds::touch`]). Leader-only: it may be lost at any moment.

use crate::shard::members::{Member, Members};
use paraft_common::{Step, WorkerId, round::RoundConfig};
use std::collections::{BTreeMap, BTreeSet};

/// A round: its step and unit.
pub type Key = (Step, usize);

/// All rounds of a shard that are not applied.
#[derive(Clone, Debug, Default)]
pub struct Rounds {
    /// The workers in each open round, by unit and step.
    open: BTreeMap<(usize, Step), BTreeSet<WorkerId>>,
    /// Rounds that may close now, or whose missing pushes may be dropped. May hold duplicates and closed rounds.
    touched: Vec<Key>,
    /// Rounds that closed without some of their pushes and are not applied yet, by unit.
    closed: BTreeSet<(usize, Step)>,
}

impl Rounds {
    /// Adds a worker's push to its round.
    pub fn add(&mut self, step: Step, unit: usize, worker: WorkerId) {
        self.touched.push((step, unit));
        self.open.entry((unit, step)).or_default().insert(worker);
    }

    /// Marks the rounds of a unit as changed, after an update of it.
    pub fn touch(&mut self, unit: usize) {
        let rounds = self.open.range((unit, Step(0))..=(unit, Step(u64::MAX)));
        self.touched.extend(rounds.map(|((b, s), _)| (*s, *b)));
    }

    /// Marks every round as changed, after a change of the members or the mode.
    pub fn touch_all(&mut self) {
        self.touched.extend(self.open.keys().map(|(b, s)| (*s, *b)));
    }

    /// Drops the pushes of a worker that left from the open rounds.
    pub fn forget(&mut self, worker: WorkerId) {
        let own = self.open.iter().filter(|(_, r)| r.contains(&worker)).map(|((b, s), _)| (*s, *b));
        let own: Vec<Key> = own.collect();
        own.into_iter().for_each(|key| self.remove(key, worker));
    }

    /// Removes from the touched rounds the members that a later round was applied without.
    pub fn take_dropped(&mut self, members: &Members) -> Vec<(Key, WorkerId)> {
        let late =
            |(step, unit): &Key, w: WorkerId| members.get(w).is_some_and(|m| m.is_dropped(*unit, *step));
        self.sort_touched();
        let found: Vec<_> = self
            .touched
            .iter()
            .filter_map(|key| Some((*key, self.round(*key)?)))
            .flat_map(|(key, r)| r.iter().filter(move |w| late(&key, **w)).map(move |w| (key, *w)))
            .collect();
        found.iter().for_each(|(key, w)| self.remove(*key, *w));
        found
    }

    /// Removes a worker from a round, and an empty round.
    fn remove(&mut self, key: Key, worker: WorkerId) {
        let Some(round) = self.open.get_mut(&(key.1, key.0)) else { return };
        round.remove(&worker);
        if round.is_empty() {
            self.take(key);
        }
    }

    /// Whether no round is open.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    fn round(&self, (step, unit): Key) -> Option<&BTreeSet<WorkerId>> {
        self.open.get(&(unit, step))
    }

    fn sort_touched(&mut self) {
        self.touched.sort_unstable();
        self.touched.dedup();
    }

    /// The touched rounds that are open, by step and unit.
    pub fn touched(&mut self) -> impl Iterator<Item = Key> {
        self.sort_touched();
        self.touched.iter().copied().filter(|key| self.round(*key).is_some())
    }

    /// Removes an open round and returns its workers.
    pub fn take(&mut self, key: Key) -> BTreeSet<WorkerId> {
        self.open.remove(&(key.1, key.0)).unwrap_or_default()
    }

    /// The touched rounds that close now: those with the pushes of as many active members as `rule` needs.
    /// `leaving`: members whose Leave is proposed; the caller touches every round when they change.
    pub fn complete(
        &mut self,
        members: &Members,
        leaving: &BTreeSet<WorkerId>,
        rule: &RoundConfig,
    ) -> Vec<Key> {
        let mut closing = Vec::new();
        self.sort_touched();
        let mut look = std::mem::take(&mut self.touched);
        for key in look.drain(..) {
            let (step, unit) = key;
            let Some(round) = self.round(key) else { continue };
            let is_behind = |m: &Member| m.is_active() && m.step(unit).is_some_and(|s| s < step);
            let expects = |w: &WorkerId| members.get(*w).is_some_and(is_behind) && !leaving.contains(w);
            let left = leaving.iter().filter(|w| members.get(**w).is_some_and(is_behind)).count();
            let active = members.behind(unit, step) - left;
            let needs = rule.needs(active);
            // Members are checked only if there may be enough.
            let arrived = if round.len() < needs { 0 } else { round.iter().filter(|w| expects(w)).count() };
            if arrived >= needs {
                closing.push(key);
            }
        }
        self.touched = look; // keeps its capacity, so a push allocates nothing
        closing
    }

    /// Closes a round and returns its workers. If rounds pass members over, it is remembered as closed until it is
    /// applied.
    pub fn close(&mut self, key: Key, drops_late: bool) -> BTreeSet<WorkerId> {
        let workers = self.take(key);
        if drops_late && !workers.is_empty() {
            self.closed.insert((key.1, key.0));
        }
        workers
    }

    /// Whether the round of this step, or of a later one, was closed without some of its pushes and is not applied
    /// yet.
    pub fn is_closed(&self, unit: usize, step: Step) -> bool {
        self.closed.range((unit, step)..=(unit, Step(u64::MAX))).next().is_some()
    }

    /// Records that its update is applied or refused.
    pub fn applied(&mut self, unit: usize, step: Step) {
        self.closed.remove(&(unit, step));
    }
}

#[cfg(test)]
#[path = "rounds_tests.rs"]
mod tests;
