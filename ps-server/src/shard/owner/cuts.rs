//! The leader's side of image cuts, at the level `leader`: when to cut, what waits for a cut, when a push must wait.
//!
//! ```text
//!           push ──room?──▶ working copy, ack ──due──▶ parts, marker ──committed──▶ replicated
//!                  no: queue                             │
//!  Join, Leave, Finish ──────────────────── behind the marker
//! ```
//!
//! What a change of leadership may cost at the level `leader` is bounded here, and nowhere else: a push is acknowledged
//! only while fewer than the window's pushes are applied that no majority is known to hold, and while the oldest of them
//! is younger than the window. That needs no lease: a leader that was deposed without knowing it cannot commit a marker,
//! so its window fills or grows old, and it goes quiet.

use super::{ConnId, Lead, Owner, Proposed, Purpose, pushes::MAX_AHEAD};
use crate::shard::{
    command::{Command, Contribution, Proposal},
    cut::{CutId, MAX_PART_BYTES},
    state::Configured,
    working::{Piece, Working},
};
use paraft_common::{Payload, WorkerId, config::ServerJob};
use paraft_trace::Moment;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::time::Instant;

/// A cut is due after this many bytes of pushes in any case.
const CUT_BYTES: u64 = 64 << 20;
/// Parts of a cut that are proposed and not yet committed: as many MiB wait in openraft's queue, which counts entries
/// and not bytes, and other commands get their turn between them.
const MAX_PARTS: usize = 16;
/// A cut of which nothing is committed for this long has no majority behind it. The leader begins again: that sends its
/// workers to look for another, which may lead without its knowing.
const STALLED: Duration = Duration::from_secs(5);

/// What a leader knows of cuts. Dropped with the leadership.
#[derive(Default)]
pub struct Cuts {
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
    /// another leader: from versions that do not exist any more, and after steps that are lost.
    pub answered: BTreeSet<WorkerId>,
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
        self.working.unreplicated() < job.leader_window.pushes && self.working.oldest().is_none_or(within)
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
        // At half the window, so that pushes go on while the cut is on its way.
        let (interval, most) = (job.leader_window.age() / 2, (job.leader_window.pushes / 2).max(1));
        let at_once = self.cut_now || !self.deferred.is_empty() || pushes >= most || bytes >= CUT_BYTES;
        Some(if at_once { since } else { since + interval })
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
        self.drain_queue(&conf).await;
        self.propose_what_waited().await;
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

    /// A marker is committed and applied.
    pub(super) fn cut_applied(&mut self) {
        if let Some(lead) = &mut self.lead {
            lead.cuts.working.committed();
        }
    }
}
