//! The ranks that have the same stages: slices of them (`parallel.tensor`), which compute each layer together, and replicas of the model, each with samples
//! of its own (`train.group_size`).
//!
//! ```text
//!  servers ──pull──▶ first slice of the first replica ──deal──▶ the others      each has its part of the weights, and computes
//!  servers ◀──push── first slice of the first replica ◀──join── the others      its part of the gradient, over its samples
//! ```
//!
//! For the servers there is neither: one rank speaks with the shards of its stages, for all who have them. Where they are cut in slices it has the stage's
//! weights whole beside its part of them, and puts the parts of the gradient together.

use super::{DEAL, JOIN, SLICES, place::Place};
use crate::{engine::Broke, worker::WorkerError};
use paraft_compute::collective::{GroupError, Lines, Tag};
use paraft_host::Pages;
use paraft_models::{DeviceError, Model, Run, Slice, SliceRanks, Sliced, Stages};
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// Who has the stages of a rank, and what of them.
pub(super) struct Alike {
    /// Computes the slice, where they are cut in several.
    pub model: Option<Box<dyn Model>>,
    /// Values of the flat vector that it computes with.
    pub len: usize,
    /// In that.
    pub stages: Stages,
    /// Of each slice, what of this rank's stages it has.
    runs: Vec<Vec<Run>>,
    deals: u64,
}

/// What the first slice of a stage has of the model's flat vectors. As long as the model; memory is where this rank's stages are.
pub(super) struct Whole {
    pub weights: Pages,
    pub gradient: Pages,
}

impl Whole {
    pub fn new(len: usize) -> Result<Self, WorkerError> {
        Ok(Self { weights: pages(len)?, gradient: pages(len)? })
    }
}

pub(super) fn pages(len: usize) -> Result<Pages, WorkerError> {
    Pages::new(len).map_err(|e| WorkerError::Job(format!("no address space for {len} values: {e}")))
}

impl Alike {
    /// Of a model of so many values that is cut in these stages.
    pub fn new(
        model: &dyn Model,
        (stages, len): (&Stages, usize),
        here: &Place,
        lines: &Lines,
    ) -> Result<Self, WorkerError> {
        let Slice { at, of } = here.slice;
        let of_stages = &stages.own()[here.stages.clone()];
        let own = of_stages.first().map_or(0, |r| r.start)..of_stages.last().map_or(0, |r| r.end);
        if of == 1 {
            let (whole, local, len_of_own) = (own.start, own.start, own.len());
            let all = Run { whole, local, rows: 1, len: len_of_own, stride: len_of_own, shared: false };
            return Ok(Self { model: None, len, stages: stages.clone(), runs: vec![vec![all]], deals: 0 });
        }
        let first = here.beside(here.at) - at;
        let places: Vec<usize> = (0..of).map(|slice| first + slice).collect();
        let ranks: Arc<dyn SliceRanks> =
            Arc::new(Beside { lines: lines.clone(), places, at, gathered: AtomicU64::new(0) });
        let (mut runs, mut sliced) = (Vec::new(), None);
        for slice in 0..of {
            let part = model.slice(Slice { at: slice, of }, ranks.clone())?;
            runs.push(part.runs.iter().copied().filter(|run| own.contains(&run.whole)).collect());
            if slice == at {
                sliced = Some(part);
            }
        }
        let sliced = sliced.ok_or_else(|| WorkerError::Job("a slice beyond those of the model".into()))?;
        let counts: Vec<usize> = stages.layers().iter().map(Range::len).collect();
        let cut = Stages::given(&sliced.model.layers(), &counts).map_err(WorkerError::Job)?;
        let Sliced { model, len, .. } = sliced;
        Ok(Self { model: Some(model), len, stages: cut, runs, deals: 0 })
    }

    /// What was pulled by who speaks for them goes to all of them. It is in `whole`, or where they are not cut in slices in `weights`.
    pub fn deal(
        &mut self,
        lines: &Lines,
        here: &Place,
        whole: Option<&Whole>,
        weights: &mut [f32],
    ) -> Result<(), Broke> {
        let tag = Tag { kind: DEAL, number: self.deals };
        self.deals += 1;
        let own = &self.runs[here.slice.at];
        let mut alike = here.alike();
        let speaker = alike.next().map_or(0, |(place, ..)| place);
        if !here.speaks() {
            let values = lines.receive(speaker, tag)?;
            return scatter(own, &values, weights, |run| run.1, <[f32]>::copy_from_slice);
        }
        let from: &[f32] = whole.map_or(&*weights, |whole| &whole.weights);
        for (place, slice, _) in alike {
            let rows = self.runs[slice].iter().flat_map(Run::each);
            let values = rows.flat_map(|(whole, _)| &from[whole]).copied().collect();
            lines.send(place, tag, values)?;
        }
        if let Some(whole) = whole {
            for (from, to) in own.iter().flat_map(Run::each) {
                weights[to].copy_from_slice(&whole.weights[from]);
            }
        }
        Ok(())
    }

    /// The parts of the gradient come together, where the first slice of the first replica is: in `whole`, or where they are not cut in slices in `sum`.
    pub fn join(
        &self,
        lines: &Lines,
        here: &Place,
        (sum, round): (&mut [f32], u64),
        whole: Option<&mut Whole>,
    ) -> Result<(), Broke> {
        let tag = Tag { kind: JOIN, number: round };
        // What all slices of a replica have its first one sends.
        let sent = |slice: usize| self.runs[slice].iter().filter(move |run| slice == 0 || !run.shared);
        let own = here.slice.at;
        let mut alike = here.alike();
        let speaker = alike.next().map_or(0, |(place, ..)| place);
        if !here.speaks() {
            let rows = sent(own).flat_map(Run::each);
            let values = rows.flat_map(|(_, local)| &sum[local]).copied().collect();
            return Ok(lines.send(speaker, tag, values)?);
        }
        let to = match whole {
            None => sum,
            Some(whole) => {
                for (to, from) in sent(own).flat_map(Run::each) {
                    whole.gradient[to].copy_from_slice(&sum[from]);
                }
                &mut whole.gradient
            }
        };
        for (place, slice, first) in alike {
            let values = lines.receive(place, tag)?;
            let runs: Vec<Run> = sent(slice).copied().collect();
            let put = if first { <[f32]>::copy_from_slice } else { plus };
            scatter(&runs, &values, to, |run| run.0, put)?;
        }
        Ok(())
    }
}

fn plus(sum: &mut [f32], values: &[f32]) {
    sum.iter_mut().zip(values).for_each(|(s, v)| *s += v);
}

/// Values as another rank has sent them, one run after the other.
fn scatter(
    runs: &[Run],
    values: &[f32],
    to: &mut [f32],
    place: impl Fn((Range<usize>, Range<usize>)) -> Range<usize>,
    put: fn(&mut [f32], &[f32]),
) -> Result<(), Broke> {
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
struct Beside {
    lines: Lines,
    /// Of each slice.
    places: Vec<usize>,
    at: usize,
    gathered: AtomicU64,
}

impl SliceRanks for Beside {
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
