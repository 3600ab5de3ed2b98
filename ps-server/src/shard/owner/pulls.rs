//! Pulls: who may go on, and what they get.

use super::{ConnId, Owner, Purpose, Reply, Weights};
use crate::shard::{
    bucket::{Shared, pulled_bytes, vector_bytes},
    command::Command,
    state::Configured,
};
use bytes::Bytes;
use paraft_common::{InForce, Step, Version, WorkerId, codec::value_bytes};
use paraft_trace::Moment;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use tokio::time::Instant;

/// The slowest of these; nobody: there is no bound.
fn least(clocks: impl Iterator<Item = Step>) -> Step {
    clocks.min().unwrap_or(Step(u64::MAX))
}

/// What may have let a pull go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Touched {
    /// Anything: membership, a cut, a new leadership.
    All,
    /// An update of one local bucket, with pushes of these workers.
    Bucket(usize, Vec<WorkerId>),
    /// It has only come now.
    Pull(ConnId),
}

/// What a worker asked for.
#[derive(Debug)]
pub(super) struct Pull {
    pub conn: ConnId,
    pub worker: WorkerId,
    pub done: Step,
    pub last: bool,
    pub section: bool,
    /// The log is to hold what it gets.
    pub records: bool,
    /// For each local bucket, the version that the worker has; empty where it has none.
    pub have: Vec<Version>,
    /// It is of some buckets only.
    pub part: bool,
}

/// A pull that is not answered whole.
#[derive(Debug)]
pub(super) struct WaitingPull {
    pub pull: Arc<Pull>,
    /// Local buckets that are not sent yet.
    pub todo: BTreeSet<usize>,
    /// Since when it waits for others.
    pub held: Option<Instant>,
}

impl WaitingPull {
    /// Counts it once among those that had to wait for others.
    fn count_if(&mut self, held: bool, waited: &AtomicU64) {
        if held && self.held.is_none() {
            self.held = Some(Instant::now());
            waited.fetch_add(1, Relaxed);
        }
    }
}

/// The pulls that wait, one of each stream.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    by_conn: BTreeMap<ConnId, WaitingPull>,
    /// Those whose answer is for a checkpoint: of all buckets at once.
    sections: BTreeSet<ConnId>,
    /// The slowest of each bucket when all were looked at last.
    slowest: BTreeMap<usize, Step>,
}

impl Waiting {
    pub fn insert(&mut self, p: WaitingPull) {
        let conn = p.pull.conn;
        self.remove(conn);
        if p.pull.section {
            self.sections.insert(conn);
        }
        self.by_conn.insert(conn, p);
    }

    pub fn remove(&mut self, conn: ConnId) {
        self.sections.remove(&conn);
        self.by_conn.remove(&conn);
    }

    pub fn iter(&self) -> impl Iterator<Item = &WaitingPull> {
        self.by_conn.values()
    }

    /// Those that may go now, if something of `touched` is what they wait for. An update lets its own workers read their
    /// writes; the others only where it was the slowest's.
    fn candidates(
        &mut self,
        touched: &Touched,
        slowest_in: impl Fn(usize) -> Step,
        conn_of: impl Fn(WorkerId) -> Option<ConnId>,
    ) -> Vec<ConnId> {
        match touched {
            Touched::Pull(conn) => vec![*conn],
            Touched::All => {
                self.slowest.clear();
                self.by_conn.keys().copied().collect()
            }
            Touched::Bucket(bucket, workers) => {
                let slowest = slowest_in(*bucket);
                if self.slowest.insert(*bucket, slowest) != Some(slowest) {
                    return self.by_conn.keys().copied().collect();
                }
                let own = workers.iter().filter_map(|w| conn_of(*w));
                self.sections.iter().copied().chain(own).collect::<BTreeSet<_>>().into_iter().collect()
            }
        }
    }
}

/// A pull, or a part of one, that goes out now.
pub(super) struct Go {
    pull: Arc<Pull>,
    /// Since when it waited for others.
    held: Option<Instant>,
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
        if lead.pulls.by_conn.is_empty() || !conf.is_initialised() {
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
            let slowest = match leader_acks {
                true => least(m.members.active().map(|(w, m)| working.member(w, m).clock())),
                false => m.members.slowest(),
            };
            let conn_of = |w| lead.by_worker.get(&w).copied();
            let touched =
                if leader_acks && matches!(touched, Touched::Bucket(..)) { Touched::All } else { touched };
            for conn in lead.pulls.candidates(&touched, |b| m.members.slowest_in(b), conn_of) {
                let Some(p) = lead.pulls.by_conn.get_mut(&conn) else { continue };
                let pull = p.pull.clone();
                let member = m.members.get(pull.worker);
                if !leader_acks && !pull.last && !pull.section {
                    let Some(member) = member.filter(|_| m.started) else { continue };
                    let mut held = lead.rounds.holds(pull.worker, pull.done);
                    let mut ready = |bucket: usize| {
                        // A worker reads its own writes; the rule decides about everyone else's.
                        let own = member.step(bucket).is_some_and(|s| s >= pull.done);
                        let may = own && mode.may_proceed(m.members.slowest_in(bucket), pull.done);
                        held |= own && !may;
                        may
                    };
                    let buckets: Vec<usize> = match &touched {
                        Touched::Bucket(b, _) => {
                            p.todo.get(b).copied().filter(|b| ready(*b)).into_iter().collect()
                        }
                        Touched::All | Touched::Pull(_) => {
                            p.todo.iter().copied().filter(|b| ready(*b)).collect()
                        }
                    };
                    buckets.iter().for_each(|b| _ = p.todo.remove(b));
                    p.count_if(held, &self.counters.pulls_waited);
                    let (whole, held) = (p.todo.is_empty(), p.held);
                    if whole {
                        lead.pulls.remove(conn);
                    }
                    if !buckets.is_empty() {
                        let of_part = || least(buckets.iter().map(|b| m.members.slowest_in(*b)));
                        let slowest = if pull.part { of_part() } else { slowest };
                        go.push(Go { pull, held, buckets, whole, slowest, in_force: m.in_force });
                    }
                    continue;
                }
                // Of a part of the buckets, only their clocks count: the others may have no push of this step yet.
                let part = pull.part.then_some(&p.todo);
                let clock = |w, m| working.member(w, m).clock_of(part);
                let own = member.map(|m| clock(pull.worker, m));
                let slowest = part.map_or(slowest, |_| least(m.members.active().map(|(w, m)| clock(w, m))));
                let may = if pull.last {
                    // The final weights are the same for everyone, whoever leads when the last one asks.
                    hurry |= !level;
                    level && m.members.unfinished().next().is_none()
                } else {
                    let reads_own = m.started && own.is_some_and(|own| own >= pull.done);
                    let may = mode.may_proceed(slowest, pull.done);
                    // Held back by others, not by the replication of its own push: in BSP that is an open
                    // round, since there a push is applied only together with the others'.
                    p.count_if(
                        reads_own && !may || lead.rounds.holds(pull.worker, pull.done),
                        &self.counters.pulls_waited,
                    );
                    reads_own && may
                };
                if may {
                    let (buckets, held) = (std::mem::take(&mut p.todo).into_iter().collect(), p.held);
                    lead.pulls.remove(conn);
                    go.push(Go { pull, held, buckets, whole: true, slowest, in_force: m.in_force });
                }
            }
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
                    lead.steering.pulled(g.held, gap);
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
        for WaitingPull { pull: p, todo, .. } in lead.pulls.iter() {
            if lead.cuts.answered.contains(&p.worker) || lead.cuts.has_queued(p.worker) {
                continue;
            }
            let lost = self.shard.read(|m| {
                let Some(replicated) = m.members.get(p.worker) else { return 0 };
                let mut skip =
                    |b| lead.cuts.working.skip(conf, replicated, p.worker, b, p.done, Instant::now());
                match p.part {
                    true => todo.iter().copied().map(&mut skip).sum(),
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
        let Go { pull, buckets, whole, slowest, in_force, .. } = go;
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
