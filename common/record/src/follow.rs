//! A run that is followed while it goes on, by a thread of its own: event files for TensorBoard, and points for whoever wants them.
//!
//! Of the processes that append to a record one writes the event files: the one that holds the lock of the record, so the launcher where
//! there is one, else the first worker; where that ends, the next. Who begins writes all points from the first, and tells TensorBoard to
//! forget those that were there. Nothing that goes wrong here ends a run.

use crate::tensorboard::EventFile;
use crate::{METRICS_FILE, Point, RecordError, Series, Tail};
use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// The folder of event files in a run's folder.
pub const TENSORBOARD_FOLDER: &str = "tensorboard";

/// New lines are looked for so often, and what they give is flushed.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// What new points are given to.
pub type Sink = Box<dyn FnMut(&[Point]) + Send>;

/// A run's folder, followed until this is dropped. What is in the record by then is followed to its end.
#[derive(Debug)]
pub struct Follow {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Follow {
    /// Follows the record in `dir`, which others may follow too. `say` is told once what went wrong with the event files.
    pub fn beside(dir: &Path, say: fn(&RecordError)) -> Self {
        Self::start(FollowState::new(dir, None, say))
    }

    /// Follows it before all others, who leave it to this one. The record must be there. All points go to `sink` too.
    pub fn first(dir: &Path, sink: Sink, say: fn(&RecordError)) -> Self {
        let mut following = FollowState::new(dir, Some(sink), say);
        following.take_turn();
        // On a file system without locks nobody else takes a turn.
        following.has_turn = true;
        Self::start(following)
    }

    fn start(mut following: FollowState) -> Self {
        let (stop, stopped) = channel();
        let work = move || {
            loop {
                let goes_on = stopped.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout);
                following.look(!goes_on);
                if !goes_on {
                    return;
                }
            }
        };
        // Without a thread the run goes on without event files.
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
    /// Locked while it is this one's turn.
    lock: Option<File>,
    has_turn: bool,
    /// It has looked, and another had the turn.
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
        // NFS locks only what is open for writing.
        let Ok(file) = OpenOptions::new().append(true).open(&self.record) else { return };
        match file.try_lock() {
            Ok(()) => (self.lock, self.has_turn) = (Some(file), true),
            Err(TryLockError::WouldBlock | TryLockError::Error(_)) => {}
        }
    }

    fn look(&mut self, is_last: bool) {
        // At its end one that has waited so far would write all anew what another has written.
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

/// Writes points, into a file that is made with the first of them.
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

/// Writes the event file of a run that has ended, from its record in `dir`; where it is. `None`: there is no point to write.
pub fn export(dir: impl AsRef<Path>) -> Result<Option<PathBuf>, RecordError> {
    let dir = dir.as_ref();
    let (first_step, points) = all(dir)?;
    let mut file = None;
    if !points.is_empty() {
        put(&mut file, &dir.join(TENSORBOARD_FOLDER), first_step, &points)?;
    }
    Ok(file.map(|f| f.path().to_path_buf()))
}

/// The points of the record in `dir`, which are those that were followed.
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
