//! An immediate checkpoint, for a loop that asks for one and waits until it is written.
//!
//! The shards take their images at this request, so no other worker is involved. If several workers save one step
//! into a shared folder, the first writes it and the others find it there.

use super::{
    Author, Checkpoints, InForce,
    author::{Failed, SavedCheckpoint, runtime},
    checkpoint_thread::{Order, SaveTask},
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

/// The delay before the client asks again for a missing image. A worker of higher rank waits longer, so that of two
/// workers with some of the images each obtains all of them.
const RETRY_DELAY: Duration = Duration::from_millis(20);
/// How often the waiting thread checks for an interrupt.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl Checkpoints {
    /// For a job that makes no checkpoints by itself. `place`: their folder, if any.
    pub(crate) fn on_demand(
        plan: &Plan,
        place: Option<PathBuf>,
        author: Author,
    ) -> Result<Self, WorkerError> {
        Self::begin(plan.checkpoints(&CheckpointConfig::default()), Duration::ZERO, place, author)
    }

    /// Writes the shards' current state, which belongs to this worker's `step`: the worker pushes nothing
    /// meanwhile. Waits until the checkpoint is on disk; returns its folder. `folder`: writes there, without a
    /// report to the fleet.
    pub(crate) fn save(
        &mut self,
        step: Step,
        folder: Option<&Path>,
        in_force: InForce,
        interrupt: &dyn Interrupt,
    ) -> Result<PathBuf, WorkerError> {
        let (reply, replies) = mpsc::channel();
        let is_jobs = folder.is_none();
        let folder = folder.map(Folder::new);
        self.waiting.fetch_add(1, SeqCst);
        self.send(Order::Save(step, SaveTask { folder, in_force, reply }));
        loop {
            match replies.recv_timeout(POLL_INTERVAL) {
                Ok(saved) => {
                    if is_jobs && saved.is_ok() {
                        self.begins(step);
                    }
                    return saved;
                }
                Err(mpsc::RecvTimeoutError::Timeout) if interrupt.is_set() => {
                    return Err(WorkerError::Interrupted);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(WorkerError::Job("the job has no folder for checkpoints".into()));
                }
            }
        }
    }
}

impl Author {
    pub(super) fn save(
        &self,
        folder: &Folder,
        step: Step,
        in_force: &InForce,
    ) -> Result<SavedCheckpoint, Failed> {
        let began = Instant::now();
        let runtime = runtime().map_err(Failed::Runtime)?;
        loop {
            let taken = CheckpointParts::take(self.job_shards(), step);
            let tried = runtime.block_on(taken).map_err(Failed::from).and_then(|parts| {
                let _alone = folder.lock(self.timeout)?;
                let founding = parts.founding;
                match self.is_there(folder, step) {
                    Some((path, bytes)) => Ok((path, bytes, founding)),
                    None => self.write_parts(folder, &runtime, parts, step, None, in_force.clone()),
                }
            });
            match tried {
                // A shard lost its leader, or another worker's image blocks this one.
                Err(Failed::Fetch(_)) if began.elapsed() < self.timeout => {
                    thread::sleep(RETRY_DELAY * (1 + self.worker.0 % 8));
                }
                tried => return tried,
            }
        }
    }

    /// A checkpoint of this step that a worker of this job has written since this worker started.
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
