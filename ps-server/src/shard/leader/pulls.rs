//! Waiting pulls, and which of them may be answered. A pull is checked when its own worker's push or the slowest
//! member's push is in, not at every update. Leader-only: after a failover the worker asks again.

use super::{messages::ConnId, working::WorkingCopies};
use crate::shard::state::Meta;
use paraft_common::{InForce, Mode, Step, Version, WorkerId};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};

/// The slowest of these clocks. Without any clock there is no bound.
fn least(clocks: impl Iterator<Item = Step>) -> Step {
    clocks.min().unwrap_or(Step(u64::MAX))
}

/// Events that may release a pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullTrigger {
    /// Any state: the mode, a delta, a new epoch.
    All,
    /// The initial state of a unit arrived. It matters only for the last unit.
    Initial,
    /// The log's record of one member.
    Member(WorkerId),
    /// An update of one unit, with pushes of these workers.
    Unit(usize, Vec<WorkerId>),
    /// The pull itself arrived.
    Pull(ConnId),
}

/// What a worker requests.
#[derive(Debug)]
pub struct Pull {
    /// The stream.
    pub conn: ConnId,
    /// The worker.
    pub worker: WorkerId,
    /// The step that it has pushed.
    pub done: Step,
    /// Requests the final weights.
    pub last: bool,
    /// A checkpoint is due.
    pub checkpoint: bool,
    /// Instead of the mode's rule: answer once every unfinished member has done the step.
    pub barrier: bool,
    /// The log must hold the versions that it gets.
    pub records: bool,
    /// For each unit, the version that the worker has; empty if it has none.
    pub have: Vec<Version>,
    /// Requests only some units.
    pub part: bool,
    /// The rows that it requests of a partition, by unit.
    pub rows: BTreeMap<usize, Vec<u64>>,
}

/// A pull that is not fully answered.
#[derive(Debug)]
struct WaitingPull {
    pull: Arc<Pull>,
    /// units that are not sent yet.
    todo: BTreeSet<usize>,
    /// Since when it waits for others.
    held: Option<Instant>,
}

impl WaitingPull {
    /// Counts the pull, once, as one that waited for others.
    fn count_if(&mut self, held: bool, now: Instant, waited: &mut u64) {
        if held && self.held.is_none() {
            self.held = Some(now);
            *waited += 1;
        }
    }
}

/// The waiting pulls, one per stream.
#[derive(Debug, Default)]
pub struct WaitingPulls {
    by_conn: BTreeMap<ConnId, WaitingPull>,
    /// Pulls for a checkpoint: all units are answered at once.
    sections: BTreeSet<ConnId>,
    /// The slowest clock of each unit at the last scan of all pulls.
    slowest: BTreeMap<usize, Step>,
    /// The decisive state at the last scan of all pulls; `None` if it may have changed since.
    decided: Option<DecisiveState>,
    /// The pulls were scanned since the shard has its initial state.
    begun: bool,
    /// Pulls that may be answered once the log holds them.
    to_record: Vec<ReleasedPull>,
}

/// The part of the state that affects every pull. While it is unchanged, an event of one member releases no other
/// pull.
#[derive(Debug, PartialEq)]
struct DecisiveState {
    started: bool,
    mode: Mode,
    all_finished: bool,
    slowest: Step,
    slowest_in: Vec<Step>,
}

impl DecisiveState {
    fn of(m: &Meta) -> Self {
        let units = m.members.iter().next().map_or(0, |(_, first)| first.steps().len());
        Self {
            started: m.started,
            mode: m.in_force.mode,
            all_finished: m.members.unfinished().next().is_none(),
            slowest: m.members.slowest(),
            slowest_in: (0..units).map(|b| m.members.slowest_in(b)).collect(),
        }
    }
}

/// What a scan needs beside the replicated state.
pub struct View<'a> {
    /// The working copies: at the level `leader` what is applied here counts, replicated or not, because the pull
    /// returns it.
    pub working: Option<&'a WorkingCopies>,
    /// Whether everything that was pushed here is replicated.
    pub level: bool,
    /// The stream of a member.
    pub conn_of: &'a dyn Fn(WorkerId) -> Option<ConnId>,
    /// Whether a push of a worker for a step waits for the others of its round.
    pub waits_in_round: &'a dyn Fn(WorkerId, Step) -> bool,
    /// The current time.
    pub now: Instant,
}

/// The result of a scan.
#[derive(Debug, Default)]
pub struct PullScan {
    /// Pulls to answer now.
    pub go: Vec<ReleasedPull>,
    /// A worker's last pull waits until everything pushed here is replicated.
    pub last_waits: bool,
    /// Number of pulls that started to wait for others.
    pub waited: u64,
}

impl WaitingPulls {
    /// Adds a worker's pull of these units.
    pub fn ask(&mut self, pull: Pull, todo: BTreeSet<usize>) {
        let conn = pull.conn;
        self.closed(conn);
        if pull.checkpoint {
            self.sections.insert(conn);
        }
        self.by_conn.insert(conn, WaitingPull { pull: Arc::new(pull), todo, held: None });
    }

    /// The stream is closed.
    pub fn closed(&mut self, conn: ConnId) {
        self.sections.remove(&conn);
        self.by_conn.remove(&conn);
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.by_conn.is_empty()
    }

    /// The waiting pulls, and the units that they wait for.
    pub fn waiting(&self) -> impl Iterator<Item = (&Pull, &BTreeSet<usize>)> {
        self.by_conn.values().map(|p| (&*p.pull, &p.todo))
    }

    /// Keeps a released pull until the log holds it.
    pub fn record(&mut self, go: ReleasedPull) {
        self.to_record.push(go);
    }

    /// Takes the pulls that the log must hold first.
    pub fn to_record(&mut self) -> Vec<ReleasedPull> {
        std::mem::take(&mut self.to_record)
    }

    /// Finds the pulls that the consistency rule releases. Except at the level `leader` it works unit by unit:
    /// a unit is sent as soon as the rule holds for it, while others are still pushed. Among the ready units
    /// the first go first, because a forward pass needs them first.
    pub fn scan(&mut self, changed: PullTrigger, m: &Meta, view: &View<'_>) -> PullScan {
        let mut looked = PullScan::default();
        let (now, mode) = (view.now, m.in_force.mode);
        let slowest = match view.working {
            Some(working) => least(m.members.active().map(|(w, m)| working.member(w, m).clock())),
            None => m.members.slowest(),
        };
        let changed = match changed {
            PullTrigger::Unit(..) | PullTrigger::Member(_) if view.working.is_some() => PullTrigger::All,
            // Before the shard has its weights no pull is scanned, and a pull may arrive between the last initial
            // unit and its event. So the first scan is of all pulls.
            _ if !self.begun => PullTrigger::All,
            changed => changed,
        };
        self.begun = true;
        let mut all_finished = None;
        for conn in self.candidates(&changed, m, view.conn_of) {
            let Some(p) = self.by_conn.get_mut(&conn) else { continue };
            let pull = p.pull.clone();
            let mode = if pull.barrier { Mode::Bsp } else { mode };
            let member = m.members.get(pull.worker);
            if view.working.is_none() && !pull.last && !pull.checkpoint {
                let Some(member) = member.filter(|_| m.started) else { continue };
                let mut held = (view.waits_in_round)(pull.worker, pull.done);
                let mut ready = |unit: usize| {
                    // A worker reads its own writes; the rule decides about the pushes of the others.
                    let own = member.step(unit).is_some_and(|s| s >= pull.done);
                    let may = own && mode.may_proceed(m.members.slowest_in(unit), pull.done);
                    held |= own && !may;
                    may
                };
                let units: Vec<usize> = match &changed {
                    PullTrigger::Unit(b, _) => {
                        p.todo.get(b).copied().filter(|b| ready(*b)).into_iter().collect()
                    }
                    _ => p.todo.iter().copied().filter(|b| ready(*b)).collect(),
                };
                units.iter().for_each(|b| _ = p.todo.remove(b));
                p.count_if(held && !pull.barrier, now, &mut looked.waited);
                let (whole, held) = (p.todo.is_empty(), p.held);
                if whole {
                    self.closed(conn);
                }
                if !units.is_empty() {
                    let of_part = || least(units.iter().map(|b| m.members.slowest_in(*b)));
                    let slowest = if pull.part { of_part() } else { slowest };
                    looked.go.push(ReleasedPull { pull, held, units, whole, slowest, in_force: m.in_force });
                }
                continue;
            }
            // A partial pull checks the clocks of its units only: the others may have no push of this step yet.
            let part = pull.part.then_some(&p.todo);
            let clock = |w, m| view.working.map_or(m, |working| working.member(w, m)).clock_of(part);
            let own = member.map(|m| clock(pull.worker, m));
            let slowest = part.map_or(slowest, |_| least(m.members.active().map(|(w, m)| clock(w, m))));
            let may = if pull.last {
                // The final weights are the same for every worker, whichever leader answers the last pull.
                looked.last_waits |= !view.level;
                let finished = || m.members.unfinished().next().is_none();
                view.level && *all_finished.get_or_insert_with(finished)
            } else {
                let reads_own = m.started && own.is_some_and(|own| own >= pull.done);
                let may = mode.may_proceed(slowest, pull.done);
                // Held back by others, not by the replication of its own push. In BSP that is an open round,
                // because a push is applied only together with the others'.
                let held = reads_own && !may || (view.waits_in_round)(pull.worker, pull.done);
                p.count_if(held && !pull.barrier, now, &mut looked.waited);
                reads_own && may
            };
            if may {
                let (units, held) = (std::mem::take(&mut p.todo).into_iter().collect(), p.held);
                self.closed(conn);
                looked.go.push(ReleasedPull {
                    pull,
                    held,
                    units,
                    whole: true,
                    slowest,
                    in_force: m.in_force,
                });
            }
        }
        looked
    }

    /// The pulls that this event may release. An update lets its own workers read their writes; it affects other
    /// pulls only if it was the slowest member's. The same holds for other member events: otherwise each of a
    /// thousand joins would scan a thousand pulls.
    fn candidates(
        &mut self,
        changed: &PullTrigger,
        m: &Meta,
        conn_of: impl Fn(WorkerId) -> Option<ConnId>,
    ) -> Vec<ConnId> {
        match changed {
            PullTrigger::Pull(conn) => vec![*conn],
            PullTrigger::Initial => Vec::new(),
            PullTrigger::All => self.all(DecisiveState::of(m)),
            PullTrigger::Member(worker) => {
                let now = DecisiveState::of(m);
                match self.decided.as_ref() == Some(&now) {
                    true => conn_of(*worker).into_iter().collect(),
                    false => self.all(now),
                }
            }
            PullTrigger::Unit(unit, workers) => {
                let slowest = m.members.slowest_in(*unit);
                if self.slowest.insert(*unit, slowest) != Some(slowest) {
                    self.decided = None;
                    return self.by_conn.keys().copied().collect();
                }
                if let (true, [only]) = (self.sections.is_empty(), workers.as_slice()) {
                    return conn_of(*only).into_iter().collect();
                }
                let own = workers.iter().filter_map(|w| conn_of(*w));
                self.sections.iter().copied().chain(own).collect::<BTreeSet<_>>().into_iter().collect()
            }
        }
    }

    /// Scans all pulls, and stores the state that decides.
    fn all(&mut self, decides: DecisiveState) -> Vec<ConnId> {
        self.decided = Some(decides);
        self.slowest.clear();
        self.by_conn.keys().copied().collect()
    }
}

/// A pull, or a part of one, that is answered now.
#[derive(Clone, Debug)]
pub struct ReleasedPull {
    /// The request.
    pub pull: Arc<Pull>,
    /// Since when it waited for others.
    pub held: Option<Instant>,
    /// units, in the order in which they are sent.
    pub units: Vec<usize>,
    /// Nothing of the pull remains.
    pub whole: bool,
    /// The slowest member when the rule released it.
    pub slowest: Step,
    /// The mode at that time.
    pub in_force: InForce,
}

#[cfg(test)]
#[path = "pulls_tests.rs"]
mod tests;
