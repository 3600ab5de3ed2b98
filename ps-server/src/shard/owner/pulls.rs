//! Pulls: who may go on, and what they get.

use super::{ConnId, Owner, Reply, Weights};
use crate::shard::state::Configured;
use paraft_common::Step;
use std::sync::atomic::Ordering::Relaxed;

impl Owner {
    /// Answers every pull that the consistency rule lets go.
    pub(super) fn answer_pulls(&mut self) {
        let Some(conf) = self.shard.configured() else { return };
        let Some(lead) = &mut self.lead else { return };
        if lead.pulls.is_empty() || !conf.buckets.iter().all(|b| b.initialised()) {
            return;
        }
        let slowest = self.shard.slowest();
        let mut go = Vec::new();
        self.shard.read(|m| {
            lead.pulls.retain_mut(|p| {
                let own = m.members.get(p.worker).map(|m| m.clock());
                let may = if p.last {
                    m.members.active().next().is_none()
                } else {
                    // A worker reads its own writes; the rule decides about everyone else's.
                    let reads_own = m.started && own.is_some_and(|own| own >= p.done);
                    let may = conf.job.mode.may_proceed(slowest, p.done);
                    // Held back by others, not by the replication of its own push: in BSP that is an open
                    // round, since there a push is applied only together with the others'.
                    let held = reads_own && !may || lead.rounds.holds(p.worker, p.done);
                    if held && !p.counted {
                        p.counted = true;
                        self.counters.pulls_waited.fetch_add(1, Relaxed);
                    }
                    reads_own && may
                };
                if may {
                    go.push((p.conn, p.worker, p.done, p.last, p.cut));
                }
                !may
            });
        });
        let due = go.iter().filter(|g| g.4).map(|g| (g.1, g.2)).collect::<Vec<_>>();
        self.cut(&conf, &due);
        for (conn, worker, done, last, cut) in go {
            if !last {
                self.counters.max_gap.fetch_max(done.0.saturating_sub(slowest.0), Relaxed);
            }
            let cut = cut && self.writes_cut(worker, done);
            self.answer(&conf, conn, done, slowest, last, cut);
        }
    }

    pub(super) fn answer(
        &mut self,
        conf: &Configured,
        conn: ConnId,
        done: Step,
        slowest: Step,
        last_pull: bool,
        cut: bool,
    ) {
        let (stop, finishers) = self.shard.read(|m| {
            let f = if last_pull { m.members.iter().map(|(w, _)| w).collect() } else { Vec::new() };
            (m.stop, f)
        });
        for (i, b) in conf.buckets.iter().enumerate() {
            let (version, payload) = b.encode();
            self.counters.bytes_pulled.fetch_add(payload.len() as u64, Relaxed);
            let last = i + 1 == conf.buckets.len();
            let finishers = finishers.clone();
            let cut = cut && last;
            let weights =
                Weights { bucket: b.id, version, payload, last, done, slowest, stop, finishers, cut };
            self.send(conn, Reply::Weights(Box::new(weights)));
        }
    }
}
