//! The model with its parameters and its gradient: in the host's memory, or on a device ([`paraft_models::Resident`]).

use crate::exchange::{PushParts, StepPush};
use paraft_client::{Client, Pulled};
use paraft_common::{Layout, Step};
use paraft_models::{Batch, Evaluation, Model, ModelError, Part};

/// See the module.
pub(crate) struct Engine<'a> {
    model: &'a mut dyn Model,
    place: Place,
}

enum Place {
    Host {
        weights: Vec<f32>,
        gradients: Vec<f32>,
    },
    /// The buckets, and how they are pushed.
    Device(Vec<Part>),
}

impl<'a> Engine<'a> {
    pub fn new(model: &'a mut dyn Model, client: &Client) -> Self {
        let layout = client.layout();
        let place = if model.resident().is_some() {
            let part = |(i, b): (u32, &paraft_common::BucketSpec)| Part {
                range: b.range(),
                encoding: client.encoding(paraft_common::BucketId(i)),
            };
            Place::Device((0..).zip(layout.buckets()).map(part).collect())
        } else {
            // The first pull fills it. Until the servers have the initial weights they are in memory too; a copy of them
            // here would be the model a third time, beside its gradient.
            Place::Host { weights: vec![0.0; layout.len()], gradients: vec![0.0; layout.len()] }
        };
        Self { model, place }
    }

    /// The weights of the last pull.
    pub fn weights(&mut self) -> &[f32] {
        match &self.place {
            Place::Host { weights, .. } => weights,
            Place::Device(_) => self.model.resident().map_or(&[], |r| r.host()),
        }
    }

    /// The same, for the next pull to write; then [`Self::landed`].
    pub fn landing(&mut self) -> Result<&mut [f32], ModelError> {
        match &mut self.place {
            Place::Host { weights, .. } => Ok(weights),
            Place::Device(_) => match self.model.resident() {
                Some(r) => r.host_mut(),
                None => Err(ModelError::new("it has left its device")),
            },
        }
    }

    /// What a pull brought is on its way to where it is needed.
    pub fn landed(&mut self, pulled: &Pulled, layout: &Layout) -> Result<(), ModelError> {
        let Some(r) = self.model.resident() else { return Ok(()) };
        let buckets = pulled.changed.iter().filter_map(|b| layout.bucket(*b));
        // Neighbours in one copy.
        let mut ranges: Vec<std::ops::Range<usize>> = Vec::new();
        for bucket in buckets {
            match ranges.last_mut() {
                Some(last) if last.end == bucket.range().start => last.end = bucket.range().end,
                _ => ranges.push(bucket.range()),
            }
        }
        r.landed(&ranges)
    }

    /// One step, its gradient pushed bucket by bucket.
    pub fn step(&mut self, client: &mut Client, step: Step, batch: &Batch) -> Result<f32, ModelError> {
        match &mut self.place {
            Place::Host { weights, gradients } => {
                let mut push = StepPush::new(client, step);
                let mut ready = |offset: usize, gradients: &[f32]| push.ready(offset, gradients);
                let loss = self.model.step(weights, gradients, batch, &mut ready)?;
                if !push.complete() {
                    return Err(ModelError::new("it did not report its whole gradient as ready"));
                }
                Ok(loss)
            }
            Place::Device(parts) => {
                let Some(r) = self.model.resident() else {
                    return Err(ModelError::new("it has left its device"));
                };
                let mut push = PushParts::new(client, step);
                r.step_resident(batch, parts, &mut |i, bytes| push.ready(i, bytes))
            }
        }
    }

    pub fn evaluate(&mut self, batch: &Batch) -> Result<Evaluation, ModelError> {
        match &self.place {
            Place::Host { weights, .. } => self.model.evaluate(weights, batch),
            Place::Device(_) => match self.model.resident() {
                Some(r) => r.evaluate_resident(batch),
                None => Err(ModelError::new("it has left its device")),
            },
        }
    }

    /// Ends it, and gives the weights of the last pull.
    pub fn into_weights(mut self) -> Vec<f32> {
        match &mut self.place {
            Place::Host { weights, .. } => std::mem::take(weights),
            Place::Device(_) => self.weights().to_vec(),
        }
    }
}
