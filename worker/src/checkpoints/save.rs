//! A checkpoint of now, for a loop that asks for one and waits until it is written.
//!
//! The shards take their images when they are asked for them, so nobody else need know. Where several workers save at one step, into a
//! folder that they have in common, the first writes and the others find it there.

use super::{
    Author, Checkpoints,
    author::{Failed, SavedCheckpoint, runtime},
    checkpoint_thread::Order,
    due,
};
use crate::{WorkerError, job::CheckpointConfig, worker::Plan};
use paraft_checkpoint::{Checkpoint, Folder};
use paraft_client::{Interrupt, checkpoint_parts::CheckpointParts};
use paraft_common::Step;
use std::{
    path::{Path, PathBuf},
    sync::{atomic::Ordering::SeqCst, mpsc},
    thread,
    time::{Duration, Instant},
};

/// So often a shard that has no image yet is asked again; a worker of higher rank waits longer, so that of two that have some of the
/// images each one gets all of them.
const RETRY_DELAY: Duration = Duration::from_millis(20);
/// Who waits looks so often whether it was interrupted.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// What the thread is asked for.
pub(super) struct SaveTask {
    /// None: where the job's checkpoints go.
    pub folder: Option<Folder>,
    /// At which the step before went.
    pub rates: Vec<f64>,
    /// Hears what has come of it.
    pub asker: mpsc::Sender<Result<PathBuf, WorkerError>>,
}

impl Checkpoints {
    /// For a job that makes none by itself. `place`: where they go, if anywhere.
    pub(crate) fn on_demand(
        plan: &Plan,
        place: Option<PathBuf>,
        author: Author,
    ) -> Result<Self, WorkerError> {
        Self::begin(due(&CheckpointConfig::default(), plan), place, author)
    }

    /// Writes the state that the shards have now, which is this worker's after `step`: it pushes nothing meanwhile. Waits until it is
    /// on the disk; gives its folder. `folder`: into this one, and the fleet hears nothing of it.
    pub(crate) fn save(
        &self,
        step: Step,
        folder: Option<&Path>,
        rates: &[f64],
        interrupt: &dyn Interrupt,
    ) -> Result<PathBuf, WorkerError> {
        let (asker, told) = mpsc::channel();
        let folder = folder.map(Folder::new);
        self.waiting.fetch_add(1, SeqCst);
        self.send(Order::Save(step, SaveTask { folder, rates: rates.to_vec(), asker }));
        loop {
            match told.recv_timeout(POLL_INTERVAL) {
                Ok(saved) => return saved,
                Err(mpsc::RecvTimeoutError::Timeout) if interrupt.is_set() => {
                    return Err(WorkerError::Interrupted);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(WorkerError::Job("the job has no place for checkpoints".into()));
                }
            }
        }
    }
}

impl Author {
    pub(super) fn save(&self, folder: &Folder, step: Step, rates: &[f64]) -> Result<SavedCheckpoint, Failed> {
        let began = Instant::now();
        let runtime = runtime().map_err(Failed::Runtime)?;
        loop {
            let taken =
                CheckpointParts::take(&self.servers, self.shards, self.transport, &self.server_job, step);
            let tried = runtime.block_on(taken).map_err(Failed::from).and_then(|parts| {
                let _alone = folder.lock(self.timeout)?;
                let founding = parts.founding;
                match self.is_there(folder, step) {
                    Some((path, bytes)) => Ok((path, bytes, founding)),
                    None => self.write_parts(folder, &runtime, parts, step, None, rates.to_vec()),
                }
            });
            match tried {
                // A leader was lost, or another's image is in the way.
                Err(Failed::Fetch(_)) if began.elapsed() < self.timeout => {
                    thread::sleep(RETRY_DELAY * (1 + self.worker.0 % 8));
                }
                tried => return tried,
            }
        }
    }

    /// A checkpoint of this step that a worker of this job has written since this one came.
    fn is_there(&self, folder: &Folder, step: Step) -> Option<(PathBuf, u64)> {
        let found = Checkpoint::open(&folder.path().join(Folder::name(step.0))).ok()?;
        let m = found.manifest();
        let ours = m.name == self.name && m.step == step.0 && m.written >= self.came;
        ours.then(|| (found.path().to_path_buf(), m.files.values().map(|f| f.bytes).sum()))
    }
}

impl From<Failed> for WorkerError {
    fn from(e: Failed) -> Self {
        match e {
            Failed::Fetch(e) => e.into(),
            Failed::Write(e) => e.into(),
            Failed::Runtime(e) => Self::Job(format!("no I/O runtime: {e}")),
        }
    }
}
