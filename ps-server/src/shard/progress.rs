//! The progress of the active members, counted as steps change: the leader asks for it after every push.
//!
//! Derived from [`super::members::Members`]; not in snapshots, but rebuilt when one is read.

use super::{
    counts::{decrement, increment},
    members::Member,
};
use paraft_common::Step;
use std::collections::BTreeMap;

/// The lowest of a member's steps, and the number of units at it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Lowest {
    step: Step,
    units: usize,
}

impl Lowest {
    /// Computes it from these steps.
    pub fn of(steps: &[Step]) -> Self {
        let step = steps.iter().copied().min().unwrap_or_default();
        Self { step, units: steps.iter().filter(|s| **s == step).count() }
    }

    /// The lowest step; 0 without units.
    pub fn step(self) -> Step {
        self.step
    }

    /// Updates it after one of `steps` went from `before` to `now`.
    pub fn moved(&mut self, before: Step, now: Step, steps: &[Step]) {
        self.units -= usize::from(before == self.step);
        self.units += usize::from(now == self.step);
        // Runs once per step of the member, not once per unit.
        if self.units == 0 || now < self.step {
            *self = Self::of(steps);
        }
    }
}

/// Number of members at each step.
type Counts = BTreeMap<Step, usize>;

/// Where the active members are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// By unit.
    units: Vec<Counts>,
    /// By clock.
    clocks: Counts,
    members: usize,
}

impl Progress {
    /// Adds a member.
    pub fn add(&mut self, steps: &[Step], clock: Step) {
        if self.units.len() < steps.len() {
            self.units.resize(steps.len(), Counts::new());
        }
        self.units.iter_mut().zip(steps).for_each(|(counts, step)| increment(counts, *step));
        increment(&mut self.clocks, clock);
        self.members += 1;
    }

    /// Removes a member.
    pub fn remove(&mut self, steps: &[Step], clock: Step) {
        self.units.iter_mut().zip(steps).for_each(|(counts, step)| decrement(counts, *step));
        decrement(&mut self.clocks, clock);
        self.members -= 1;
        if self.members == 0 {
            self.units.clear(); // equality must not depend on former members
        }
    }

    /// Changes a member's step in this unit, and updates the counts.
    pub fn changes(&mut self, m: &mut Member, unit: usize, f: impl FnOnce(&mut Member)) {
        let (step, clock) = (m.step(unit), m.clock());
        f(m);
        if !m.is_active() {
            return;
        }
        let moves = self.units.get_mut(unit).zip(step).zip(m.step(unit));
        if let Some(((counts, before), now)) = moves {
            decrement(counts, before);
            increment(counts, now);
        }
        decrement(&mut self.clocks, clock);
        increment(&mut self.clocks, m.clock());
    }

    /// Number of active members.
    pub fn members(&self) -> usize {
        self.members
    }

    /// The lowest clock.
    pub fn slowest(&self) -> Option<Step> {
        self.clocks.keys().next().copied()
    }

    /// The lowest step in a unit.
    pub fn slowest_in(&self, unit: usize) -> Option<Step> {
        self.units.get(unit)?.keys().next().copied()
    }

    /// Number of members before `step` in a unit.
    pub fn behind(&self, unit: usize, step: Step) -> usize {
        self.units.get(unit).map_or(0, |c| c.range(..step).map(|(_, n)| n).sum())
    }
}

#[cfg(test)]
#[path = "progress_tests.rs"]
mod tests;
