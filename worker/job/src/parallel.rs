//! `[parallel]`: how the ranks of a worker share its model.

use crate::{
    Job,
    check::{Check, bad},
    is_default,
};
use paraft_common::{ModeChoice, pipeline::PipelineSchedule};
use paraft_models::{Layer, Model, Stages};
use serde::{Deserialize, Serialize};

/// `[parallel]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelConfig {
    /// Pipeline stages of the model, one per rank; from 1 to 64.
    pub pipeline: u32,
    /// Tensor slices of each stage's layers, one per rank, which compute every layer together; from 1 to 64.
    #[serde(skip_serializing_if = "is_one")]
    pub tensor: u32,
    /// Micro-batches per minibatch. Default: four per stage if there are several, at most the number of samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batches: Option<usize>,
    /// The order of a stage's micro-batches.
    #[serde(skip_serializing_if = "is_default")]
    pub schedule: PipelineSchedule,
}

impl Default for ParallelConfig {
    fn default() -> Self {
        Self { pipeline: 1, tensor: 1, micro_batches: None, schedule: PipelineSchedule::default() }
    }
}

const MAX_STAGES: u32 = 64;

fn is_one(n: &u32) -> bool {
    *n == 1
}

impl Job {
    /// Ranks of a worker: those that share its samples, times those that share its model.
    pub fn ranks_of_worker(&self) -> u32 {
        self.train.group_size.saturating_mul(self.parallel.mesh()).max(1)
    }

    /// Ranks of a worker that reduce gradients together, on GPUs by NCCL. Ranks of a split model send them instead.
    pub fn ranks_that_reduce(&self) -> u32 {
        if self.parallel.is_cut() { 1 } else { self.train.group_size }
    }

    /// Number of parts of a step's samples.
    pub fn shares(&self) -> u32 {
        self.train.workers.saturating_mul(self.train.group_size)
    }

    /// The part of a rank; in a split model it depends on the rank's current mesh.
    pub fn share_of(&self, rank: u32, mesh: u32) -> u32 {
        match self.parallel.is_cut() {
            false => rank,
            true => rank / self.ranks_of_worker() * self.train.group_size + mesh,
        }
    }

    /// Micro-batches per minibatch.
    pub fn micro_batches(&self) -> usize {
        let most = self.train.batch.max(1);
        let stages = self.parallel.pipeline as usize;
        let default = if stages > 1 { 4 * stages } else { 1 };
        self.parallel.micro_batches.unwrap_or(default).min(most)
    }

    /// Checks that a model can be split into the requested slices.
    ///
    /// # Errors
    /// It cannot; the text is for users.
    pub fn check_slices(&self, model: &dyn Model) -> Result<(), String> {
        let of = self.parallel.tensor as usize;
        paraft_models::layers_of_slice(model, of).map(drop).map_err(|e| format!("parallel.tensor: {e}"))
    }

    /// Splits a model of these layers so that the most expensive stage costs least.
    ///
    /// # Errors
    /// The model has too few layers; the text is for users.
    pub fn stages(&self, layers: &[Layer]) -> Result<Stages, String> {
        let p = &self.parallel;
        if layers.is_empty() && p.mesh() > 1 {
            return Err(
                "parallel: this model isn't divided in layers (Model::layers); take [parallel] out".into()
            );
        }
        Stages::even(layers, p.pipeline as usize).map_err(|e| format!("parallel.pipeline: {e}"))
    }
}

impl ParallelConfig {
    /// Ranks that hold one model together: stages times slices.
    pub fn mesh(&self) -> u32 {
        self.pipeline.saturating_mul(self.tensor)
    }

    /// Whether the model is split over several ranks.
    pub fn is_cut(&self) -> bool {
        self.mesh() > 1
    }

    pub(crate) fn check(&self, job: &Job) -> Check {
        let train = &job.train;
        if self.pipeline == 0 || self.pipeline > MAX_STAGES {
            let why = format!("{} stages", self.pipeline);
            return bad("parallel.pipeline", why, "use 1 to 64");
        }
        if self.tensor == 0 || self.tensor > MAX_STAGES {
            let why = format!("{} slices", self.tensor);
            return bad("parallel.tensor", why, "use 1 to 64");
        }
        if self.micro_batches.is_some_and(|n| n == 0 || n > train.batch) {
            let why = format!("{} micro-batches of {} samples", self.micro_batches.unwrap_or(0), train.batch);
            return bad("parallel.micro_batches", why, "use 1 to train.batch");
        }
        if !self.is_cut() {
            return Ok(());
        }
        let no = |key: &'static str, what: &str, remedy: &str| {
            bad(key, format!("a model that is cut ([parallel]) {what}"), remedy)
        };
        if self.schedule.overlaps_minibatches() && self.pipeline > 1 {
            if job.micro_batches() < self.pipeline as usize {
                let why = format!(
                    "{} of a minibatch for {} stages, and schedule \"2bw\" wants at least one for each",
                    job.micro_batches(),
                    self.pipeline
                );
                return bad(
                    "parallel.micro_batches",
                    why,
                    "set as many as parallel.pipeline, or more; train.batch may have to grow",
                );
            }
            if job.clip.norm.is_some() {
                return bad(
                    "clip.norm",
                    "the norm of the whole gradient is known when all stages have ended a step, and with schedule \"2bw\" none of them waits for that",
                    "set parallel.schedule = \"1f1b\", or use clip.value",
                );
            }
            if job.algorithm.algorithm().keeps().pulled {
                let why = format!(
                    "{} corrects a gradient by the weights of the last pull, and with schedule \"2bw\" it is of the one before",
                    job.algorithm.kind()
                );
                return bad(
                    "algorithm.kind",
                    why,
                    "take [algorithm] out, or set parallel.schedule = \"1f1b\"",
                );
            }
        }
        job.check_by_layers()?;
        if train.mode == ModeChoice::Auto {
            return no(
                "train.mode",
                "has no rank that receives a switch for all stages",
                "name a mode, and switch it with `paraft mode`",
            );
        }
        if train.backup_workers > 0 {
            return no("train.backup_workers", "waits for all of a round's pushes", "take it out");
        }
        if self.pipeline > 1 && job.cluster.shards.is_some_and(|shards| shards < self.pipeline) {
            let why = format!("each of {} stages has shards of its own", self.pipeline);
            return bad("cluster.shards", why, "set cluster.shards to parallel.pipeline or more");
        }
        Ok(())
    }
}
