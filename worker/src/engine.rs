//! The model with its parameters and its gradient: in the host's memory, or on a device ([`paraft_models::Resident`]); alone, or
//! as a rank of a group, whose calls then come here on all ranks.

use crate::{
    exchange::PushParts,
    group::{ControlMessage, Ranks, Together},
    local::Local,
    stage::{Batches, Stage, further},
    streamed::{Going, Stopped, Streamed},
    worker::WorkerError,
};
use paraft_checkpoint::State;
use paraft_client::{Client, ClientError, Pull, Pulled};
use paraft_common::{Layout, Step};
use paraft_compute::collective::GroupError;
use paraft_models::{Batch, DeviceError, Evaluation, Model, ModelError, Part};
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

/// A step that was made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Stepped {
    /// Mean over the group's ranks.
    pub loss: f32,
    /// Of all ranks.
    pub samples: u64,
}

/// Why a rank's part of a step or an evaluation was not done.
pub(crate) enum Broke {
    /// The group is formed anew, and it begins again.
    Group(GroupError),
    Other(WorkerError),
}

impl Broke {
    /// Where the group is what broke, this rank is to be in another.
    pub fn or_regrouped(self) -> WorkerError {
        match self {
            Self::Group(_) => WorkerError::Regrouped,
            Self::Other(e) => e,
        }
    }
}

impl From<GroupError> for Broke {
    fn from(e: GroupError) -> Self {
        Self::Group(e)
    }
}

impl From<ModelError> for Broke {
    fn from(e: ModelError) -> Self {
        Self::from(WorkerError::from(e))
    }
}

impl From<ClientError> for Broke {
    fn from(e: ClientError) -> Self {
        Self::Other(e.into())
    }
}

impl From<WorkerError> for Broke {
    fn from(e: WorkerError) -> Self {
        match e {
            WorkerError::Model(e) if e.is_group() => Self::Group(GroupError::Broken(e.to_string())),
            e => Self::Other(e),
        }
    }
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

    /// All ranks pull their stages.
    fn pull_stages(&mut self, client: &mut Client, pull: &Pull) -> Result<Pulled, WorkerError> {
        let (mut pull, mut rejoined) = (pull.clone(), false);
        loop {
            let pulled = match self.pull_behind(client, &pull) {
                Ok(Some(pulled)) if pulled.done == pull.done && !pulled.stop => return Ok(pulled),
                Ok(Some(pulled)) => {
                    (pull.done, rejoined) = (pulled.done, rejoined || pulled.rejoined);
                    self.pull_together(client, &pull)
                }
                Ok(None) => self.pull_together(client, &pull),
                Err(e) => Err(e),
            };
            match pulled {
                Ok(pulled) => return Ok(Pulled { rejoined: rejoined || pulled.rejoined, ..pulled }),
                Err(e) => self.recover(e)?,
            }
        }
    }

    /// Behind a step that another one is behind: each rank pulls by itself, and so does this one. `None`: there is none.
    fn pull_behind(&mut self, client: &mut Client, pull: &Pull) -> Result<Option<Pulled>, Broke> {
        let (Memory::Stage(stage), Some(ranks)) = (&mut self.memory, &mut self.ranks) else {
            return Ok(None);
        };
        if !stage.goes_on_with(pull.done.next()) {
            return Ok(None);
        }
        let pulled = client.pull_by(pull.clone(), stage.landing())?;
        stage.is_at(&Pull { done: pulled.done, ..pull.clone() });
        stage.lend(ranks.lines()?)?;
        Ok(Some(pulled))
    }

    fn pull_together(&mut self, client: &mut Client, pull: &Pull) -> Result<Pulled, Broke> {
        self.is_between_steps()?;
        let (Memory::Stage(stage), Some(ranks)) = (&mut self.memory, &mut self.ranks) else {
            return Err(alone_only().into());
        };
        ranks.say(&ControlMessage::Pull(pull.clone()))?;
        let mut pulled = client.pull_by(pull.clone(), stage.landing())?;
        // Who had lost its session is put where the other workers are, and the others come along.
        while let Some(done) = stage.level(ranks, pulled.done, pull)? {
            if pulled.done < done {
                client.advance_to(done);
                pulled = client.pull_by(further(pull, done), stage.landing())?;
                pulled.rejoined = true;
            }
        }
        stage.agree(ranks, pull, &mut pulled)?;
        stage.is_at(&Pull { done: pulled.done, ..pull.clone() });
        stage.lend(ranks.lines()?)?;
        Ok(pulled)
    }

    /// What the group's leader says is heard where no next step is under way. If one is, nothing comes of it.
    fn is_between_steps(&self) -> Result<(), Broke> {
        match (&self.memory, &self.ranks) {
            (Memory::Stage(stage), Some(ranks)) if stage.is_going() => {
                Err(ranks.break_up("its leader does something else than the next step").into())
            }
            _ => Ok(()),
        }
    }

    /// The final weights of all ranks come here.
    pub fn gather(&mut self) -> Result<(), WorkerError> {
        loop {
            let (Memory::Stage(stage), Some(ranks)) = (&mut self.memory, &mut self.ranks) else {
                return Ok(());
            };
            let gathered = ranks.say(&ControlMessage::Gather).map_err(Broke::from);
            match gathered.and_then(|()| stage.gather(ranks.lines()?)) {
                Ok(()) => return Ok(()),
                Err(e) => self.recover(e)?,
            }
        }
    }

    /// One step of a model that is streamed, its gradient pushed bucket by bucket.
    pub fn step_streamed(
        &mut self,
        client: &mut Client,
        step: Step,
        batch: &Batch,
    ) -> Result<Stepped, Stopped> {
        let Memory::Streamed(streamed) = &mut self.memory else {
            return Err(Stopped::Failed(ModelError::new("it is not streamed").into()));
        };
        let mut push = PushParts::new(client, step, batch.n);
        let mut going = Going::new(streamed, &mut push);
        let made = self.model.step_by_layers(&mut going, batch).map_err(WorkerError::from);
        let loss = going.end(made)?;
        Ok(Stepped { loss, samples: batch.n as u64 })
    }

    /// Likewise, for ranks that apply the gradients themselves.
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
            Memory::Stage(stage) => Ok(stage.landing()),
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
    fn share(&mut self, ranges: &[Range<usize>]) -> Result<(), Broke> {
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
    fn take_weights(&mut self, ranges: &[Range<usize>]) -> Result<(), Broke> {
        match (&mut self.memory, &mut self.ranks) {
            (Memory::Host { .. }, None) | (Memory::Streamed(_) | Memory::Stage(_), _) => Ok(()),
            (Memory::Host { weights, .. }, Some(ranks)) => Ok(ranks.reducer()?.broadcast(weights, ranges)?),
            (Memory::Device, _) => Ok(self.model.resident().ok_or_else(gone)?.landed(ranges)?),
        }
    }

    /// After [`ControlMessage::State`], on every rank.
    fn take_state(&mut self, done: Step) -> Result<(), Broke> {
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

    /// Sees whether the group is to blame for what went wrong, and if so forms it anew: smaller, or with somebody else in it.
    /// Everyone has this rank's weights then.
    fn recover(&mut self, why: Broke) -> Result<(), WorkerError> {
        let Some(ranks) = &mut self.ranks else {
            return Err(match why {
                Broke::Other(e) => e,
                Broke::Group(e) => WorkerError::Job(e.to_string()),
            });
        };
        let why = blame(ranks, why)?;
        tracing::warn!(error = %why, "the group is formed anew");
        self.reform()
    }

    /// Leaves the group for the next one. False: the job is done.
    pub fn form(&mut self) -> Result<bool, WorkerError> {
        self.ranks.as_mut().map_or(Ok(false), |r| r.form(self.model))
    }

    fn reform(&mut self) -> Result<(), WorkerError> {
        loop {
            let Some(ranks) = &mut self.ranks else { return Ok(()) };
            if !ranks.form(self.model)? || !ranks.leads() {
                return Err(WorkerError::Deposed);
            }
            match self.regroup() {
                Ok(()) => return Ok(()),
                Err(e) => {
                    let Some(ranks) = &self.ranks else { return Ok(()) };
                    let why = blame(ranks, e)?;
                    tracing::warn!(error = %why, "the group is formed again");
                }
            }
        }
    }

    /// In a new group that this rank leads: everyone has what it needs to go on.
    fn regroup(&mut self) -> Result<(), Broke> {
        let (Memory::Stage(stage), Some(ranks)) = (&mut self.memory, &mut self.ranks) else {
            let all = 0..self.len();
            return self.share(std::slice::from_ref(&all));
        };
        if !stage.stays(ranks) {
            return Err(WorkerError::Regrouped.into());
        }
        let pull = stage.behind();
        ranks.say(&ControlMessage::Meet(pull.done))?;
        if stage.meet(ranks, self.model, pull.done)? > pull.done {
            // A session that had to be opened anew is further on.
            return Err(WorkerError::Regrouped.into());
        }
        ranks.say(&ControlMessage::Pull(pull.clone()))?;
        while let Some(done) = stage.level(ranks, pull.done, &pull)? {
            if done > pull.done {
                // The others are in this pull, and this rank can't take part with the weights that it computes with.
                return Err(ranks.break_up("a rank's session was lost, and it is further on").into());
            }
        }
        stage.lend(ranks.lines()?)
    }

    /// Whether the minibatch of the next step is to go in behind that of this one, where nothing else is to be done between.
    pub fn goes_on(&self) -> bool {
        matches!(&self.memory, Memory::Stage(stage) if stage.goes_on())
            && !self.ranks.as_ref().is_some_and(|r| r.newcomers())
    }

    /// One step, its gradient pushed bucket by bucket. Behind its minibatch comes that of the next, where there is one.
    pub fn step(
        &mut self,
        client: &mut Client,
        step: Step,
        batches: Batches<'_>,
    ) -> Result<Stepped, WorkerError> {
        let samples = batches.0.n * self.sharers().1;
        let mut push = PushParts::new(client, step, samples);
        loop {
            match self.lead_step(step, batches, &mut push) {
                Ok(stepped) => return Ok(stepped),
                // What was pushed is the mean over those who were there; the rest is that over those who are.
                Err(e) => self.recover(e)?,
            }
        }
    }

    /// One step, applied on every rank. Done again where the group breaks: what the leader has is what counts.
    pub fn step_alone(&mut self, step: Step, batch: &Batch) -> Result<Stepped, WorkerError> {
        loop {
            match self.announce(step).and_then(|()| self.make_step(step, (batch, None), None)) {
                Ok(stepped) => return Ok(stepped),
                Err(e) => self.recover(e)?,
            }
        }
    }

    fn lead_step(
        &mut self,
        step: Step,
        batches: Batches<'_>,
        push: &mut PushParts<'_>,
    ) -> Result<Stepped, Broke> {
        push.begin();
        self.announce(step)?;
        self.make_step(step, batches, Some(push))
    }

    fn announce(&mut self, step: Step) -> Result<(), Broke> {
        if let Some(ranks) = &self.ranks {
            ranks.begins(step);
        }
        if matches!(&self.memory, Memory::Stage(stage) if stage.goes_on_with(step)) {
            return Ok(()); // all are in it
        }
        self.is_between_steps()?;
        if self.ranks.as_ref().is_some_and(|r| r.newcomers()) {
            if let Some(ranks) = &self.ranks {
                ranks.say(&ControlMessage::Reform)?;
            }
            self.reform()?;
        }
        if let Some(ranks) = &self.ranks {
            ranks.say(&ControlMessage::Step(step))?;
        }
        Ok(())
    }

    /// After [`ControlMessage::Step`], on every rank; only the leader pushes, unless each applies the gradient itself.
    fn make_step(
        &mut self,
        step: Step,
        batches: Batches<'_>,
        mut push: Option<&mut PushParts<'_>>,
    ) -> Result<Stepped, Broke> {
        let batch = batches.0;
        let loss = match &mut self.memory {
            Memory::Host { weights, gradients } => {
                let (parts, local) = (&self.parts, &mut self.local);
                let mut to = |i: usize, mean: &[f32]| match (&mut push, &mut *local) {
                    (Some(push), _) => push.values(i, mean),
                    (None, Some(local)) => local.take(parts[i].range.start, mean),
                    (None, None) => {}
                };
                match &mut self.ranks {
                    None => alone(self.model, (weights, gradients), parts, batch, &mut to)?,
                    Some(r) => together(self.model, (weights, gradients), parts, batch, &mut to, r)?,
                }
            }
            Memory::Streamed(_) => return Err(alone_only().into()),
            Memory::Stage(stage) => {
                let Some(ranks) = &mut self.ranks else { return Err(alone_only().into()) };
                let mut loss = [stage.step(self.model, ranks.lines()?, step, batches, push)?];
                if !stage.is_going() {
                    ranks.sum(&mut loss)?;
                }
                stage.made(step);
                return Ok(Stepped { loss: loss[0] as f32, samples: batch.n as u64 });
            }
            Memory::Device if self.local.is_some() => {
                self.model.resident().ok_or_else(gone)?.step_local(batch)?
            }
            Memory::Device => {
                let resident = self.model.resident().ok_or_else(gone)?;
                resident.step_resident(batch, &self.parts, &mut |i, bytes| {
                    if let Some(push) = &mut push {
                        push.ready(i, bytes);
                    }
                })?
            }
        };
        let mut sums = [f64::from(loss), batch.n as f64, 1.0];
        if let Some(ranks) = &self.ranks {
            ranks.sum(&mut sums)?;
        }
        // Everyone has the mean now.
        if let Some(local) = &mut self.local {
            match &mut self.memory {
                Memory::Host { weights, .. } => local.apply(step, weights)?,
                Memory::Streamed(_) | Memory::Stage(_) => return Err(alone_only().into()),
                Memory::Device => {
                    let resident = self.model.resident().ok_or_else(gone)?;
                    resident.optimize(&local.descent.optimizer, &local.hyper(step), local.clip_norm())?;
                    local.done = Some(step);
                }
            }
        }
        Ok(Stepped { loss: (sums[0] / sums[2]) as f32, samples: sums[1] as u64 })
    }

    /// The gradient of a minibatch at weights that are not the pulled ones, and its loss; nothing is pushed. For a worker that
    /// is alone and has its model in the host's memory.
    pub fn gradient_at(&mut self, weights: &[f32], batch: &Batch) -> Result<(f32, &[f32]), ModelError> {
        match &mut self.memory {
            Memory::Host { gradients, .. } => {
                let loss = self.model.step(weights, gradients, batch, &mut |_, _| {})?;
                Ok((loss, gradients))
            }
            Memory::Streamed(_) | Memory::Stage(_) => Err(alone_only()),
            Memory::Device => Err(ModelError::new("its weights are on a device")),
        }
    }

    /// Loss and accuracy of this rank alone.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<Evaluation, ModelError> {
        match &mut self.memory {
            Memory::Host { weights, .. } => self.model.evaluate(weights, batch),
            Memory::Streamed(streamed) => self.model.evaluate(streamed.whole(), batch),
            Memory::Stage(stage) => {
                // Once the others have gone, it has their weights in a file.
                let Some(ranks) = &mut self.ranks else {
                    return self.model.evaluate(stage.whole(), batch);
                };
                let lines = ranks.lines().map_err(DeviceError::from)?;
                match stage.evaluate(self.model, lines, batch) {
                    Ok(e) => Ok(e),
                    Err(Broke::Group(e)) => Err(DeviceError::from(e).into()),
                    Err(Broke::Other(e)) => Err(ModelError::new(e.to_string())),
                }
            }
            Memory::Device => self.model.resident().ok_or_else(gone)?.evaluate_resident(batch),
        }
    }

    /// The worker's share of an evaluation, by all its ranks: `own(engine, place, size)` evaluates a part of it.
    pub fn evaluate_share(
        &mut self,
        epoch: u64,
        mut own: impl FnMut(&mut Self, (usize, usize)) -> Result<Evaluation, WorkerError>,
    ) -> Result<Evaluation, WorkerError> {
        loop {
            let mut said = self.is_between_steps();
            if let (Ok(()), Some(ranks)) = (&said, &self.ranks) {
                said = ranks.say(&ControlMessage::Evaluate(epoch)).map_err(Broke::Group);
            }
            match said.and_then(|()| self.sum_evaluation(&mut own)) {
                Ok(e) => return Ok(e),
                Err(e) => self.recover(e)?,
            }
        }
    }

    /// After [`ControlMessage::Evaluate`], on every rank.
    fn sum_evaluation(
        &mut self,
        own: &mut impl FnMut(&mut Self, (usize, usize)) -> Result<Evaluation, WorkerError>,
    ) -> Result<Evaluation, Broke> {
        let place = self.sharers();
        let e = own(self, place)?;
        let Some(ranks) = &self.ranks else { return Ok(e) };
        let mut sums = [e.loss_sum, e.correct as f64, e.count as f64];
        ranks.sum(&mut sums)?;
        Ok(Evaluation { loss_sum: sums[0], correct: sums[1] as u64, count: sums[2] as u64 })
    }

    /// Of the ranks that share its worker's samples, this one's place, and how many they are.
    fn sharers(&self) -> (usize, usize) {
        match self.memory {
            // They share the model instead.
            Memory::Stage(_) => (0, 1),
            _ => self.ranks.as_ref().map_or((0, 1), |r| r.place()),
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

/// What a rank that does not lead is asked for.
pub(crate) trait Follows {
    /// The minibatch of a step; with `two` that of the next one too, where there is one.
    fn batches(&mut self, step: Step, two: bool) -> Result<Batches<'_>, WorkerError>;
    /// A step was made.
    fn stepped(&mut self, step: Step, stepped: Stepped) -> Result<(), WorkerError>;
    /// A part of the worker's share of the held-out samples: that of `place` among so many.
    fn evaluate(
        &self,
        engine: &mut Engine,
        epoch: u64,
        place: (usize, usize),
    ) -> Result<Evaluation, WorkerError>;
}

impl Engine<'_> {
    /// Does what the group's leader says. True: the job is done; false: this rank leads from now on.
    pub fn follow(&mut self, work: &mut dyn Follows) -> Result<bool, WorkerError> {
        loop {
            let followed = self.follow_one(work);
            let Some(ranks) = &mut self.ranks else { return Ok(true) };
            match followed {
                Ok(None) => continue,
                Ok(Some(true)) => {
                    ranks.leave(self.model);
                    return Ok(true);
                }
                Ok(Some(false)) => tracing::info!("the group is formed anew: a rank wants to be taken in"),
                Err(e) => {
                    let why = blame(ranks, e)?;
                    tracing::warn!(error = %why, "the group is formed anew");
                }
            }
            if !ranks.form(self.model)? {
                return Ok(true);
            }
            if let Memory::Stage(stage) = &mut self.memory {
                stage.formed(ranks);
            }
            if ranks.leads() {
                return Ok(false);
            }
        }
    }

    /// `Some(true)`: the job is done; `Some(false)`: the group is formed anew.
    fn follow_one(&mut self, work: &mut dyn Follows) -> Result<Option<bool>, Broke> {
        let len = self.len();
        let Some(ranks) = &mut self.ranks else { return Ok(Some(true)) };
        match (ranks.hear(len)?, &mut self.memory) {
            (ControlMessage::Meet(step), Memory::Stage(stage)) => {
                stage.meet(ranks, self.model, step)?;
                Ok(None)
            }
            (ControlMessage::Pull(pull), Memory::Stage(stage)) => {
                stage.pull(ranks, &pull)?;
                Ok(None)
            }
            (ControlMessage::Gather, Memory::Stage(stage)) => {
                stage.gather(ranks.lines()?)?;
                Ok(None)
            }
            (said, _) => self.do_as_said(said, work),
        }
    }

    fn do_as_said(&mut self, said: ControlMessage, work: &mut dyn Follows) -> Result<Option<bool>, Broke> {
        match said {
            ControlMessage::Weights(ranges) => self.take_weights(&ranges)?,
            ControlMessage::State(done) => self.take_state(done)?,
            ControlMessage::Step(mut step) => loop {
                let two = matches!(&self.memory, Memory::Stage(stage) if stage.goes_on());
                let stepped = self.make_step(step, work.batches(step, two)?, None)?;
                work.stepped(step, stepped)?;
                step = step.next();
                if !matches!(&self.memory, Memory::Stage(stage) if stage.goes_on_with(step)) {
                    break;
                }
            },
            ControlMessage::Meet(_) | ControlMessage::Pull(_) | ControlMessage::Gather => {
                return Err(alone_only().into());
            }
            ControlMessage::Evaluate(epoch) => {
                self.sum_evaluation(&mut |engine: &mut Self, place| work.evaluate(engine, epoch, place))?;
            }
            ControlMessage::Reform => return Ok(Some(false)),
            ControlMessage::Over => return Ok(Some(true)),
        }
        Ok(None)
    }
}

/// Whether the group is to blame, as far as can be told; else the error that is this rank's own.
fn blame(ranks: &Ranks, why: Broke) -> Result<GroupError, WorkerError> {
    match why {
        Broke::Group(e) => Ok(ranks.reason(e)),
        Broke::Other(e) => ranks.broken().ok_or(e),
    }
}

type Flat<'a> = (&'a [f32], &'a mut [f32]);

pub(crate) fn incomplete() -> ModelError {
    ModelError::new("it did not report its whole gradient as ready")
}

fn alone(
    model: &mut dyn Model,
    (weights, gradients): Flat,
    parts: &[Part],
    batch: &Batch,
    to: &mut dyn FnMut(usize, &[f32]),
) -> Result<f32, ModelError> {
    let mut next = parts.len();
    let mut ready = |offset: usize, gradients: &[f32]| {
        while next > 0 && parts[next - 1].range.start >= offset {
            next -= 1;
            to(next, &gradients[parts[next].range.clone()]);
        }
    };
    let loss = model.step(weights, gradients, batch, &mut ready)?;
    if next > 0 { Err(incomplete()) } else { Ok(loss) }
}

fn together(
    model: &mut dyn Model,
    (weights, gradients): Flat,
    parts: &[Part],
    batch: &Batch,
    to: &mut dyn FnMut(usize, &[f32]),
    ranks: &mut Ranks,
) -> Result<f32, Broke> {
    let reducer = ranks.reducer()?;
    let mut next = parts.len();
    let mut broke: Together = Ok(());
    let mut ready = |offset: usize, gradients: &[f32]| {
        while next > 0 && parts[next - 1].range.start >= offset {
            next -= 1;
            reducer.reduce(next, &gradients[parts[next].range.clone()]);
        }
        while broke.is_ok() {
            match reducer.take(false, &mut *to) {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => broke = Err(e),
            }
        }
    };
    let loss = model.step(weights, gradients, batch, &mut ready)?;
    broke?;
    if next > 0 {
        return Err(incomplete().into());
    }
    while reducer.take(true, &mut *to)? {}
    Ok(loss)
}
