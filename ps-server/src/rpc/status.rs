//! This server's view of its shards, for `paraft status`, the launcher and Prometheus.

use super::digests::Digests;
use crate::{
    connections::{Connections, Counts},
    control::ControlReplica,
    raft::Role,
    replicas::{Replica, Replicas, Stopped},
    room::Allocated,
    shard::{
        leader::{
            Counters, WorkerInfo,
            progress::{Progress, WaitTotal},
        },
        members,
        staleness::PushStaleness,
        state::{Meta, ShardConfig},
    },
};
use paraft_common::{JobShard, ShardId, TableSpec, WorkerId, histogram::LogHistogram, need::Need};
use paraft_proto::{
    self as proto, Bin, Chunks, Member, PROTOCOL, Reported, ServerMemory, ShardStatus, StatusReply,
    StoppedReplica, TableStatus, WorkerStaleness,
};
use std::{
    path::PathBuf,
    sync::{Arc, atomic::Ordering::Relaxed},
};

/// Builds status replies.
#[derive(Clone)]
pub struct StatusService {
    /// This server.
    pub server: u64,
    /// Its address.
    pub address: String,
    /// host:port of the page that this process serves.
    pub page: String,
    /// Its data folder.
    pub data: PathBuf,
    /// The replicas hosted here.
    pub replicas: Arc<Replicas>,
    /// This server's replica of the control group.
    pub control: Arc<ControlReplica>,
    /// The connections to it.
    pub connections: Arc<Connections>,
    /// The digests that were asked for.
    pub digests: Arc<Digests>,
}

impl StatusService {
    /// Counts a message refused before it reached the leader.
    pub fn count_refusal(&self, shard: JobShard) {
        if let Some(w) = self.replicas.get(shard) {
            w.counters.refused.fetch_add(1, Relaxed);
        }
    }

    /// The reply; `digest`: reads and hashes the whole state; `logs`: includes the workers' last lines.
    pub async fn reply(&self, digest: bool, logs: bool) -> StatusReply {
        let usage = paraft_host::usage();
        let (storage_free, storage_size) = paraft_host::storage(&self.data).unwrap_or_default();
        let control = self.control.stopped();
        let (mut shards, mut queued) = (Vec::new(), (0, 0));
        for (shard, w) in self.replicas.all() {
            queued = (queued.0 + w.queued.bytes(), queued.1 + w.queued.most());
            let mut s = shard_status(&w, logs);
            if digest && let Some((index, digest)) = self.digests.of(shard, &w.group).await {
                (s.applied_index, s.digest) = (index, digest);
            }
            shards.push(s);
        }
        let room = self.replicas.room();
        let (memory, promised) = (room.memory(), room.promised_to(|_| true));
        let memory = memory.tightest().map(|p| ServerMemory {
            free: p.free,
            limit: p.limit,
            what: p.what.clone(),
            promised,
        });
        StatusReply {
            memory,
            server: self.server,
            address: self.address.clone(),
            page: self.page.clone(),
            storage_free,
            storage_size,
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            shards,
            cpu_seconds: usage.cpu_seconds,
            peak_rss_bytes: usage.peak_rss_bytes,
            replicas_diverged: self.replicas.diverged(),
            connections: Some(self.connections.counts().into()),
            descriptors: paraft_host::open_descriptors(),
            descriptors_limit: paraft_host::descriptor_limit(),
            queued_bytes: queued.0,
            queued_bytes_limit: queued.1,
            stopped: self.replicas.stopped().into_iter().map(waits).collect(),
            control_stopped_ms: control.as_ref().map_or(0, |(_, since)| since.elapsed().as_millis() as u64),
            control_trouble: control.map(|(why, _)| why).unwrap_or_default(),
        }
    }
}

impl From<Counts> for proto::Connections {
    fn from(c: Counts) -> Self {
        let few = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Self {
            unknown: few(c.unknown),
            readers: few(c.readers),
            workers: few(c.workers),
            servers: few(c.servers),
            limit: few(c.most),
            shed: c.shed,
            refused: c.refused,
            silent: c.silent,
            stalled: c.stalled,
            denied: c.denied,
        }
    }
}

fn waits((shard, w): (JobShard, Stopped)) -> StoppedReplica {
    let stopped_ms = w.since.elapsed().as_millis() as u64;
    let (job, shard) = (shard.job().0, shard.shard().0);
    StoppedReplica { job, shard, node: w.node.unwrap_or_default().0, why: w.why, stopped_ms }
}

fn staleness((worker, of): (WorkerId, PushStaleness)) -> WorkerStaleness {
    let bins = |h: &LogHistogram| h.bins().into_iter().map(|(upper, count)| Bin { upper, count }).collect();
    WorkerStaleness {
        worker: worker.0,
        delay_counts: of.delay.counts().to_vec(),
        distance: bins(&of.distance),
        distance_sum: of.distance.sum(),
        age_seconds: bins(&of.age),
        age_seconds_sum: of.age.sum(),
    }
}

/// Maximum number of pairs of workers: those that have waited longest.
const MAX_WAITS: usize = 1024;

fn who_waits(progress: &Progress) -> Vec<proto::Wait> {
    let mut all: Vec<_> = progress.waits().collect();
    if all.len() > MAX_WAITS {
        all.select_nth_unstable_by_key(MAX_WAITS, |(.., waited)| std::cmp::Reverse(waited.time));
        all.truncate(MAX_WAITS);
    }
    let wait = |(worker, of, waited): (WorkerId, WorkerId, WaitTotal)| proto::Wait {
        worker: worker.0,
        of: of.0,
        seconds: waited.time.as_secs_f64(),
        times: waited.times,
    };
    all.into_iter().map(wait).collect()
}

/// A shard's status; `logs`: includes the workers' log lines.
fn shard_status(w: &Replica, logs: bool) -> ShardStatus {
    let lead = *w.group.leadership().borrow();
    let staged = w.shard.staged_bytes();
    let (c, log) = (&w.counters, w.group.log_size());
    let membership = w.group.membership();
    w.shard.view(|conf, m| {
        let mut said = of_state(w.shard.id(), conf, m, c);
        if lead.role != Role::Leader {
            said.waits.clear();
        }
        if !logs {
            said.members.iter_mut().for_each(|m| m.said.clear());
        }
        ShardStatus {
            job: w.shard.name().job().0,
            job_name: conf.map(|c| c.job.name.clone()).unwrap_or_default(),
            role: lead.role.name().into(),
            term: lead.term,
            leader: lead.leader.map(|l| l.0),
            applied_index: w.group.applied_index(),
            voters: membership.voters.iter().map(|n| n.0).collect(),
            changing: membership.changing,
            node: w.group.me().0,
            trouble: w.group.trouble().unwrap_or_default(),
            memory_staged: staged,
            memory_need: conf.map_or(0, |c| Need::of(&c.job, w.shard.id(), w.shard.shards()).total()),
            log_bytes: log.bytes,
            log_memory_bytes: log.in_memory,
            snapshots_installed: w.group.snapshots_installed(),
            ..said
        }
    })
}

/// What a shard's state and its leader's counts say, without a group that replicates it.
pub fn of_state(shard: ShardId, conf: Option<&Arc<ShardConfig>>, m: &Meta, c: &Counters) -> ShardStatus {
    let leases = c.leases.lock().clone();
    let progress = c.progress.lock().clone();
    let member = |(worker, m): (WorkerId, &members::Member)| {
        let WorkerInfo { host, device, said } = c.about.lock().get(&worker).cloned().unwrap_or_default();
        Member {
            worker: worker.0,
            session: m.session.tag(),
            clock: m.clock().0,
            last_seq: m.last_seq.0,
            finished: m.finished,
            idle: m.idle,
            lease_ms: leases.get(&worker).map(|l| l.as_millis() as u64),
            host,
            device,
            said,
        }
    };
    // Every shard has what a checkpoint says of evaluations; workers report only to the first.
    let is_first = shard == ShardId(0);
    ShardStatus {
        shard: shard.0,
        version: conf.map_or(0, |c| c.buckets.iter().map(|b| b.version().0).sum()),
        mode: conf.map(|_| m.in_force.mode.to_string()).unwrap_or_default(),
        mode_number: m.in_force.number,
        mode_auto: m.in_force.auto.map(|loosest| loosest.to_string()).unwrap_or_default(),
        members: m.members.iter().map(member).collect(),
        delay_counts: m.delays.counts().to_vec(),
        pushes: m.pushes,
        duplicates: m.duplicates,
        refused: c.refused.load(Relaxed),
        redirected: c.redirected.load(Relaxed),
        leads: c.leads.load(Relaxed),
        pulls: c.pulls.load(Relaxed),
        pulls_waited: c.pulls_waited.load(Relaxed),
        not_modified: c.not_modified.load(Relaxed),
        bytes_pushed: m.bytes_pushed,
        bytes_pulled: c.bytes_pulled.load(Relaxed),
        workers_lost: m.workers_lost,
        buckets: conf.map_or(0, |c| c.buckets.len() as u32),
        values: conf.map_or(0, |c| c.buckets.iter().map(|b| b.spec.len as u64).sum()),
        started: m.started,
        expected_workers: conf.map_or(0, |c| c.job.workers),
        max_step_lead: c.max_step_lead.load(Relaxed),
        durability: conf.map(|c| c.job.durability.to_string()).unwrap_or_default(),
        dropped: m.dropped,
        staleness: c.staleness.workers().into_iter().map(staleness).collect(),
        pushes_lost: m.pushes_lost,
        bytes_logged: c.bytes_logged.load(Relaxed),
        deltas: c.deltas.load(Relaxed),
        memory_kept: conf.map_or(0, |c| c.kept_bytes()),
        memory_allocated: conf.map_or(0, |c| c.held()),
        memory_copies: conf.map_or(0, |c| c.outdated_bytes()),
        memory_staleness: c.staleness.bytes(),
        memory_queued: c.queued.load(Relaxed),
        state_bytes: conf.map_or(0, |c| c.bytes()),
        loss_sum: progress.losses.0,
        losses: progress.losses.1,
        samples: progress.samples,
        waits: who_waits(&progress),
        evaluated: m.stopping(None).evaluated.filter(|_| is_first).map(|e| Reported {
            epoch: e.number,
            loss_sum: e.loss_sum,
            correct: e.correct,
            count: e.count,
            stop: m.stop,
            incomplete: false,
        }),
        tables: conf.map_or_else(Vec::new, |c| tables(c)),
        chunks: m.chunks.as_ref().map(|c| {
            let s = c.summary();
            let (epoch, per_epoch, done, held, returned) = (s.epoch, s.per_epoch, s.done, s.held, s.returned);
            Chunks { epoch, per_epoch, done, held, returned }
        }),
        ..ShardStatus::default()
    }
}

/// A shard's part of each table.
fn tables(conf: &ShardConfig) -> Vec<TableStatus> {
    let named = |table: &TableSpec| TableStatus { name: table.name.clone(), ..TableStatus::default() };
    let mut tables: Vec<_> = conf.job.tables.iter().map(named).collect();
    for partition in conf.partitions() {
        let (header, table) = (partition.header(), &mut tables[usize::from(partition.place().0)]);
        table.rows += header.rows;
        table.created += header.created;
        table.evicted += header.evicted;
        table.refused += header.refused;
        table.too_rare += header.too_rare;
        table.expired += header.expired;
        table.revived += header.revived;
        table.bytes += partition.bytes();
        table.most += partition.spec().partition_rows();
    }
    tables
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
