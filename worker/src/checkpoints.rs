//! Checkpoints during training: when one is due, and the thread that writes it.
//!
//! ```text
//!  training thread                          paraft-checkpoint thread
//!  pull of step k ────────▶ "you write it" ──Write(k)──▶ images of all shards ─▶ files ─▶ rename, latest
//!  evaluation of k complete ───────────Loss(k)───▶ best
//!  lines of the record ◀──────────events──────────
//! ```
//!
//! The training thread waits only before its last step, whose checkpoint is always made, and after a stop, for the
//! checkpoint of the state at which the job has ended. The thread writes one checkpoint at a time; one more waits on
//! the servers. Any further due checkpoint is skipped and the record says so. A third thread (`control_notifier`)
//! reports the checkpoints to the control group.
//!
//! If the job names no interval, checkpoints have a least distance in time
//! ([`crate::job::CheckpointConfig::least_distance`]). Then only the worker with the first share of the evaluations asks
//! for them, by its own clock: if others asked by theirs, servers would make images that no worker fetches. The last step's is due on
//! all workers.

mod author;
mod checkpoint_thread;
mod control_notifier;
mod save;
mod spacing;

use crate::{
    Job, WorkerError,
    recorder::{Recorder, wall},
    worker::Plan,
};
pub(crate) use author::{Author, InForce};
use checkpoint_thread::{CheckpointThread, Order};
use control_notifier::ControlNotifier;
use paraft_checkpoint::{Folder, State};
use paraft_client::Pulled;
use paraft_common::{Share, Step, WorkerId};
use paraft_record::{Event, event};
use paraft_trainer::CheckpointSteps;
use spacing::Spacing;
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

/// The folder of the checkpoints within a run's folder, unless the job names another one.
pub const CHECKPOINTS: &str = "checkpoints";

/// The folder of a job's checkpoints: `checkpoint.dir`, or a folder within the run's.
pub fn folder(job: &Job, run_dir: Option<&Path>) -> Option<PathBuf> {
    let own = job.checkpoint.as_ref().and_then(|c| c.dir.as_ref());
    own.map(|d| job.base_dir.join(d)).or_else(|| run_dir.map(|d| d.join(CHECKPOINTS)))
}

/// Creates the checkpoints' folder, and fails if the job's checkpoints cannot be written there.
pub fn try_out(job: &Job, run_dir: Option<&Path>) -> Result<(), WorkerError> {
    match job.checkpoints() {
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

/// The training thread's handle.
pub struct Checkpoints {
    due: CheckpointSteps,
    spacing: Spacing,
    /// The step of this worker's last checkpoint, or of the job's start. `None`: the job makes none by itself.
    last: Option<Step>,
    worker: WorkerId,
    orders: Option<mpsc::Sender<Order>>,
    events: mpsc::Receiver<event::Checkpoint>,
    /// Number of checkpoints that wait to be written.
    waiting: Arc<AtomicU64>,
    thread: Option<thread::JoinHandle<()>>,
    skipped: Vec<event::Checkpoint>,
    /// As of this worker's last pull.
    pub(crate) in_force: InForce,
}

impl Checkpoints {
    /// Starts the thread, if the job makes checkpoints. `begun`: the step at the job's start.
    pub(crate) fn start(
        job: &Job,
        run_dir: Option<&Path>,
        plan: &Plan,
        author: Author,
        begun: Step,
    ) -> Result<Option<Self>, WorkerError> {
        let Some(config) = job.checkpoints() else { return Ok(None) };
        let place = place(job, run_dir)?;
        let mut checkpoints =
            Self::begin(plan.checkpoints(config), config.least_distance(), Some(place), author)?;
        checkpoints.last = Some(begun);
        Ok(Some(checkpoints))
    }

    /// `folder`: where the checkpoints go, if anywhere.
    fn begin(
        due: CheckpointSteps,
        least: Duration,
        folder: Option<PathBuf>,
        author: Author,
    ) -> Result<Self, WorkerError> {
        let teller = ControlNotifier::start(author.servers.clone(), author.transport)
            .map_err(|e| WorkerError::Job(format!("no thread for checkpoints: {e}")))?;
        let worker = author.worker;
        let (orders, received) = mpsc::channel();
        let (tell, events) = mpsc::channel();
        let waiting = Arc::new(AtomicU64::new(0));
        let done = waiting.clone();
        let in_force = InForce { mode: author.server_job.first_mode(), rates: Vec::new() };
        let checkpoint_thread = CheckpointThread { author, folder: folder.map(Folder::new), teller };
        let work = move || checkpoint_thread.work(&received, &tell, &done);
        let thread = thread::Builder::new()
            .name("paraft-checkpoint".into())
            .spawn(work)
            .map_err(|e| WorkerError::Job(format!("no thread for checkpoints: {e}")))?;
        Ok(Self {
            due,
            spacing: Spacing::new(least),
            last: None,
            worker,
            orders: Some(orders),
            events,
            waiting,
            thread: Some(thread),
            skipped: Vec::new(),
            in_force,
        })
    }

    /// Leased sampler: reports that this many epochs are over at `step`.
    pub fn epochs(&self, step: Step, epochs: u64) {
        self.send(Order::Epochs(step, epochs));
    }

    /// Whether a checkpoint is due now that `step` is done.
    pub fn due(&self, step: Step) -> bool {
        self.due.at(step) && (self.due.is_last(step) || self.spacing.allows(Instant::now()))
    }

    /// The training continues. Returns whether this worker asks for no checkpoint for now. `share`: its share of the
    /// evaluations; `None`: a server says who asks.
    pub(crate) fn rests(&mut self, share: Option<Share>) -> bool {
        let now = Instant::now();
        self.spacing.trains(now);
        let is_others = share.is_some_and(|share| share.place > 0);
        self.spacing.limits() && (is_others || !self.spacing.allows(now))
    }

    /// Whether the job makes checkpoints, and this worker none at `step` or later.
    pub(crate) fn lacks(&self, step: Step) -> bool {
        self.last.is_some_and(|last| last < step)
    }

    /// This worker makes a checkpoint of `step`.
    fn begins(&mut self, step: Step) {
        self.spacing.begins(Instant::now());
        self.last = self.last.map(|last| last.max(step));
    }

    /// Handles the answer to a pull with a checkpoint. Returns at once.
    pub fn pulled(&mut self, step: Step, pulled: &Pulled) {
        if pulled.checkpoint {
            self.begins(step);
            self.waiting.fetch_add(1, SeqCst);
            self.send(Order::Write(step, self.in_force.clone()));
        } else if pulled.partial_checkpoint {
            self.send(Order::Release(step));
        } else if self.waiting.load(SeqCst) > 0 {
            self.skip(step);
        }
    }

    /// A checkpoint of the ranks' own state is due at `step`. `state` copies that state, if a checkpoint can be
    /// queued. Returns at once, except at the job's last step, whose checkpoint is always made.
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
        self.begins(step);
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

    /// At the job's last step, waits for queued checkpoints: no other checkpoint may be in progress while the last
    /// step is cut.
    pub fn clear_the_way(&self, step: Step) {
        if self.due.is_last(step) {
            self.wait();
        }
    }

    /// Waits until all queued checkpoints are written.
    pub fn wait(&self) {
        let (tell, told) = mpsc::channel();
        self.send(Order::Tell(tell));
        let _ = told.recv();
    }

    /// Reports the held-out loss at `step`.
    pub fn loss(&self, step: Step, loss: f64) {
        self.send(Order::Loss(step, loss));
    }

    fn send(&self, order: Order) {
        if let Some(orders) = &self.orders {
            let _ = orders.send(order); // the thread outlives this handle
        }
    }

    /// The events since the last call.
    pub fn events(&mut self) -> Vec<event::Checkpoint> {
        let mut events = std::mem::take(&mut self.skipped);
        events.extend(self.events.try_iter());
        events
    }

    /// Waits until all queued checkpoints are written; returns the events.
    pub fn finish(&mut self) -> Vec<event::Checkpoint> {
        self.orders = None;
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
        self.events()
    }
}

/// Writes the events into the record. `wait`: first waits for all of them.
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
