//! Pulls: who may go on, and what they get.

use super::cuts::MAX_AHEAD;
use super::{ConnId, Owner, Reply, Weights};
use crate::shard::{bucket::vector_bytes, form::Form, state::Configured};
use paraft_common::{Durability, Step};
use std::sync::atomic::Ordering::Relaxed;
use tokio::time::Instant;

impl Owner {
    /// Answers every pull that the consistency rule lets go.
    pub(super) fn answer_pulls(&mut self) {
        let Some(conf) = self.shard.configured() else { return };
        let Some(lead) = &mut self.lead else { return };
        if lead.pulls.is_empty() || !conf.buckets.iter().all(|b| b.initialised()) {
            return;
        }
        self.count_lost_steps(&conf);
        let Some(lead) = &mut self.lead else { return };
        let (working, images) = (&lead.cuts.working, lead.cuts.form == Form::Images);
        let keeps_pushes = images && conf.job.durability != Durability::Leader;
        let level = lead.cuts.is_level();
        let mut hurry = false;
        let mut go = Vec::new();
        let slowest = self.shard.read(|m| {
            // What is applied here counts, replicated or not: it is what the pull will show.
            let clocks = m.members.active().map(|(w, m)| working.member(w, m).clock());
            let slowest = clocks.min().unwrap_or(Step(u64::MAX));
            lead.pulls.retain_mut(|p| {
                let member = m.members.get(p.worker);
                let own = member.map(|m| working.member(p.worker, m).clock());
                let may = if p.last {
                    // The final weights are the same for everyone, whoever leads when the last one asks.
                    hurry |= !level;
                    level && m.members.unfinished().next().is_none()
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
                    // It keeps what is not acknowledged: so many steps and no more.
                    let replicated = member.map_or(Step(0), |m| m.clock());
                    let too_far = keeps_pushes && p.done.0 > replicated.0.saturating_add(MAX_AHEAD);
                    hurry |= too_far;
                    reads_own && may && !too_far
                };
                if may {
                    go.push((p.conn, p.worker, p.done, p.last, p.section));
                }
                !may
            });
            slowest
        });
        if hurry {
            lead.cuts.hurry();
        }
        let due = go.iter().filter(|g| g.4).map(|g| (g.1, g.2)).collect::<Vec<_>>();
        self.keep_section(&conf, &due);
        for (conn, worker, done, last, section) in go {
            if !last {
                self.counters.max_gap.fetch_max(done.0.saturating_sub(slowest.0), Relaxed);
            }
            let section = section && self.writes_section(&conf, worker, done);
            self.answer(&conf, conn, done, slowest, last, section);
        }
    }

    /// At the level `leader`: a worker that comes from another leader and asks for weights after a step has pushed
    /// everything up to it, so what is missing here was acknowledged there and went down. Without this it would wait for
    /// ever for its own writes.
    fn count_lost_steps(&mut self, conf: &Configured) {
        let Some(lead) = &mut self.lead else { return };
        if lead.cuts.form != Form::Images || conf.job.durability != Durability::Leader {
            return;
        }
        let mut found = Vec::new();
        for p in &lead.pulls {
            if lead.cuts.answered.contains(&p.worker) || lead.cuts.has_queued(p.worker) {
                continue;
            }
            let lost = self.shard.read(|m| {
                let Some(replicated) = m.members.get(p.worker) else { return 0 };
                let mut skip =
                    |b| lead.cuts.working.skip(conf, replicated, p.worker, b, p.done, Instant::now());
                (0..conf.buckets.len()).map(&mut skip).sum()
            });
            found.push((p.worker, lost));
        }
        for (worker, lost) in found {
            self.report_lost(worker, lost);
        }
    }

    pub(super) fn answer(
        &mut self,
        conf: &Configured,
        conn: ConnId,
        done: Step,
        slowest: Step,
        last_pull: bool,
        section: bool,
    ) {
        let (stop, finishers) = self.shard.read(|m| {
            let f = if last_pull { m.members.iter().map(|(w, _)| w).collect() } else { Vec::new() };
            (m.stop, f)
        });
        if let Some((lead, stream)) = self.lead.as_mut().zip(self.streams.get(&conn)) {
            lead.cuts.answered.insert(stream.worker);
        }
        for (i, b) in conf.buckets.iter().enumerate() {
            let Some(lead) = &self.lead else { return };
            let data = lead.cuts.working.data(conf, i);
            let (version, payload) = (data.version, vector_bytes(&data, 0));
            drop(data);
            self.counters.bytes_pulled.fetch_add(payload.len() as u64, Relaxed);
            let last = i + 1 == conf.buckets.len();
            let finishers = finishers.clone();
            let section = section && last;
            let weights =
                Weights { bucket: b.id, version, payload, last, done, slowest, stop, finishers, section };
            self.send(conn, Reply::Weights(Box::new(weights)));
        }
    }
}
