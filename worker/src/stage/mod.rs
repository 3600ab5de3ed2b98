//! A rank that holds some stages of its worker's model (`parallel.pipeline`).
//!
//! ```text
//!  place 0   pull ─▶ [lend] ─▶ F0 F1 ... B0 ── B1 ── push as it is complete        (leads; the samples)
//!               activations │  ▲ their gradients
//!  place 1   pull ─▶ [borrow]─▶ F0 B0 F1 B1 ... ── push                             (the loss)
//! ```
//!
//! Each rank has its own session with the shards of its stages, under the worker's name; no other rank of the
//! worker speaks with those shards. The leader starts each step, pull and evaluation. Stages exchange data over the
//! group's [lines](Lines).
//!
//! After a rank dies there may be fewer ranks than stages: then a rank has several consecutive stages. The ranks of
//! an incomplete mesh wait.

mod loans;
mod lookahead;
mod messages;
mod norms;
mod place;
mod pulls;
mod slices;
mod step;
mod sums;
mod versioned;
mod whole;

pub(crate) use pulls::further;
pub(crate) use step::Batches;

use crate::{engine::StepError, group::Ranks, worker::WorkerError};
use paraft_client::{Client, Pull};
use paraft_common::{Step, pipeline::PipelineSchedule};
use paraft_compute::collective::Lines;
use paraft_host::{Pages, Scratch};
use paraft_models::{Model, Slice, Stages};
use place::{ModelSplit, Place};
use slices::StageReplicas;
use std::{
    ops::Range,
    path::{Path, PathBuf},
};
use versioned::{Versioned, pages};

/// Opens a follower's session with the shards of these stages; returns it and the step to continue from. With
/// `false` it supplies no initial weights.
pub(crate) type Join<'a> =
    dyn FnMut(&dyn Model, Range<usize>, bool) -> Result<(Client, Step), WorkerError> + 'a;

/// See the module.
pub(crate) struct Stage<'a> {
    stages: Stages,
    /// Number of slices per stage and number of meshes, when there are enough ranks.
    tensor: usize,
    meshes: usize,
    alike: Option<StageReplicas>,
    schedule: PipelineSchedule,
    /// Whether the job clips by the norm of the whole gradient, which several stages share.
    clips: bool,
    micro_batches: usize,
    /// Samples of the largest micro-batch.
    part: usize,
    /// The values of each bucket.
    buckets: Vec<Range<usize>>,
    /// As long as the model, or a slice of it. Only the pages of this rank's own and borrowed parameters take
    /// memory.
    weights: Versioned,
    /// The previous weights, while a minibatch that started at them is in progress.
    stash: Versioned,
    /// Gradient sum of the micro-batches so far.
    sum: Pages,
    /// One micro-batch's gradient, as it becomes ready.
    gradient: Pages,
    here: Place,
    /// Steps of this group.
    rounds: u64,
    /// This rank's parts of evaluations.
    evaluations: u64,
    /// Pulls of this group.
    pulls: u64,
    /// Exchanges of norms of this group.
    norms: u64,
    /// How often new weights have landed.
    editions: u64,
    /// Opens a follower's session.
    join: Option<Box<Join<'a>>>,
    client: Option<Client>,
    /// Buckets from this index on are pushed of this step, in this session.
    pushed: Option<(Step, usize)>,
    /// The session was reopened in this step.
    moved: bool,
    /// The session was reopened in a failed pull.
    lost: bool,
    /// A pull failed after it had received something. The next pull would bring only the rest, but other ranks need
    /// everything from it.
    spoiled: bool,
    /// The next step, if it is in progress.
    next_minibatch: Option<StartedMinibatch>,
    slots: Slots,
    /// A pull whose weights are not needed yet.
    asked: Option<Pull>,
    /// The group that this state belongs to.
    generation: u64,
    /// The step of this rank's shards, as far as it knows.
    done: Step,
    /// The last pull, with the step that it reached.
    pulled: Pull,
    /// All final weights, if this rank leads.
    whole: Option<Scratch>,
    folder: PathBuf,
}

/// The next step's minibatch, with some finished forward passes.
#[derive(Debug)]
struct StartedMinibatch {
    step: Step,
    /// Micro-batches with a finished forward pass.
    forward: usize,
}

/// The activations that a model keeps.
#[derive(Debug, Default)]
struct Slots {
    forward: usize,
    back: usize,
}

impl<'a> Stage<'a> {
    /// For a model split into these stages, this many slices and meshes, with these buckets of its flat vector. A
    /// follower opens its session by `join`.
    pub fn new(
        (stages, tensor, meshes): (Stages, usize, usize),
        (schedule, micro_batches, part): (PipelineSchedule, usize, usize),
        clips: bool,
        buckets: Vec<Range<usize>>,
        join: Option<Box<Join<'a>>>,
        folder: &Path,
    ) -> Result<Self, WorkerError> {
        let len = buckets.last().map_or(0, |b| b.end);
        Ok(Self {
            stages,
            tensor,
            meshes,
            alike: None,
            schedule,
            clips,
            micro_batches,
            part,
            buckets,
            weights: Versioned::new(len)?,
            stash: Versioned::new(len)?,
            sum: pages(len)?,
            gradient: pages(len)?,
            here: Place::default(),
            rounds: 0,
            evaluations: 0,
            pulls: 0,
            norms: 0,
            editions: 0,
            join,
            client: None,
            pushed: None,
            moved: false,
            lost: false,
            spoiled: false,
            next_minibatch: None,
            slots: Slots::default(),
            asked: None,
            generation: 0,
            done: Step(0),
            pulled: Pull::default(),
            whole: None,
            folder: folder.to_path_buf(),
        })
    }

    /// All weights, after [`Self::gather`].
    pub fn whole(&self) -> &[f32] {
        self.whole.as_deref().unwrap_or_default()
    }

    /// The stages of a rank in a group.
    pub fn stages_at(&self, place: (usize, usize)) -> Range<usize> {
        self.place(place).stages
    }

    fn place(&self, place: (usize, usize)) -> Place {
        let (stages, slices, meshes) = (self.stages.len(), self.tensor, self.meshes);
        Place::new(place, ModelSplit { stages, slices, meshes })
    }

    /// This rank's mesh, and the number of meshes. Each mesh has its own samples.
    pub fn meshes(&self) -> (usize, usize) {
        (self.here.mesh, self.here.meshes)
    }

    /// Starts in a new group at the leader's step; returns the lowest step of any rank. A rank with new stages
    /// opens sessions with their shards.
    pub fn meet(&mut self, ranks: &mut Ranks, model: &dyn Model, step: Step) -> Result<Step, StepError> {
        self.formed(ranks);
        (self.rounds, self.evaluations, self.pulls, self.norms) = (0, 0, 0, 0);
        self.cut(model, ranks.lines()?)?;
        // First receive the pull that is in progress.
        if let Some(pull) = self.asked.take()
            && let Some(pulled) = self.pull_own(pull)?
        {
            self.done = pulled.done;
            self.has_moved(&pulled);
        }
        let mut at = step;
        if ranks.leads() {
            self.done = step;
        } else if self.here.speaks() {
            if self.client.is_none()
                && let Some(join) = &mut self.join
            {
                // After the first step the servers have weights.
                let (client, start) = join(model, self.here.stages.clone(), step == Step(0))?;
                (self.client, self.done, self.pushed) = (Some(client), start, None);
            }
            at = self.done;
        }
        let (least, most) = self.clocks(ranks, at)?;
        let Slice { at: slice, of: slices } = self.here.slice;
        let (mesh, meshes) = self.meshes();
        tracing::info!(stages = ?self.here.stages, layers = ?self.layers(), slice, slices, mesh, meshes, "this rank's part of the model");
        // All ranks repeat a step that some have pushed; with overlapping steps it may be two. A larger gap means
        // that a reopened session skipped steps.
        let apart = if self.schedule.overlaps_minibatches() { 2 } else { 1 };
        let step = if most.0 - least.0 > apart { most } else { least };
        if ranks.leads() && self.pulled == Pull::default() {
            self.pulled.done = step;
        }
        Ok(step)
    }

    /// Prepares for a new group. If this rank has new stages, or missed a group, another rank has taken over its
    /// session, so this rank drops it.
    pub fn formed(&mut self, ranks: &Ranks) {
        let (here, generation) = (self.place(ranks.place()), ranks.generation());
        // The leader's session belongs to the training loop, which notices another owner.
        let next = ranks.leads() || self.generation == generation || self.generation + 1 == generation;
        // The connections between these ranks changed too.
        self.alike = None;
        if !here.has_what(&self.here) || !next || std::mem::take(&mut self.spoiled) {
            self.weights.values.release(0..self.weights.values.len());
            (self.client, self.pushed, self.asked, self.lost) = (None, None, None, false);
        }
        self.next_minibatch = None;
        self.stash.values.release(0..self.stash.values.len());
        (self.here, self.generation) = (here, generation);
    }

    /// If other ranks have the same stages, takes this rank's part of them.
    fn cut(&mut self, model: &dyn Model, lines: &Lines) -> Result<(), WorkerError> {
        let whole = self.buckets.last().map_or(0, |b| b.end);
        if self.here.are_several() && !self.here.stages.is_empty() {
            self.alike = Some(StageReplicas::new(model, (&self.stages, &self.buckets), &self.here, lines)?);
            // The other ranks may have no weights yet.
            if let Some(client) = &mut self.client {
                client.forget_weights();
            }
        }
        let len = self.alike.as_ref().map_or(whole, |alike| alike.len);
        if len != self.weights.values.len() {
            self.weights = Versioned::new(len)?;
            self.stash = Versioned::new(len)?;
            (self.sum, self.gradient) = (pages(len)?, pages(len)?);
        }
        Ok(())
    }

    /// The stages, as places in the flat vector that this rank computes with.
    fn computed(&self) -> &Stages {
        self.alike.as_ref().map_or(&self.stages, |alike| &alike.stages)
    }

    /// The lowest and highest step of the ranks with stages.
    fn clocks(&self, ranks: &Ranks, at: Step) -> Result<(Step, Step), StepError> {
        let (place, size) = ranks.place();
        let mut clocks = vec![0.0; size];
        clocks[place] = at.0 as f64;
        ranks.sum(&mut clocks)?;
        let of = self.here.speakers().map(|place| clocks[place]);
        let (least, most) = of.fold((f64::INFINITY, 0.0f64), |(l, m), c| (l.min(c), m.max(c)));
        Ok((Step(least.min(most) as u64), Step(most as u64)))
    }

    /// The values of each stage, as in a server's job.
    pub fn values(&self) -> Vec<usize> {
        self.stages.values()
    }

    /// Whether the group's leader keeps its stages, and all weights that it must send to others.
    pub fn stays(&self, ranks: &Ranks) -> bool {
        let there = self.place(ranks.place());
        there.has_what(&self.here) && there.slice.of == 1 && !self.spoiled
    }

    /// Records that all ranks have completed a step.
    pub fn made(&mut self, step: Step) {
        (self.done, self.pushed) = (step, Some((step, 0)));
    }

    /// The layers that this rank computes.
    fn layers(&self) -> Range<usize> {
        let of = &self.stages.layers()[self.here.stages.clone()];
        of.first().map_or(0, |l| l.start)..of.last().map_or(0, |l| l.end)
    }

    /// The parameters that it owns for the worker, in its own flat vector; `None`: it waits.
    fn own(&self) -> Option<Range<usize>> {
        self.own_of(self.computed())
    }

    /// The same, in the model's flat vector.
    fn own_of_model(&self) -> Option<Range<usize>> {
        self.own_of(&self.stages)
    }

    /// The buckets of its stages.
    fn own_buckets(&self) -> Range<usize> {
        self.buckets_of(&self.here)
    }

    /// The buckets of a place's stages.
    fn buckets_of(&self, place: &Place) -> Range<usize> {
        let own = &self.stages.own()[place.stages.clone()];
        let own = own.first().map_or(0, |r| r.start)..own.last().map_or(0, |r| r.end);
        let before = |at: usize| self.buckets.partition_point(|b| b.start < at);
        before(own.start)..before(own.end)
    }

    fn own_of(&self, stages: &Stages) -> Option<Range<usize>> {
        let own = &stages.own()[self.here.stages.clone()];
        Some(own.first()?.start..own.last()?.end)
    }
}

/// The longest message between the ranks of such a split model.
pub(crate) fn longest(stages: &Stages, outputs: impl Iterator<Item = usize>, batch: usize) -> usize {
    let edges = outputs.max().unwrap_or_default().saturating_mul(batch);
    let own = stages.own().iter().map(|own| own.len()).max().unwrap_or_default();
    let loans = stages.loans().iter().map(|l| l.range.len()).max().unwrap_or_default();
    edges.max(loans).max(own)
}
