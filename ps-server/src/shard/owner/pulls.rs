//! Pulls: who may go on, and what they get.

use super::{ConnId, Owner, Purpose, Reply, WaitingPull, Weights};
use crate::shard::{
    bucket::{Shared, pulled_bytes, vector_bytes},
    command::Command,
    state::Configured,
};
use bytes::Bytes;
use paraft_common::{InForce, Step, codec::value_bytes};
use paraft_trace::Moment;
use std::sync::{Arc, atomic::Ordering::Relaxed};
use tokio::time::Instant;

/// The slowest of these; nobody: there is no bound.
fn least(clocks: impl Iterator<Item = Step>) -> Step {
    clocks.min().unwrap_or(Step(u64::MAX))
}

/// What may have let a pull go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Touched {
    /// Anything: membership, a cut, a new leadership.
    All,
    /// An update of one local bucket.
    Bucket(usize),
    /// It has only come now.
    Pull(ConnId),
}

/// A pull, or a part of one, that goes out now.
pub(super) struct Go {
    pull: WaitingPull,
    /// Local buckets, in the order in which they go out.
    buckets: Vec<usize>,
    /// Nothing is left of it.
    whole: bool,
    /// The slowest member when the rule let it go.
    slowest: Step,
    /// The mode then.
    in_force: InForce,
}

impl Owner {
    /// Answers every pull that the consistency rule lets go, bucket by bucket (but at the level `leader`), as soon as the
    /// rule holds for the bucket: the weights of one travel while the others are still pushed. Of those that are ready the
    /// first go first; a forward pass needs them first.
    pub(super) fn answer_pulls(&mut self, touched: Touched) {
        let Some(conf) = self.shard.configured() else { return };
        let Some(lead) = &mut self.lead else { return };
        if lead.pulls.is_empty() || !conf.buckets.iter().all(|b| b.initialised()) {
            return;
        }
        self.count_lost_steps(&conf);
        let Some(lead) = &mut self.lead else { return };
        let (working, leader_acks) = (&lead.cuts.working, conf.job.durability.is_leader());
        let level = lead.cuts.is_level();
        let mut hurry = false;
        let mut go = Vec::new();
        self.shard.view(|now, m| {
            // It is deposed, or a snapshot was installed: these clocks are not those of its buckets.
            if !now.is_some_and(|now| Arc::ptr_eq(now, &conf)) || lead.term < self.shard.term() {
                return;
            }
            let mode = m.in_force.mode;
            // What is applied here counts, replicated or not: it is what the pull will show.
            let slowest = least(m.members.active().map(|(w, m)| working.member(w, m).clock()));
            lead.pulls.retain_mut(|p| {
                if matches!(touched, Touched::Pull(conn) if conn != p.conn) {
                    return true;
                }
                let member = m.members.get(p.worker);
                if !leader_acks && !p.last && !p.section {
                    let Some(member) = member.filter(|_| m.started) else { return true };
                    let mut held = lead.rounds.holds(p.worker, p.done);
                    let mut ready = |bucket: usize| {
                        // A worker reads its own writes; the rule decides about everyone else's.
                        let own = member.steps.get(bucket).is_some_and(|s| *s >= p.done);
                        let may = own && mode.may_proceed(m.members.slowest_in(bucket), p.done);
                        held |= own && !may;
                        may
                    };
                    let buckets: Vec<usize> = match touched {
                        Touched::Bucket(b) => {
                            p.todo.get(&b).copied().filter(|b| ready(*b)).into_iter().collect()
                        }
                        Touched::All | Touched::Pull(_) => {
                            p.todo.iter().copied().filter(|b| ready(*b)).collect()
                        }
                    };
                    buckets.iter().for_each(|b| _ = p.todo.remove(b));
                    p.count_if(held, &self.counters.pulls_waited);
                    let whole = p.todo.is_empty();
                    if !buckets.is_empty() {
                        let of_part = || least(buckets.iter().map(|b| m.members.slowest_in(*b)));
                        let slowest = if p.part { of_part() } else { slowest };
                        go.push(Go { pull: p.clone(), buckets, whole, slowest, in_force: m.in_force });
                    }
                    return !whole;
                }
                // Of a part of the buckets, only their clocks count: the others may have no push of this step yet.
                let part = p.part.then_some(&p.todo);
                let clock = |w, m| working.member(w, m).clock_of(part);
                let own = member.map(|m| clock(p.worker, m));
                let slowest = part.map_or(slowest, |_| least(m.members.active().map(|(w, m)| clock(w, m))));
                let may = if p.last {
                    // The final weights are the same for everyone, whoever leads when the last one asks.
                    hurry |= !level;
                    level && m.members.unfinished().next().is_none()
                } else {
                    let reads_own = m.started && own.is_some_and(|own| own >= p.done);
                    let may = mode.may_proceed(slowest, p.done);
                    // Held back by others, not by the replication of its own push: in BSP that is an open
                    // round, since there a push is applied only together with the others'.
                    p.count_if(
                        reads_own && !may || lead.rounds.holds(p.worker, p.done),
                        &self.counters.pulls_waited,
                    );
                    reads_own && may
                };
                if may {
                    let buckets = std::mem::take(&mut p.todo).into_iter().collect();
                    go.push(Go { pull: p.clone(), buckets, whole: true, slowest, in_force: m.in_force });
                }
                !may
            });
        });
        if hurry {
            lead.cuts.hurry();
        }
        let due =
            go.iter().filter(|g| g.pull.section).map(|g| (g.pull.worker, g.pull.done)).collect::<Vec<_>>();
        self.keep_section(&conf, &due);
        for g in go {
            if g.whole && !g.pull.last {
                let gap = g.pull.done.0.saturating_sub(g.slowest.0);
                if let Some(lead) = &mut self.lead {
                    lead.steering.pulled(g.pull.held, gap);
                }
                self.counters.max_gap.fetch_max(gap, Relaxed);
            }
            match &mut self.lead {
                // What it gets is what the log says that it got.
                Some(lead) if g.pull.records => lead.to_record.push(g),
                _ => self.answer(&conf, g, false),
            }
        }
    }

    /// Proposes the pulls that the log must hold. They are answered once they are applied.
    pub(super) async fn record_pulls(&mut self) {
        let Some(conf) = self.shard.configured() else { return };
        let pulls = self.lead.as_mut().map(|l| std::mem::take(&mut l.to_record)).unwrap_or_default();
        for g in pulls {
            let worker = g.pull.worker;
            let Some(session) = self.streams.get(&g.pull.conn).and_then(|s| s.session) else { continue };
            let mut buckets: Vec<_> = g.buckets.iter().map(|b| conf.buckets[*b].id).collect();
            buckets.sort_unstable();
            self.propose(Purpose::Pull(g), Command::Pull { worker, session, buckets }.into()).await;
        }
    }

    /// A pull is in the log, and applied.
    pub(super) fn pull_recorded(&mut self, go: Go) {
        if let Some(conf) = self.shard.configured() {
            self.answer(&conf, go, true);
        }
    }

    /// At the level `leader`: a worker that comes from another leader and asks for weights after a step has pushed
    /// everything up to it, so what is missing here was acknowledged there and went down. Without this it would wait for
    /// ever for its own writes.
    fn count_lost_steps(&mut self, conf: &Configured) {
        let Some(lead) = &mut self.lead else { return };
        if !conf.job.durability.is_leader() {
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
                match p.part {
                    true => p.todo.iter().copied().map(&mut skip).sum(),
                    false => (0..conf.buckets.len()).map(&mut skip).sum(),
                }
            });
            found.push((p.worker, lost));
        }
        for (worker, lost) in found {
            self.report_lost(worker, lost);
        }
    }

    /// `recorded`: the worker gets what the log says that it got.
    fn answer(&mut self, conf: &Configured, go: Go, recorded: bool) {
        let Go { pull, buckets, whole, slowest, in_force } = go;
        let section = pull.section && self.writes_section(conf, pull.worker, pull.done);
        let (stop, clock, finishers) = self.shard.read(|m| {
            let f = if pull.last { m.members.iter().map(|(w, _)| w).collect() } else { Vec::new() };
            (m.stop, m.members.get(pull.worker).map_or(pull.done, |m| m.clock()), f)
        });
        if let Some((lead, stream)) = self.lead.as_mut().zip(self.streams.get(&pull.conn)) {
            lead.cuts.answered.insert(stream.worker);
        }
        let (count, since) = (buckets.len(), Moment::now());
        for (i, bucket) in (1..).zip(buckets) {
            let Some(lead) = &self.lead else { return };
            let data = lead.cuts.working.data(conf, bucket);
            let got = data.kept.get(&pull.worker).and_then(|k| k.pulled.clone()).filter(|_| recorded);
            let version = got.as_ref().map_or(data.version, |(version, _)| *version);
            if !pull.last {
                let weights = got.as_ref().map_or(&data.weights, |(_, weights)| weights);
                self.counters.lateness.pulled(pull.worker, bucket, version, weights);
            }
            // What the worker has already is not sent again.
            let not_modified = pull.have.get(bucket) == Some(&version);
            let payload = match got {
                _ if not_modified => Bytes::new(),
                Some((_, weights)) => value_bytes(Shared(weights)),
                None if pull.last => vector_bytes(&data, 0),
                None => pulled_bytes(&conf.job, conf.buckets[bucket].spec.kind, &data),
            };
            drop(data);
            self.counters.bytes_pulled.fetch_add(payload.len() as u64, Relaxed);
            self.counters.not_modified.fetch_add(u64::from(not_modified), Relaxed);
            let last = whole && i == count;
            let weights = Weights {
                bucket: conf.buckets[bucket].id,
                version,
                payload,
                not_modified,
                last,
                done: pull.done,
                slowest,
                stop,
                in_force,
                clock: clock.max(pull.done),
                finishers: if last { finishers.clone() } else { Vec::new() },
                section: section && last,
                since,
            };
            self.send(pull.conn, Reply::Weights(Box::new(weights)));
        }
    }
}
