//! Leadership epochs: how one starts, serves workers, restarts and ends; and when its Raft group may sleep.

use super::{
    DeferredCommand, Effect, GroupStatus, Leader, Purpose, Reply, Task, checkpoint, chunks, deltas, leases,
    norms, pending, pulls, rounds, shares, streams, switching, tally,
};
use crate::{
    compute::Panicked,
    raft::{Leadership, ProposeError},
    shard::Command,
};
use paraft_proto::RefusalKind;
use std::{
    collections::BTreeMap,
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

/// Delay before a leader restarts its epoch. Without it, a leader that cannot reach its followers would spin and
/// handle no input.
const RESTART_DELAY: Duration = Duration::from_millis(20);
/// How long a restarted epoch waits for a majority before it redirects its workers again.
const FENCE_TIMEOUT: Duration = Duration::from_secs(2);
/// A leader whose group answers nothing for this long has no majority. It restarts its epoch: its workers then look
/// for another leader, which may exist without its knowledge, and give up if there is none.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// A group without workers is put to sleep after this long.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// A group whose workers say nothing is put to sleep after this long. More than a step takes: after it their streams
/// have to be opened again.
const SILENT_TIMEOUT: Duration = Duration::from_secs(60);
/// A group that sleeps is checked so much later: a server leads many of them.
const ASLEEP_CHECK_DELAY: Duration = Duration::from_secs(15);

/// One leadership epoch: all leader-only state. Dropped as a whole.
pub(super) struct Epoch {
    pub term: u64,
    /// The epoch is not the first of its term.
    pub again: bool,
    /// Some of its state is lost: it must restart.
    pub broken: bool,
    pub phase: Phase,
    /// The purposes of the proposals and confirmations in flight, by number.
    pub asked: BTreeMap<u64, Purpose>,
    /// When the last of them was answered; if none was, when the first was made.
    pub heard: Instant,
    /// Since when the epoch is idle, and after how long it may sleep.
    pub quiet: Option<(Instant, Duration)>,
    pub streams: streams::Streams,
    pub leases: leases::Leases,
    pub pending: pending::PendingPushes<DeferredCommand>,
    pub rounds: rounds::Rounds,
    pub norms: norms::Norms,
    /// A script clips steps by their norm.
    pub clips: bool,
    pub pulls: pulls::WaitingPulls,
    pub shares: shares::Shares,
    pub deltas: deltas::Deltas,
    pub switching: switching::Switching,
    pub tally: tally::Tally,
    pub asks: chunks::ChunkRequests,
    pub kept: checkpoint::CheckpointSlot,
}

impl Epoch {
    /// Whether a worker waits for something, or has sent something that is not in the log.
    fn owes(&self) -> bool {
        let waits = [
            self.pending.is_empty(),
            self.rounds.is_empty(),
            self.norms.is_empty(),
            self.pulls.is_empty(),
            self.asks.is_empty(),
            self.deltas.working().is_level(),
        ];
        waits.contains(&false) || self.switching.is_under_way()
    }

    /// When the leader must assume that it has no majority.
    pub fn stalled(&self) -> Option<Instant> {
        (!self.asked.is_empty()).then_some(self.heard + STALL_TIMEOUT)
    }
}

/// The progress of an epoch. No push is admitted before everything up to the term's first entry is applied: a push
/// that the last leader committed and this one has not applied yet would look new. A restart in the same term also
/// waits for everything that it proposed so far. An entry with an unknown outcome may still be committed, and must
/// not come between the applied state and what is built on it.
/// between what is applied from then on and what that is built on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Waits until this time, then restarts.
    Pauses(Instant),
    /// An entry behind all its proposals is in flight, until this time at most.
    Fences(Instant),
    /// Its leadership is being confirmed.
    CatchesUp,
    /// It serves workers.
    Leads,
}

impl Leader {
    /// Handles the deadlines that have passed.
    pub(super) fn time(&mut self, group: &dyn GroupStatus) {
        let now = self.now.at;
        match self.epoch.as_ref().map(|e| e.phase) {
            Some(Phase::Pauses(at)) if at <= now => {
                self.enter_phase(Phase::Fences(now + FENCE_TIMEOUT));
                self.propose(Purpose::Fence, Command::Fence.into());
            }
            Some(Phase::Fences(until)) if until <= now => {
                let why = format!("no majority answered within {FENCE_TIMEOUT:?}");
                self.cannot_lead_yet(group, &ProposeError::new(why));
            }
            Some(Phase::Leads) => {
                self.sleep_if_quiet(group);
                self.check_leases();
                self.absent_too_long();
                self.next([Task::Rounds]);
            }
            _ => {}
        }
    }

    // ---- leadership ----

    pub(super) fn leadership(&mut self, group: &dyn GroupStatus, now: &Leadership) {
        let leads = now.leads.then_some(now.term);
        if self.epoch.as_ref().map(|e| e.term) == leads {
            return;
        }
        self.step_down(group);
        if let Some(term) = leads {
            self.begin(term, false);
        }
    }

    pub(super) fn begin(&mut self, term: u64, again: bool) {
        let phase = if again { Phase::Pauses(self.now.at + RESTART_DELAY) } else { Phase::CatchesUp };
        // A requester of an earlier epoch has asked another leader since, or given up.
        self.counters.save.store(false, std::sync::atomic::Ordering::Relaxed);
        self.epoch = Some(Epoch {
            term,
            again,
            broken: false,
            phase,
            asked: BTreeMap::new(),
            heard: self.now.at,
            quiet: None,
            streams: Default::default(),
            leases: Default::default(),
            pending: Default::default(),
            rounds: Default::default(),
            norms: Default::default(),
            clips: false,
            pulls: Default::default(),
            shares: Default::default(),
            deltas: Default::default(),
            switching: Default::default(),
            tally: Default::default(),
            asks: Default::default(),
            kept: Default::default(),
        });
        if !again {
            self.confirm(Purpose::CatchUp);
        }
    }

    /// Drops all leader-only state; redirects the streams to the leader.
    pub(super) fn step_down(&mut self, group: &dyn GroupStatus) {
        let Some(epoch) = self.epoch.take() else { return };
        self.counters.leases.lock().clear();
        *self.counters.auto.lock() = None;
        self.counters.staleness.clear();
        self.counters.queued.store(0, Relaxed);
        self.counters.leads.store(false, Relaxed);
        self.counters.streams.store(0, Relaxed);
        let window = epoch.deltas.working().unreplicated();
        if window > 0 {
            let shard = self.shard.id().0;
            tracing::warn!(shard, pushes = window, "stepping down with pushes that no delta holds");
        }
        let refusal = self.not_leader(group);
        for conn in epoch.streams.all() {
            self.out.push_back(Effect::Send(conn, Reply::Refused(refusal.clone().into())));
            self.out.push_back(Effect::Close(conn));
        }
    }

    pub(super) fn not_leader(&self, group: &dyn GroupStatus) -> RefusalKind {
        RefusalKind::NotLeader { shard: self.shard.id(), leader: group.leader_address(), stopped: None }
    }

    /// Restarts the epoch: a proposal failed although the term did not end (the lease ran out, say).
    pub(super) fn restart(&mut self, group: &dyn GroupStatus) {
        let term = self.epoch.as_ref().map(|e| e.term).filter(|_| !self.is_deposed());
        self.step_down(group);
        if let Some(term) = term.filter(|_| group.leads()) {
            self.begin(term, true);
        }
    }

    /// Whether an entry of a successor is applied here before this leader learned of the successor. The leader-only
    /// state (working copies, pushes in flight) then does not match the replicated state, so this leader must
    /// answer nothing.
    pub(super) fn is_deposed(&self) -> bool {
        self.epoch.as_ref().is_some_and(|e| e.term < self.shard.term())
    }

    pub(super) fn enter_phase(&mut self, phase: Phase) {
        if let Some(e) = &mut self.epoch {
            e.phase = phase;
        }
    }

    /// The epoch, if it serves workers.
    pub(super) fn leading(&mut self) -> Option<&mut Epoch> {
        self.epoch.as_mut().filter(|e| e.phase == Phase::Leads)
    }

    pub(super) fn ready(&mut self) {
        let conf = self.shard.configured();
        let Some(e) = &mut self.epoch else { return };
        e.phase = Phase::Leads;
        self.counters.leads.store(true, Relaxed);
        let members = self.shard.read(|m| m.members.unfinished().map(|(w, _)| w).collect());
        e.leases.begin(members, conf.as_ref().map(|c| &c.job), self.now.at);
        tracing::info!(shard = self.shard.id().0, term = e.term, "leading");
    }

    pub(super) fn cannot_lead_yet(&mut self, group: &dyn GroupStatus, e: &ProposeError) {
        // Logged once a term: it retries many times a second. On a busy host elections end like this: no warning.
        let shard = self.shard.id().0;
        match self.epoch.as_ref().is_some_and(|e| e.again) {
            true => tracing::debug!(shard, error = %e, "cannot lead yet; trying again"),
            false => tracing::info!(shard, error = %e, "cannot lead yet; trying again"),
        }
        self.restart(group);
    }

    pub(super) fn continue_epoch(&mut self, group: &dyn GroupStatus, counts: bool) {
        let now = self.now.at;
        if self.leading().and_then(|e| e.stalled()).is_some_and(|at| at <= now) {
            tracing::warn!(
                shard = self.shard.id().0,
                "no majority answers; workers are redirected until one does"
            );
            return self.restart(group);
        }
        if self.epoch.as_ref().is_some_and(|e| e.broken) || self.is_deposed() {
            return self.restart(group);
        }
        if counts {
            self.tell_counts();
        }
        self.propose_switch();
    }

    /// Restarts the epoch after a failed computation, as after a lost proposal: its input is gone.
    pub(super) fn broken(&mut self, e: &Panicked) {
        tracing::error!(shard = self.shard.id().0, error = %e, "a computation failed; the leader restarts");
        if let Some(epoch) = &mut self.epoch {
            epoch.broken = true;
        }
    }

    // ---- sleep: no stream is open or all are silent, no member is absent, and nothing is in flight ----

    pub(super) fn check_idle(&mut self) {
        let (under_way, now) = (self.under_way, self.now.at);
        let members = || self.shard.read(|m| m.members.unfinished().next().is_some());
        let Some(e) = &mut self.epoch else { return };
        self.counters.streams.store(e.streams.len() as u64, Relaxed);
        if under_way > 0 || e.phase != Phase::Leads || !e.leases.is_quiet() || e.owes() {
            e.quiet = None;
            return;
        }
        let workers = !e.streams.is_empty() || members();
        let timeout = if workers { SILENT_TIMEOUT } else { IDLE_TIMEOUT };
        e.quiet = Some((e.quiet.map_or(now, |(since, _)| since), timeout));
    }

    /// Puts an idle group to sleep. It checks a sleeping group too: another replica may wake it without an event
    /// here.
    pub(super) fn sleep_if_quiet(&mut self, group: &dyn GroupStatus) {
        let now = self.now.at;
        let Some(e) = &mut self.epoch else { return };
        let Some((since, timeout)) = e.quiet.filter(|(since, timeout)| *since + *timeout <= now) else {
            return;
        };
        let asleep = group.is_asleep();
        e.quiet = Some((if asleep { now + ASLEEP_CHECK_DELAY } else { now }, timeout));
        if !asleep {
            tracing::debug!(shard = self.shard.id().0, idle = ?(now - since), "the group may sleep");
            self.falls_asleep = true;
            self.under_way += 1;
            self.out.push_back(Effect::Sleep);
        }
    }
}
