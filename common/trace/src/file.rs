//! The trace file of a process, one JSON object per line.
//!
//! A separate thread writes. A caller that records a span puts it into a bounded queue and never waits:
//! a full queue drops and counts the span.

use crate::{
    Span,
    moment::{boot, epoch},
};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

/// The default number of steps to trace.
pub const DEFAULT_STEPS: u64 = 50;
/// The maximal number: a trace is for a person to look at.
pub const MAX_STEPS: u64 = 100_000;
/// Maximal spans of one process: about 70 MB of lines. A model of 1 G parameters has 20,000 spans per
/// step and worker.
pub const MAX_SPANS: u64 = 1 << 19;
/// Spans in the writer's queue, of 64 bytes each: those of a step of a large model.
const QUEUE: usize = 1 << 15;
/// The writer polls at this interval. A wake-up would cost the recording thread a system call. Older
/// spans are in the file, so a killed process leaves its trace.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long the end of a process waits for a hung disk.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// A line of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Line {
    /// The first line of each start of the process.
    Process(Process),
    Span(Span),
    /// The number of dropped spans of this incarnation so far.
    Missing(u64),
}

/// The process of the following spans.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Process {
    /// `server-0`, `worker-1`.
    pub name: String,
    pub pid: u32,
    /// The boot id of its host.
    pub boot: String,
    /// Unix time of the host's monotonic zero, in nanoseconds.
    pub epoch: i64,
}

/// An incarnation of a process, as read from its file. [`crate::merge()`] puts the times of all on one clock.
#[derive(Clone, Debug)]
pub(crate) struct Incarnation {
    pub process: Process,
    pub spans: Vec<Span>,
    pub missing: u64,
}

enum Message {
    Span(Span),
    Flush(SyncSender<()>),
}

/// A trace in progress.
#[derive(Debug)]
pub struct Tracing {
    queue: SyncSender<Message>,
    missing: Arc<AtomicU64>,
    /// The first pushed step; `NONE` before it.
    first: AtomicU64,
    steps: u64,
}

const NONE: u64 = u64::MAX;

impl Tracing {
    pub(crate) fn start(folder: &Path, process: &str, steps: u64) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let path = folder.join(format!("{process}.jsonl"));
        let file = File::options().create(true).append(true).open(&path)?;
        let (queue, messages) = sync_channel(QUEUE);
        let missing = Arc::new(AtomicU64::new(0));
        let process = Process { name: process.into(), pid: std::process::id(), boot: boot(), epoch: epoch() };
        let mut out = BufWriter::new(file);
        writeln!(out)?; // ends a line that an earlier incarnation may have written in part
        line(&mut out, &Line::Process(process))?;
        out.flush()?;
        let writer = Writer { out, path, messages, missing: missing.clone(), reported: 0, spans: 0 };
        thread::Builder::new().name("trace".into()).spawn(move || writer.run())?;
        Ok(Self { queue, missing, first: AtomicU64::new(NONE), steps: steps.clamp(1, MAX_STEPS) })
    }

    pub(crate) fn record(&self, span: Span) {
        if self.wants(&span) && self.queue.try_send(Message::Span(span)).is_err() {
            self.missing.fetch_add(1, Relaxed);
        }
    }

    /// The first step that is pushed, or that passes forward through a rank's stages, opens the window
    /// of steps.
    fn wants(&self, span: &Span) -> bool {
        let mut first = self.first.load(Relaxed);
        if first == NONE && !span.stage.is_of_weights() {
            first = match self.first.compare_exchange(NONE, span.step.0, Relaxed, Relaxed) {
                Ok(_) => span.step.0,
                Err(other) => other,
            };
        }
        first != NONE && span.step.0.checked_sub(first).is_some_and(|after| after < self.steps)
    }

    pub(crate) fn flush(&self) {
        let (done, wait) = sync_channel(1);
        let deadline = Instant::now() + FLUSH_TIMEOUT;
        let mut message = Message::Flush(done);
        while let Err(TrySendError::Full(again)) = self.queue.try_send(message) {
            if Instant::now() >= deadline {
                return;
            }
            message = again;
            thread::sleep(POLL_INTERVAL);
        }
        let _ = wait.recv_timeout(FLUSH_TIMEOUT);
    }
}

fn line(out: &mut impl Write, line: &Line) -> io::Result<()> {
    serde_json::to_writer(&mut *out, line)?;
    out.write_all(b"\n")
}

struct Writer {
    out: BufWriter<File>,
    path: PathBuf,
    messages: Receiver<Message>,
    missing: Arc<AtomicU64>,
    /// The number of dropped spans that the file reports.
    reported: u64,
    spans: u64,
}

impl Writer {
    fn run(mut self) {
        if let Err(e) = self.write() {
            // Training continues without the trace.
            tracing::warn!(path = %self.path.display(), error = %e, "the trace cannot be written; it ends here");
        }
    }

    fn write(&mut self) -> io::Result<()> {
        loop {
            match self.messages.try_recv() {
                Ok(Message::Span(span)) if self.spans < MAX_SPANS => {
                    self.spans += 1;
                    line(&mut self.out, &Line::Span(span))?;
                }
                Ok(Message::Span(_)) => _ = self.missing.fetch_add(1, Relaxed),
                Ok(Message::Flush(done)) => {
                    self.flush()?;
                    let _ = done.send(()); // the caller may have given up
                }
                Err(TryRecvError::Empty) => {
                    self.flush()?;
                    thread::sleep(POLL_INTERVAL);
                }
                Err(TryRecvError::Disconnected) => return self.flush(),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        let missing = self.missing.load(Relaxed);
        if missing > self.reported {
            self.reported = missing;
            line(&mut self.out, &Line::Missing(missing))?;
        }
        self.out.flush()
    }
}
