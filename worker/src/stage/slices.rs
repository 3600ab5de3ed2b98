//! Ranks with the same stages: slices (`parallel.tensor`), which compute each layer together, and ranks of other
//! meshes, each with its own samples (`train.group_size`).
//!
//! ```text
//!  servers ──pull──▶ first slice of the first mesh ──deal──▶ the others      each has its part of the weights, and computes
//!  servers ◀──push── first slice of the first mesh ◀──join── the others      its part of the gradient, over its samples
//! ```
//!
//! The servers see neither slices nor meshes: one rank speaks with the shards of its stages for all ranks that have
//! them. No rank holds a sliced stage completely. A pulled bucket is distributed at once, and a gradient bucket is
//! assembled when it is pushed.

use super::{
    messages::{DISTRIBUTE, DISTRIBUTED, JOIN, MAX_UNREAD, RECEIVED, SLICES},
    place::Place,
};
use crate::{engine::StepError, worker::WorkerError};
use paraft_client::Places;
use paraft_common::BucketId;
use paraft_compute::collective::{GroupError, Lines, Tag};
use paraft_models::{DeviceError, Model, Run, Slice, SliceRanks, Sliced, Stages};
use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// The ranks with the same stages, and each one's part of them.
pub(super) struct StageReplicas {
    /// Computes this rank's slice, if there are several slices.
    pub model: Option<Box<dyn Model>>,
    /// Length of the flat vector that it computes with.
    pub len: usize,
    /// The stages, as places in that vector.
    pub stages: Stages,
    /// For each slice, its part of each of the model's buckets.
    runs: Vec<Vec<Vec<Run>>>,
    /// Number of distributed pulls.
    deals: u64,
    /// Value of `deals` at the last accepted pull.
    landed: u64,
    here: Place,
    lines: Lines,
}

impl StageReplicas {
    /// For a model with these buckets and stages.
    pub fn new(
        model: &dyn Model,
        (stages, buckets): (&Stages, &[Range<usize>]),
        here: &Place,
        lines: &Lines,
    ) -> Result<Self, WorkerError> {
        let Slice { at, of } = here.slice;
        let of_buckets = |all: &[Run]| buckets.iter().map(|bucket| in_bucket(all, bucket)).collect();
        let (here, lines) = (here.clone(), lines.clone());
        if of == 1 {
            let len = buckets.last().map_or(0, |b| b.end);
            let (stages, runs) = (stages.clone(), vec![of_buckets(&[Run::whole(0..len)])]);
            return Ok(Self { model: None, len, stages, runs, deals: 0, landed: 0, here, lines });
        }
        let first = here.beside(here.at) - at;
        let places: Vec<usize> = (0..of).map(|slice| first + slice).collect();
        let ranks: Arc<dyn SliceRanks> =
            Arc::new(ReplicaRanks { lines: lines.clone(), places, at, gathered: AtomicU64::new(0) });
        let (mut runs, mut sliced) = (Vec::new(), None);
        for slice in 0..of {
            let part = model.slice(Slice { at: slice, of }, ranks.clone())?;
            runs.push(of_buckets(&part.runs));
            if slice == at {
                sliced = Some(part);
            }
        }
        let sliced = sliced.ok_or_else(|| WorkerError::Job("a slice beyond those of the model".into()))?;
        let counts: Vec<usize> = stages.layers().iter().map(Range::len).collect();
        let cut = Stages::given(&sliced.model.layers(), &counts).map_err(WorkerError::Job)?;
        let Sliced { model, len, .. } = sliced;
        Ok(Self { model: Some(model), len, stages: cut, runs, deals: 0, landed: 0, here, lines })
    }

    /// Accepts the last pull on ranks that do not speak with the servers. `own`: the buckets of this rank's stages.
    pub fn landed(&mut self, own: Range<usize>, weights: &mut [f32]) -> Result<(), StepError> {
        self.landed += 1;
        let tag = Tag { kind: DISTRIBUTED, number: self.landed };
        if self.here.speaks() {
            for (place, ..) in self.here.alike().skip(1) {
                // In halves: an f32 counts exactly only to 2^24.
                let halves = [self.deals >> 16, self.deals & 0xffff];
                self.lines.send(place, tag, halves.map(|half| half as f32).to_vec())?;
            }
            return Ok(());
        }
        let halves = self.lines.receive(self.here.speaker(), tag)?;
        let deals = halves.iter().fold(0, |deals, half| deals << 16 | *half as u64);
        while self.deals < deals {
            self.have(own.clone(), weights)?;
        }
        Ok(())
    }

    /// Receives the next distributed pull from the rank that speaks with the servers.
    pub fn have(&mut self, own: Range<usize>, weights: &mut [f32]) -> Result<(), StepError> {
        self.deals += 1;
        for bucket in own {
            let runs = &self.runs[self.here.slice.at][bucket];
            if !runs.is_empty() {
                let values =
                    self.lines.receive(self.here.speaker(), numbered(DISTRIBUTE, self.deals, bucket))?;
                // An empty message: these values are unchanged.
                if !values.is_empty() {
                    scatter(runs, &values, weights, |run| run.1, <[f32]>::copy_from_slice)?;
                }
            }
        }
        Ok(())
    }

    /// A slice's part of a bucket's gradient, or of its final weights. The first slice sends the parts that all
    /// slices share.
    pub fn sent(&self, slice: usize, bucket: usize) -> Vec<Run> {
        let counts = |run: &&Run| slice == 0 || !run.shared;
        self.runs[slice][bucket].iter().filter(counts).copied().collect()
    }

    /// Sends the parts of the gradient in these buckets to the rank that speaks for them, in the order in which
    /// that rank [assembles them](Self::join).
    pub fn send(&self, own: Range<usize>, (sum, round): (&[f32], u64)) -> Result<(), StepError> {
        let mut sent = Vec::new();
        for bucket in own.rev() {
            let runs = self.sent(self.here.slice.at, bucket);
            if runs.is_empty() {
                continue;
            }
            // Unread messages wait in the receiver's memory.
            if let Some(before) = sent.len().checked_sub(MAX_UNREAD) {
                self.lines.receive(self.here.speaker(), numbered(RECEIVED, round, sent[before]))?;
            }
            let values = values_of(&runs, sum);
            self.lines.send(self.here.speaker(), numbered(JOIN, round, bucket), values)?;
            sent.push(bucket);
        }
        for bucket in sent.iter().rev().take(MAX_UNREAD).rev() {
            self.lines.receive(self.here.speaker(), numbered(RECEIVED, round, *bucket))?;
        }
        Ok(())
    }

    /// Assembles a bucket of the gradient.
    pub fn join(
        &self,
        (bucket, range): (usize, &Range<usize>),
        (sum, round): (&[f32], u64),
        to: &mut Vec<f32>,
    ) -> Result<(), StepError> {
        to.clear();
        to.resize(range.len(), 0.0);
        for (whole, local) in self.sent(self.here.slice.at, bucket).iter().flat_map(Run::each) {
            to[from(range, whole)].copy_from_slice(&sum[local]);
        }
        for (place, slice, first) in self.here.alike().skip(1) {
            let runs = self.sent(slice, bucket);
            if runs.is_empty() {
                continue;
            }
            let values = self.lines.receive(place, numbered(JOIN, round, bucket))?;
            self.lines.send(place, numbered(RECEIVED, round, bucket), Vec::new())?;
            let put = if first { <[f32]>::copy_from_slice } else { plus };
            scatter(&runs, &values, to, |run| from(range, run.0), put)?;
        }
        Ok(())
    }
}

/// A pull of the rank that speaks with the servers: it sends each bucket to all ranks with a part of it.
pub(super) struct SharedPull<'a> {
    alike: Option<&'a StageReplicas>,
    buckets: &'a [Range<usize>],
    weights: &'a mut [f32],
    /// A received bucket, if the model has slices.
    bucket: Vec<f32>,
    dealt: BTreeSet<usize>,
    pub broken: Option<GroupError>,
}

impl<'a> SharedPull<'a> {
    pub fn new(
        mut alike: Option<&'a mut StageReplicas>,
        (buckets, weights): (&'a [Range<usize>], &'a mut [f32]),
    ) -> Self {
        if let Some(alike) = &mut alike {
            alike.deals += 1;
        }
        let (alike, bucket, dealt) = (alike.map(|alike| &*alike), Vec::new(), BTreeSet::new());
        Self { alike, buckets, weights, bucket, dealt, broken: None }
    }
}

impl Places for SharedPull<'_> {
    fn place(&mut self, bucket: BucketId) -> Option<&mut [f32]> {
        let range = self.buckets.get(bucket.0 as usize)?;
        match self.alike.map_or(1, |alike| alike.here.slice.of) {
            1 => self.weights.get_mut(range.clone()),
            _ => {
                self.bucket.resize(range.len(), 0.0);
                Some(&mut self.bucket)
            }
        }
    }

    fn placed(&mut self, bucket: BucketId, changed: bool) {
        let i = bucket.0 as usize;
        let (Some(alike), Some(range), None) = (self.alike, self.buckets.get(i), &self.broken) else {
            return;
        };
        if !self.dealt.insert(i) {
            // The bucket came again from another leader or in another session. The other ranks may have the former
            // version.
            let why = "a shard's weights have come twice in a pull";
            self.broken = Some(alike.lines.break_up(why));
            return;
        }
        let sliced = alike.here.slice.of > 1;
        let whole = if sliced { &self.bucket } else { &self.weights[range.clone()] };
        for (place, slice, _) in alike.here.alike().skip(1) {
            let runs = &alike.runs[slice][i];
            if !runs.is_empty() {
                let values = if changed { gather(runs, whole, |run| from(range, run.0)) } else { Vec::new() };
                let sent = alike.lines.send(place, numbered(DISTRIBUTE, alike.deals, i), values);
                self.broken = sent.err().or(self.broken.take());
            }
        }
        if sliced && changed {
            for (of_bucket, to) in alike.runs[alike.here.slice.at][i].iter().flat_map(Run::each) {
                self.weights[to].copy_from_slice(&self.bucket[from(range, of_bucket)]);
            }
        }
    }
}

/// The runs' part of a bucket.
fn in_bucket(runs: &[Run], range: &Range<usize>) -> Vec<Run> {
    let mut parts: Vec<Run> = Vec::new();
    for run in runs {
        let stride = run.stride.max(1);
        let first = (range.start + 1).saturating_sub(run.whole + run.len).div_ceil(stride);
        let end = range.end.saturating_sub(run.whole).div_ceil(stride).min(run.rows);
        for row in first..end {
            let (whole, local) = (run.whole + row * run.stride, run.local + row * run.len);
            let part = whole.max(range.start)..(whole + run.len).min(range.end);
            let next = Run {
                whole: part.start,
                local: local + part.start - whole,
                rows: 1,
                len: part.len(),
                ..*run
            };
            match parts.last_mut() {
                Some(last) if last.is_followed_by(&next) => last.rows += 1,
                _ => parts.push(next),
            }
        }
    }
    parts
}

/// Converts a range of the model's vector to one of a bucket.
fn from(bucket: &Range<usize>, whole: Range<usize>) -> Range<usize> {
    whole.start - bucket.start..whole.end - bucket.start
}

fn numbered(kind: u32, round: u64, bucket: usize) -> Tag {
    Tag { kind, number: round << 24 | bucket as u64 }
}

fn plus(sum: &mut [f32], values: &[f32]) {
    sum.iter_mut().zip(values).for_each(|(s, v)| *s += v);
}

/// The values of runs in a slice's vector, concatenated.
pub(super) fn values_of(runs: &[Run], from: &[f32]) -> Vec<f32> {
    gather(runs, from, |run| run.1)
}

fn gather(
    runs: &[Run],
    from: &[f32],
    place: impl Fn((Range<usize>, Range<usize>)) -> Range<usize>,
) -> Vec<f32> {
    let mut values = Vec::with_capacity(runs.iter().map(|run| run.rows * run.len).sum());
    for row in runs.iter().flat_map(Run::each) {
        values.extend_from_slice(&from[place(row)]);
    }
    values
}

/// Writes another rank's values, run by run.
pub(super) fn scatter(
    runs: &[Run],
    values: &[f32],
    to: &mut [f32],
    place: impl Fn((Range<usize>, Range<usize>)) -> Range<usize>,
    put: fn(&mut [f32], &[f32]),
) -> Result<(), StepError> {
    let len: usize = runs.iter().map(|run| run.rows * run.len).sum();
    if len != values.len() {
        return Err(GroupError::Broken(format!("a rank has sent {} values for {len}", values.len())).into());
    }
    let mut values = values;
    for row in runs.iter().flat_map(Run::each) {
        let (of_row, rest) = values.split_at(row.0.len());
        put(&mut to[place(row)], of_row);
        values = rest;
    }
    Ok(())
}

/// The ranks with the slices of the same stages.
#[derive(Debug)]
struct ReplicaRanks {
    lines: Lines,
    /// The rank of each slice.
    places: Vec<usize>,
    at: usize,
    gathered: AtomicU64,
}

impl SliceRanks for ReplicaRanks {
    fn gather(&self, own: &[f32]) -> Result<Vec<Vec<f32>>, DeviceError> {
        let tag = Tag { kind: SLICES, number: self.gathered.fetch_add(1, Relaxed) };
        let others = || self.places.iter().enumerate().filter(|(slice, _)| *slice != self.at);
        for (_, place) in others() {
            self.lines.send(*place, tag, own.to_vec())?;
        }
        let mut all = Vec::with_capacity(self.places.len());
        for (slice, place) in self.places.iter().enumerate() {
            all.push(if slice == self.at { own.to_vec() } else { self.lines.receive(*place, tag)? });
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If ranges cover the vector, each value is in one of them, at its place.
    #[test]
    fn runs_are_cut_at_buckets() {
        for (rows, len, gap, at, cut) in (0..2 * 3 * 4 * 3 * 5 * 4)
            .map(|n: usize| (1 + n % 4, 1 + n / 4 % 5, n / 20 % 3, n / 60 % 4, 1 + n / 240 % 6))
        {
            let run = Run { whole: at, local: 100, rows, len, stride: len + gap, shared: false };
            let mut seen = Vec::new();
            for begin in (0..60).step_by(cut) {
                let range = begin..begin + cut;
                for (whole, local) in in_bucket(&[run], &range).iter().flat_map(Run::each) {
                    assert!(range.start <= whole.start && whole.end <= range.end && !whole.is_empty());
                    seen.extend(whole.zip(local));
                }
            }
            let all: Vec<(usize, usize)> = run.each().flat_map(|(whole, local)| whole.zip(local)).collect();
            assert_eq!(seen, all, "{run:?} in parts of {cut}");
        }
    }
}
