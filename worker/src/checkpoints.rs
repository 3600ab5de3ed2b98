//! Checkpoints of a job that is training: when one is due, and the thread that writes it.
//!
//! ```text
//!  training thread                          paraft-checkpoint thread
//!  pull_for_checkpoint(k) ─▶ "you write it" ──Write(k)──▶ images of all shards ─▶ files ─▶ rename, latest
//!  evaluation of k complete ───────────Loss(k)───▶ best
//!  lines of the record ◀──────────events──────────
//! ```
//!
//! The training thread waits for none of it but before its last step, whose checkpoint is always made. One is
//! written at a time and another waits, kept by the servers; what is due beyond is not made, and the record says so.
//! Which checkpoints there are is told to the control group by a third thread (`tell`).

mod save;
mod tell;

use crate::{
    Job, WorkerError,
    job::CheckpointConfig,
    recorder::{Recorder, wall},
    worker::Plan,
};
use paraft_checkpoint::{
    CheckpointError, Folder, Manifest, State, Writer,
    manifest::{self, Clock, Stamp},
};
use paraft_client::{
    ClientError, ClientOptions, Pulled, Transport, checkpoint_parts::CheckpointParts,
    checkpoints::FolderContents,
};
use paraft_common::{
    Mode, Step, TensorSpec, WorkerId,
    checkpoint::{KnownCheckpoint, MAX_KNOWN_CHECKPOINTS},
    codec::put_f32_le,
    config::ServerJob,
};
use paraft_record::{Event, event};
use paraft_trainer::Due;
use save::Save;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};
use tell::Teller;
use tokio::runtime::{self, Runtime};

/// Values that are written at a time.
const PIECE: usize = 1 << 18;

/// Where the checkpoints of a job go: `checkpoint.dir`, else a folder in the run's.
pub fn folder(job: &Job, run_dir: Option<&Path>) -> Option<PathBuf> {
    let own = job.checkpoint.as_ref().and_then(|c| c.dir.as_ref());
    own.map(|d| job.base_dir.join(d)).or_else(|| run_dir.map(|d| d.join("checkpoints")))
}

/// Whether the job's checkpoints, if it makes any, can be written. Makes their folder.
pub fn try_out(job: &Job, run_dir: Option<&Path>) -> Result<(), WorkerError> {
    match &job.checkpoint {
        None => Ok(()),
        Some(_) => Ok(Folder::new(place(job, run_dir)?).try_out()?),
    }
}

pub(crate) fn place(job: &Job, run_dir: Option<&Path>) -> Result<PathBuf, WorkerError> {
    folder(job, run_dir).ok_or_else(|| {
        WorkerError::Job(
            "there is no place for checkpoints: give --run-dir (run_dir in a script) or checkpoint.dir"
                .into(),
        )
    })
}

/// The steps at which a job's checkpoints are due.
pub fn due(config: &CheckpointConfig, plan: &Plan) -> Due {
    Due::new(config.every_steps, config.epochs(), &plan.steps, plan.leased)
}

enum Order {
    /// So many epochs are done at this step.
    Epochs(Step, u64),
    /// Say when everything before is done.
    Tell(mpsc::Sender<()>),
    /// With the rates of its step.
    Write(Step, Vec<f64>),
    /// The state of now, which is the worker's after this step.
    Save(Step, Save),
    /// This state, of a job whose ranks keep it themselves; and what names the job.
    Own(Step, Box<State>, u64),
    /// Only some shards keep an image of this step.
    Release(Step),
    Loss(Step, f64),
}

/// The training thread's side.
pub struct Checkpoints {
    due: Due,
    worker: WorkerId,
    orders: Option<mpsc::Sender<Order>>,
    events: mpsc::Receiver<event::Checkpoint>,
    /// To be written.
    waiting: Arc<AtomicU64>,
    thread: Option<thread::JoinHandle<()>>,
    skipped: Vec<event::Checkpoint>,
    /// Those that the loop has said last, of each group; none: the job's schedule.
    pub rates: Vec<f64>,
}

impl Checkpoints {
    /// Starts the thread, if the job wants checkpoints.
    pub(crate) fn start(
        job: &Job,
        run_dir: Option<&Path>,
        plan: &Plan,
        author: Author,
    ) -> Result<Option<Self>, WorkerError> {
        let Some(config) = &job.checkpoint else { return Ok(None) };
        Self::begin(due(config, plan), Some(place(job, run_dir)?), author).map(Some)
    }

    /// `folder`: where they go, if anywhere.
    fn begin(due: Due, folder: Option<PathBuf>, author: Author) -> Result<Self, WorkerError> {
        let teller = Teller::start(author.servers.clone(), author.transport)
            .map_err(|e| WorkerError::Job(format!("no thread for checkpoints: {e}")))?;
        let worker = author.worker;
        let (orders, received) = mpsc::channel();
        let (tell, events) = mpsc::channel();
        let waiting = Arc::new(AtomicU64::new(0));
        let done = waiting.clone();
        let desk = Desk { author, folder: folder.map(Folder::new), teller };
        let work = move || desk.work(&received, &tell, &done);
        let thread = thread::Builder::new()
            .name("paraft-checkpoint".into())
            .spawn(work)
            .map_err(|e| WorkerError::Job(format!("no thread for checkpoints: {e}")))?;
        Ok(Self {
            due,
            worker,
            orders: Some(orders),
            events,
            waiting,
            thread: Some(thread),
            skipped: Vec::new(),
            rates: Vec::new(),
        })
    }

    /// Leased sampler: so many epochs are over at `step`.
    pub fn epochs(&self, step: Step, epochs: u64) {
        self.send(Order::Epochs(step, epochs));
    }

    /// Whether a checkpoint is due once `step` is done.
    pub fn due(&self, step: Step) -> bool {
        self.due.at(step)
    }

    /// What a pull at which one was due says. Returns at once.
    pub fn pulled(&mut self, step: Step, pulled: &Pulled) {
        if pulled.checkpoint {
            self.waiting.fetch_add(1, SeqCst);
            self.send(Order::Write(step, self.rates.clone()));
        } else if pulled.partial_checkpoint {
            self.send(Order::Release(step));
        } else if self.waiting.load(SeqCst) > 0 {
            self.skip(step);
        }
    }

    /// A checkpoint is due at `step`, of what the ranks keep themselves: `state` copies it, if there is room. Returns at once, but
    /// at the job's last step, whose checkpoint is always made.
    pub fn own(
        &mut self,
        step: Step,
        founding: u64,
        state: impl FnOnce() -> Result<State, WorkerError>,
    ) -> Result<(), WorkerError> {
        if self.due.is_last(step) {
            self.wait();
        }
        if self.waiting.load(SeqCst) > 0 {
            self.skip(step);
            return Ok(());
        }
        self.waiting.fetch_add(1, SeqCst);
        self.send(Order::Own(step, Box::new(state()?), founding));
        Ok(())
    }

    fn skip(&mut self, step: Step) {
        let why = "the ones before are still being written; make them rarer";
        self.skipped.push(event::Checkpoint {
            wall: wall(),
            worker: self.worker,
            step,
            error: Some(why.into()),
            ..Default::default()
        });
    }

    /// Waits for what is being written when `step` is the job's last: while its step is cut, no other checkpoint
    /// may be on its way.
    pub fn clear_the_way(&self, step: Step) {
        if self.due.is_last(step) {
            self.wait();
        }
    }

    /// Waits for what is being written.
    pub fn wait(&self) {
        let (tell, told) = mpsc::channel();
        self.send(Order::Tell(tell));
        let _ = told.recv();
    }

    /// The held-out loss at `step` is known.
    pub fn loss(&self, step: Step, loss: f64) {
        self.send(Order::Loss(step, loss));
    }

    fn send(&self, order: Order) {
        if let Some(orders) = &self.orders {
            let _ = orders.send(order); // its thread ends only with us
        }
    }

    /// What has happened since the last call.
    pub fn events(&mut self) -> Vec<event::Checkpoint> {
        let mut events = std::mem::take(&mut self.skipped);
        events.extend(self.events.try_iter());
        events
    }

    /// Waits for what is being written; gives what has happened.
    pub fn finish(&mut self) -> Vec<event::Checkpoint> {
        self.orders = None;
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
        self.events()
    }
}

/// Writes what has been done into the record; `wait`s for all of it at the end.
pub(crate) fn note(
    checkpoints: &mut Option<Checkpoints>,
    recorder: &mut Recorder,
    wait: bool,
) -> Result<(), WorkerError> {
    let Some(c) = checkpoints else { return Ok(()) };
    for e in if wait { c.finish() } else { c.events() } {
        recorder.write(&Event::Checkpoint(e))?;
    }
    Ok(())
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        self.finish();
    }
}

/// What a checkpoint of a job says of it, and where its state is.
#[derive(Clone)]
pub(crate) struct Author {
    keep: usize,
    name: String,
    job: String,
    batch: u64,
    steps_per_epoch: u64,
    tensors: Vec<TensorSpec>,
    servers: Vec<String>,
    shards: u32,
    transport: Transport,
    server_job: ServerJob,
    worker: WorkerId,
    timeout: Duration,
    note: String,
    /// When this worker came, by its clock.
    came: f64,
}

/// What the thread has.
struct Desk {
    author: Author,
    folder: Option<Folder>,
    teller: Teller,
}

/// What this worker has written.
#[derive(Default)]
struct Written {
    /// What names the job to the control group.
    job: u64,
    /// By step; the held-out loss where it is known.
    losses: BTreeMap<u64, Option<f64>>,
}

/// A checkpoint's folder, the bytes of its bulk, and what names the job to the control group.
type Made = (PathBuf, u64, u64);

/// Why a checkpoint was not made.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Fetch(#[from] ClientError),
    #[error(transparent)]
    Write(#[from] CheckpointError),
    #[error("no I/O runtime: {0}")]
    Runtime(std::io::Error),
}

impl Desk {
    fn work(
        self,
        orders: &mpsc::Receiver<Order>,
        tell: &mpsc::Sender<event::Checkpoint>,
        waiting: &AtomicU64,
    ) {
        let mut written = Written::default();
        let mut epochs = None;
        while let Ok(order) = orders.recv() {
            match order {
                Order::Tell(who) => {
                    let _ = who.send(());
                }
                Order::Epochs(step, done) => epochs = Some((step, done)),
                Order::Write(..) | Order::Own(..) | Order::Save(..) => {
                    let began = Instant::now();
                    let mut asker = None;
                    let (step, result) = match (order, &self.folder) {
                        (Order::Own(step, state, founding), Some(folder)) => {
                            let written = self.author.write_own(folder, step, &state);
                            (step, written.map(|(path, bytes)| (path, bytes, founding)))
                        }
                        (Order::Write(step, rates), Some(folder)) => {
                            let done = epochs.filter(|(at, _)| *at == step).map(|(_, done)| done);
                            (step, self.author.write(folder, step, done, rates))
                        }
                        (Order::Save(step, Save { folder: None, rates, asker: who }), Some(folder)) => {
                            asker = Some(who);
                            (step, self.author.save(folder, step, &rates))
                        }
                        (Order::Save(step, Save { folder: Some(folder), rates, asker }), _) => {
                            let saved = self.author.save(&folder, step, &rates);
                            let _ = asker.send(saved.map(|(path, ..)| path).map_err(Into::into));
                            waiting.fetch_sub(1, SeqCst);
                            continue;
                        }
                        _ => continue,
                    };
                    let mut e = event::Checkpoint {
                        wall: wall(),
                        worker: self.author.worker,
                        step,
                        seconds: began.elapsed().as_secs_f64(),
                        ..Default::default()
                    };
                    match result {
                        Ok((path, bytes, founding)) => {
                            written.job = founding;
                            written.losses.insert(step.0, None);
                            self.tell(&written);
                            tracing::info!(step = step.0, path = %path.display(), seconds = e.seconds, "checkpoint");
                            (e.path, e.bytes) = (path.display().to_string(), bytes);
                            if let Some(asker) = asker {
                                let _ = asker.send(Ok(path));
                            }
                        }
                        Err(why) => {
                            tracing::warn!(step = step.0, %why, "no checkpoint");
                            e.error = Some(why.to_string());
                            if let Some(asker) = asker {
                                let _ = asker.send(Err(why.into()));
                            }
                        }
                    }
                    let _ = tell.send(e);
                    waiting.fetch_sub(1, SeqCst);
                }
                Order::Release(step) => {
                    tracing::info!(step = step.0, "no checkpoint: not every shard has an image");
                    self.author.release(step);
                }
                Order::Loss(step, loss) if written.losses.contains_key(&step.0) => {
                    let Some(folder) = &self.folder else { continue };
                    if let Err(why) = folder.note_loss(step.0, loss) {
                        tracing::warn!(step = step.0, %why, "`best` was not updated");
                    }
                    folder.prune(self.author.keep); // the one that was the best may have stayed only for that
                    written.losses.insert(step.0, Some(loss).filter(|l| l.is_finite()));
                    self.tell(&written);
                }
                Order::Loss(..) => {}
            }
        }
    }

    /// Tells the control group what the folder holds now. Returns at once.
    fn tell(&self, written: &Written) {
        let absolute = |p: &Path| std::path::absolute(p).unwrap_or_else(|_| p.to_path_buf());
        let Some(own) = &self.folder else { return };
        let best = own.best();
        let is_best = |path: &Path| best.as_ref().filter(|(p, _)| p.file_name() == path.file_name());
        let held = |(path, manifest): (PathBuf, Option<Manifest>)| {
            let m = manifest.filter(|m| m.name == self.author.name)?;
            let versions = || m.buckets.iter().map(|b| b.version);
            let ours = written.losses.get(&m.step);
            Some(KnownCheckpoint {
                path: absolute(&path).display().to_string(),
                step: m.step,
                versions: (versions().min().unwrap_or(0), versions().max().unwrap_or(0)),
                bytes: m.files.values().map(|f| f.bytes).sum(),
                loss: ours.copied().flatten().or(is_best(&path).map(|(_, loss)| *loss)),
                written_ms: (m.written * 1e3) as u64,
                worker: ours.map(|_| self.author.worker),
                best: is_best(&path).is_some(),
            })
        };
        let all: Vec<KnownCheckpoint> = own.manifests().into_iter().filter_map(held).collect();
        let (mut held, older) = all.split_at(all.len().min(MAX_KNOWN_CHECKPOINTS));
        let best = older.iter().find(|h| h.best);
        if best.is_some() {
            held = &held[..MAX_KNOWN_CHECKPOINTS - 1];
        }
        let held = held.iter().chain(best).cloned().collect();
        let folder = absolute(own.path()).display().to_string();
        self.teller.tell(FolderContents { job: written.job, folder, held });
    }
}

impl Author {
    /// Of a worker of this job; `note`: what its loop says of itself.
    pub(crate) fn new(
        job: &Job,
        plan: &Plan,
        tensors: &[TensorSpec],
        client: &ClientOptions,
        note: String,
    ) -> Self {
        Self {
            keep: job.checkpoint.clone().unwrap_or_default().num_to_keep,
            name: job.name.clone(),
            job: job.to_toml(),
            batch: job.train.batch as u64 * u64::from(job.train.group_size),
            steps_per_epoch: plan.per_epoch,
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

    fn release(&self, step: Step) {
        let release =
            CheckpointParts::release(&self.servers, self.shards, self.transport, &self.server_job, step);
        if let Ok(runtime) = runtime() {
            runtime.block_on(release);
        }
    }

    /// Writes what the shards keep of `step`.
    fn write(
        &self,
        folder: &Folder,
        step: Step,
        epochs: Option<u64>,
        rates: Vec<f64>,
    ) -> Result<Made, Failed> {
        let runtime = runtime().map_err(Failed::Runtime)?;
        let sections =
            CheckpointParts::open(&self.servers, self.shards, self.transport, &self.server_job, step);
        let sections = runtime.block_on(sections)?;
        // Others may save a checkpoint in the same folder.
        let _alone = folder.lock(self.timeout)?;
        self.write_parts(folder, &runtime, sections, step, epochs, rates)
    }

    fn write_parts(
        &self,
        folder: &Folder,
        runtime: &Runtime,
        mut sections: CheckpointParts,
        step: Step,
        epochs: Option<u64>,
        rates: Vec<f64>,
    ) -> Result<Made, Failed> {
        let slots = self.server_job.slot_names();
        let mut writer = Writer::create(folder, step.0, &self.tensors, &slots)?;
        let mut stamps = vec![Stamp::default(); self.server_job.layout().buckets().len()];
        let mut bytes = 0;
        while let Some(p) = runtime.block_on(sections.next())? {
            stamps[p.bucket.0 as usize] = Stamp { version: p.version, clock: p.clock };
            bytes += p.payload.len() as u64;
            writer.put(p.part, p.offset, &p.payload)?;
        }
        let slowest = sections.clocks.iter().filter(|c| !c.finished).map(|c| c.step).min();
        // Between two epochs of the leased sampler nobody trains: there all go on from the same step, in every mode.
        let together = self.server_job.first_mode() == Mode::Bsp || epochs.is_some();
        let resume = if together { step } else { slowest.unwrap_or(step) };
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
            rates,
            ..self.manifest((step, resume), clocks, stamps)
        };
        let path = writer.finish(manifest, self.keep)?;
        Ok((path, bytes, sections.founding))
    }

    /// Likewise, of what the ranks keep themselves.
    fn write_own(&self, folder: &Folder, step: Step, state: &State) -> Result<(PathBuf, u64), Failed> {
        let slots = self.server_job.slot_names();
        let mut writer = Writer::create(folder, step.0, &self.tensors, &slots)?;
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

    /// Without what only servers know.
    fn manifest(&self, (step, resume): (Step, Step), clocks: Vec<Clock>, buckets: Vec<Stamp>) -> Manifest {
        let job = &self.server_job;
        Manifest {
            format: manifest::format(job.groups.len()),
            paraft: env!("CARGO_PKG_VERSION").into(),
            written: wall(),
            name: self.name.clone(),
            step: step.0,
            resume_step: resume.0,
            mode: job.mode,
            workers: job.workers,
            batch: self.batch,
            steps_per_epoch: self.steps_per_epoch,
            epochs_done: None,
            shards: self.shards,
            bucket_len: job.bucket_len,
            groups: job.groups.clone(),
            optimizer: job.optimizer.clone(),
            slots: job.slot_names().iter().map(ToString::to_string).collect(),
            tensors: self.tensors.clone(),
            buckets,
            clocks,
            early_stop: Default::default(),
            rates: Vec::new(),
            note: self.note.clone(),
            job: self.job.clone(),
            files: BTreeMap::new(), // these two by the writer
            seal: String::new(),
        }
    }
}

/// The connections live on a thread of the runtime's own: the one that writes waits for the disk, and a peer whose
/// keepalive is not answered meanwhile would hang up.
fn runtime() -> std::io::Result<Runtime> {
    runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()
}
