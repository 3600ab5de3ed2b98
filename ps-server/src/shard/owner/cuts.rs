//! The leader's side of image cuts: when to cut, what waits for a cut, when a push must wait, and the change of form.
//!
//! ```text
//!           push ──room?──▶ working copy ──due──▶ parts, marker ──committed──▶ acks (quorum levels)
//!                  no: queue                          │
//!  Join, Leave, Finish, change of form ──── behind the marker
//! ```
//!
//! What a change of leadership may cost at the level `leader` is bounded here, and nowhere else: a push is acknowledged
//! only while fewer than the window's pushes are applied that no majority is known to hold, and while the oldest of them
//! is younger than the window. That needs no lease: a leader that was deposed without knowing it cannot commit a marker,
//! so its window fills or grows old, and it goes quiet.

use super::{ConnId, Lead, Owner, Proposed, Purpose};
use crate::shard::{
    command::{Command, Contribution, Proposal},
    cut::{CutId, MAX_PART_BYTES},
    form::{Form, Meter},
    state::Configured,
    working::{Owed, Piece, Working},
};
use paraft_common::{Durability, Mode, Payload, WorkerId, config::ServerJob};
use paraft_trace::Moment;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::time::Instant;

/// Time between two cuts under the quorum levels, at most: their acks wait for it, their workers (up to [`MAX_AHEAD`])
/// do not.
const CUT_INTERVAL: Duration = Duration::from_millis(100);
/// A cut is due after this many pushes in any case: each of them is an ack that waits.
const CUT_PUSHES: u64 = 8192;
/// And after this many bytes of pushes: the workers keep them until the ack.
const CUT_BYTES: u64 = 64 << 20;
/// Parts of a cut that are proposed and not yet committed: as many MiB wait in openraft's queue, which counts entries
/// and not bytes, and other commands get their turn between them.
const MAX_PARTS: usize = 16;
/// A cut of which nothing is committed for this long has no majority behind it. The leader begins again: that sends its
/// workers to look for another, which may lead without its knowing.
const STALLED: Duration = Duration::from_secs(5);
/// Under the quorum levels, a worker whose step is this far ahead of what is replicated of it waits for the next cut: it
/// keeps the pushes of so many steps for a new leader, and its stream has room for as many acks.
pub const MAX_AHEAD: u64 = 4;

/// What a leader knows of cuts. Dropped with the leadership.
#[derive(Default)]
pub struct Cuts {
    pub form: Form,
    /// A change of form is under way: pushes wait until it is applied.
    changing: Option<Form>,
    /// And it is proposed.
    change_proposed: bool,
    pub working: Working,
    /// Parts proposed and not yet applied.
    parts: usize,
    /// When the cut under way was begun or a part of it was last applied.
    moved: Option<Instant>,
    /// When the cut under way was begun.
    begun: Moment,
    /// Somebody waits for the next cut.
    cut_now: bool,
    queue: VecDeque<Queued>,
    /// How many of the queue are whose.
    queued: BTreeMap<WorkerId, usize>,
    /// To be proposed behind the next cut.
    deferred: Vec<(Purpose, Proposal)>,
    /// To be proposed behind the marker of the cut under way.
    behind: Vec<(Purpose, Proposal)>,
    /// Workers that got weights from this leader. Before, what they push may come from a state that went down with
    /// another leader: from versions that do not exist any more and, at the level `leader`, after steps that are lost.
    pub answered: BTreeSet<WorkerId>,
    meter: Option<Meter>,
}

/// A push that waits for room.
pub struct Queued {
    pub conn: ConnId,
    pub contribution: Contribution,
    pub bucket: usize,
    pub sum_of_squares: f64,
    pub payload: Payload,
    pub arrived: Moment,
    /// It came before its worker got weights from this leader.
    pub from_elsewhere: bool,
}

impl Cuts {
    /// Whether `worker` has pushes in the queue.
    pub fn has_queued(&self, worker: WorkerId) -> bool {
        self.queued.contains_key(&worker)
    }

    /// Whether a change of form is proposed and not yet taken over.
    pub fn is_changing(&self) -> bool {
        self.changing.is_some()
    }

    /// Whether everything that was pushed here is replicated.
    pub fn is_level(&self) -> bool {
        self.working.is_level() && self.queue.is_empty()
    }

    /// Drops what waits of a worker whose session ends: it was never acknowledged.
    pub fn forget(&mut self, worker: WorkerId) {
        if self.queued.remove(&worker).is_some() {
            self.queue.retain(|q| q.contribution.worker != worker);
        }
    }

    /// Somebody waits for the next cut.
    pub fn hurry(&mut self) {
        self.cut_now = true;
    }

    /// Whether the next push may be taken.
    fn has_room(&self, job: &ServerJob, now: Instant) -> bool {
        let within = |since: Instant| now < since + job.leader_window.age();
        self.changing.is_none()
            && (job.durability != Durability::Leader
                || self.working.unreplicated() < job.leader_window.pushes
                    && self.working.oldest().is_none_or(within))
    }

    fn pop(&mut self) -> Option<Queued> {
        let q = self.queue.pop_front()?;
        if let Some(n) = self.queued.get_mut(&q.contribution.worker) {
            *n -= 1;
            if *n == 0 {
                self.queued.remove(&q.contribution.worker);
            }
        }
        Some(q)
    }

    /// When the open window must be cut; `None` where there is nothing to cut, or a cut is under way.
    fn due(&self, job: &ServerJob) -> Option<Instant> {
        let (since, pushes, bytes) = self.working.open().filter(|_| !self.working.cutting())?;
        let (interval, most) = match job.durability {
            // At half the window, so that pushes go on while the cut is on its way.
            Durability::Leader => (job.leader_window.age() / 2, (job.leader_window.pushes / 2).max(1)),
            Durability::QuorumMemory | Durability::QuorumDisk => (CUT_INTERVAL, CUT_PUSHES),
        };
        let at_once = self.cut_now || !self.deferred.is_empty() || pushes >= most || bytes >= CUT_BYTES;
        Some(if at_once { since } else { since + interval })
    }
}

impl Lead {
    /// Whether the form may change now: not while rounds are open, which end as updates.
    fn may_change_form(&self, conf: &Configured, mode: Mode) -> bool {
        let in_rounds = !self.rounds.is_empty() || !self.unclipped.is_empty();
        conf.job.may_change_form(mode)
            && self.switching.is_none()
            && self.cuts.changing.is_none()
            && !in_rounds
    }
}

impl Owner {
    /// Whether a push may be taken now; else it must be queued, behind those that are.
    pub(super) fn takes_pushes(&self, conf: &Configured) -> bool {
        let room = |l: &Lead| l.cuts.queue.is_empty() && l.cuts.has_room(&conf.job, Instant::now());
        self.lead.as_ref().is_some_and(room)
    }

    /// Lets a push wait. False where its worker has more waiting than an honest one can have.
    pub(super) fn queue(&mut self, conf: &Configured, push: Queued) -> bool {
        let Some(lead) = &mut self.lead else { return true };
        let queued = lead.cuts.queued.entry(push.contribution.worker).or_insert(0);
        // All that a worker keeps may come again at once, and the step that it is in.
        if *queued > (MAX_AHEAD as usize + 2) * conf.buckets.len() {
            return false;
        }
        *queued += 1;
        lead.cuts.queue.push_back(push);
        true
    }

    /// Proposes a command that must find everything in the log that was pushed before it: a member that leaves or
    /// finishes, or one that begins where the others are.
    pub(super) async fn propose_behind_cut(&mut self, purpose: Purpose, proposal: Proposal) {
        let Some(lead) = &mut self.lead else { return };
        let cuts = &mut lead.cuts;
        if cuts.working.open().is_some() {
            cuts.deferred.push((purpose, proposal));
        } else if cuts.working.proposing() {
            cuts.behind.push((purpose, proposal));
        } else {
            self.propose(purpose, proposal).await;
        }
    }

    /// Whatever has become possible: called after everything that the owner does.
    pub(super) async fn go_on(&mut self, reigns: &mut u64) {
        if self.stalled().is_some_and(|at| at <= Instant::now()) {
            tracing::warn!(shard = self.shard.id().0, "no majority takes the image cut under way");
            return self.restart(reigns);
        }
        if self.lead.as_ref().is_some_and(|l| l.broken) || self.is_deposed() {
            return self.restart(reigns);
        }
        let Some(conf) = self.shard.configured() else { return };
        if !self.lead.as_ref().is_some_and(|l| l.ready) {
            return;
        }
        self.steer(&conf);
        self.go_on_switching(&conf).await;
        if self.follow_form(&conf) {
            self.answer_pulls(super::pulls::Touched::All); // of the other form's state none were
        }
        self.propose_change().await;
        self.drain_queue(&conf).await;
        self.propose_what_waited().await;
        if self.shard.read(|m| m.in_force.mode).averages() {
            return; // image cuts are not for lock-step
        }
        self.consider_form(&conf).await;
        self.cut_if_due(&conf).await;
    }

    /// When [`Self::go_on`] has something to do though nothing happens.
    pub(super) fn cut_deadline(&self) -> Option<Instant> {
        let conf = self.shard.configured()?;
        let due = self.lead.as_ref().filter(|l| l.ready)?.cuts.due(&conf.job);
        due.into_iter().chain(self.stalled()).min()
    }

    fn stalled(&self) -> Option<Instant> {
        let cuts = &self.lead.as_ref().filter(|l| l.ready)?.cuts;
        cuts.moved.filter(|_| cuts.working.cutting()).map(|at| at + STALLED)
    }

    /// Takes over the form of the replicated state; a change is over when its entry is applied and every cut before it.
    fn follow_form(&mut self, conf: &Configured) -> bool {
        let form = self.shard.read(|m| m.form);
        let Some(lead) = &mut self.lead else { return false };
        let over = lead.cuts.changing.is_none_or(|to| to == form && lead.cuts.change_proposed);
        if !over || lead.cuts.form == form && lead.cuts.changing.is_none() || !lead.cuts.working.is_level() {
            return false;
        }
        let changed = lead.cuts.changing.take().is_some();
        (lead.cuts.form, lead.cuts.meter) = (form, None);
        if changed {
            let (shard, form) = (self.shard.id().0, form.name());
            tracing::info!(shard, form, job = conf.job.name, "the log changed its form");
        }
        true
    }

    async fn drain_queue(&mut self, conf: &Arc<Configured>) {
        let mut drained = false;
        loop {
            let Some(lead) = &mut self.lead else { return };
            if !lead.cuts.has_room(&conf.job, Instant::now()) {
                break;
            }
            let Some(q) = lead.cuts.pop() else { break };
            self.take_push(conf, q).await;
            drained = true;
        }
        if drained {
            self.answer_pulls(super::pulls::Touched::All);
        }
    }

    /// Counts a push for the choice of form.
    pub(super) fn measure(&mut self, conf: &Configured, bucket: usize, payload: usize) {
        let mode = self.shard.read(|m| m.in_force.mode);
        let Some(lead) = self.lead.as_mut().filter(|_| conf.job.may_change_form(mode)) else { return };
        let spec = conf.buckets[bucket].spec;
        let image = spec.len * size_of::<f32>() * (1 + conf.slots(spec.kind));
        let meter = lead.cuts.meter.get_or_insert_with(|| Meter::new(CUT_INTERVAL));
        meter.push(bucket, payload, image, Instant::now());
    }

    async fn consider_form(&mut self, conf: &Configured) {
        let mode = self.shard.read(|m| m.in_force.mode);
        let may = |l: &&mut Lead| l.may_change_form(conf, mode);
        let Some(lead) = self.lead.as_mut().filter(may) else { return };
        let cuts = &mut lead.cuts;
        let Some(meter) = &mut cuts.meter else { return };
        let Some(form) = meter.decide(cuts.form, Instant::now()) else { return };
        if form == Form::Images && self.group.others() == 0 {
            return; // there is nobody to send fewer bytes to, and acks would wait for cuts
        }
        self.change_form(form).await;
    }

    #[cfg(test)]
    pub(super) async fn change_form_if_possible(&mut self, form: Form) {
        let Some(conf) = self.shard.configured() else { return };
        let mode = self.shard.read(|m| m.in_force.mode);
        let may = |l: &Lead| l.ready && l.may_change_form(&conf, mode) && l.cuts.form != form;
        if self.lead.as_ref().is_some_and(may) {
            self.change_form(form).await;
        }
    }

    /// Begins a change of form; pushes wait until it is applied.
    pub(super) async fn change_form(&mut self, form: Form) {
        let Some(lead) = &mut self.lead else { return };
        (lead.cuts.changing, lead.cuts.change_proposed) = (Some(form), false);
        self.propose_change().await;
    }

    /// Proposes the change of form, behind the pushes that were taken before it: those that wait for what is not applied yet
    /// become updates first.
    async fn propose_change(&mut self) {
        let Some(lead) = self.lead.as_mut().filter(|l| l.early.is_empty()) else { return };
        let cuts = &mut lead.cuts;
        let Some(form) = cuts.changing.filter(|_| !cuts.change_proposed) else { return };
        cuts.change_proposed = true;
        self.propose_behind_cut(Purpose::ChangeForm, Command::ChangeForm { form }.into()).await;
    }

    async fn cut_if_due(&mut self, conf: &Configured) {
        let number = self.cuts + 1;
        let last = self.shard.read(|m| m.last_cut);
        let Some(lead) = &mut self.lead else { return };
        let cut = CutId { term: lead.term, number };
        let cuts = &mut lead.cuts;
        if cuts.due(&conf.job).is_some_and(|at| at <= Instant::now())
            && cuts.working.cut(conf, cut, last, MAX_PART_BYTES)
        {
            self.cuts = number;
            self.counters.cuts.fetch_add(1, Relaxed);
            cuts.cut_now = false;
            cuts.moved = Some(Instant::now());
            cuts.begun = Moment::now();
            cuts.behind.append(&mut cuts.deferred);
            if let Some(meter) = &mut cuts.meter {
                meter.cut();
            }
        }
        self.propose_parts(conf).await;
    }

    async fn propose_parts(&mut self, conf: &Configured) {
        loop {
            let Some(lead) = &mut self.lead else { return };
            if lead.cuts.parts >= MAX_PARTS {
                return;
            }
            match lead.cuts.working.next(conf) {
                None => return,
                Some(Piece::Part(part)) => {
                    lead.cuts.parts += 1;
                    self.propose(Purpose::CutPart, part).await;
                }
                Some(Piece::Marker(marker)) => {
                    let behind = std::mem::take(&mut lead.cuts.behind);
                    let bytes = match &marker.command {
                        Command::Cut { record, .. } => record.bytes,
                        _ => 0,
                    };
                    let step = marker.command.latest_step().unwrap_or_default();
                    let of = Proposed { began: lead.cuts.begun, step, bytes };
                    self.propose(Purpose::Cut(of), marker).await;
                    for (purpose, proposal) in behind {
                        self.propose(purpose, proposal).await;
                    }
                }
            }
        }
    }

    /// A part is applied.
    pub(super) fn part_applied(&mut self) {
        if let Some(lead) = &mut self.lead {
            lead.cuts.parts = lead.cuts.parts.saturating_sub(1);
            lead.cuts.moved = Some(Instant::now());
        }
    }

    /// A marker is committed and applied: now the quorum levels acknowledge what it covers.
    pub(super) fn cut_applied(&mut self) {
        let Some(lead) = &mut self.lead else { return };
        for Owed { worker, session, seq, version } in lead.cuts.working.committed() {
            self.ack(worker, session, seq, version);
        }
    }
}
