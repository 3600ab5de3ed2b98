//! The model and the data: real gradients, one at a time. All workers share them; what differs between workers is their
//! weights and their samples.

use crate::SimError;
use bytes::Bytes;
use paraft_common::{Layout, Step, WorkerId, config::ServerJob};
use paraft_data::{Dataset, Split};
use paraft_models::{Batch, Evaluation, Model};
use paraft_worker::samples::fill;

/// Samples that are evaluated at once.
const CHUNK: usize = 256;

/// See the module.
pub(crate) struct Learner {
    model: Box<dyn Model>,
    train: Dataset,
    test: Dataset,
    layout: Layout,
    job: ServerJob,
    gradient: Vec<f32>,
    batch: Batch,
}

/// What a step comes to.
pub(crate) struct Gradient {
    /// Mean over the minibatch.
    pub loss: f32,
    /// By bucket, in the job's encoding.
    pub buckets: Vec<Bytes>,
}

impl Learner {
    pub fn new(model: Box<dyn Model>, data: Split, layout: Layout, job: ServerJob) -> Self {
        let gradient = vec![0.0; layout.len()];
        let Split { train, test } = data;
        Self { model, train, test, layout, job, gradient, batch: Batch::default() }
    }

    /// One step of a worker with these weights on these samples.
    pub fn step(
        &mut self,
        (worker, step): (WorkerId, Step),
        weights: &[f32],
        samples: &[u32],
    ) -> Result<Gradient, SimError> {
        fill(&self.train, samples, &mut self.batch);
        let loss = self.model.step(weights, &mut self.gradient, &self.batch, &mut |_, _| {})?;
        // The servers would refuse such a push.
        if !loss.is_finite() || !self.gradient.iter().all(|g| g.is_finite()) {
            return Err(SimError::NotFinite { loss, step, worker });
        }
        let encoded = |spec: &paraft_common::BucketSpec| {
            let mut out = Vec::new();
            self.job.encoding(spec.kind).encode(&self.gradient[spec.range()], &mut out);
            Bytes::from(out)
        };
        Ok(Gradient { loss, buckets: self.layout.buckets().iter().map(encoded).collect() })
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
        let samples: Vec<u32> = samples.map(|i| i as u32).collect();
        let mut sum = Evaluation::default();
        for chunk in samples.chunks(CHUNK) {
            fill(&self.test, chunk, &mut self.batch);
            let e = self.model.evaluate(weights, &self.batch)?;
            sum.loss_sum += e.loss_sum;
            sum.correct += e.correct;
            sum.count += e.count;
        }
        Ok(sum)
    }
}
