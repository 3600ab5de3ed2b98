//! Checkpoints that the servers or the loop request, and the final weights.

use super::{Driver, End, WeightBuffer};
use crate::{
    checkpoints::{Checkpoints, InForce},
    worker::WorkerError,
};
use paraft_checkpoint::{MODEL_FILE, weights};
use paraft_common::Step;
use std::path::{Path, PathBuf};

impl Driver {
    /// Writes a checkpoint of the servers' state after the last step, waits until it is on disk, and returns its
    /// folder. `folder`: the target, instead of the job's. `rates`: the learning rates of its gradients, if the
    /// loop sets them.
    pub fn save_now(&mut self, folder: Option<&Path>, rates: &[f64]) -> Result<PathBuf, WorkerError> {
        let step = self.done();
        let in_force = InForce { mode: self.client.mode().1, rates: rates.to_vec() };
        let checkpoints = match &mut self.checkpoints {
            Some(checkpoints) => checkpoints,
            none => {
                let (author, place) = self.on_demand.clone();
                none.insert(Checkpoints::on_demand(&self.plan, place, author)?)
            }
        };
        let saved = checkpoints.save(step, folder, in_force, &*self.interrupt);
        self.note_checkpoints(false)?;
        saved
    }

    /// Writes a checkpoint if the servers request one. A failure does not end the training.
    pub(super) fn save_as_asked(&mut self) {
        if !std::mem::take(&mut self.save) {
            return;
        }
        let rates = self.checkpoints.as_ref().map(|c| c.in_force.rates.clone()).unwrap_or_default();
        match self.save_now(None, &rates) {
            Ok(path) => tracing::info!(path = %path.display(), "the requested checkpoint is written"),
            Err(e) => tracing::warn!(error = %e, "the requested checkpoint cannot be written"),
        }
    }

    /// Writes the final weights and waits for the remaining checkpoints.
    pub fn save(&mut self, end: End, into: &mut dyn WeightBuffer) -> Result<(), WorkerError> {
        self.note_evaluations()?;
        let own = self.weights.clone();
        let run = self.run_dir.as_ref().filter(|_| end.first).map(|d| d.join(MODEL_FILE));
        for path in own.into_iter().chain(run) {
            weights::save(&path, &self.layout, into.weights(), end.done.0)?;
        }
        if end.first {
            self.save_at_stop(end.done);
        }
        self.note_checkpoints(true)
    }

    /// Writes the state at which the job was stopped, if the job makes checkpoints and none has this state: all workers
    /// have finished, so it is that of the final weights. Not with leased samples: no run could resume from it within an
    /// epoch. A failure does not fail the run.
    fn save_at_stop(&mut self, done: Step) {
        let is_stopped = self.trainer.is_stopped() && self.plan.leased.is_none() && done.0 < self.plan.total;
        let Some(c) = self.checkpoints.as_ref().filter(|c| is_stopped && c.lacks(done)) else { return };
        let rates = c.in_force.rates.clone();
        match self.save_now(None, &rates) {
            Ok(path) => tracing::info!(path = %path.display(), "the job was stopped; its state is written"),
            Err(e) => tracing::warn!(error = %e, "the job was stopped; its state cannot be written"),
        }
    }

    /// Tells the trainer whether checkpoints rest, as it is between two steps.
    pub(super) fn space_checkpoints(&mut self) {
        let Some(c) = &mut self.checkpoints else { return };
        // With leased samples shard 0 names the worker that writes.
        let share = self.plan.leased.is_none().then(|| self.trainer.share());
        self.trainer.rest_checkpoints(c.rests(share));
    }

    pub(super) fn clear_the_way(&self, step: Step) {
        if let Some(c) = &self.checkpoints {
            c.clear_the_way(step);
        }
    }
}
