//! The model with its parameters and gradient, in host memory or on a device ([`paraft_models::Resident`]). The
//! worker runs alone or as a rank of a group; then all ranks call the engine.
//!
//! - this file: where the weights are, and how they arrive there.
//! - `step`: a step, an evaluation. `stages`: pulls of ranks with pipeline stages. `follow`: the work of a
//!   follower.
//! - `regroup`: forms the group again after a failure.

mod follow;
mod regroup;
mod stages;
mod step;
mod step_error;

pub(crate) use follow::FollowerSteps;
pub(crate) use step::StepLoss;
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
    /// The buckets, in the form in which they are pushed.
    parts: Vec<Part>,
    ranks: Option<&'a mut Ranks>,
    /// The local optimizer, if the ranks apply the gradients themselves.
    local: Option<Local>,
}

enum Memory<'a> {
    Host {
        weights: Vec<f32>,
        gradients: Vec<f32>,
    },
    /// Some layers at a time, in host memory.
    Streamed(Box<Streamed>),
    /// Some stages, in host memory; other ranks hold the rest.
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
    /// For a model with these buckets. A leader passes its group.
    pub fn new(model: &'a mut dyn Model, parts: Vec<Part>, ranks: Option<&'a mut Ranks>) -> Self {
        let len = parts.last().map_or(0, |p| p.range.end);
        let memory = match model.resident() {
            Some(_) => Memory::Device,
            // The first pull fills it. Until the servers have the initial weights, those are in memory too: a copy
            // here would be the model a third time, beside its gradient.
            None => Memory::Host { weights: vec![0.0; len], gradients: vec![0.0; len] },
        };
        Self { model, memory, parts, ranks, local: None }
    }

    /// For a single worker that holds some layers of its model at a time.
    pub fn streamed(model: &'a mut dyn Model, parts: Vec<Part>, streamed: Streamed) -> Self {
        Self { model, memory: Memory::Streamed(Box::new(streamed)), parts, ranks: None, local: None }
    }

    /// The streamed layers, if the engine does not hold the whole model.
    pub fn streams(&mut self) -> Option<&mut Streamed> {
        match &mut self.memory {
            Memory::Streamed(streamed) => Some(streamed),
            Memory::Host { .. } | Memory::Stage(_) | Memory::Device => None,
        }
    }

    /// For a rank that holds some stages of its worker's model.
    pub fn staged(
        model: &'a mut dyn Model,
        parts: Vec<Part>,
        stage: Stage<'a>,
        ranks: &'a mut Ranks,
    ) -> Self {
        Self { model, memory: Memory::Stage(Box::new(stage)), parts, ranks: Some(ranks), local: None }
    }

    /// The worker's pull, if this engine pulls in its own way. `None`: pull into [`Self::buffer`].
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

    /// The trained model.
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

    /// The memory that the next pull writes; then call [`Self::landed`].
    pub fn buffer(&mut self) -> Result<&mut [f32], WorkerError> {
        match &mut self.memory {
            Memory::Host { weights, .. } => Ok(weights),
            Memory::Streamed(streamed) => streamed.buffer(),
            Memory::Stage(_) => Err(alone_only().into()),
            Memory::Device => Ok(self.model.resident().ok_or_else(gone)?.host_mut()?),
        }
    }

    /// Passes pulled weights on to the device and the other ranks.
    pub fn landed(&mut self, pulled: &Pulled, layout: &Layout) -> Result<(), WorkerError> {
        if let Memory::Streamed(streamed) = &mut self.memory {
            streamed.landed(pulled);
            return Ok(());
        }
        let buckets = pulled.changed.iter().filter_map(|b| layout.bucket(*b));
        // Copy neighbouring buckets at once.
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

    /// Sends these new weights of the leader to all ranks.
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

    /// Receives the weights after [`ControlMessage::Weights`], on every rank.
    fn take_weights(&mut self, ranges: &[Range<usize>]) -> Result<(), StepError> {
        match (&mut self.memory, &mut self.ranks) {
            (Memory::Host { .. }, None) | (Memory::Streamed(_) | Memory::Stage(_), _) => Ok(()),
            (Memory::Host { weights, .. }, Some(ranks)) => Ok(ranks.reducer()?.broadcast(weights, ranges)?),
            (Memory::Device, _) => Ok(self.model.resident().ok_or_else(gone)?.landed(ranges)?),
        }
    }

    /// Receives the state after [`ControlMessage::State`], on every rank.
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

    /// Whether this rank leads its group.
    pub fn leads(&self) -> bool {
        self.ranks.as_ref().is_some_and(|r| r.leads())
    }

    /// The generation of its group.
    pub fn generation(&self) -> u64 {
        self.ranks.as_ref().map_or(0, |r| r.generation())
    }

    /// The step of this rank's state, if it applies the gradients itself.
    pub fn done(&self) -> Option<Step> {
        self.local.as_ref().and_then(|l| l.done)
    }

    /// Sets the initial state of this rank and, if it leads, of its whole group.
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

    /// Sends this rank's state to all ranks.
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

    /// Tells the other ranks that the job is done.
    pub fn over(&mut self) {
        if let Some(ranks) = &mut self.ranks {
            ranks.over(self.model);
        }
        self.ranks = None;
    }

    /// Consumes the engine and returns the weights of the last pull.
    pub fn into_weights(mut self) -> Vec<f32> {
        match &mut self.memory {
            Memory::Host { weights, .. } => std::mem::take(weights),
            // The whole model exceeds this process's memory.
            Memory::Streamed(_) | Memory::Stage(_) => Vec::new(),
            Memory::Device => self.weights().to_vec(),
        }
    }
}
