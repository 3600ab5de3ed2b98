//! The model with its parameters and its gradient: in the host's memory, or on a device ([`paraft_models::Resident`]); alone, or
//! as a rank of a group, whose calls then come here on all ranks.
//!
//! - this file: where the weights are, and how they come there.
//! - `step`: a step, an evaluation. `stages`: pulls of ranks that have a stage each. `follow`: what a rank does that doesn't lead.
//! - `regroup`: a group that broke.

mod follow;
mod regroup;
mod stages;
mod step;
mod step_error;

pub(crate) use follow::FollowerSteps;
pub(crate) use step::{StepLoss, incomplete};
pub(crate) use step_error::StepError;

use crate::{
    group::{ControlMessage, Ranks},
    local::Local,
    stage::Stage,
    streamed::Streamed,
    worker::WorkerError,
};
use paraft_checkpoint::State;
use paraft_client::{Client, Pull, Pulled};
use paraft_common::{Layout, Step};
use paraft_compute::collective::GroupError;
use paraft_models::{Model, ModelError, Part};
use std::ops::Range;

/// See the module.
pub(crate) struct Engine<'a> {
    model: &'a mut dyn Model,
    memory: Memory<'a>,
    /// The buckets, and how they are pushed.
    parts: Vec<Part>,
    ranks: Option<&'a mut Ranks>,
    /// Where the ranks apply the gradients themselves.
    local: Option<Local>,
}

enum Memory<'a> {
    Host {
        weights: Vec<f32>,
        gradients: Vec<f32>,
    },
    /// Some layers at a time, in the host's.
    Streamed(Box<Streamed>),
    /// Some stages, in the host's; other ranks have the rest.
    Stage(Box<Stage<'a>>),
    Device,
}

fn alone_only() -> ModelError {
    ModelError::new("a rank that hasn't the whole model has no weights of its own")
}

fn gone() -> ModelError {
    ModelError::new("it has left its device")
}

impl<'a> Engine<'a> {
    /// For a model whose buckets are these. A leader brings the group that it leads.
    pub fn new(model: &'a mut dyn Model, parts: Vec<Part>, ranks: Option<&'a mut Ranks>) -> Self {
        let len = parts.last().map_or(0, |p| p.range.end);
        let memory = match model.resident() {
            Some(_) => Memory::Device,
            // The first pull fills it. Until the servers have the initial weights they are in memory too; a copy of them
            // here would be the model a third time, beside its gradient.
            None => Memory::Host { weights: vec![0.0; len], gradients: vec![0.0; len] },
        };
        Self { model, memory, parts, ranks, local: None }
    }

    /// For a worker that is alone and has some layers of its model at a time.
    pub fn streamed(model: &'a mut dyn Model, parts: Vec<Part>, streamed: Streamed) -> Self {
        Self { model, memory: Memory::Streamed(Box::new(streamed)), parts, ranks: None, local: None }
    }

    /// What is here of the model, where that is not all of it.
    pub fn streams(&mut self) -> Option<&mut Streamed> {
        match &mut self.memory {
            Memory::Streamed(streamed) => Some(streamed),
            Memory::Host { .. } | Memory::Stage(_) | Memory::Device => None,
        }
    }

    /// For a rank that has some stages of its worker's model.
    pub fn staged(
        model: &'a mut dyn Model,
        parts: Vec<Part>,
        stage: Stage<'a>,
        ranks: &'a mut Ranks,
    ) -> Self {
        Self { model, memory: Memory::Stage(Box::new(stage)), parts, ranks: Some(ranks), local: None }
    }

    /// A pull of the worker, where this engine has a way of its own; `None`: into [`Self::landing`].
    pub fn pull(&mut self, client: &mut Client, pull: &Pull) -> Option<Result<Pulled, WorkerError>> {
        match &mut self.memory {
            Memory::Streamed(streamed) if !pull.last && !pull.barrier => {
                Some(streamed.pull_between(client, pull.clone()).map_err(Into::into))
            }
            Memory::Stage(_) => Some(self.pull_stages(client, pull)),
            Memory::Streamed(_) | Memory::Host { .. } | Memory::Device => None,
        }
    }

    /// For ranks that apply the gradients themselves.
    pub fn with(local: Local, model: &'a mut dyn Model, parts: Vec<Part>, ranks: &'a mut Ranks) -> Self {
        Self { local: Some(local), ..Self::new(model, parts, Some(ranks)) }
    }

    /// What is trained.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    fn len(&self) -> usize {
        self.parts.last().map_or(0, |p| p.range.end)
    }

    /// The weights of the last pull.
    pub fn weights(&mut self) -> &[f32] {
        match &self.memory {
            Memory::Host { weights, .. } => weights,
            Memory::Streamed(streamed) => streamed.whole(),
            Memory::Stage(stage) => stage.whole(),
            Memory::Device => self.model.resident().map_or(&[], |r| r.host()),
        }
    }

    /// The same, for the next pull to write; then [`Self::landed`].
    pub fn landing(&mut self) -> Result<&mut [f32], WorkerError> {
        match &mut self.memory {
            Memory::Host { weights, .. } => Ok(weights),
            Memory::Streamed(streamed) => streamed.landing(),
            Memory::Stage(_) => Err(alone_only().into()),
            Memory::Device => Ok(self.model.resident().ok_or_else(gone)?.host_mut()?),
        }
    }

    /// What a pull brought is on its way to where it is needed: to the device, and to the other ranks.
    pub fn landed(&mut self, pulled: &Pulled, layout: &Layout) -> Result<(), WorkerError> {
        if let Memory::Streamed(streamed) = &mut self.memory {
            streamed.landed(pulled);
            return Ok(());
        }
        let buckets = pulled.changed.iter().filter_map(|b| layout.bucket(*b));
        // Neighbours in one copy.
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for bucket in buckets {
            match ranges.last_mut() {
                Some(last) if last.end == bucket.range().start => last.end = bucket.range().end,
                _ => ranges.push(bucket.range()),
            }
        }
        match self.share(&ranges) {
            Ok(()) => Ok(()),
            Err(e) => self.recover(e),
        }
    }

    /// These weights of the leader's are new: all ranks get them.
    fn share(&mut self, ranges: &[Range<usize>]) -> Result<(), StepError> {
        if let Some(done) = self.local.as_ref().and_then(|l| l.done) {
            if let Some(ranks) = &self.ranks {
                ranks.say(&ControlMessage::State(done))?;
            }
            return self.take_state(done);
        }
        if let Some(ranks) = &self.ranks {
            ranks.say(&ControlMessage::Weights(ranges.to_vec()))?;
        }
        self.take_weights(ranges)
    }

    /// After [`ControlMessage::Weights`], on every rank.
    fn take_weights(&mut self, ranges: &[Range<usize>]) -> Result<(), StepError> {
        match (&mut self.memory, &mut self.ranks) {
            (Memory::Host { .. }, None) | (Memory::Streamed(_) | Memory::Stage(_), _) => Ok(()),
            (Memory::Host { weights, .. }, Some(ranks)) => Ok(ranks.reducer()?.broadcast(weights, ranges)?),
            (Memory::Device, _) => Ok(self.model.resident().ok_or_else(gone)?.landed(ranges)?),
        }
    }

    /// After [`ControlMessage::State`], on every rank.
    fn take_state(&mut self, done: Step) -> Result<(), StepError> {
        let (Some(local), Some(ranks)) = (&mut self.local, &mut self.ranks) else {
            return Err(GroupError::Broken("its ranks are of different jobs".into()).into());
        };
        match &mut self.memory {
            Memory::Host { weights, .. } => {
                let reducer = ranks.reducer()?;
                for values in std::iter::once(weights).chain(&mut local.slots) {
                    let all = 0..values.len();
                    reducer.broadcast(values, std::slice::from_ref(&all))?;
                }
            }
            Memory::Device => {
                self.model.resident().ok_or_else(gone)?.share_state(&local.descent.optimizer)?
            }
            Memory::Streamed(_) | Memory::Stage(_) => return Err(alone_only().into()),
        }
        local.done = Some(done);
        Ok(())
    }

    /// Whether this rank speaks for its group.
    pub fn leads(&self) -> bool {
        self.ranks.as_ref().is_some_and(|r| r.leads())
    }

    /// Which group it is in.
    pub fn generation(&self) -> u64 {
        self.ranks.as_ref().map_or(0, |r| r.generation())
    }

    /// The step of the state that this rank has, where it applies the gradients itself.
    pub fn done(&self) -> Option<Step> {
        self.local.as_ref().and_then(|l| l.done)
    }

    /// The state that this rank begins with, for all: in the group that it leads.
    pub fn set_state(&mut self, state: State, done: Step) -> Result<(), WorkerError> {
        if let Some(local) = &mut self.local {
            local.done = Some(done);
            match &mut self.memory {
                Memory::Host { weights, .. } => {
                    weights.copy_from_slice(&state.weights);
                    if !state.slots.is_empty() {
                        local.slots = state.slots;
                    }
                }
                Memory::Device => {
                    self.model.resident().ok_or_else(gone)?.set_state(&state.weights, &state.slots)?;
                }
                Memory::Streamed(_) | Memory::Stage(_) => return Err(alone_only().into()),
            }
        }
        Ok(())
    }

    /// Gives all ranks this one's state.
    pub fn share_state(&mut self) -> Result<(), WorkerError> {
        self.share(&[]).or_else(|e| self.recover(e))
    }

    /// A copy of the state.
    pub fn state(&mut self) -> Result<State, WorkerError> {
        match (&self.memory, &self.local) {
            (Memory::Host { weights, .. }, Some(local)) => {
                Ok(State { weights: weights.clone(), slots: local.slots.clone() })
            }
            (Memory::Host { weights, .. }, None) => Ok(State { weights: weights.clone(), slots: Vec::new() }),
            (Memory::Streamed(_) | Memory::Stage(_), _) => Err(alone_only().into()),
            (Memory::Device, _) => {
                let (weights, slots) = self.model.resident().ok_or_else(gone)?.state()?;
                Ok(State { weights, slots })
            }
        }
    }

    /// The job is done: the other ranks may end.
    pub fn over(&mut self) {
        if let Some(ranks) = &mut self.ranks {
            ranks.over(self.model);
        }
        self.ranks = None;
    }

    /// Ends it, and gives the weights of the last pull.
    pub fn into_weights(mut self) -> Vec<f32> {
        match &mut self.memory {
            Memory::Host { weights, .. } => std::mem::take(weights),
            // They are more than this process is to hold.
            Memory::Streamed(_) | Memory::Stage(_) => Vec::new(),
            Memory::Device => self.weights().to_vec(),
        }
    }
}
