//! The thread that writes a log, and its queue.

use super::{Done, LogStats, Record, segments::Segments};
use crate::DiskLock;
use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use std::{
    collections::VecDeque,
    io, mem,
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
};

/// One sync covers at most so many bytes (or one append): a bound on how long the first of them waits.
const MAX_BATCH_BYTES: u64 = 32 << 20;

/// The outcome that an append is owed. It is given even if a panic takes the writer away first.
pub(super) struct Owed(Option<Done>);

impl Owed {
    pub fn new(done: Done) -> Owed {
        Owed(Some(done))
    }

    fn give(mut self, outcome: io::Result<()>) {
        if let Some(done) = self.0.take() {
            done(outcome);
        }
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            done(Err(gone()));
        }
    }
}

/// What is queued. Dropped undone, it tells whoever waits that the log is gone.
pub(super) enum Job {
    Append { records: Vec<Record>, bytes: u64, done: Owed },
    Truncate { last: Option<u64>, reply: mpsc::SyncSender<io::Result<()>> },
    Purge { upto: u64, tag: Bytes, reply: mpsc::SyncSender<io::Result<()>> },
}

struct Append {
    records: Vec<Record>,
    done: Owed,
}

enum Work {
    Batch(Vec<Append>),
    Truncate { last: Option<u64>, reply: mpsc::SyncSender<io::Result<()>> },
    Purge { upto: u64, tag: Bytes, reply: mpsc::SyncSender<io::Result<()>> },
    Close,
}

/// What handles and writer share.
#[derive(Default)]
pub(super) struct Shared {
    queue: Mutex<Queue>,
    ready: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    stats: LogStats,
    /// No handle is left.
    closed: bool,
    /// No writer is left.
    gone: bool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Shared({:?})", self.stats())
    }
}

/// Why a log whose thread ended does nothing more. Only a panic ends it early, such as one in a `done`.
pub(super) fn gone() -> io::Error {
    io::Error::other("the log's writer has ended; open the log anew")
}

impl Shared {
    pub fn push(&self, job: Job) {
        let mut queue = self.queue.lock();
        if queue.gone {
            drop(queue); // a `done` may look at the log
            return drop(job);
        }
        if let Job::Append { bytes, .. } = &job {
            queue.stats.queued_bytes += bytes;
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.ready.notify_one();
    }

    pub fn close(&self) {
        self.queue.lock().closed = true;
        self.ready.notify_one();
    }

    pub fn stats(&self) -> LogStats {
        self.queue.lock().stats
    }

    fn take(&self) -> Work {
        let mut queue = self.queue.lock();
        while queue.jobs.is_empty() && !queue.closed {
            self.ready.wait(&mut queue);
        }
        let (mut batch, mut total) = (Vec::new(), 0);
        loop {
            match queue.jobs.pop_front() {
                Some(Job::Append { records, bytes, done })
                    if batch.is_empty() || total + bytes <= MAX_BATCH_BYTES =>
                {
                    total += bytes;
                    queue.stats.queued_bytes -= bytes;
                    batch.push(Append { records, done });
                }
                Some(Job::Truncate { last, reply }) if batch.is_empty() => {
                    return Work::Truncate { last, reply };
                }
                Some(Job::Purge { upto, tag, reply }) if batch.is_empty() => {
                    return Work::Purge { upto, tag, reply };
                }
                Some(later) => {
                    queue.jobs.push_front(later);
                    return Work::Batch(batch);
                }
                None if batch.is_empty() => return Work::Close,
                None => return Work::Batch(batch),
            }
        }
    }
}

pub(super) fn spawn(shared: Arc<Shared>, segments: Segments, lock: DiskLock) -> io::Result<JoinHandle<()>> {
    let writer = Writer { shared, segments, failed: None };
    thread::Builder::new().name("paraft-log".into()).spawn(move || {
        writer.run();
        // Last of all: then another may open the folder.
        drop(lock);
    })
}

struct Writer {
    shared: Arc<Shared>,
    segments: Segments,
    /// What the disk said first. From then on nobody knows what is on it.
    failed: Option<(io::ErrorKind, String)>,
}

impl Writer {
    fn run(mut self) {
        loop {
            match self.shared.take() {
                Work::Batch(batch) => self.append(batch),
                Work::Truncate { last, reply } => {
                    let outcome = self.unless_failed(|s| s.truncate_after(last));
                    let _ = reply.send(outcome); // nobody waits any more: nothing to tell
                }
                Work::Purge { upto, tag, reply } => {
                    let outcome = self.unless_failed(|s| s.purge(upto, &tag));
                    let _ = reply.send(outcome);
                }
                Work::Close => {
                    // Nobody is left to tell; all that may be missing is the mark of an orderly end.
                    let _ = self.unless_failed(Segments::close);
                    return;
                }
            }
        }
    }

    fn unless_failed<T>(&mut self, act: impl FnOnce(&mut Segments) -> io::Result<T>) -> io::Result<T> {
        if let Some((kind, first)) = &self.failed {
            let what = format!("the log in {} stopped: {first}", self.segments.dir().display());
            return Err(io::Error::new(*kind, what));
        }
        act(&mut self.segments).inspect_err(|e| self.failed = Some((e.kind(), e.to_string())))
    }

    fn append(&mut self, batch: Vec<Append>) {
        // Each append is right or wrong by itself; the right ones share the write.
        let (mut next, mut records, mut outcomes) = (self.segments.next(), Vec::new(), Vec::new());
        for Append { records: wanted, done } in batch {
            let checked = super::segments::check(&mut next, &wanted);
            if checked.is_ok() {
                records.extend(wanted);
            }
            outcomes.push((done, checked));
        }
        let written = self.unless_failed(|s| s.append(&records));
        if written.is_ok() && !records.is_empty() {
            let (segments, recycled) = self.segments.begun();
            let stats = &mut self.shared.queue.lock().stats;
            stats.batches += 1;
            stats.records += records.len() as u64;
            stats.bytes += records.iter().map(Record::bytes).sum::<u64>();
            (stats.segments, stats.recycled) = (segments, recycled);
        }
        drop(records);
        for (done, checked) in outcomes {
            done.give(checked.and_then(|()| match &written {
                Ok(()) => Ok(()),
                Err(e) => Err(io::Error::new(e.kind(), e.to_string())),
            }));
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let jobs = {
            let mut queue = self.shared.queue.lock();
            queue.gone = true;
            queue.stats.queued_bytes = 0;
            mem::take(&mut queue.jobs)
        };
        drop(jobs);
    }
}
