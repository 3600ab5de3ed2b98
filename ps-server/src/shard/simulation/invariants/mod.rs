//! The invariants of every schedule, one per file. They check the same history.

mod acknowledged;
mod exactly_once;
mod membership;
mod recorded;
mod replicas;
mod retries;
mod skipped;
mod staleness;
mod versions;

use super::{
    cluster::{Cluster, Group},
    worker::{BUCKETS, PLACES},
};
use crate::shard::Shard;
use bytes::Bytes;
use paraft_common::{Mode, SessionId, Step, Version, WorkerId};
use std::collections::BTreeMap;

pub use replicas::replicas;

/// A step of a worker: the value that it adds at its own place in every bucket.
#[derive(Clone, Debug)]
pub struct Pushed {
    worker: WorkerId,
    session: SessionId,
    step: Step,
    /// It has no gradient, and adds nothing at its place.
    skip: bool,
    acked: [bool; BUCKETS],
    /// Its worker was notified that it came too late for its round.
    dropped: [bool; BUCKETS],
}

/// The context of a pull's answer.
pub struct Answer {
    /// The stream.
    pub conn: u64,
    /// The last session that any worker knew when it was sent. Later sessions are not in it.
    pub told: SessionId,
    /// The slowest worker's clock, according to the leader.
    pub slowest: Step,
    /// The mode in force when each bucket was released.
    pub modes: BTreeMap<usize, Mode>,
}

/// All actions of the workers, and all replies to them.
pub struct History {
    /// Whether pushes may be averaged, in any mode that the job had, has or may get.
    averages: bool,
    /// Rounds may close without a worker's push.
    drops_late: bool,
    /// The level is `leader`: a failover may lose acknowledged pushes, and counts them.
    lossy: bool,
    cluster: Cluster,
    /// By place.
    pushed: Vec<Pushed>,
    /// The highest acknowledged version, by term and bucket.
    acked: BTreeMap<(u64, usize), Version>,
    /// The minimum versions that a pull must return, set when it is sent.
    floor: BTreeMap<WorkerId, [Version; BUCKETS]>,
    /// The versions of each worker's last pull, and its stream.
    shown: BTreeMap<WorkerId, (u64, [Version; BUCKETS])>,
    sessions: membership::Sessions,
    /// The last weights that each worker got of each bucket, before the job's end.
    got: BTreeMap<(WorkerId, usize), (Version, Bytes)>,
    /// The weights of the finished job, which must be the same for all workers.
    last: Option<Vec<Bytes>>,
}

impl History {
    pub fn new(averages: bool, drops_late: bool, lossy: bool, cluster: Cluster) -> Self {
        Self {
            averages,
            drops_late,
            lossy,
            cluster,
            pushed: Vec::new(),
            acked: BTreeMap::new(),
            floor: BTreeMap::new(),
            shown: BTreeMap::new(),
            sessions: membership::Sessions::default(),
            got: BTreeMap::new(),
            last: None,
        }
    }

    /// A worker pushes a step in every bucket, or skips it; returns its place.
    pub fn pushes(&mut self, worker: WorkerId, session: SessionId, step: Step, skip: bool) -> usize {
        self.pushed.push(Pushed {
            worker,
            session,
            step,
            skip,
            acked: [false; BUCKETS],
            dropped: [false; BUCKETS],
        });
        assert!(self.pushed.len() <= PLACES, "the schedule is too long for its ledger");
        self.pushed.len() - 1
    }

    /// Number of pushed steps.
    pub fn len(&self) -> usize {
        self.pushed.len()
    }

    /// The worker's process is replaced.
    pub fn forgets(&mut self, worker: WorkerId) {
        self.floor.remove(&worker);
        self.shown.remove(&worker);
        self.got.retain(|(w, _), _| *w != worker);
    }

    /// A worker pulls from a leader of this term.
    pub fn asks(&mut self, worker: WorkerId, term: u64) {
        self.floor.insert(worker, self.promised(term));
    }

    /// Checks what the true state must satisfy at any moment.
    pub fn check(&self, group: &Group) {
        let truth = &group.truth;
        self.exactly_once(truth);
        if !self.lossy {
            self.acknowledged_is_in(group);
        }
        self.skips_are_agreed(group);
        self.late_is_out(truth);
        self.retries_are_recognised(truth);
        self.recorded_pulls_are_what_workers_got(truth);
    }

    /// Checks the end of the job, after its last leader has sent everything.
    pub fn ends(&self, truth: &Shard) {
        if self.lossy {
            self.check_lost_pushes(truth);
        }
    }

    /// A worker reads the answer of its pull.
    pub fn pulled(
        &mut self,
        worker: WorkerId,
        answer: Answer,
        done: Step,
        last: bool,
        got: &BTreeMap<usize, (Version, Bytes)>,
    ) {
        assert_eq!(got.len(), BUCKETS, "a pull brings every bucket");
        self.versions_do_not_go_back(worker, answer.conn, got);
        if last {
            self.the_end_is_the_same_for_all(got);
        } else {
            self.staleness_is_bounded(worker, &answer, done, got);
            self.got.extend(got.iter().map(|(bucket, got)| ((worker, *bucket), got.clone())));
        }
    }

    /// How far each place of a bucket is below 0.
    fn weights(payload: &[u8]) -> Vec<f32> {
        payload.as_chunks::<4>().0.iter().map(|b| -f32::from_le_bytes(*b)).collect()
    }
}
