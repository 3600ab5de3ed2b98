//! What must hold in every schedule: one promise in each file. They look at the same history.

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

/// A step of a worker: what it adds to the place of its own in every bucket.
#[derive(Clone, Debug)]
pub struct Pushed {
    worker: WorkerId,
    session: SessionId,
    step: Step,
    /// It brings nothing, and adds nothing to its place.
    skip: bool,
    acked: [bool; BUCKETS],
    /// Its worker was told that it came too late for its round.
    dropped: [bool; BUCKETS],
}

/// Who answered a pull, and when.
pub struct Answer {
    /// The stream that it came by.
    pub conn: u64,
    /// The last session that anyone had been told of when it was sent: those who came later are not in it.
    pub told: SessionId,
    /// The slowest worker's clock, as the leader says.
    pub slowest: Step,
    /// The mode in force when each bucket was let go.
    pub modes: BTreeMap<usize, Mode>,
}

/// Everything that the workers did and were told.
pub struct History {
    /// Whether pushes may be averaged: in a mode that the job has, or had, or may come to.
    averages: bool,
    /// Rounds may close without a worker's push.
    drops_late: bool,
    /// The level is `leader`: what was acknowledged may go down with a leader, and is counted then.
    lossy: bool,
    cluster: Cluster,
    /// By place.
    pushed: Vec<Pushed>,
    /// The highest version that was acknowledged, by term and bucket.
    acked: BTreeMap<(u64, usize), Version>,
    /// What a pull must show at least: set when it is asked.
    floor: BTreeMap<WorkerId, [Version; BUCKETS]>,
    /// The last pull's versions of each worker, and by which stream it came.
    shown: BTreeMap<WorkerId, (u64, [Version; BUCKETS])>,
    sessions: membership::Sessions,
    /// What each worker got last of each bucket, and that is not the job's end.
    got: BTreeMap<(WorkerId, usize), (Version, Bytes)>,
    /// The weights of the finished job, which must be the same for all.
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

    /// A worker pushes a step in every bucket, or skips it; gives its place.
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

    /// Steps that were pushed.
    pub fn len(&self) -> usize {
        self.pushed.len()
    }

    /// The process is another now.
    pub fn forgets(&mut self, worker: WorkerId) {
        self.floor.remove(&worker);
        self.shown.remove(&worker);
        self.got.retain(|(w, _), _| *w != worker);
    }

    /// A worker asks for weights, of a leader of this term.
    pub fn asks(&mut self, worker: WorkerId, term: u64) {
        self.floor.insert(worker, self.promised(term));
    }

    /// What the true state must satisfy at any moment.
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

    /// The job is over, and its last leader has said all it knows.
    pub fn ends(&self, truth: &Shard) {
        if self.lossy {
            self.what_is_lost_is_counted(truth);
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

    /// Each place of a bucket: how far below 0 it is.
    fn weights(payload: &[u8]) -> Vec<f32> {
        payload.as_chunks::<4>().0.iter().map(|b| -f32::from_le_bytes(*b)).collect()
    }
}
