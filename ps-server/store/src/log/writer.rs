//! The thread that writes a log, and its queue.

use super::{
    groups::{Groups, gone, stopped},
    record::{Done, LogStats, Record},
    segments::Segments,
};
use crate::DiskLock;
use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use std::{
    collections::VecDeque,
    io, mem,
    path::PathBuf,
    sync::Arc,
    thread::{self, JoinHandle},
};

/// Maximum bytes per sync (or one append): a bound on the latency of the first of them.
const MAX_BATCH_BYTES: u64 = 32 << 20;

/// The callback of a queued request. It is called even if a panic ends the writer first.
pub(super) struct PendingCallback(Option<Done>);

impl PendingCallback {
    pub fn new(done: Done) -> PendingCallback {
        PendingCallback(Some(done))
    }

    fn give(mut self, outcome: io::Result<()>) {
        if let Some(done) = self.0.take() {
            done(outcome);
        }
    }
}

impl Drop for PendingCallback {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            done(Err(gone()));
        }
    }
}

/// A queued request of a group. Dropped unfinished, it reports to its caller that the log is gone.
pub(super) struct Job {
    pub key: u64,
    pub what: Request,
    pub done: PendingCallback,
}

pub(super) enum Request {
    Append {
        records: Vec<Record>,
        bytes: u64,
    },
    Truncate {
        last: Option<u64>,
    },
    Purge {
        upto: u64,
        tag: Bytes,
    },
    /// Remove the group.
    Remove,
    /// The last handle of the group's log was dropped.
    Close,
}

impl Request {
    fn bytes(&self) -> u64 {
        match self {
            Request::Append { bytes, .. } => *bytes,
            _ => 0,
        }
    }

    /// Whether it is durable on completion even in a log that does not sync its records.
    fn is_always_synced(&self) -> bool {
        matches!(self, Request::Truncate { .. } | Request::Purge { .. } | Request::Remove)
    }
}

enum Work {
    Batch(Vec<Job>),
    Close,
}

/// State shared by handles and writer.
pub(super) struct Shared {
    dir: PathBuf,
    queue: Mutex<Queue>,
    ready: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    stats: LogStats,
    /// No handle is left, or nothing more may be written.
    closed: bool,
    /// The writer has ended.
    gone: bool,
    /// The first disk error. From then on the content of the disk is unknown.
    failed: Option<(io::ErrorKind, String)>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Shared({:?})", self.stats())
    }
}

impl Shared {
    pub fn new(dir: PathBuf) -> Shared {
        Shared { dir, queue: Mutex::default(), ready: Condvar::new() }
    }

    pub fn push(&self, job: Job) {
        let mut queue = self.queue.lock();
        if let Some(failed) = &queue.failed {
            let why = stopped(&self.dir, failed);
            drop(queue); // a `done` may use the log
            return job.done.give(Err(why));
        }
        if queue.gone {
            drop(queue);
            return drop(job);
        }
        queue.stats.queued_bytes += job.what.bytes();
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

    /// Whether nothing more is written.
    pub fn has_ended(&self) -> bool {
        let queue = self.queue.lock();
        queue.gone || queue.closed || queue.failed.is_some()
    }

    /// The next batch; empty if there is none and the writer `has_more`.
    fn take(&self, has_more: bool) -> Work {
        let mut queue = self.queue.lock();
        while queue.jobs.is_empty() && !queue.closed && !has_more {
            self.ready.wait(&mut queue);
        }
        if queue.jobs.is_empty() && queue.closed {
            return Work::Close;
        }
        let (mut batch, mut total) = (Vec::new(), 0);
        while let Some(job) = queue.jobs.pop_front() {
            let bytes = job.what.bytes();
            if !batch.is_empty() && total + bytes > MAX_BATCH_BYTES {
                queue.jobs.push_front(job);
                break;
            }
            total += bytes;
            queue.stats.queued_bytes -= bytes;
            batch.push(job);
        }
        Work::Batch(batch)
    }
}

pub(super) fn spawn(shared: Arc<Shared>, segments: Segments, lock: DiskLock) -> io::Result<JoinHandle<()>> {
    let groups = segments.groups.clone();
    let writer = Writer { shared, segments, groups };
    thread::Builder::new().name("paraft-log".into()).spawn(move || {
        writer.run();
        // Released last: then another process may open the folder.
        drop(lock);
    })
}

struct Writer {
    shared: Arc<Shared>,
    segments: Segments,
    groups: Arc<Groups>,
}

impl Writer {
    fn run(mut self) {
        let mut has_more = false;
        loop {
            let done = match self.shared.take(has_more) {
                Work::Batch(batch) => self.batch(batch),
                Work::Close => {
                    // No caller is left; at most the mark of a proper close is missing.
                    let _ = self.segments.close();
                    return;
                }
            };
            // After the first error the content of the disk is unknown, and nothing more is written.
            if let Err(e) = done.and_then(|()| self.segments.tidy()) {
                return self.fail(&e);
            }
            self.note_segments();
            has_more = self.segments.is_crowded();
        }
    }

    fn batch(&mut self, batch: Vec<Job>) -> io::Result<()> {
        let (mut outcomes, mut must_sync) = (Vec::with_capacity(batch.len()), self.segments.options.sync);
        let (mut records, mut bytes, mut failed) = (0, 0, None);
        for Job { key, what, done } in batch {
            must_sync |= what.is_always_synced();
            let (new, more) = match &what {
                Request::Append { records, bytes } => (records.len() as u64, *bytes),
                _ => (0, 0),
            };
            // Each job is valid or invalid by itself; the valid ones share the sync.
            let outcome = match failed {
                Some(_) => Ok(()), // it gets the first job's error
                None => self.carry_out(key, what).unwrap_or_else(|e| {
                    failed = Some(e);
                    Ok(())
                }),
            };
            if outcome.is_ok() {
                (records, bytes) = (records + new, bytes + more);
            }
            outcomes.push((done, outcome));
        }
        let synced = self.segments.synced;
        if failed.is_none() && must_sync {
            failed = self.segments.sync().err();
        }
        if let Some(e) = failed {
            let said = (e.kind(), e.to_string());
            self.shared.queue.lock().failed = Some(said.clone());
            for (done, outcome) in outcomes {
                done.give(outcome.and(Err(io::Error::new(said.0, said.1.clone()))));
            }
            return Err(e);
        }
        if records > 0 || self.segments.synced > synced {
            let stats = &mut self.shared.queue.lock().stats;
            stats.batches += 1;
            stats.records += records;
            stats.bytes += bytes;
        }
        self.note_segments();
        outcomes.into_iter().for_each(|(done, outcome)| done.give(outcome));
        Ok(())
    }

    /// The inner result is the job's own error, the outer one a disk error.
    fn carry_out(&mut self, key: u64, what: Request) -> io::Result<io::Result<()>> {
        let records: &[Record] = if let Request::Append { records, .. } = &what { records } else { &[] };
        let checked = match &what {
            Request::Remove | Request::Close => Ok(()),
            _ => self.segments.check(key, records),
        };
        if checked.is_ok() {
            match what {
                Request::Append { records, .. } => self.segments.append(key, &records)?,
                Request::Truncate { last } => self.segments.truncate_after(key, last)?,
                Request::Purge { upto, tag } => self.segments.purge(key, upto, tag)?,
                Request::Remove => self.segments.remove(key)?,
                Request::Close => self.segments.close_group(key),
            }
        }
        Ok(checked)
    }

    fn note_segments(&self) {
        let stats = &mut self.shared.queue.lock().stats;
        let Segments { begun, recycled, moved, .. } = self.segments;
        (stats.segments, stats.recycled, stats.moved) = (begun, recycled, moved);
    }

    /// Reports the error to all waiting callers and to later ones.
    fn fail(&self, e: &io::Error) {
        let jobs = {
            let mut queue = self.shared.queue.lock();
            queue.failed.get_or_insert_with(|| (e.kind(), e.to_string()));
            queue.stats.queued_bytes = 0;
            mem::take(&mut queue.jobs)
        };
        let why = || match &self.shared.queue.lock().failed {
            Some(failed) => stopped(self.segments.dir(), failed),
            None => gone(),
        };
        for job in jobs {
            let why = why();
            job.done.give(Err(why));
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.groups.die();
        let jobs = {
            let mut queue = self.shared.queue.lock();
            queue.gone = true;
            queue.stats.queued_bytes = 0;
            mem::take(&mut queue.jobs)
        };
        drop(jobs);
    }
}
