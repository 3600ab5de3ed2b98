//! Follows a run in progress on its own thread: writes event files for TensorBoard, and passes points
//! to a sink.
//!
//! Of the processes that append to a record, only the holder of the record's lock writes event files:
//! the launcher if there is one, else the first worker, and after its end the next. A new writer writes
//! all points from the first, and tells TensorBoard to forget the old ones. Errors here never end a
//! run.

use crate::tensorboard::EventFile;
use crate::{METRICS_FILE, Point, RecordError, Series, Tail};
use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// The folder of event files in a run's folder.
pub const TENSORBOARD_FOLDER: &str = "tensorboard";

/// The poll interval of the record; each poll flushes its points.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The receiver of new points.
pub type Sink = Box<dyn FnMut(&[Point]) + Send>;

/// A followed run, until drop, which still handles the rest of the record.
#[derive(Debug)]
pub struct Follow {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Follow {
    /// Follows the record in `dir`, which other processes may follow too. `say` receives the first
    /// error of the event files.
    pub fn beside(dir: &Path, say: fn(&RecordError)) -> Self {
        Self::start(FollowState::new(dir, None, say))
    }

    /// Follows it before all other processes, which leave it to this one. The record must exist. `sink`
    /// also receives all points.
    pub fn first(dir: &Path, sink: Sink, say: fn(&RecordError)) -> Self {
        let mut following = FollowState::new(dir, Some(sink), say);
        following.take_turn();
        // On a file system without locks no other process takes a turn.
        following.has_turn = true;
        Self::start(following)
    }

    fn start(mut following: FollowState) -> Self {
        let (stop, stopped) = channel();
        let work = move || {
            loop {
                let continues = stopped.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout);
                following.look(!continues);
                if !continues {
                    return;
                }
            }
        };
        // Without a thread the run continues without event files.
        let thread = std::thread::Builder::new().name("follow".into()).spawn(work).ok();
        Self { stop: Some(stop), thread }
    }
}

impl Drop for Follow {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct FollowState {
    record: PathBuf,
    folder: PathBuf,
    tail: Tail,
    series: Series,
    sink: Option<Sink>,
    say: fn(&RecordError),
    /// Locked while this process writes.
    lock: Option<File>,
    has_turn: bool,
    /// It has polled while another process held the lock.
    waited: bool,
    file: Option<EventFile>,
    failed: bool,
}

impl FollowState {
    fn new(dir: &Path, sink: Option<Sink>, say: fn(&RecordError)) -> Self {
        let record = dir.join(METRICS_FILE);
        Self {
            tail: Tail::new(&record),
            record,
            folder: dir.join(TENSORBOARD_FOLDER),
            series: Series::default(),
            sink,
            say,
            lock: None,
            has_turn: false,
            waited: false,
            file: None,
            failed: false,
        }
    }

    fn take_turn(&mut self) {
        // NFS locks only files that are open for writing.
        let Ok(file) = OpenOptions::new().append(true).open(&self.record) else { return };
        match file.try_lock() {
            Ok(()) => (self.lock, self.has_turn) = (Some(file), true),
            Err(TryLockError::WouldBlock | TryLockError::Error(_)) => {}
        }
    }

    fn look(&mut self, is_last: bool) {
        // A process that never held the lock must not rewrite at its end what another has written.
        if !(self.has_turn || is_last && self.waited) {
            self.take_turn();
        }
        if !self.has_turn {
            self.waited = true;
            return;
        }
        let mut points = Vec::new();
        match self.tail.poll() {
            Ok(events) => points.extend(events.iter().flat_map(|e| self.series.follow(e))),
            Err(e) => self.fail(&e),
        }
        if is_last {
            points.extend(self.series.end());
        }
        if points.is_empty() {
            return;
        }
        if !self.failed
            && let Err(e) = put(&mut self.file, &self.folder, self.series.first_step(), &points)
        {
            self.fail(&e);
        }
        if let Some(sink) = &mut self.sink {
            sink(&points);
        }
    }

    fn fail(&mut self, e: &RecordError) {
        if !self.failed {
            (self.say)(e);
        }
        self.failed = true;
    }
}

/// Writes points to a file, which is created with the first point.
fn put(
    file: &mut Option<EventFile>,
    folder: &Path,
    first_step: u64,
    points: &[Point],
) -> Result<(), RecordError> {
    let file = match file {
        Some(file) => file,
        None => file.insert(EventFile::restart(folder, first_step)?),
    };
    points.iter().try_for_each(|p| file.point(p))?;
    file.flush()
}

/// Writes the event file of an ended run from its record in `dir`; returns its path. `None`: there are
/// no points.
pub fn export(dir: impl AsRef<Path>) -> Result<Option<PathBuf>, RecordError> {
    let dir = dir.as_ref();
    let (first_step, points) = all(dir)?;
    let mut file = None;
    if !points.is_empty() {
        put(&mut file, &dir.join(TENSORBOARD_FOLDER), first_step, &points)?;
    }
    Ok(file.map(|f| f.path().to_path_buf()))
}

/// The points of the record in `dir`, equal to the followed ones.
pub fn points(dir: impl AsRef<Path>) -> Result<Vec<Point>, RecordError> {
    Ok(all(dir.as_ref())?.1)
}

fn all(dir: &Path) -> Result<(u64, Vec<Point>), RecordError> {
    let mut series = Series::default();
    let events = crate::read_events(dir.join(METRICS_FILE))?;
    let mut points: Vec<_> = events.iter().flat_map(|e| series.follow(e)).collect();
    points.extend(series.end());
    Ok((series.first_step(), points))
}
