//! The log of a server, which all its groups share.

use super::{
    Done, Log, LogOptions, LogStats, MAX_GROUPS, Open, Record, Recovered, group_copy,
    groups::{Fault, Groups, gone},
    recover,
    writer::{self, Job, PendingCallback, Request, Shared},
};
use crate::{Disk, StoreError};
use parking_lot::Mutex;
use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread::JoinHandle,
};

/// A handle to the log of a server. Clones share the log, and so do the handles of its groups. Dropping the last
/// one closes the log: queued data is written, the thread ends, and the folder is released.
///
/// The first disk error poisons the log: every later call, of any group, fails with that error, nothing more is
/// written, and the folder is released. Open it again when the disk is repaired; everything acknowledged is there.
#[derive(Clone, Debug)]
pub struct SharedLog {
    pub(super) inner: Arc<Inner>,
}

/// What the handles of a log share.
#[derive(Debug)]
pub(super) struct Inner {
    pub shared: Arc<Shared>,
    pub groups: Arc<Groups>,
    pub disk: Arc<dyn Disk>,
    pub dir: PathBuf,
    writer: Mutex<Option<JoinHandle<()>>>,
}

impl SharedLog {
    /// Opens the log in `dir`, or creates one; no other log may use the folder. Cuts a torn tail, and returns the
    /// number of its bytes in started items: 0 after a proper close, and usually after a crash. Damage is reported
    /// for the affected groups ([`Self::group`]).
    ///
    /// [`StoreError::Locked`] if it is open elsewhere.
    pub fn open(
        disk: Arc<dyn Disk>,
        dir: &Path,
        options: LogOptions,
    ) -> Result<(SharedLog, u64), StoreError> {
        let (segments, lock, torn_bytes) = recover::open(disk.clone(), dir, options)?;
        let (shared, groups) = (Arc::new(Shared::new(dir.to_path_buf())), segments.groups.clone());
        let writer = writer::spawn(shared.clone(), segments, lock)
            .map_err(StoreError::io("start the writer of the log in", dir))?;
        let writer = Mutex::new(Some(writer));
        let inner = Inner { shared, groups, disk, dir: dir.to_path_buf(), writer };
        Ok((SharedLog { inner: Arc::new(inner) }, torn_bytes))
    }

    /// Opens the log of group `key`, or creates it. Reads and checks every record after the purge point and passes
    /// it to `each`, in order; on an error the caller must ignore these records.
    ///
    /// [`StoreError::Damaged`]: some of it may be lost; nothing was changed. [`StoreError::Locked`]: it is already
    /// open.
    pub fn group(&self, key: u64, each: &mut dyn FnMut(Record)) -> Result<(Log, Recovered), StoreError> {
        if self.inner.groups.known().get(&key).is_some_and(|g| g.open) {
            // Another thread may have just dropped the last handle.
            self.wait(key, Request::Append { records: Vec::new(), bytes: 0 }).map_err(self.at("open"))?;
        }
        let damage = self.inner.groups.damage(key);
        let purged = {
            let mut known = self.inner.groups.known();
            if known.len() >= MAX_GROUPS && !known.contains_key(&key) {
                let e = io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("{MAX_GROUPS} groups share it already"),
                );
                return Err(self.at("begin a group in")(e));
            }
            let group = known.entry(key).or_default();
            if let Some(fault) = damage {
                let error = fault.error();
                group.damage = Some(fault);
                return Err(error);
            }
            if std::mem::replace(&mut group.open, true) {
                return Err(StoreError::Locked { dir: self.inner.dir.clone() });
            }
            group.purged.clone()
        };
        let log = Log { open: Arc::new(Open { of: self.clone(), key }) };
        let read = self.inner.groups.read_all(&*self.inner.disk, &self.inner.dir, key, each);
        if let (Err(StoreError::Damaged { path, offset, what }), Some(group)) =
            (&read, self.inner.groups.known().get_mut(&key))
        {
            let (path, what) = (path.clone(), what.clone());
            group.damage = Some(Fault { path, offset: *offset, what });
        }
        Ok((log, Recovered { records: read?, purged }))
    }

    /// Creates the log of a group that never existed.
    pub fn begin(&self, key: u64) -> Result<Log, StoreError> {
        self.inner.groups.known().entry(key).or_default();
        Ok(self.group(key, &mut |_| ())?.0)
    }

    /// Whether the log contains anything of group `key`, damaged or not.
    pub fn has(&self, key: u64) -> bool {
        self.inner.groups.known().get(&key).is_some_and(|g| g.turn > 0 || g.damage.is_some())
    }

    /// The groups in the log.
    pub fn keys(&self) -> Vec<u64> {
        let known = self.inner.groups.known();
        known.iter().filter(|(_, g)| g.turn > 0 || g.damage.is_some()).map(|(key, _)| *key).collect()
    }

    /// Copies a group into the folder `to`, which [`Log::inspect`] reads: if the group is damaged, as the segments
    /// that may contain it. Replaces what was in the folder; the copy is durable on return. The group must not be
    /// written meanwhile. Waits for the disk.
    pub fn keep(&self, key: u64, to: &Path) -> Result<(), StoreError> {
        let damaged = self.inner.groups.known().get(&key).is_some_and(|g| g.damage.is_some());
        let copied = match damaged {
            true => group_copy::damaged(self, key, to),
            false => group_copy::whole(self, key, to),
        };
        match copied {
            // The damage was found only now.
            Err(StoreError::Damaged { path, offset, what }) if !damaged => {
                if let Some(group) = self.inner.groups.known().get_mut(&key) {
                    group.damage = Some(Fault { path, offset, what });
                }
                group_copy::damaged(self, key, to)
            }
            copied => copied,
        }
    }

    /// Imports the log of group `there` in `dir` ([`Log::inspect`]) as a new group `key`. It is durable on return;
    /// `dir` is not changed. Waits for the disk.
    pub fn import(&self, key: u64, dir: &Path, there: u64) -> Result<(), StoreError> {
        let into = self.begin(key)?;
        group_copy::import(&*self.inner.disk, dir, there, into).map_err(|e| match e {
            group_copy::ImportError::Reading(e) => e,
            group_copy::ImportError::Writing(e) => self.at("write to the log in")(e),
        })
    }

    /// Removes group `key`, damaged or not, forever: the key must not be reused, because the remains of both groups
    /// after a crash or damage could be taken for one. Durable on return. Waits for the disk.
    pub fn remove(&self, key: u64) -> io::Result<()> {
        self.wait(key, Request::Remove)
    }

    /// Writes queued data and releases the folder; later calls fail.
    pub fn close(&self) {
        self.inner.close();
    }

    /// Whether nothing more is written, after an error or [`Self::close`].
    pub fn has_ended(&self) -> bool {
        self.inner.shared.has_ended()
    }

    /// The log's counts so far.
    pub fn stats(&self) -> LogStats {
        self.inner.shared.stats()
    }

    fn at(&self, doing: &'static str) -> impl FnOnce(io::Error) -> StoreError {
        StoreError::io(doing, &self.inner.dir)
    }

    /// Waits until the writer has handled a request.
    pub(super) fn wait(&self, key: u64, what: Request) -> io::Result<()> {
        if self.inner.on_writer_thread() {
            return Err(io::Error::new(
                io::ErrorKind::Deadlock,
                "the log's own thread cannot wait for the log",
            ));
        }
        let (reply, outcome) = mpsc::sync_channel(1);
        let done: Done = Box::new(move |done| _ = reply.send(done));
        self.inner.shared.push(Job { key, what, done: PendingCallback::new(done) });
        outcome.recv().unwrap_or_else(|_| Err(gone()))
    }
}

impl Inner {
    fn on_writer_thread(&self) -> bool {
        let writer = self.writer.lock();
        writer.as_ref().is_some_and(|w| w.thread().id() == std::thread::current().id())
    }

    fn close(&self) {
        self.shared.close();
        // A `done` may hold the last handle: then this is the writer's thread, which cannot join itself.
        if self.on_writer_thread() {
            return;
        }
        let writer = self.writer.lock().take();
        // It reported every failure through the jobs.
        let _ = writer.map(JoinHandle::join);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}
