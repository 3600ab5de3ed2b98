//! A training step and an evaluation.

use super::{Engine, Memory, StepError, alone_only, gone};
use crate::{
    exchange::{PushParts, incomplete},
    group::{ControlMessage, GroupResult, Ranks},
    stage::Batches,
    streamed::{StreamError, StreamedStep},
    worker::WorkerError,
};
use paraft_client::Client;
use paraft_common::{Share, Step};
use paraft_models::{Batch, DeviceError, Evaluation, Model, ModelError, Part};

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepLoss {
    /// Mean over the group's ranks.
    pub loss: f32,
    /// Samples of all ranks.
    pub samples: u64,
}

impl Engine<'_> {
    /// One step of a streamed model. It pushes the gradient bucket by bucket.
    pub fn step_streamed(
        &mut self,
        client: &mut Client,
        step: Step,
        batch: &Batch,
    ) -> Result<StepLoss, StreamError> {
        let Memory::Streamed(streamed) = &mut self.memory else {
            return Err(StreamError::Failed(ModelError::new("it is not streamed").into()));
        };
        let mut push = PushParts::new(client, step, batch.n);
        let mut streaming = StreamedStep::new(streamed, &mut push);
        let result = self.model.step_by_layers(&mut streaming, batch).map_err(WorkerError::from);
        let loss = streaming.end(result)?;
        Ok(StepLoss { loss, samples: batch.n as u64 })
    }

    /// One step. It pushes the gradient bucket by bucket. The next step's minibatch follows, if there is one.
    pub fn step(
        &mut self,
        client: &mut Client,
        step: Step,
        batches: Batches<'_>,
    ) -> Result<StepLoss, WorkerError> {
        let samples = batches.0.n * self.sharers().1;
        let mut push = PushParts::new(client, step, samples);
        loop {
            match self.lead_step(step, batches, &mut push) {
                Ok(stepped) => return Ok(stepped),
                // Pushed buckets are the mean over the former ranks; the rest is the mean over the present ones.
                Err(e) => self.recover(e)?,
            }
        }
    }

    /// One step, applied on every rank. It repeats if the group breaks: the leader's state is authoritative.
    pub fn step_alone(&mut self, step: Step, batch: &Batch) -> Result<StepLoss, WorkerError> {
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
    ) -> Result<StepLoss, StepError> {
        push.begin();
        self.announce(step)?;
        self.make_step(step, batches, Some(push))
    }

    fn announce(&mut self, step: Step) -> Result<(), StepError> {
        if let Some(ranks) = &self.ranks {
            ranks.begins(step);
        }
        if matches!(&self.memory, Memory::Stage(stage) if stage.has_begun(step)) {
            return Ok(()); // the ring's sum has all ranks
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

    /// Computes a step after [`ControlMessage::Step`], on every rank. Only the leader pushes, unless each rank
    /// applies the gradient.
    pub(super) fn make_step(
        &mut self,
        step: Step,
        batches: Batches<'_>,
        mut push: Option<&mut PushParts<'_>>,
    ) -> Result<StepLoss, StepError> {
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
                if !stage.has_begun_next() {
                    ranks.sum(&mut loss)?;
                }
                stage.made(step);
                let samples = batch.n * stage.meshes().1;
                return Ok(StepLoss { loss: loss[0] as f32, samples: samples as u64 });
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
        // Every rank has the mean now.
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
        Ok(StepLoss { loss: (sums[0] / sums[2]) as f32, samples: sums[1] as u64 })
    }

    /// The loss and gradient of a minibatch at weights other than the pulled ones; pushes nothing. For a single
    /// worker with its model in host memory.
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

    /// Loss and accuracy on this rank alone.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<Evaluation, ModelError> {
        match &mut self.memory {
            Memory::Host { weights, .. } => self.model.evaluate(weights, batch),
            Memory::Streamed(streamed) => self.model.evaluate(streamed.whole(), batch),
            Memory::Stage(stage) => {
                // After the other ranks have ended, their weights are in a file here.
                let Some(ranks) = &mut self.ranks else {
                    return self.model.evaluate(stage.whole(), batch);
                };
                let lines = ranks.lines().map_err(DeviceError::from)?;
                match stage.evaluate(self.model, lines, batch) {
                    Ok(e) => Ok(e),
                    Err(StepError::Group(e)) => Err(DeviceError::from(e).into()),
                    Err(StepError::Other(e)) => Err(ModelError::new(e.to_string())),
                }
            }
            Memory::Device => self.model.resident().ok_or_else(gone)?.evaluate_resident(batch),
        }
    }

    /// The worker's share of an evaluation, by all its ranks: `own` evaluates this rank's part.
    pub fn evaluate_share(
        &mut self,
        number: u64,
        share: Share,
        mut own: impl FnMut(&mut Self, Share) -> Result<Evaluation, WorkerError>,
    ) -> Result<Evaluation, WorkerError> {
        loop {
            let mut said = self.is_between_steps();
            if let (Ok(()), Some(ranks)) = (&said, &self.ranks) {
                said = ranks.say(&ControlMessage::Evaluate { number, share }).map_err(StepError::Group);
            }
            match said.and_then(|()| self.sum_evaluation(share, &mut own)) {
                Ok(e) => return Ok(e),
                Err(e) => self.recover(e)?,
            }
        }
    }

    /// Sums the evaluation after [`ControlMessage::Evaluate`], on every rank.
    pub(super) fn sum_evaluation(
        &mut self,
        share: Share,
        own: &mut impl FnMut(&mut Self, Share) -> Result<Evaluation, WorkerError>,
    ) -> Result<Evaluation, StepError> {
        let (place, of) = self.sharers();
        let e = own(self, share.part(place as u32, of as u32))?;
        let Some(ranks) = &self.ranks else { return Ok(e) };
        let mut sums = [e.loss_sum, e.correct as f64, e.count as f64];
        ranks.sum(&mut sums)?;
        Ok(Evaluation { loss_sum: sums[0], correct: sums[1] as u64, count: sums[2] as u64 })
    }

    /// This rank's index among the ranks that share the worker's samples, and their number.
    fn sharers(&self) -> (usize, usize) {
        match &self.memory {
            // Ranks that share the model have the same samples.
            Memory::Stage(stage) => stage.meshes(),
            _ => self.ranks.as_ref().map_or((0, 1), |r| r.place()),
        }
    }
}

type Flat<'a> = (&'a [f32], &'a mut [f32]);

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
) -> Result<f32, StepError> {
    let reducer = ranks.reducer()?;
    let mut next = parts.len();
    let mut broke: GroupResult = Ok(());
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
