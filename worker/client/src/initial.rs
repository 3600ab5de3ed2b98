//! The state that the servers receive if they have no weights yet: fresh weights, or a checkpoint's state.

use bytes::Bytes;
use paraft_common::{
    BucketId, BucketSpec, TensorKind,
    codec::{F32_BYTES, put_f32_le},
};
use paraft_host::Scratch;
use paraft_proto::Init;
use std::{
    collections::BTreeMap,
    ops::{Deref, DerefMut},
    sync::Arc,
};

/// Values in memory, or in a file if they exceed the process's memory.
#[derive(Debug)]
pub enum Values {
    /// In memory.
    Memory(Vec<f32>),
    /// In a file.
    Scratch(Scratch),
}

impl Default for Values {
    fn default() -> Self {
        Self::Memory(Vec::new())
    }
}

impl From<Scratch> for Values {
    fn from(values: Scratch) -> Self {
        Self::Scratch(values)
    }
}

impl From<Vec<f32>> for Values {
    fn from(values: Vec<f32>) -> Self {
        Self::Memory(values)
    }
}

impl Deref for Values {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Memory(values) => values,
            Self::Scratch(values) => values,
        }
    }
}

impl DerefMut for Values {
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Self::Memory(values) => values,
            Self::Scratch(values) => values,
        }
    }
}

impl PartialEq for Values {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

/// The initial state of a whole job, as flat vectors.
#[derive(Debug, Default, PartialEq)]
pub struct Initial {
    /// All weights, buffers included.
    pub weights: Values,
    /// The optimizer's state vectors, each as long as the parameters. Empty for fresh weights; otherwise as many as
    /// the optimizer keeps.
    pub slots: Vec<Values>,
    /// For each of the job's buckets, its number of updates and the schedule's clock. Empty for fresh weights.
    pub stamps: Vec<(u64, f64)>,
    /// The partitions of tables from a checkpoint. Empty: rows begin with the values that their ids give.
    pub rows: BTreeMap<BucketId, SavedPartition>,
}

/// A partition of a table from a checkpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SavedPartition {
    /// Whole rows as a server keeps them, in one or more parts of at most 1 MiB.
    pub rows: Vec<Bytes>,
    /// What it knows of ids that are no rows, in parts; none if the table had other partitions.
    pub history: Vec<Bytes>,
}

impl Initial {
    /// Weights without any update.
    pub fn fresh(weights: impl Into<Values>) -> Self {
        Self { weights: weights.into(), ..Self::default() }
    }

    /// The messages that give `buckets` their state, made one by one: each bucket's slots, then its weights.
    pub(crate) fn messages(self: Arc<Self>, buckets: Arc<[(BucketId, BucketSpec)]>) -> Messages {
        Messages { initial: self, buckets, bucket: 0, slot: 0 }
    }

    fn slots_of(&self, kind: TensorKind) -> usize {
        if kind == TensorKind::Param { self.slots.len() } else { 0 }
    }
}

/// See [`Initial::messages`].
pub(crate) struct Messages {
    initial: Arc<Initial>,
    buckets: Arc<[(BucketId, BucketSpec)]>,
    /// Position of the next message: the bucket's index and its slot. After the last slot come the weights.
    bucket: usize,
    slot: usize,
}

impl Iterator for Messages {
    type Item = Init;

    fn next(&mut self) -> Option<Init> {
        let (id, spec) = self.buckets.get(self.bucket)?;
        let initial = &self.initial;
        let (version, clock) = initial.stamps.get(id.0 as usize).copied().unwrap_or_default();
        if let Some(saved) = initial.rows.get(id) {
            let (part, parts) = (self.slot, saved.rows.len() + saved.history.len());
            let payload = saved.rows.iter().chain(&saved.history).nth(part).cloned().unwrap_or_default();
            (self.bucket, self.slot) = match part + 1 < parts {
                true => (self.bucket, part + 1),
                false => (self.bucket + 1, 0),
            };
            let history = part >= saved.rows.len();
            let (part, parts) = (part as u32, parts as u32);
            return Some(Init { bucket: id.0, payload, part, version, clock, parts, history });
        }
        if self.slot < initial.slots_of(spec.kind) {
            let payload = le(&initial.slots[self.slot][spec.range()]);
            self.slot += 1;
            return Some(Init { bucket: id.0, payload, part: self.slot as u32, ..Init::default() });
        }
        (self.bucket, self.slot) = (self.bucket + 1, 0);
        let payload = le(&initial.weights[spec.range()]);
        Some(Init { bucket: id.0, payload, version, clock, ..Init::default() })
    }
}

fn le(values: &[f32]) -> bytes::Bytes {
    let mut le = Vec::with_capacity(values.len() * F32_BYTES);
    put_f32_le(values, &mut le);
    le.into()
}
