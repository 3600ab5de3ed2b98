//! Pulls, to where the weights are used.

use super::{Driver, WeightBuffer};
use crate::worker::WorkerError;
use paraft_client::{Pull, Pulled};
use std::{sync::mpsc, thread, time::Duration};

/// After this wait for the first weights, a worker logs that it waits.
const WAIT_WARNING_DELAY: Duration = Duration::from_secs(5);

impl Driver {
    /// Pulls to the model's own destination.
    pub(super) fn pull(&mut self, pull: Pull, into: &mut dyn WeightBuffer) -> Result<Pulled, WorkerError> {
        let whole = pull.only.is_empty();
        let waits = (self.steps == 0).then(|| warn_waiting(self.scores.workers));
        let pulled = match into.pull(&mut self.client, &pull) {
            Some(pulled) => pulled?,
            None => {
                let pulled = match &mut self.mean.rest {
                    Some(rest) if whole => self.client.pull_results(pull, into.buffer()?, rest)?,
                    _ => self.client.pull_by(pull, into.buffer()?)?,
                };
                if whole {
                    self.have_results(&pulled)?;
                }
                into.landed(&pulled, &self.layout)?;
                pulled
            }
        };
        drop(waits);
        if let Some(local) = self.local.as_mut().filter(|_| whole) {
            local.pulled(into.weights());
            self.copy_to_user(0..self.layout.len())?;
        }
        self.note_mode(pulled.done)?;
        self.save |= pulled.save;
        Ok(pulled)
    }
}

/// Logs once, after a delay, that the worker waits for the first weights, unless dropped before.
fn warn_waiting(workers: u64) -> mpsc::Sender<()> {
    let (waits, over) = mpsc::channel::<()>();
    thread::spawn(move || {
        if over.recv_timeout(WAIT_WARNING_DELAY) == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::warn!(
                "no first weights yet: training begins once all {workers} workers of the job have joined"
            );
        }
    });
    waits
}
