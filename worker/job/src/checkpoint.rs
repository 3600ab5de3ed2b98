//! `[checkpoint]`: interval, number of kept checkpoints, folder.

use crate::{
    Job, SamplerKind,
    check::{Check, bad},
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// A checkpoint after each this many steps, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// A checkpoint after each this many epochs, from 1. If neither key is given: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_epochs: Option<u64>,
    /// How many are kept, from 1; the latest and the best are always kept.
    pub num_to_keep: usize,
    /// Their folder. Default: `checkpoints` in the run's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dir: Option<PathBuf>,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every_steps: None, every_epochs: None, num_to_keep: 3, dir: None }
    }
}

impl CheckpointConfig {
    /// Epochs between two checkpoints, if the interval is in epochs.
    pub fn epochs(&self) -> Option<u64> {
        self.every_epochs.or_else(|| self.every_steps.is_none().then_some(1))
    }

    pub(crate) fn check(&self, job: &Job) -> Check {
        if job.train.sampler == SamplerKind::Leased && self.every_steps.is_some() {
            let why = "with the leased sampler checkpoints are cut between epochs, when no worker trains";
            return bad("checkpoint.every_steps", why, "use checkpoint.every_epochs");
        }
        let keys =
            [("checkpoint.every_steps", self.every_steps), ("checkpoint.every_epochs", self.every_epochs)];
        if let Some((key, _)) = keys.iter().find(|(_, every)| *every == Some(0)) {
            return bad(key, "every 0", "use 1 or more, or leave it out");
        }
        if self.num_to_keep == 0 {
            return bad("checkpoint.num_to_keep", "0 checkpoints", "use 1 or more");
        }
        Ok(())
    }
}
