//! The content of a job's checkpoint: the servers' images or this rank's own state, and the job's description.

use crate::{Job, recorder::wall, worker::Plan};
use paraft_checkpoint::{
    CheckpointError, Folder, Manifest, State, Writer,
    manifest::{self, Clock, Stamp},
};
use paraft_client::{
    ClientError, ClientOptions, Transport,
    checkpoint_parts::{CheckpointParts, JobShards, TablePart},
};
use paraft_common::{Mode, Step, TensorSpec, WorkerId, codec::put_f32_le, config::ServerJob};
use std::{collections::BTreeMap, path::PathBuf, time::Duration};
use tokio::runtime::{self, Runtime};

/// Values per write.
const PIECE: usize = 1 << 18;

/// The job's description in a checkpoint, and the source of the state.
#[derive(Clone)]
pub(crate) struct Author {
    pub(super) keep: usize,
    pub(super) name: String,
    job: String,
    batch: u64,
    /// Steps per epoch, and numbers that no step has.
    steps: (u64, u64),
    tensors: Vec<TensorSpec>,
    pub(super) servers: Vec<String>,
    pub(super) shards: u32,
    pub(super) transport: Transport,
    pub(super) server_job: ServerJob,
    pub(super) worker: WorkerId,
    pub(super) timeout: Duration,
    note: String,
    /// When this worker started, by its clock.
    pub(super) came: f64,
}

/// What a job's training is by when a checkpoint is made, beside the job itself.
#[derive(Clone, Debug)]
pub(crate) struct InForce {
    /// The mode.
    pub mode: Mode,
    /// The learning rates that the loop set last, per group. Empty: the job's schedule.
    pub rates: Vec<f64>,
}

/// A checkpoint's folder, its size in bytes, and the founding number that identifies the job.
pub(super) type SavedCheckpoint = (PathBuf, u64, u64);

/// Why a checkpoint was not made.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failed {
    #[error(transparent)]
    Fetch(#[from] ClientError),
    #[error(transparent)]
    Write(#[from] CheckpointError),
    #[error("no I/O runtime: {0}")]
    Runtime(std::io::Error),
}

impl Author {
    /// For a worker of this job. `note`: its loop's own description.
    pub(crate) fn new(
        job: &Job,
        plan: &Plan,
        tensors: &[TensorSpec],
        client: &ClientOptions,
        note: String,
    ) -> Self {
        Self {
            keep: job.checkpoints().cloned().unwrap_or_default().keep,
            name: job.name.clone(),
            job: job.to_toml(),
            batch: job.train.batch as u64 * u64::from(job.train.group_size),
            steps: (plan.per_epoch, plan.left_out),
            tensors: tensors.to_vec(),
            servers: client.servers.clone(),
            shards: client.shards,
            transport: client.transport,
            server_job: client.job.clone(),
            worker: client.worker,
            timeout: client.timeout,
            note,
            came: wall(),
        }
    }

    pub(super) fn release(&self, step: Step) {
        if let Ok(runtime) = runtime() {
            runtime.block_on(CheckpointParts::release(self.job_shards(), step));
        }
    }

    pub(super) fn job_shards(&self) -> JobShards<'_> {
        JobShards {
            servers: &self.servers,
            shards: self.shards,
            transport: self.transport,
            job: &self.server_job,
        }
    }

    /// Writes the shards' images of `step`.
    pub(super) fn write(
        &self,
        folder: &Folder,
        step: Step,
        epochs: Option<u64>,
        in_force: InForce,
    ) -> Result<SavedCheckpoint, Failed> {
        let runtime = runtime().map_err(Failed::Runtime)?;
        let sections = runtime.block_on(CheckpointParts::open(self.job_shards(), step))?;
        // Other workers may write a checkpoint into the same folder.
        let _alone = folder.lock(self.timeout)?;
        self.write_parts(folder, &runtime, sections, step, epochs, in_force)
    }

    pub(super) fn write_parts(
        &self,
        folder: &Folder,
        runtime: &Runtime,
        mut sections: CheckpointParts,
        step: Step,
        epochs: Option<u64>,
        in_force: InForce,
    ) -> Result<SavedCheckpoint, Failed> {
        let slots = self.server_job.slot_names();
        let sizes = sections.table_sizes();
        let tables: Vec<_> = self.server_job.tables.iter().cloned().zip(sizes).collect();
        let mut writer = Writer::create(folder, step.0, &self.tensors, &slots, &tables)?;
        let mut stamps = vec![Stamp::default(); self.server_job.layout().buckets().len()];
        let mut bytes = 0;
        while let Some(p) = runtime.block_on(sections.next())? {
            stamps[p.bucket.0 as usize] = Stamp { version: p.version, clock: p.clock };
            bytes += p.payload.len() as u64;
            writer.put(p.part, p.offset, &p.payload)?;
        }
        while let Some((table, part)) = runtime.block_on(sections.next_of_tables())? {
            bytes += match part {
                TablePart::Rows(rows) => writer.put_rows(table, &rows).map(|()| rows.len())?,
                TablePart::History(some) => writer.put_history(table, &some).map(|()| some.len())?,
            } as u64;
        }
        let clocks = || sections.clocks.iter();
        let slowest = clocks().filter(|c| !c.finished).map(|c| c.step).min();
        // The job was stopped: each worker has finished where it was.
        let ended = clocks().map(|c| c.step).min().filter(|_| slowest.is_none());
        // Between epochs of the leased sampler no worker trains, so all workers resume from the same step in every
        // mode. A job that has left bsp has workers that are behind.
        let is_bsp = self.server_job.first_mode() == Mode::Bsp && in_force.mode == Mode::Bsp;
        let together = is_bsp || epochs.is_some();
        let resume = match ended {
            Some(ended) => ended.min(step),
            None if together => step,
            None => slowest.unwrap_or(step),
        };
        let clock = |c: &paraft_client::checkpoint_parts::ClockOf| Clock {
            shard: c.shard.0,
            worker: c.worker.0,
            step: c.step.0,
            finished: c.finished,
        };
        let clocks = sections.clocks.iter().map(clock).collect();
        let manifest = Manifest {
            epochs_done: epochs,
            early_stop: (&sections.stopping).into(),
            mode: in_force.mode.into(),
            rates: in_force.rates,
            ..self.manifest((step, resume), clocks, stamps)
        };
        let path = writer.finish(manifest, self.keep)?;
        Ok((path, bytes, sections.founding))
    }

    /// Likewise, for the ranks' own state.
    pub(super) fn write_own(
        &self,
        folder: &Folder,
        step: Step,
        state: &State,
    ) -> Result<(PathBuf, u64), Failed> {
        let slots = self.server_job.slot_names();
        let mut writer = Writer::create(folder, step.0, &self.tensors, &slots, &[])?;
        let mut bytes = 0;
        for (part, values) in std::iter::once(&state.weights).chain(&state.slots).enumerate() {
            for (i, piece) in values.chunks(PIECE).enumerate() {
                let mut le = Vec::with_capacity(size_of_val(piece));
                put_f32_le(piece, &mut le);
                bytes += le.len() as u64;
                writer.put(part, i * PIECE, &le.into())?;
            }
        }
        let stamp = Stamp { version: step.0, clock: step.0 as f64 };
        let stamps = vec![stamp; self.server_job.layout().buckets().len()];
        let clock = |shard| Clock { shard, worker: self.worker.0, step: step.0, finished: false };
        let clocks = (0..self.shards).map(clock).collect();
        let path = writer.finish(self.manifest((step, step), clocks, stamps), self.keep)?;
        Ok((path, bytes))
    }

    /// A manifest without the servers' part.
    fn manifest(&self, (step, resume): (Step, Step), clocks: Vec<Clock>, buckets: Vec<Stamp>) -> Manifest {
        let job = &self.server_job;
        Manifest {
            format: manifest::FORMAT,
            paraft: env!("CARGO_PKG_VERSION").into(),
            written: wall(),
            name: self.name.clone(),
            step: step.0,
            resume_step: resume.0,
            mode: job.mode,
            workers: job.workers,
            batch: self.batch,
            steps_per_epoch: self.steps.0,
            steps_left_out: self.steps.1,
            epochs_done: None,
            shards: self.shards,
            bucket_len: job.bucket_len,
            groups: job.groups.clone(),
            stages: job.stages.clone(),
            constraints: job.constraints.clone(),
            optimizer: job.optimizer.clone(),
            slots: job.slot_names().iter().map(ToString::to_string).collect(),
            tensors: self.tensors.clone(),
            tables: job.tables.clone(),
            buckets,
            clocks,
            early_stop: Default::default(),
            rates: Vec::new(),
            note: self.note.clone(),
            job: self.job.clone(),
            files: BTreeMap::new(), // the writer fills in files and size
            seal: String::new(),
        }
    }
}

/// The runtime has its own thread: this thread waits for the disk, and a server would close a connection whose
/// keepalive is not answered meanwhile.
pub(super) fn runtime() -> std::io::Result<Runtime> {
    runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()
}
