//! The model and the data: real gradients, one at a time. All workers share them; what differs between workers is their
//! weights and their samples.

use crate::error::SimError;
use bytes::Bytes;
use paraft_common::{BucketId, Layout, Step, WorkerId};
use paraft_data::{Dataset, Split};
use paraft_models::{Batch, Evaluation, Model};
use paraft_worker::{
    WorkerError,
    samples::{evaluate, fill},
};

/// See the module.
pub(crate) struct Learner {
    model: Box<dyn Model>,
    train: Dataset,
    test: Dataset,
    layout: Layout,
    gradient: Vec<f32>,
    batch: Batch,
}

/// What a step comes to.
pub(crate) struct Gradient {
    /// Mean over the minibatch.
    pub loss: f32,
    /// By bucket, as the worker writes them.
    pub buckets: Vec<Bytes>,
}

impl Learner {
    pub fn new(model: Box<dyn Model>, data: Split, layout: Layout) -> Self {
        let gradient = vec![0.0; layout.len()];
        let Split { train, test } = data;
        Self { model, train, test, layout, gradient, batch: Batch::default() }
    }

    /// One step of a worker with these weights on these samples; `encode` writes its buckets.
    pub fn step(
        &mut self,
        (worker, step): (WorkerId, Step),
        weights: &[f32],
        samples: &[u32],
        mut encode: impl FnMut(BucketId, &[f32]) -> Bytes,
    ) -> Result<Gradient, SimError> {
        let (loss, _) = self.gradient((worker, step), weights, samples)?;
        // The last one first, as a backward pass has them.
        let parts = self.layout.buckets().iter().enumerate().rev();
        let mut buckets: Vec<Bytes> =
            parts.map(|(b, spec)| encode(BucketId(b as u32), &self.gradient[spec.range()])).collect();
        buckets.reverse();
        Ok(Gradient { loss, buckets })
    }

    /// The gradient of a minibatch at these weights, and its loss.
    pub fn gradient(
        &mut self,
        (worker, step): (WorkerId, Step),
        weights: &[f32],
        samples: &[u32],
    ) -> Result<(f32, &[f32]), SimError> {
        fill(&self.train, samples, &mut self.batch).map_err(WorkerError::from)?;
        let loss = self.model.step(weights, &mut self.gradient, &self.batch, &mut |_, _| {})?;
        // The servers would refuse such a push.
        if !loss.is_finite() || !self.gradient.iter().all(|g| g.is_finite()) {
            return Err(SimError::NotFinite { loss, step, worker });
        }
        Ok((loss, &self.gradient))
    }

    /// The same of a minibatch that is computed in so many parts, whose sum is in their order.
    pub fn in_parts(
        &mut self,
        (worker, step): (WorkerId, Step),
        weights: &[f32],
        samples: &[u32],
        parts: usize,
    ) -> Result<(f32, Vec<f32>), SimError> {
        let (n, parts) = (samples.len(), parts.min(samples.len()).max(1));
        let (mut loss, mut sum) = (0.0, Vec::new());
        for m in 0..parts {
            let part = &samples[n * m / parts..n * (m + 1) / parts];
            let (of_part, gradient) = self.gradient((worker, step), weights, part)?;
            loss += f64::from(of_part) * part.len() as f64 / n as f64;
            let share = part.len() as f32 / n as f32;
            match m {
                0 if parts == 1 => sum = gradient.to_vec(),
                0 => sum = gradient.iter().map(|g| share * g).collect(),
                _ => sum.iter_mut().zip(gradient).for_each(|(s, g)| *s += share * g),
            }
        }
        Ok((loss as f32, sum))
    }

    /// Held-out samples.
    pub fn held_out(&self) -> usize {
        self.test.len()
    }

    /// Whether a held-out sample has a class that the model says.
    pub fn classes(&self) -> bool {
        self.test.classes().is_some()
    }

    /// Loss and correct predictions over these held-out samples.
    pub fn evaluate(
        &mut self,
        weights: &[f32],
        samples: impl Iterator<Item = usize>,
    ) -> Result<Evaluation, SimError> {
        Ok(evaluate(&mut *self.model, weights, &self.test, samples)?)
    }
}
