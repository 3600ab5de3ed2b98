//! The file that holds a replica's last snapshot: the state that its log begins after.

use super::{
    image::ImagePart,
    replicated::Replicated,
    storage::{FolderError, blocking, invalid},
    types::{LogId, SnapshotMeta},
    wire,
};
use bytes::Bytes;
use paraft_common::Payload;
use paraft_store::files::DataFile;
use paraft_store::{Disk, SnapshotReader, SnapshotWriter, StoreError};
use parking_lot::Mutex;
use std::{
    cell::Cell,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// The state that a log on disk begins after. Replaced as a whole.
pub struct SnapshotFile {
    disk: Arc<dyn Disk>,
    path: PathBuf,
    dir: PathBuf,
    /// The last entry in the file's snapshot. Locked while a snapshot is written: otherwise the built one and the
    /// installed one could overwrite each other.
    newest: Mutex<Option<LogId>>,
    /// The replica has ended: the next one under its name writes the file.
    closed: AtomicBool,
}

impl SnapshotFile {
    /// The file in a replica's folder.
    pub fn new(disk: Arc<dyn Disk>, dir: &Path) -> Self {
        Self {
            disk,
            path: dir.join(DataFile::Snapshot.name()),
            dir: dir.into(),
            newest: Mutex::default(),
            closed: AtomicBool::new(false),
        }
    }

    /// Returns when no write is in progress; a write in progress stops at the next part.
    pub fn close(&self) {
        self.closed.store(true, Relaxed);
        drop(self.newest.lock());
    }

    fn is_open(&self) -> io::Result<()> {
        match self.closed.load(Relaxed) {
            true => Err(io::Error::new(
                io::ErrorKind::BrokenPipe,
                "this replica has ended: no snapshot of it is written",
            )),
            false => Ok(()),
        }
    }

    /// Writes the snapshot while the state changes; it is durable on return. The parts that `order` names first are
    /// written first, and each is released once it is written: later changes need not copy it.
    ///
    /// One snapshot is written at a time. A later state in the file stays: the log may have been purged up to it.
    pub async fn write(
        self: &Arc<Self>,
        meta: SnapshotMeta,
        head: Bytes,
        parts: Vec<ImagePart>,
        order: Vec<u32>,
    ) -> io::Result<()> {
        let this = self.clone();
        blocking(move || {
            let mut newest = this.newest.lock();
            this.is_open()?;
            if *newest > meta.last_log_id {
                return Ok(());
            }
            this.disk.create_dir_all(&this.dir)?;
            let head = wire::encode(&(&meta, &head[..])).map_err(invalid)?;
            let mut file = SnapshotWriter::create(this.disk.clone(), &this.path)?;
            file.push(&head.into())?;
            let first = file.reserve(parts.iter().map(ImagePart::len))?;
            let mut parts: Vec<Option<ImagePart>> = parts.into_iter().map(Some).collect();
            let all = 0..parts.len();
            for place in order.into_iter().map(|place| place as usize).chain(all) {
                if let Some(part) = parts.get_mut(place).and_then(Option::take) {
                    this.is_open()?;
                    file.fill(first + place as u64, &part.read())?;
                }
            }
            file.finish()?;
            *newest = meta.last_log_id;
            Ok(())
        })
        .await
    }

    /// Restores the stored snapshot into `state`, part by part; returns its metadata, or `None` if there is none.
    pub fn restore<S: Replicated + ?Sized>(&self, state: &S) -> Result<Option<SnapshotMeta>, FolderError> {
        let Some(mut chunks) = open_snapshot(&*self.disk, &self.path)? else { return Ok(None) };
        let (meta, head) = snapshot_head(&mut chunks, &self.path)?;
        let unreadable = Cell::new(None);
        let mut parts = chunks.map(|c| {
            c.map(Payload::from).map_err(|e| {
                let text = e.to_string();
                unreadable.set(Some(FolderError::from(e)));
                text
            })
        });
        let installed = state.install_parts(&head, &mut parts);
        // Data with a correct checksum is not damaged, even if the state refuses it.
        installed.map_err(|e| {
            let unfit = || FolderError::passing(format!("{}: {e}", self.path.display()));
            unreadable.take().unwrap_or_else(unfit)
        })?;
        *self.newest.lock() = meta.last_log_id;
        Ok(Some(meta))
    }
}

/// The last entry in a snapshot file, without reading the bulk. `None` if there is none.
pub(super) fn snapshot_end(disk: Arc<dyn Disk>, path: &Path) -> Result<Option<LogId>, FolderError> {
    let Some(mut chunks) = open_snapshot(&*disk, path)? else { return Ok(None) };
    Ok(snapshot_head(&mut chunks, path)?.0.last_log_id)
}

pub(super) fn open_snapshot(disk: &dyn Disk, path: &Path) -> Result<Option<SnapshotReader>, FolderError> {
    match SnapshotReader::open(disk, path) {
        Ok(chunks) => Ok(Some(chunks)),
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e.into()),
    }
}

pub(super) fn snapshot_head(
    chunks: &mut SnapshotReader,
    path: &Path,
) -> Result<(SnapshotMeta, Vec<u8>), FolderError> {
    let at = path.display();
    let head = chunks.next().ok_or_else(|| FolderError::damage(format!("{at}: it is empty")))??;
    wire::decode(&head).map_err(|e| FolderError::passing(format!("{at}: {e}")))
}
