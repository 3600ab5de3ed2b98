//! The pushes that the leader has received and not yet seen applied, and what each one waits for.
//!
//! ```text
//!            ┌── room in the loss window (level `leader`)
//!            ├── an update of its unit: it follows another of its worker, or a round is in flight
//!   push ────┤
//!            ├── the others of its round ──▶ its round's sum, the norm of its step ──┐
//!            └──────────────────────────────────────────────────────────────────────┴──▶ its proposal's outcome
//! ```
//!
//! A push is identified by its worker, unit and step, and waits for one thing at a time. Commands that a worker
//! sends after its pushes (finish, pause, resume) wait here too, until all its pushes are proposed.
//!
//! This module makes no decisions: `admission` decides which push is accepted, and `rounds` decides which round
//! closes. Finding, adding and removing a push costs the same with any number of workers and units. Leader-only:
//! all of it may be lost at any moment, because nothing in it has been acknowledged.

use super::push::Push;
use crate::shard::{
    command::Contribution,
    counts::{decrement, increment},
    round::RoundPush,
};
use paraft_common::{SessionId, Step, WorkerId};
use paraft_trace::Moment;
use std::collections::{BTreeMap, BTreeSet};

/// What a push waits for.
#[derive(Debug)]
enum Pending {
    /// Room in the loss window, at this place in the queue.
    Room(u64, Box<Push>),
    /// The next update of its unit, after which the push is decided again.
    Update(Box<Push>),
    /// The other pushes of its round.
    Round { part: RoundPush, arrived: Moment },
    /// The sum of its closed round, or the norm of its step. The round holds the payload.
    Norm { session: SessionId, arrived: Moment, bytes: u64 },
    /// The outcome of its proposal.
    Outcome { session: SessionId },
}

impl Pending {
    fn session(&self) -> SessionId {
        match self {
            Pending::Room(_, push) | Pending::Update(push) => push.contribution.session,
            Pending::Round { part, .. } => part.contribution.session,
            Pending::Norm { session, .. } | Pending::Outcome { session } => *session,
        }
    }

    /// Payload bytes that the leader holds for this push.
    fn bytes(&self) -> u64 {
        match self {
            Pending::Room(_, push) | Pending::Update(push) => push.payload.len() as u64,
            Pending::Round { part, .. } => part.payload.len() as u64,
            Pending::Norm { bytes, .. } => *bytes,
            Pending::Outcome { .. } => 0,
        }
    }

    /// Whether the push is admitted; a retry of it then has no effect.
    fn is_taken(&self) -> bool {
        !matches!(self, Pending::Room(..) | Pending::Update(_))
    }

    fn is_proposed(&self) -> bool {
        matches!(self, Pending::Outcome { .. })
    }
}

/// A worker, a unit and a step.
type Key = (WorkerId, usize, Step);

/// The pushes of a unit.
type UnitPushes = BTreeMap<(WorkerId, Step), Pending>;

/// All pending pushes.
#[derive(Debug)]
pub struct PendingPushes<C> {
    /// By unit.
    all: Vec<UnitPushes>,
    /// The pushes that wait for room, in the order of arrival.
    room: BTreeMap<u64, Key>,
    /// The queue number of the last push that waited for room.
    came: u64,
    /// Pushes per worker that wait for room.
    rooms: BTreeMap<WorkerId, usize>,
    /// The pushes that wait for an update, by unit.
    updates: BTreeSet<(usize, WorkerId, Step)>,
    /// For a worker and step: the number of units in which its push waits for its round.
    rounds: BTreeMap<(WorkerId, Step), usize>,
    /// Pushes per worker that are not proposed.
    held: BTreeMap<WorkerId, usize>,
    /// Payload bytes held in total.
    bytes: u64,
    /// Commands that workers sent after pushes that are not proposed yet, in order.
    behind: Vec<(WorkerId, C)>,
}

impl<C> Default for PendingPushes<C> {
    fn default() -> Self {
        Self {
            all: Vec::new(),
            room: BTreeMap::new(),
            came: 0,
            rooms: BTreeMap::new(),
            updates: BTreeSet::new(),
            rounds: BTreeMap::new(),
            held: BTreeMap::new(),
            bytes: 0,
            behind: Vec::new(),
        }
    }
}

impl<C> PendingPushes<C> {
    fn put(&mut self, key: Key, pending: Pending) {
        let _ = self.take(key); // the first try waits on behalf of the retry
        let (worker, unit, step) = key;
        match &pending {
            Pending::Room(place, _) => {
                self.room.insert(*place, key);
                increment(&mut self.rooms, worker);
            }
            Pending::Update(_) => _ = self.updates.insert((unit, worker, step)),
            Pending::Round { .. } => increment(&mut self.rounds, (worker, step)),
            Pending::Norm { .. } | Pending::Outcome { .. } => {}
        }
        if !pending.is_proposed() {
            increment(&mut self.held, worker);
        }
        self.bytes += pending.bytes();
        if self.all.len() <= unit {
            self.all.resize_with(unit + 1, UnitPushes::new);
        }
        self.all[unit].insert((worker, step), pending);
    }

    fn take(&mut self, key: Key) -> Option<Pending> {
        let (worker, unit, step) = key;
        let pending = self.all.get_mut(unit)?.remove(&(worker, step))?;
        match &pending {
            Pending::Room(place, _) => {
                self.room.remove(place);
                decrement(&mut self.rooms, worker);
            }
            Pending::Update(_) => _ = self.updates.remove(&(unit, worker, step)),
            Pending::Round { .. } => decrement(&mut self.rounds, (worker, step)),
            Pending::Norm { .. } | Pending::Outcome { .. } => {}
        }
        if !pending.is_proposed() {
            decrement(&mut self.held, worker);
        }
        self.bytes -= pending.bytes();
        Some(pending)
    }

    fn of(&self, worker: WorkerId, unit: usize) -> impl DoubleEndedIterator<Item = (Step, &Pending)> {
        let all = (worker, Step(0))..=(worker, Step(u64::MAX));
        let of_unit = self.all.get(unit).into_iter();
        of_unit.flat_map(move |of| of.range(all.clone()).map(|((_, step), pending)| (*step, pending)))
    }

    fn get(&self, (worker, unit, step): Key) -> Option<&Pending> {
        self.all.get(unit)?.get(&(worker, step))
    }

    fn get_mut(&mut self, (worker, unit, step): Key) -> Option<&mut Pending> {
        self.all.get_mut(unit)?.get_mut(&(worker, step))
    }

    // ---- what waits ----

    /// Whether a push of this step is admitted and not known to be applied.
    pub fn is_taken(&self, worker: WorkerId, unit: usize, step: Step) -> bool {
        self.get((worker, unit, step)).is_some_and(Pending::is_taken)
    }

    /// The last admitted step that is not known to be applied.
    pub fn last_taken(&self, worker: WorkerId, unit: usize) -> Option<Step> {
        self.of(worker, unit).rev().find(|(_, p)| p.is_taken()).map(|(step, _)| step)
    }

    /// How many of a session's pushes before `step` wait for an update of the unit, and the step of the last such
    /// push of the worker.
    pub fn early(&self, c: &Contribution, unit: usize) -> (u64, Option<Step>) {
        let early = self.of(c.worker, unit).take_while(|(step, _)| *step < c.step);
        let own = early.filter(|(_, p)| matches!(p, Pending::Update(_)) && p.session() == c.session);
        own.fold((0, None), |(n, _), (step, _)| (n + 1, Some(step)))
    }

    /// Whether any push of the worker is not proposed.
    pub fn holds(&self, worker: WorkerId) -> bool {
        self.held.contains_key(&worker)
    }

    /// Whether a push of the worker for `step` waits for its round, in any unit.
    pub fn waits_in_round(&self, worker: WorkerId, step: Step) -> bool {
        self.rounds.contains_key(&(worker, step))
    }

    /// Whether any push of the worker waits for room.
    pub fn waits_for_room(&self, worker: WorkerId) -> bool {
        self.rooms.contains_key(&worker)
    }

    /// Whether every push is proposed, and no command waits behind one.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty() && self.behind.is_empty()
    }

    /// Whether any push waits for room.
    pub fn any_waits_for_room(&self) -> bool {
        !self.room.is_empty()
    }

    /// The last proposed step of any worker and unit.
    pub fn last_proposed(&self) -> Option<Step> {
        self.all.iter().flatten().filter(|(_, p)| p.is_proposed()).map(|((_, step), _)| *step).max()
    }

    /// Payload bytes of the pushes that are not proposed.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    // ---- transitions ----

    /// Queues a push for room. Returns false if its worker already has `most` pushes in the queue; a correct worker
    /// never has.
    #[must_use]
    pub fn wait_for_room(&mut self, push: Push, most: usize) -> bool {
        let (worker, step) = (push.contribution.worker, push.contribution.step);
        let key = (worker, push.unit, step);
        // A retry keeps the place of its first try.
        let before = match self.get(key) {
            Some(Pending::Room(place, _)) => Some(*place),
            _ => None,
        };
        if before.is_none() && self.rooms.get(&worker).is_some_and(|n| *n >= most) {
            return false;
        }
        self.came += 1;
        let place = before.unwrap_or(self.came);
        self.put(key, Pending::Room(place, Box::new(push)));
        true
    }

    /// The first push in the queue for room.
    pub fn next_for_room(&mut self) -> Option<Push> {
        let (_, key) = self.room.first_key_value()?;
        match self.take(*key)? {
            Pending::Room(_, push) => Some(*push),
            _ => None,
        }
    }

    /// Keeps a push until the next update of its unit is applied.
    pub fn wait_for_update(&mut self, push: Push) {
        let c = push.contribution;
        self.put((c.worker, push.unit, c.step), Pending::Update(Box::new(push)));
    }

    /// Returns the pushes that waited for this update of the unit, each worker's in the order of its steps.
    pub fn updated(&mut self, unit: usize) -> Vec<Push> {
        let all = (unit, WorkerId(0), Step(0))..=(unit, WorkerId(u32::MAX), Step(u64::MAX));
        let keys: Vec<_> = self.updates.range(all).map(|(b, w, s)| (*w, *b, *s)).collect();
        let push = |pending| match pending {
            Pending::Update(push) => Some(*push),
            _ => None,
        };
        keys.into_iter().filter_map(|key| self.take(key).and_then(push)).collect()
    }

    /// Keeps a push until its round closes.
    pub fn wait_for_round(&mut self, unit: usize, part: RoundPush, arrived: Moment) {
        let c = part.contribution;
        self.put((c.worker, unit, c.step), Pending::Round { part, arrived });
    }

    /// When each push of an open round arrived.
    pub fn arrivals(&self, step: Step, unit: usize) -> Vec<(WorkerId, Moment)> {
        let of = |((worker, of), pending): (&(WorkerId, Step), &Pending)| match pending {
            Pending::Round { arrived, .. } if *of == step => Some((*worker, *arrived)),
            _ => None,
        };
        self.all.get(unit).into_iter().flatten().filter_map(of).collect()
    }

    /// Closes a round and returns the pushes of these workers, in the order of the workers.
    pub fn close(&mut self, step: Step, unit: usize, workers: BTreeSet<WorkerId>) -> Vec<RoundPush> {
        let mut parts = Vec::with_capacity(workers.len());
        for worker in workers {
            let Some(pending) = self.get_mut((worker, unit, step)) else { continue };
            let Pending::Round { part, arrived } = pending else { continue };
            let (session, bytes) = (part.contribution.session, part.payload.len() as u64);
            let next = Pending::Norm { session, arrived: *arrived, bytes };
            // The pending entry is replaced in place: the number of held pushes and bytes does not change.
            if let Pending::Round { part, .. } = std::mem::replace(pending, next) {
                parts.push(part);
            }
            decrement(&mut self.rounds, (worker, step));
        }
        parts
    }

    /// Removes a push from its round.
    pub fn leave_round(&mut self, worker: WorkerId, unit: usize, step: Step) -> Option<(RoundPush, Moment)> {
        match self.take((worker, unit, step))? {
            Pending::Round { part, arrived } => Some((part, arrived)),
            _ => None,
        }
    }

    /// Records that an update with this push is proposed. Returns the arrival time and the bytes of a push that
    /// waited for its round.
    pub fn proposed(&mut self, unit: usize, c: &Contribution) -> Option<(Moment, u64)> {
        let (key, proposed) = ((c.worker, unit, c.step), Pending::Outcome { session: c.session });
        if let Some(pending) = self.get_mut(key)
            && let Pending::Norm { arrived, bytes, .. } = *pending
        {
            *pending = proposed;
            decrement(&mut self.held, c.worker);
            self.bytes -= bytes;
            return Some((arrived, bytes));
        }
        self.put(key, proposed);
        None
    }

    /// Records that the outcome of the update arrived. The shard may show the update before the outcome arrives,
    /// and the worker's next push may already be in flight; that push stays.
    pub fn outcome(&mut self, unit: usize, c: &Contribution) {
        let key = (c.worker, unit, c.step);
        if self.get(key).is_some_and(|p| p.is_proposed() && p.session() == c.session) {
            self.take(key);
        }
    }

    /// Records that the sum with this push has no effect.
    pub fn given_up(&mut self, unit: usize, c: &Contribution) {
        let key = (c.worker, unit, c.step);
        if matches!(self.get(key), Some(Pending::Norm { session, .. }) if *session == c.session) {
            self.take(key);
        }
    }

    /// Drops the pushes that wait for room, when the worker's session ends.
    pub fn forget_room(&mut self, worker: WorkerId) {
        if self.waits_for_room(worker) {
            self.forget(worker, |p| matches!(p, Pending::Room(..)));
        }
    }

    /// Drops all pushes of a worker whose session is over. Otherwise the same steps of its next session would look
    /// in flight, and their outcome would never arrive.
    pub fn forget_all(&mut self, worker: WorkerId) {
        self.forget(worker, |_| true);
    }

    fn forget(&mut self, worker: WorkerId, drops: impl Fn(&Pending) -> bool) {
        let units = 0..self.all.len();
        let all = units.flat_map(|b| self.of(worker, b).map(move |(step, p)| ((worker, b, step), p)));
        let keys: Vec<Key> = all.filter(|(_, p)| drops(p)).map(|(key, _)| key).collect();
        keys.into_iter().for_each(|key| _ = self.take(key));
    }

    // ---- commands behind pushes ----

    /// Queues a command that the log must hold behind the worker's pushes. Returns the command if no push and no
    /// earlier command of the worker waits.
    pub fn defer_command(&mut self, worker: WorkerId, said: C) -> Option<C> {
        if self.holds(worker) || self.behind.iter().any(|(w, _)| *w == worker) {
            self.behind.push((worker, said));
            return None;
        }
        Some(said)
    }

    /// Takes the commands that need not wait any more, in the order of arrival.
    pub fn take_ready_commands(&mut self) -> Vec<C> {
        if self.behind.is_empty() {
            return Vec::new();
        }
        let all = std::mem::take(&mut self.behind);
        all.into_iter().filter_map(|(worker, said)| self.defer_command(worker, said)).collect()
    }
}

#[cfg(test)]
#[path = "pending_tests.rs"]
mod tests;
