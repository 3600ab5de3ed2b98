//! Slices of a rank's stages (`parallel.tensor`): the ranks of a stage compute each of its layers together.
//!
//! ```text
//!  servers ──pull──▶ first slice ──deal──▶ the others          each has its part of the weights, and computes
//!  servers ◀──push── first slice ◀──join── the others          its part of the gradient
//! ```
//!
//! For the servers there are no slices: the first one of a stage speaks with its shards, for all. It has the stage's weights whole beside its part of
//! them, and puts the parts of the gradient together.

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

/// What a rank has of its stages, where they are cut in slices.
pub(super) struct Slices {
    /// Computes the slice.
    pub model: Option<Box<dyn Model>>,
    /// Values of its flat vector.
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

impl Slices {
    /// Of a model that is cut in these stages.
    pub fn new(model: &dyn Model, stages: &Stages, here: &Place, lines: &Lines) -> Result<Self, WorkerError> {
        let Slice { at, of } = here.slice;
        let places: Vec<usize> = (0..of).map(|slice| here.at * of + slice).collect();
        let ranks: Arc<dyn SliceRanks> =
            Arc::new(Beside { lines: lines.clone(), places, at, gathered: AtomicU64::new(0) });
        let of_stages = &stages.own()[here.stages.clone()];
        let own = of_stages.first().map_or(0, |r| r.start)..of_stages.last().map_or(0, |r| r.end);
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

    /// What the first slice has pulled goes to all of them.
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
        let Some(Whole { weights: whole, .. }) = whole else {
            let values = lines.receive(here.at * here.slice.of, tag)?;
            return scatter(own, &values, weights, |run| run.1);
        };
        for (slice, runs) in self.runs.iter().enumerate().skip(1) {
            let rows = runs.iter().flat_map(Run::each);
            let values = rows.flat_map(|(from, _)| &whole[from]).copied().collect();
            lines.send(here.at * here.slice.of + slice, tag, values)?;
        }
        for (from, to) in own.iter().flat_map(Run::each) {
            weights[to].copy_from_slice(&whole[from]);
        }
        Ok(())
    }

    /// The parts of the gradient come together, where the first slice is.
    pub fn join(
        &self,
        lines: &Lines,
        here: &Place,
        (sum, round): (&[f32], u64),
        whole: Option<&mut Whole>,
    ) -> Result<(), Broke> {
        let tag = Tag { kind: JOIN, number: round };
        let own = &self.runs[here.slice.at];
        let Some(Whole { gradient, .. }) = whole else {
            let rows = own.iter().filter(|run| !run.shared).flat_map(Run::each);
            let values = rows.flat_map(|(_, local)| &sum[local]).copied().collect();
            return Ok(lines.send(here.at * here.slice.of, tag, values)?);
        };
        for (to, from) in own.iter().flat_map(Run::each) {
            gradient[to].copy_from_slice(&sum[from]);
        }
        for (slice, runs) in self.runs.iter().enumerate().skip(1) {
            let values = lines.receive(here.at * here.slice.of + slice, tag)?;
            let once: Vec<Run> = runs.iter().copied().filter(|run| !run.shared).collect();
            scatter(&once, &values, gradient, |run| run.0)?;
        }
        Ok(())
    }
}

/// Values as another slice has sent them, one run after the other.
fn scatter(
    runs: &[Run],
    values: &[f32],
    to: &mut [f32],
    place: impl Fn((Range<usize>, Range<usize>)) -> Range<usize>,
) -> Result<(), Broke> {
    let len: usize = runs.iter().map(|run| run.rows * run.len).sum();
    if len != values.len() {
        return Err(GroupError::Broken(format!("a slice has sent {} values for {len}", values.len())).into());
    }
    let mut values = values;
    for row in runs.iter().flat_map(Run::each) {
        let (of_row, rest) = values.split_at(row.0.len());
        to[place(row)].copy_from_slice(of_row);
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
