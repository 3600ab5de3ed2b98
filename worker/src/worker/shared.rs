//! What the leader and the followers of a group need alike.

use super::{Plan, WorkerError, WorkerOptions};
use crate::{
    job::Job,
    metrics::Gauges,
    stage::{Join, Stage},
};
use paraft_common::layout::Cuts;
use paraft_data::{DataDigest, Dataset};
use paraft_models::Model;
use std::sync::Arc;

/// The state of every rank, leader or follower.
#[derive(Clone)]
pub(super) struct Shared {
    pub train: Arc<Dataset>,
    pub test: Arc<Dataset>,
    /// Of both parts of the data. Workers with other data are refused.
    pub digest: DataDigest,
    pub plan: Plan,
    pub gauges: Arc<Gauges>,
}

/// A rank's part of its worker's model, if the ranks share it. A follower opens its session by `join`.
pub(super) fn staged<'a>(
    job: &Job,
    options: &WorkerOptions,
    model: &dyn Model,
    join: Option<Box<Join<'a>>>,
) -> Result<Stage<'a>, WorkerError> {
    let stages = job.stages(&model.layers()).map_err(WorkerError::Job)?;
    let cuts = Cuts { stages: &stages.values(), ..Cuts::default() };
    let layout = job.layout_cut(model.tensors(), cuts).map_err(|e| WorkerError::Job(e.to_string()))?;
    let buckets = layout.buckets().iter().map(|b| b.range()).collect();
    let micro = job.micro_batches();
    let schedule = (job.parallel.schedule, micro, job.train.batch.div_ceil(micro));
    let (slices, meshes) = (job.parallel.tensor as usize, job.train.group_size as usize);
    let clips = job.clip.norm.is_some() && job.parallel.pipeline > 1;
    Stage::new((stages, slices, meshes), schedule, clips, buckets, join, &options.scratch_folder())
}
