//! Versions never go back: a leader returns at least what it and its predecessors have acknowledged, and a worker
//! that keeps its stream never gets an older version. (With a new stream it may: weights that a leader returned and
//! did not replicate are lost when the leader restarts its epoch, even in its own term.)

use super::{BUCKETS, History};
use bytes::Bytes;
use paraft_common::{Version, WorkerId};
use std::collections::BTreeMap;

impl History {
    /// The versions that leaders up to this term have acknowledged.
    pub(super) fn promised(&self, term: u64) -> [Version; BUCKETS] {
        std::array::from_fn(|bucket| {
            let up_to = self.acked.iter().filter(|((t, b), _)| *t <= term && *b == bucket);
            up_to.map(|(_, v)| *v).max().unwrap_or_default()
        })
    }

    pub(super) fn versions_do_not_go_back(
        &mut self,
        worker: WorkerId,
        conn: u64,
        got: &BTreeMap<usize, (Version, Bytes)>,
    ) {
        let now: [Version; BUCKETS] = std::array::from_fn(|b| got[&b].0);
        let floor = self.floor.get(&worker).copied().filter(|_| !self.lossy).unwrap_or_default();
        for bucket in 0..BUCKETS {
            let (now, floor) = (now[bucket], floor[bucket]);
            assert!(
                now >= floor,
                "{worker} got bucket {bucket} at {now}; {floor} was acknowledged before it asked"
            );
        }
        if let Some((c, before)) = self.shown.insert(worker, (conn, now)).filter(|(c, _)| *c == conn) {
            let back = before.iter().zip(&now).any(|(before, now)| now < before);
            assert!(!back, "{worker} saw {before:?} and then {now:?} by stream {c}");
        }
    }
}
