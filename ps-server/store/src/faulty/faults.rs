//! A disk that can become full, slow or dead.

use crate::disk::{Access, Disk, DiskFile, DiskLock};
use parking_lot::Mutex;
use std::{
    collections::BTreeSet,
    fmt,
    io::{self, IoSlice},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

/// Wraps a disk and injects faults on request. Clones share the disk; faults can be set while files are open.
#[derive(Clone, Debug)]
pub struct FaultyDisk {
    inner: Arc<dyn Disk>,
    faults: Arc<Mutex<Faults>>,
}

#[derive(Debug, Default)]
struct Faults {
    /// Bytes that files may still grow by.
    room: Option<u64>,
    /// Changes that may still be made.
    changes_left: Option<u64>,
    changes: u64,
    sync_delay: Duration,
    /// The OS error number of every read.
    failing_reads: Option<i32>,
    failing_changes: Option<FailingChanges>,
    /// Changed files, if recording was requested.
    recorded: Option<BTreeSet<PathBuf>>,
}

/// The files whose changes fail, and the error number.
struct FailingChanges {
    number: i32,
    which: Box<dyn Fn(&Path) -> bool + Send>,
}

impl fmt::Debug for FailingChanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FailingChanges({})", self.number)
    }
}

impl Faults {
    /// Counts a change of the file or folder `path`; fails if the disk is dead.
    fn change(&mut self, path: &Path) -> io::Result<()> {
        if let Some(failing) = self.failing_changes.as_ref().filter(|f| (f.which)(path)) {
            return Err(io::Error::from_raw_os_error(failing.number));
        }
        if let Some(left) = &mut self.changes_left {
            *left = left.checked_sub(1).ok_or_else(|| io::Error::other("the disk is dead (on purpose)"))?;
        }
        self.changes += 1;
        Ok(())
    }
}

impl FaultyDisk {
    /// Wraps `inner`, without faults.
    pub fn new(inner: Arc<dyn Disk>) -> FaultyDisk {
        FaultyDisk { inner, faults: Arc::default() }
    }

    /// Makes the disk full after files have grown by `bytes` more bytes: a write beyond that is done in part and
    /// fails with `ErrorKind::StorageFull`, and nothing can be reserved. Existing bytes can be overwritten. `None`:
    /// there is room again.
    pub fn full_after(&self, bytes: Option<u64>) {
        self.faults.lock().room = bytes;
    }

    /// Makes every change fail after `changes` more changes (opening to write, writing, syncing, resizing,
    /// renaming, removing). `None`: it works again.
    pub fn dead_after(&self, changes: Option<u64>) {
        self.faults.lock().changes_left = changes;
    }

    /// Delays every sync by this much.
    pub fn slow_syncs(&self, delay: Duration) {
        self.faults.lock().sync_delay = delay;
    }

    /// Makes every read of names or contents fail with this OS error number (5: EIO). `None`: it works again.
    pub fn fail_reads(&self, number: Option<i32>) {
        self.faults.lock().failing_reads = number;
    }

    /// Makes every change (opening to write, locking, writing, syncing, resizing, renaming, removing) fail with
    /// this OS error number (5: EIO, 30: EROFS). `None`: it works again.
    pub fn fail_changes(&self, number: Option<i32>) {
        self.fail_changes_of(number, |_| true);
    }

    /// As [`Self::fail_changes`], for the files (and folders) whose paths satisfy `which`.
    pub fn fail_changes_of(&self, number: Option<i32>, which: impl Fn(&Path) -> bool + Send + 'static) {
        self.faults.lock().failing_changes =
            number.map(|number| FailingChanges { number, which: Box::new(which) });
    }

    /// Starts to record which files are changed.
    pub fn record(&self) {
        self.faults.lock().recorded.get_or_insert_default();
    }

    /// The files that were opened to write, locked, renamed (both names) or removed since [`Self::record`].
    pub fn recorded(&self) -> BTreeSet<PathBuf> {
        self.faults.lock().recorded.clone().unwrap_or_default()
    }

    /// Number of changes so far; the unit of [`dead_after`](Self::dead_after).
    pub fn changes(&self) -> u64 {
        self.faults.lock().changes
    }

    fn change(&self, path: &Path) -> io::Result<()> {
        self.faults.lock().change(path)
    }

    /// Counts a change of the file's name or existence, not only of its content.
    fn change_file(&self, path: &Path) -> io::Result<()> {
        let mut faults = self.faults.lock();
        if let Some(recorded) = faults.recorded.as_mut().filter(|r| !r.contains(path)) {
            recorded.insert(path.to_path_buf());
        }
        faults.change(path)
    }

    fn reading(&self) -> io::Result<()> {
        self.faults.lock().failing_reads.map_or(Ok(()), |number| Err(io::Error::from_raw_os_error(number)))
    }
}

impl Disk for FaultyDisk {
    fn create_dir_all(&self, dir: &Path) -> io::Result<()> {
        self.change(dir)?;
        self.inner.create_dir_all(dir)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        self.reading()?;
        self.inner.list(dir)
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn DiskFile>> {
        match access {
            Access::Read => self.reading()?,
            Access::Write | Access::Create | Access::Append => self.change_file(path)?,
        }
        let inner = self.inner.open(path, access)?;
        Ok(Box::new(FaultyFile { inner, path: path.to_path_buf(), disk: self.clone() }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        // One change of two names.
        let failing = {
            let mut faults = self.faults.lock();
            faults.recorded.iter_mut().for_each(|recorded| _ = recorded.insert(from.to_path_buf()));
            faults.failing_changes.as_ref().filter(|f| (f.which)(from)).map(|f| f.number)
        };
        match failing {
            Some(number) => return Err(io::Error::from_raw_os_error(number)),
            None => self.change_file(to)?,
        }
        self.inner.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.change_file(path)?;
        self.inner.remove(path)
    }

    fn remove_dir_all(&self, dir: &Path) -> io::Result<()> {
        self.change(dir)?;
        self.inner.remove_dir_all(dir)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.change(dir)?;
        self.inner.sync_dir(dir)
    }

    fn lock(&self, path: &Path) -> io::Result<DiskLock> {
        self.change_file(path)?;
        self.inner.lock(path)
    }
}

#[derive(Debug)]
struct FaultyFile {
    inner: Box<dyn DiskFile>,
    path: PathBuf,
    disk: FaultyDisk,
}

impl DiskFile for FaultyFile {
    fn size(&self) -> io::Result<u64> {
        self.inner.size()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.disk.reading()?;
        self.inner.read_at(offset, into)
    }

    fn write_at(&mut self, offset: u64, parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        let wanted: u64 = parts.iter().map(|p| p.len() as u64).sum();
        let size = self.inner.size()?;
        let allowed = {
            let mut faults = self.disk.faults.lock();
            faults.change(&self.path)?;
            // Bytes within the file already have their room.
            let growth = (offset + wanted).saturating_sub(size).min(wanted);
            let allowed = faults.room.map_or(growth, |room| room.min(growth));
            faults.room = faults.room.map(|room| room - allowed);
            wanted - growth + allowed
        };
        if allowed == wanted {
            return self.inner.write_at(offset, parts);
        }
        let part: Vec<u8> = parts.iter().flat_map(|p| p.iter().copied()).take(allowed as usize).collect();
        self.inner.write_at(offset, &mut [IoSlice::new(&part)])?;
        Err(io::Error::new(io::ErrorKind::StorageFull, "the disk is full (on purpose)"))
    }

    fn set_len(&mut self, size: u64) -> io::Result<()> {
        self.disk.change(&self.path)?;
        self.inner.set_len(size)
    }

    fn allocate(&mut self, size: u64) -> io::Result<()> {
        self.disk.change(&self.path)?;
        if self.disk.faults.lock().room.is_some() {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "the disk is almost full (on purpose)"));
        }
        self.inner.allocate(size)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.disk.change(&self.path)?;
        let delay = self.disk.faults.lock().sync_delay;
        if !delay.is_zero() {
            thread::sleep(delay);
        }
        self.inner.sync()
    }
}
