//! What the tests of simulated runs share.

use paraft_data::Split;
use paraft_models::Model;
use paraft_sim::{Outcome, Setup, SimError, Sink, simulate};
use paraft_worker::{Job, samples::shape_of};
use std::path::Path;

/// The job's own model and data, which lies in `folder`.
pub fn own(job: &Job, folder: &Path) -> (Box<dyn Model>, Split) {
    let data = job.data.as_ref().expect("data").load(folder).expect("it loads");
    (job.model.as_ref().expect("a model").build(shape_of(&data.train)).expect("fits"), data)
}

/// A run of the job with these.
#[allow(dead_code)] // not in each of the tests
pub fn run_in(job: &Job, setup: &Setup, folder: &Path, sink: Sink) -> Result<Outcome, SimError> {
    let (model, data) = own(job, folder);
    simulate(job, setup, model, data, sink)
}

pub fn bits(weights: &[f32]) -> Vec<u32> {
    weights.iter().map(|w| w.to_bits()).collect()
}
