//! The maximal memory that a job needs on a server for a replica of a shard. Pure: another module finds
//! the server's memory.
//!
//! The parts are the bounds of ARCHITECTURE's invariant 4, so an admitted job stays below them:
//!
//! | part | bytes |
//! |---|---|
//! | weights | 4 for each value; of tables, the most rows that partitions may have, and their index |
//! | slots | as many for each state vector of the optimizer and the algorithm |
//! | kept | the algorithm's state per worker: a copy of the weights, or the optimizer's state, for each
//! |
//! | staged | a job with state deltas: the working copies of a leader, or the parts of a delta, both at
//! most the state again |
//! | log | as much as the state, from 32 MiB to 256 MiB (on disk to 64 MiB: the rest is read back) |
//! | copies | replaced values with open readers: 1 GiB or a sixteenth of the state, and not more than
//! the state |
//! | queued | pushes in the leader's queue: a worker's window, or its share of the shard where that is
//! less, for each |
//! | tables | the pushes and pulls of each worker: 24 bytes for each worker and bucket, and 4 KiB up to
//! 64 MiB in all |

use crate::{
    config::ServerJob, encoding::Encoding, id::ShardId, layout::TensorKind, placement, table::MAX_PUSH_BYTES,
};
use serde::{Deserialize, Serialize};
use std::{fmt, iter::Sum, ops::Add, str::FromStr};

const F32: u64 = 4;
const MIB: u64 = 1 << 20;
/// Unacknowledged payload of a worker (`paraft_proto::limits::PUSH_WINDOW_BYTES`).
const WINDOW: u64 = 64 * MIB;
/// The maximum of a leader's records of pulls (`shard/staleness.rs`).
const MAX_PULL_RECORDS: u64 = 64 * MIB;
/// Such records for each worker and bucket.
const PULL_RECORD_BYTES: u64 = 4 << 10;

/// Bytes, by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // the table above
pub struct Need {
    pub weights: u64,
    pub slots: u64,
    pub kept: u64,
    pub staged: u64,
    pub log: u64,
    pub copies: u64,
    pub queued: u64,
    pub tables: u64,
}

impl Need {
    /// The need of one replica of a shard of `shards`. A shard without buckets of the job needs
    /// nothing.
    pub fn of(job: &ServerJob, shard: ShardId, shards: u32) -> Self {
        let (params, buffers, dense) = held(job, shard, shards);
        let (rows, partitions) = held_rows(job, shard, shards);
        let (values, buckets) = (params + buffers, dense + partitions);
        if buckets == 0 {
            return Self::default();
        }
        let (workers, keeps) = (u64::from(job.workers), job.keeps());
        let weights = (values * F32).saturating_add(rows);
        let slots = params * F32 * job.slots() as u64;
        // A combined update has its own state, the fleet's, beside that of each worker.
        let own = if keeps.own_slots { job.on_shard().slots() as u64 * (workers + 1) } else { 0 };
        let pulled = if keeps.pulled { workers } else { 0 };
        let kept = (params * F32).saturating_mul(own + pulled);
        let state = weights.saturating_add(slots).saturating_add(kept);
        let log = state.clamp(32 * MIB, if job.durability.on_disk() { 64 } else { 256 } * MIB);
        let encoded = |kind: TensorKind, values: u64| match job.encoding(kind) {
            Encoding::F32 => values * F32,
            other => other.encoded_len(usize::try_from(values).unwrap_or(usize::MAX)) as u64,
        };
        let pushed = encoded(TensorKind::Param, params)
            .saturating_add(encoded(TensorKind::Buffer, buffers))
            .saturating_add(partitions.saturating_mul(MAX_PUSH_BYTES as u64));
        // With clipping by the global norm, a step's pushes wait for all of them. Otherwise a worker
        // has one window for all shards.
        let window =
            if job.clip.norm.is_some() { u64::MAX } else { WINDOW.div_ceil(u64::from(shards.max(1))) };
        let noted = workers.saturating_mul(buckets);
        Self {
            weights,
            slots,
            kept,
            staged: if job.durability.is_leader() { state } else { 0 },
            log,
            copies: state.min((1024 * MIB).max(state / 16)),
            queued: pushed.min(window).saturating_mul(workers),
            tables: noted
                .saturating_mul(24)
                .saturating_add(noted.saturating_mul(PULL_RECORD_BYTES).min(MAX_PULL_RECORDS)),
        }
    }

    /// The total.
    pub fn total(&self) -> u64 {
        self.parts().iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// By name, in the order of the table.
    pub fn parts(&self) -> [(&'static str, u64); 8] {
        [
            ("weights", self.weights),
            ("slots", self.slots),
            ("kept", self.kept),
            ("staged", self.staged),
            ("log", self.log),
            ("copies", self.copies),
            ("queued", self.queued),
            ("tables", self.tables),
        ]
    }
}

impl Add for Need {
    type Output = Need;

    fn add(self, other: Need) -> Need {
        Need {
            weights: self.weights.saturating_add(other.weights),
            slots: self.slots.saturating_add(other.slots),
            kept: self.kept.saturating_add(other.kept),
            staged: self.staged.saturating_add(other.staged),
            log: self.log.saturating_add(other.log),
            copies: self.copies.saturating_add(other.copies),
            queued: self.queued.saturating_add(other.queued),
            tables: self.tables.saturating_add(other.tables),
        }
    }
}

impl Sum for Need {
    fn sum<I: Iterator<Item = Need>>(all: I) -> Need {
        all.fold(Need::default(), Add::add)
    }
}

/// `96.0 GiB (weights 64.0 GiB, slots 32.0 GiB)`; parts below a hundredth are omitted.
impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.total();
        write!(f, "{}", Bytes(total))?;
        let parts = self.parts().into_iter().filter(|(_, bytes)| *bytes > 0 && *bytes >= total / 100);
        for (i, (name, bytes)) in parts.enumerate() {
            write!(f, "{}{name} {}", if i == 0 { " (" } else { ", " }, Bytes(bytes))?;
        }
        if total > 0 { f.write_str(")") } else { Ok(()) }
    }
}

/// A number of bytes for people: `4.1 GiB`, `310 B`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit =
            [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)].into_iter().find(|(_, s)| self.0 >> s > 0);
        match unit {
            Some((name, shift)) => write!(f, "{:.1} {name}", self.0 as f64 / (1u64 << shift) as f64),
            None => write!(f, "{} B", self.0),
        }
    }
}

/// The displayed form (`4.1 GiB`, `512MiB`, `310 B`), or with a letter (`64K`); a bare number is bytes.
/// Powers of 1024, whole bytes.
impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("`{text}` is no number of bytes: write 512MiB, 24GiB or 1.5TiB");
        let number = text.trim_end().trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let shift = match text[number.len()..].trim().to_ascii_uppercase().as_str() {
            "" | "B" => 0,
            "K" | "KIB" => 10,
            "M" | "MIB" => 20,
            "G" | "GIB" => 30,
            "T" | "TIB" => 40,
            _ => return Err(bad()),
        };
        let number: f64 = number.trim().parse().map_err(|_| bad())?;
        let bytes = number * f64::from(2u32).powi(shift);
        // Beyond this a float holds no whole bytes, and no memory is so large.
        (number.is_finite() && (0.0..=f64::from(2u32).powi(53)).contains(&bytes))
            .then_some(Self(bytes as u64))
            .ok_or_else(bad)
    }
}

/// Bytes of the full partitions of a shard, and their number.
fn held_rows(job: &ServerJob, shard: ShardId, shards: u32) -> (u64, u64) {
    let (mut bytes, mut count) = (0u64, 0);
    let mut first = (job.buckets() - job.tables.iter().map(|t| t.partitions as usize).sum::<usize>()) as u64;
    for table in job.tables.iter().filter(|_| shard.0 < shards) {
        let end = first + u64::from(table.partitions);
        let round = u64::from(shards);
        let below = |n: u64| (n + round - 1 - u64::from(shard.0) % round) / round;
        let here = below(end) - below(first);
        bytes = bytes.saturating_add(table.partition_bytes().saturating_mul(here));
        count += here;
        first = end;
    }
    (bytes, count)
}

/// Trained values, running statistics and buckets of a shard: the sum over
/// [`crate::placement::buckets_of`], without a list as long as the job.
fn held(job: &ServerJob, shard: ShardId, shards: u32) -> (u64, u64, u64) {
    let stages = job.stages.len().max(1);
    let (mut stage, mut first) = (0, 0);
    let (mut params, mut buffers, mut buckets) = (0, 0, 0);
    if shard.0 >= shards {
        return (0, 0, 0);
    }
    for part in job.parts() {
        let values = part.values as u64;
        let len = part.bucket_len(job.bucket_len.max(1)) as u64;
        // Each stage's buckets are assigned round-robin to its own shards.
        let (here, round) = match placement::shards_of(part.stage, stages, shards) {
            Some(own) => {
                if part.stage != stage {
                    (stage, first) = (part.stage, 0);
                }
                let own_shard = shard.0 as usize % stages == stage;
                (own_shard.then_some(u64::from(shard.0) / stages as u64), u64::from(own))
            }
            None => (Some(u64::from(shard.0)), u64::from(shards)),
        };
        let end = first + values.div_ceil(len);
        if let Some(nth) = here {
            // Buckets in `first..end` whose number modulo `round` is `nth`.
            let below = |n: u64| (n + round - 1 - nth % round) / round;
            let count = below(end) - below(first);
            let last_is_here = end > first && (end - 1) % round == nth;
            let missing = if last_is_here { (end - first) * len - values } else { 0 };
            buckets += count;
            *if part.kind == TensorKind::Param { &mut params } else { &mut buffers } += count * len - missing;
        }
        first = end;
    }
    (params, buffers, buckets)
}

#[cfg(test)]
#[path = "need_tests.rs"]
mod tests;
