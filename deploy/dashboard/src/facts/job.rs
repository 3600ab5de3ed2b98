//! A job in a snapshot of a fleet.

use paraft_common::histogram::DelayHistogram;
use paraft_proto::{JobInfo, ShardStatus};
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;

/// A job, as the leaders of its shards report it. Counters belong to the leaders' processes: they may
/// decrease when another server leads.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Job {
    /// Its number.
    pub id: u32,
    /// Its name; empty until a worker has started it.
    pub name: String,
    /// waiting, running, finished, stopped, lost.
    pub state: String,
    /// A user has requested the end of the job.
    pub stopping: bool,
    /// The current mode.
    pub mode: String,
    /// The loosest mode that `auto` may choose; empty without `auto`.
    pub auto: String,
    /// Workers in the job file.
    pub workers: u32,
    /// The largest number of workers that can be requested; `None` if the launcher is on another host
    /// or cannot scale.
    pub most: Option<u32>,
    /// Raft groups.
    pub shards: u32,
    /// Replicas of each shard.
    pub replicas: u32,
    /// quorum-disk, quorum-memory, leader.
    pub durability: String,
    /// Bytes on all servers together.
    pub bytes: u64,
    /// The folder of its record, HOST:FOLDER.
    pub run: String,
    /// Time of the first observation.
    pub since: u64,
    /// The first shard has no leader: values that only this leader knows are from the last observation.
    pub stale: bool,
    /// The current members.
    pub members: Vec<Member>,
    /// All expected workers have joined at least once.
    pub started: bool,
    /// Members that left without finishing.
    pub workers_lost: u64,
    /// Samples that the applied pushes were computed from.
    pub samples: u64,
    /// Applied pushes, counted per bucket.
    pub pushes: u64,
    /// Payload bytes of the applied pushes.
    pub bytes_pushed: u64,
    /// Payload bytes of the answered pulls.
    pub bytes_pulled: u64,
    /// Refused messages.
    pub refused: u64,
    /// Duplicate pushes.
    pub duplicates: u64,
    /// Acknowledged pushes that were lost with a leader; only at durability `leader`.
    pub pushes_lost: u64,
    /// Sum of the reported training losses.
    pub loss_sum: f64,
    /// Number of reported training losses.
    pub losses: u64,
    /// The latest held-out evaluation.
    pub evaluated: Option<Evaluated>,
    /// `delays[d]` pushes were applied `d` versions after their weights were pulled.
    pub delays: Vec<u64>,
    /// Which worker waited for which.
    #[serde(serialize_with = "longest")]
    pub waits: Vec<Wait>,
    /// The sparse tables, over all shards.
    pub tables: Vec<Table>,
    /// The latest checkpoint: its step, and when it was written.
    pub checkpoint: Option<(u64, u64)>,
}

impl Job {
    /// Steps of the fastest worker.
    pub fn steps(&self) -> u64 {
        self.members.iter().map(|m| m.clock).max().unwrap_or_default()
    }
}

/// A sparse table.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Table {
    /// Its name.
    pub name: String,
    /// Rows, and the most that the shards have room for.
    pub rows: u64,
    /// As `rows`.
    pub most: u64,
    /// Rows made since the job began.
    pub created: u64,
    /// Of them, those that had been removed before.
    pub revived: u64,
    /// Rows removed to make room.
    pub evicted: u64,
    /// Rows removed because no update named them for long.
    pub expired: u64,
    /// Gradients of ids that did not become rows.
    pub dropped: u64,
    /// Memory of rows and index.
    pub bytes: u64,
}

/// A worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Member {
    /// Its number.
    pub worker: u32,
    /// Finished steps.
    pub clock: u64,
    /// The worker has finished all steps.
    pub finished: bool,
    /// The worker has nothing to train at present.
    pub idle: bool,
    /// Remaining time of its lease.
    pub lease_ms: Option<u64>,
    /// The worker's host; empty until it has reported it to the current leader.
    pub host: String,
    /// The worker's device.
    pub device: String,
}

/// A held-out evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Evaluated {
    /// Finished passes over the data; the step, if the job sets `eval.every_steps`.
    pub epoch: u64,
    /// Mean loss.
    pub loss: f64,
    /// Share classified correctly; 0 if the model does not classify.
    pub accuracy: f64,
}

/// How long one worker waited for another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Wait {
    /// The worker that waited.
    pub worker: u32,
    /// The worker that it waited for.
    pub of: u32,
    /// Total seconds.
    pub seconds: f64,
}

/// Maximal waits that a page receives: of 200 workers there may be 40,000.
const MAX_SHOWN_WAITS: usize = 1500;

/// Serializes the longest waits.
fn longest<S: Serializer>(waits: &[Wait], to: S) -> Result<S::Ok, S::Error> {
    if waits.len() <= MAX_SHOWN_WAITS {
        return waits.serialize(to);
    }
    let mut longest = waits.to_vec();
    longest.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    longest.truncate(MAX_SHOWN_WAITS);
    longest.sort_by_key(|w| (w.worker, w.of));
    longest.serialize(to)
}

/// The job in the replies of the control group and of its shards' leaders.
pub(super) fn job(info: &JobInfo, led: &BTreeMap<(u32, u32), &ShardStatus>) -> Job {
    let shape = info.shape.clone().unwrap_or_default();
    let of = || led.range((info.job, 0)..=(info.job, u32::MAX)).map(|(_, s)| *s);
    let first = led.get(&(info.job, 0)).copied();
    let sum = |count: fn(&ShardStatus) -> u64| of().map(count).sum::<u64>();
    let mut delays = DelayHistogram::default();
    let mut waits: BTreeMap<(u32, u32), f64> = BTreeMap::new();
    for s in of() {
        delays.merge(&DelayHistogram::from_counts(&s.delay_counts));
        for w in &s.waits {
            let seconds = waits.entry((w.worker, w.of)).or_default();
            // A worker waits for all shards at the same time, so the longest wait counts.
            *seconds = seconds.max(w.seconds);
        }
    }
    let evaluated = first.and_then(|s| s.evaluated).map(|e| {
        let n = e.count.max(1) as f64;
        Evaluated { epoch: e.epoch, loss: e.loss_sum / n, accuracy: e.correct as f64 / n }
    });
    Job {
        id: info.job,
        name: info.name.clone(),
        state: info.state.clone(),
        stopping: info.stopping && info.ended_ms == 0,
        mode: first.map_or_else(|| info.mode.clone(), |s| s.mode.clone()),
        auto: first.map(|s| s.mode_auto.clone()).unwrap_or_default(),
        workers: info.workers,
        most: None,
        shards: shape.shards,
        replicas: shape.replicas,
        durability: if info.durability.is_empty() { shape.durability } else { info.durability.clone() },
        bytes: info.bytes,
        run: info.run.clone(),
        since: info.first_seen_ms,
        stale: first.is_none(),
        members: first.map(|s| s.members.iter().map(member).collect()).unwrap_or_default(),
        started: first.is_some_and(|s| s.started),
        workers_lost: first.map_or(0, |s| s.workers_lost),
        samples: first.map_or(0, |s| s.samples),
        pushes: sum(|s| s.pushes),
        bytes_pushed: sum(|s| s.bytes_pushed),
        bytes_pulled: sum(|s| s.bytes_pulled),
        refused: sum(|s| s.refused),
        duplicates: sum(|s| s.duplicates),
        pushes_lost: sum(|s| s.pushes_lost),
        loss_sum: first.map_or(0.0, |s| s.loss_sum),
        losses: first.map_or(0, |s| s.losses),
        evaluated,
        delays: delays.counts().to_vec(),
        waits: waits.into_iter().map(|((worker, of), seconds)| Wait { worker, of, seconds }).collect(),
        tables: tables(of()),
        checkpoint: info.checkpoints.last().map(|c| (c.step, c.written_ms)),
    }
}

/// The tables of a job, over these of its shards.
pub fn tables<'a>(shards: impl Iterator<Item = &'a ShardStatus>) -> Vec<Table> {
    let mut all: BTreeMap<&str, Table> = BTreeMap::new();
    for t in shards.flat_map(|s| &s.tables) {
        let sum = all.entry(&t.name).or_insert_with(|| Table { name: t.name.clone(), ..Table::default() });
        (sum.rows, sum.most, sum.bytes) = (sum.rows + t.rows, sum.most + t.most, sum.bytes + t.bytes);
        (sum.created, sum.revived) = (sum.created + t.created, sum.revived + t.revived);
        (sum.evicted, sum.expired) = (sum.evicted + t.evicted, sum.expired + t.expired);
        sum.dropped += t.refused + t.too_rare;
    }
    all.into_values().collect()
}

fn member(m: &paraft_proto::Member) -> Member {
    let paraft_proto::Member { worker, clock, finished, idle, lease_ms, .. } = *m;
    Member { worker, clock, finished, idle, lease_ms, host: m.host.clone(), device: m.device.clone() }
}
