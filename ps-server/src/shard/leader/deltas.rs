//! State deltas at the level `leader`: when one is written, which commands wait for it, and when a push must wait.
//!
//! ```text
//!           push ──room?──▶ working copy, ack ──due──▶ parts, marker ──committed──▶ replicated
//!                  no: waits (`pending`)                 │
//!  Join, Leave, Finish ──────────────────── behind the marker
//! ```
//!
//! This module alone bounds what a failover may lose at the level `leader`. A push is acknowledged only while fewer
//! than the window's pushes are applied here without a known majority, and while the oldest of them is younger than
//! the window. This needs no lease: a deposed leader cannot commit a marker, so its window fills or becomes too
//! old, and it stops acknowledging.

use super::{
    Purpose,
    working::{DeltaPiece, WorkingCopies},
};
use crate::shard::{
    command::Proposal,
    delta::{DeltaId, MAX_PART_BYTES},
    members::Members,
    state::ShardConfig,
};
use paraft_common::{WorkerId, config::ServerJob};
use paraft_trace::Moment;
use std::{collections::BTreeSet, time::Instant};

/// A delta is always due after this many bytes of pushes.
const DELTA_BYTES: u64 = 64 << 20;
/// Parts of a delta that are proposed and not yet committed. openraft's queue counts entries, not bytes, so this
/// bounds it in MiB, and other commands get their turn between the parts.
const MAX_PARTS: usize = 16;

/// The leader's state of deltas. Dropped with the epoch.
#[derive(Default)]
pub struct Deltas {
    working: WorkingCopies,
    /// Parts proposed and not yet applied.
    parts: usize,
    /// When the delta in flight was started.
    begun: Moment,
    /// A command waits for the next delta.
    now_due: bool,
    /// To be proposed behind the next delta.
    behind_next: Vec<(Purpose, Proposal)>,
    /// To be proposed behind the marker of the delta in flight.
    behind_marker: Vec<(Purpose, Proposal)>,
    /// Workers that got weights from this leader. The pushes of other workers may come from state that another
    /// leader lost: they may name versions that do not exist any more, and follow lost steps.
    answered: BTreeSet<WorkerId>,
}

/// The next proposal of a delta.
pub enum DeltaProposal {
    /// A part.
    Part(Proposal),
    /// The marker, when its delta was started, and the commands behind it.
    Marker(Proposal, Moment, Vec<(Purpose, Proposal)>),
}

impl Deltas {
    /// The working copies.
    pub fn working(&self) -> &WorkingCopies {
        &self.working
    }

    /// The working copies, for a push.
    pub fn working_mut(&mut self) -> &mut WorkingCopies {
        &mut self.working
    }

    /// Adopts the changes of the members in the log.
    pub fn follow(&mut self, members: &Members) {
        self.working.follow(members);
    }

    /// Makes the next delta due now, because a command waits for it.
    pub fn request_delta(&mut self) {
        self.now_due = true;
    }

    /// Records that a worker gets weights from this leader.
    pub fn mark_answered(&mut self, worker: WorkerId) {
        self.answered.insert(worker);
    }

    /// Whether the worker got weights from this leader.
    pub fn has_answered(&self, worker: WorkerId) -> bool {
        self.answered.contains(&worker)
    }

    /// Whether the next push may be accepted.
    pub fn has_room(&self, job: &ServerJob, now: Instant) -> bool {
        let within = |since: Instant| now < since + job.leader_window.age();
        self.working.unreplicated() < job.leader_window.pushes && self.working.oldest().is_none_or(within)
    }

    /// Queues a command that the log must hold behind everything that was pushed before it: a member leaves,
    /// finishes, or resumes where the others are. Returns the command if the log already holds all pushes.
    pub fn behind(&mut self, purpose: Purpose, proposal: Proposal) -> Option<(Purpose, Proposal)> {
        if self.working.open().is_some() {
            self.behind_next.push((purpose, proposal));
        } else if self.working.proposing() {
            self.behind_marker.push((purpose, proposal));
        } else {
            return Some((purpose, proposal));
        }
        None
    }

    /// When the open window must be written; `None` if there is nothing to write, or a delta is in flight.
    pub fn due(&self, job: &ServerJob) -> Option<Instant> {
        let (since, pushes, bytes) = self.working.open().filter(|_| !self.working.cutting())?;
        // At half the window, so that pushes continue while the delta is in flight.
        let (interval, most) = (job.leader_window.age() / 2, (job.leader_window.pushes / 2).max(1));
        let at_once = self.now_due || !self.behind_next.is_empty() || pushes >= most || bytes >= DELTA_BYTES;
        Some(if at_once { since } else { since + interval })
    }

    /// Starts a delta, if one is due. `last`: the last delta that took effect.
    pub fn begin_if_due(
        &mut self,
        conf: &ShardConfig,
        delta: DeltaId,
        last: Option<DeltaId>,
        now: Instant,
        moment: Moment,
    ) -> bool {
        let due = self.due(&conf.job).is_some_and(|at| at <= now);
        let begins = due && self.working.delta(conf, delta, last, MAX_PART_BYTES);
        if begins {
            self.now_due = false;
            self.begun = moment;
            self.behind_marker.append(&mut self.behind_next);
        }
        begins
    }

    /// The next proposal of the delta in flight.
    pub fn propose(&mut self, conf: &ShardConfig) -> Option<DeltaProposal> {
        if self.parts >= MAX_PARTS {
            return None;
        }
        Some(match self.working.next(conf)? {
            DeltaPiece::Part(part) => {
                self.parts += 1;
                DeltaProposal::Part(part)
            }
            DeltaPiece::Marker(marker) => {
                DeltaProposal::Marker(marker, self.begun, std::mem::take(&mut self.behind_marker))
            }
        })
    }

    /// Records that a part is applied.
    pub fn part_applied(&mut self) {
        self.parts = self.parts.saturating_sub(1);
    }

    /// Records that a marker is committed and applied.
    pub fn applied(&mut self) {
        self.working.committed();
    }
}

#[cfg(test)]
#[path = "deltas_tests.rs"]
mod tests;
