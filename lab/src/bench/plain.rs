//! The reference: the same model, data and optimizer in one process and one thread, without servers.

use paraft_common::{
    Encoding, TensorKind,
    codec::put_f32_le,
    optim::{Gradient, Hyper, apply_buffer},
};
use paraft_data::Sampler;
use paraft_models::{Batch, Model, ModelError};
use paraft_worker::{Job, Split, samples::fill};
use std::time::Instant;

/// Trains for `epochs` and returns samples/s of the loop; evaluation is not part of it.
pub fn samples_per_s(job: &Job, model: &mut dyn Model, data: &Split, epochs: u64) -> Result<f64, ModelError> {
    let layout = job.layout(model.tensors()).map_err(|e| ModelError::new(e.to_string()))?;
    let mut weights = vec![0.0; layout.len()];
    let mut gradients = vec![0.0; layout.len()];
    model.init(job.seed, &mut weights);
    let mut slots: Vec<_> = layout.buckets().iter().map(|b| job.optimizer.new_slots(b.len)).collect();
    let mut sampler = Sampler::new(data.train.len(), job.seed);
    (sampler.shuffle, sampler.drop_last, sampler.drop_last_batch) = (job.train.shuffle, true, true);
    let (mut batch, mut t, mut samples) = (Batch::default(), 0, 0u64);
    let began = Instant::now();
    for epoch in 0..epochs {
        for indices in sampler.batches(epoch, 0, 1, job.train.batch) {
            fill(&data.train, &indices, &mut batch).map_err(|e| ModelError::new(e.to_string()))?;
            model.step(&weights, &mut gradients, &batch, &mut |_, _| {})?;
            t += 1;
            samples += batch.n as u64;
            for (b, slots) in layout.buckets().iter().zip(&mut slots) {
                let mut le = Vec::new();
                put_f32_le(&gradients[b.range()], &mut le);
                let gradient = Gradient { payload: &le.into(), encoding: Encoding::F32, scale: 1.0 };
                let hyper = Hyper { lr: job.optimizer.lr() as f32, t, clip_value: job.clip.value };
                match b.kind {
                    TensorKind::Param => {
                        job.optimizer.apply(&hyper, &mut weights[b.range()], slots, gradient)
                    }
                    TensorKind::Buffer => apply_buffer(&mut weights[b.range()], gradient),
                    TensorKind::Result | TensorKind::Rows => {} // built-in models have none
                }
            }
        }
    }
    Ok(samples as f64 / began.elapsed().as_secs_f64())
}
