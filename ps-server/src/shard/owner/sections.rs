//! Sections: the image of the shard that a checkpoint is written from. It holds what is replicated, and nothing of the
//! working copies.
//!
//! Leader-only: a section that vanishes with its leader is a checkpoint that is not made; the next one is. The image
//! shares the buckets until they change (copy on write), so it costs the leader memory as training goes on, at
//! most a copy of the shard; a bucket that was fetched is let go. There is one at a time: until it is fetched, no other is kept, unless the worker that was
//! to fetch it has left, or has not come for a long time.
//!
//! A worker says in its pull that a checkpoint is due. In BSP the state is exactly that of step k from the apply
//! that completes step k until the first pull of step k is answered, because nobody can push step k+1 before; so
//! the section is taken right before that answer. In SSP and ASP no such moment exists: the section is taken when the
//! member that is to write it comes to step k, and says what it holds.
//!
//! With the leased sampler only the worker that is to write a checkpoint asks for its sections, between two epochs, while
//! nobody trains (`shard/chunks.rs`): then they are of one moment in every mode.

use super::{Lead, Owner};
use crate::shard::{bucket::BucketData, state::Configured};
use paraft_common::{BucketId, Mode, Step, WorkerId, config::Stopping};
use paraft_proto::RefusalKind;
use parking_lot::Mutex;
use std::{
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::time::Instant;

/// A consistent copy of what a checkpoint keeps of a shard.
#[derive(Debug)]
pub struct Section {
    /// The step it was asked for. In BSP the state is that of this step.
    pub step: Step,
    /// TOML of the job.
    pub job: String,
    /// Hears that they are let go.
    conf: Arc<Configured>,
    /// The buckets, by rising id; those that were fetched are gone.
    buckets: Vec<(BucketId, Mutex<Option<Arc<BucketData>>>)>,
    /// Each member's clock, and whether it has finished. In SSP and ASP one bucket may hold a push more.
    pub members: Vec<(WorkerId, Step, bool)>,
    /// Early stopping (shard 0).
    pub stopping: Stopping,
}

impl Section {
    /// Buckets that it has or had.
    pub fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// The bucket at a place among the shard's, unless it was let go.
    pub fn bucket(&self, place: usize) -> Option<(BucketId, Arc<BucketData>)> {
        let (id, data) = self.buckets.get(place)?;
        Some((*id, data.lock().clone()?))
    }

    /// The bucket at a place is fetched: from now on an update need not copy it.
    pub fn let_go(&self, place: usize) {
        if let Some((_, data)) = self.buckets.get(place) {
            data.lock().take();
            self.conf.let_go();
        }
    }

    fn is_whole(&self) -> bool {
        self.buckets.iter().all(|(_, data)| data.lock().is_some())
    }
}

/// A section that was not fetched for so long gives way to the next: longer than a worker writes the one before, as a
/// rule. (It fetches what it was told to, or lets it go; this is for the message that was lost.)
const FETCH_PATIENCE: Duration = Duration::from_secs(60);

/// The section that a leader keeps. Once it is being fetched, only the fetching holds it.
#[derive(Debug, Default)]
pub(super) struct Kept {
    step: Step,
    /// Nobody has asked for it yet.
    section: Option<Waiting>,
    fetching: Weak<Section>,
}

#[derive(Debug)]
struct Waiting {
    section: Arc<Section>,
    writer: Option<WorkerId>,
    since: Instant,
}

impl Kept {
    fn has(&self, step: Step) -> bool {
        self.step == step && (self.section.is_some() || self.fetching.strong_count() > 0)
    }
}

impl Owner {
    /// Takes the section that is due, if one is, before the pulls of `due` (worker, step) are answered.
    pub(super) fn keep_section(&mut self, conf: &Arc<Configured>, due: &[(WorkerId, Step)]) {
        let Some(lead) = &mut self.lead else { return };
        let leased = conf.job.chunks.is_some();
        let lowest = self.shard.read(|m| m.members.active().map(|(w, _)| w).next());
        let mode = self.shard.read(|m| m.in_force.mode);
        let any = leased || mode == Mode::Bsp;
        let wanted = due.iter().find(|(worker, _)| any || Some(*worker) == lowest);
        let writer = if leased { wanted.map(|(worker, _)| *worker) } else { lowest };
        let Some(&(_, step)) = wanted.filter(|(_, step)| !lead.kept.has(*step)) else { return };
        let id = self.shard.id().0;
        let waited_for =
            |w: &Waiting| w.writer == writer && w.writer.is_some() && w.since.elapsed() < FETCH_PATIENCE;
        if lead.kept.fetching.strong_count() > 0 || lead.kept.section.as_ref().is_some_and(waited_for) {
            let before = lead.kept.step.0;
            tracing::info!(
                shard = id,
                step = step.0,
                before,
                "no section kept: the one before is not fetched yet"
            );
            return;
        }
        // While the small part is held: `apply` changes a bucket before it records whose step that was, so what is
        // recorded is in the buckets, and at most one push more; an image cut is in as a whole or not at all.
        let taken = self.shard.view(|now, m| {
            // Of a snapshot that was installed meanwhile the small part is not that of these buckets.
            now.filter(|now| Arc::ptr_eq(now, conf))?;
            let buckets = conf.buckets.iter().map(|b| (b.id, Mutex::new(Some(b.image())))).collect();
            let level = m.members.active().all(|(_, m)| m.steps().iter().all(|s| *s == step));
            let members = m.members.iter().map(|(w, m)| (w, m.clock(), m.finished)).collect();
            Some((buckets, members, m.stopping(), level, m.job.clone()))
        });
        let Some((buckets, members, stopping, level, job)) = taken else { return };
        if mode == Mode::Bsp && !(level && nothing_later_in_flight(lead, step)) {
            tracing::warn!(shard = id, step = step.0, "no section kept: some member is not at this step");
            return;
        }
        let section = Arc::new(Section { step, job, conf: conf.clone(), buckets, members, stopping });
        let waiting = Waiting { section, writer, since: Instant::now() };
        lead.kept = Kept { step, section: Some(waiting), fetching: Weak::new() };
    }

    /// Whether this worker is to write the checkpoint of `step`: the lowest that trains, if there is a section.
    pub(super) fn writes_section(&self, conf: &Configured, worker: WorkerId, step: Step) -> bool {
        if conf.job.chunks.is_some() {
            return self.lead.as_ref().is_some_and(|l| l.kept.has(step)); // nobody else asks
        }
        let lowest = self.shard.read(|m| m.members.active().map(|(w, _)| w).next());
        lowest == Some(worker) && self.lead.as_ref().is_some_and(|l| l.kept.has(step))
    }

    /// Hands the section out, once: it is the fetching that keeps it from then on.
    pub(super) fn fetch_section(&mut self, step: Step) -> Result<Arc<Section>, RefusalKind> {
        let shard = self.shard.id();
        let Some(lead) = &mut self.lead else { return Err(self.not_leader()) };
        let none = RefusalKind::NoSection { shard, step };
        let kept = Some(&mut lead.kept).filter(|k| k.step == step).ok_or(none.clone())?;
        let section = kept
            .section
            .take()
            .map(|w| w.section)
            .or_else(|| kept.fetching.upgrade().filter(|s| s.is_whole()));
        let section = section.ok_or(none)?;
        kept.fetching = Arc::downgrade(&section);
        Ok(section)
    }
}

/// Whether no update beyond `step` is on its way to the buckets while they are read: the task that applies may be
/// ahead of this one.
fn nothing_later_in_flight(lead: &Lead, step: Step) -> bool {
    lead.in_flight.values().all(|s| *s <= step)
}
