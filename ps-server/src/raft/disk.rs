//! What a replica keeps on disk: its name, its vote, its log, its last snapshot.
//!
//! ```text
//! <data>/shard-3/
//!   replica     who this replica is, and of which founding
//!   vote        the vote, replaced as a whole
//!   begun       the log has had entries
//!   log/        segments
//!   snapshot    the state that the log begins after
//! ```

use super::{
    image::RawImage,
    types::{Entry, LogId, Snapshot, SnapshotMeta, Vote},
    wire,
};
use openraft::EntryPayload;
use paraft_common::Payload;
use paraft_store::{
    Disk, Log, LogOptions, Record, SnapshotReader, SnapshotWriter, StoreError, read_small, write_small,
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// A segment of the log: a snapshot lets whole segments go.
const SEGMENT_BYTES: u64 = 64 << 20;

/// A replica's folder. Cheap to clone.
#[derive(Clone)]
pub struct Folder {
    disk: Arc<dyn Disk>,
    path: PathBuf,
}

/// What a replica that does not run has left.
pub struct Left {
    pub snapshot: Option<(SnapshotMeta, RawImage)>,
    pub entries: Vec<Entry>,
}

/// What a log on disk held when it was opened.
#[derive(Default)]
pub struct Stored {
    pub entries: Vec<Entry>,
    pub purged: Option<LogId>,
    pub vote: Option<Vote>,
}

fn invalid(e: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, e.to_string())
}

impl Folder {
    /// A folder; it need not exist yet.
    pub fn new(disk: Arc<dyn Disk>, path: impl Into<PathBuf>) -> Self {
        Self { disk, path: path.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads a small file; the error names it.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, String> {
        read_small(&*self.disk, &self.path.join(name)).map_err(|e| e.to_string())
    }

    /// Replaces a small file, durably.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), String> {
        let at = |e: io::Error| format!("{}: {e}", self.path.join(name).display());
        self.disk.create_dir_all(&self.path).map_err(at)?;
        write_small(&*self.disk, &self.path.join(name), bytes).map_err(at)
    }

    /// Opens the log.
    pub(super) fn open_log(&self) -> Result<(DiskLog, Stored), String> {
        let path = self.path.join("log");
        let at = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        self.disk.create_dir_all(&path).map_err(|e| at(&e))?;
        let options = LogOptions { segment_bytes: SEGMENT_BYTES, sync: true };
        let (log, found) = Log::open(self.disk.clone(), &path, options).map_err(|e| e.to_string())?;
        if found.torn_bytes > 0 {
            tracing::warn!(path = %path.display(), bytes = found.torn_bytes, "the log's torn tail was cut");
        }
        let entries: Vec<Entry> =
            found.records.into_iter().map(entry_of).collect::<Result<_, _>>().map_err(|e| at(&e))?;
        let purged = found.purged.map(|(_, tag)| wire::decode::<LogId>(&tag)).transpose();
        let purged = purged.map_err(|e| at(&e))?;
        let vote = self.read("vote")?.map(|b| wire::decode(&b)).transpose().map_err(|e| at(&e))?;
        // The founding is written before any vote; everything else is what a vote let in.
        let promised = purged.is_some() || entries.iter().any(|e| e.log_id.index > 0);
        if vote.is_none() && promised {
            let vote = self.path.join("vote");
            return Err(format!(
                "{}: it is gone, though the log has held entries: a replica that forgot its vote must not vote",
                vote.display()
            ));
        }
        if let Some(purged) = &purged {
            self.holds(purged)?;
        }
        let begun = self.read(BEGUN)?.is_some();
        if begun && entries.is_empty() && purged.is_none() {
            return Err(at(&"its segments are gone, though it has held entries: a lost log must not vote"));
        }
        let disk = DiskLog { log, folder: self.clone(), begun: begun.into() };
        Ok((disk, Stored { entries, purged, vote }))
    }

    /// Fails unless the snapshot holds what the log has purged.
    fn holds(&self, purged: &LogId) -> Result<(), String> {
        let path = self.path.join("snapshot");
        let (last, after) = (snapshot_end(self.disk.clone(), &path)?, purged.index);
        match last {
            Some(last) if last.index >= after => Ok(()),
            Some(last) => Err(format!(
                "{}: it ends with entry {}, and the log begins after {after}: what is between is gone",
                path.display(),
                last.index
            )),
            None => Err(format!("{}: it is gone, and the log begins after entry {after}", path.display())),
        }
    }

    /// What a replica left here, without changing it: its last snapshot, and the entries of its log.
    pub(super) fn look(&self) -> Result<Left, String> {
        let path = self.path.join("log");
        let at = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let snapshot = read_snapshot(self.disk.clone(), &self.path.join("snapshot"))?;
        let found = Log::look(self.disk.clone(), &path).map_err(|e| e.to_string())?;
        if let Some((_, tag)) = &found.purged {
            self.holds(&wire::decode(tag).map_err(|e| at(&e))?)?;
        }
        let entries = found.records.into_iter().map(entry_of).collect::<Result<_, _>>();
        Ok(Left { snapshot, entries: entries.map_err(|e| at(&e))? })
    }

    /// The snapshot's file.
    pub(super) fn snapshot(&self) -> SnapshotFile {
        SnapshotFile { disk: self.disk.clone(), path: self.path.join("snapshot"), dir: self.path.clone() }
    }

    /// Forgets the replica for ever; the folder is gone afterwards.
    pub fn remove(&self) -> io::Result<()> {
        match std::fs::remove_dir_all(&self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

/// An entry as it is stored.
pub(super) fn record_of(entry: &Entry) -> Result<Record, wire::WireError> {
    let payload = match &entry.payload {
        EntryPayload::Normal(change) => change.payload().clone(),
        _ => Payload::EMPTY,
    };
    Ok(Record { index: entry.log_id.index, header: wire::encode(entry)?, payload })
}

/// And back.
pub(super) fn entry_of(record: Record) -> Result<Entry, wire::WireError> {
    let mut entry: Entry = wire::decode(&record.header)?;
    if entry.log_id.index != record.index {
        return Err(wire::WireError::new(format!(
            "entry {} is stored as {}",
            entry.log_id.index, record.index
        )));
    }
    if let EntryPayload::Normal(change) = &mut entry.payload {
        change.attach(record.payload);
    }
    Ok(entry)
}

/// Says that the log has had entries: one that is empty all the same was lost, and its replica must not vote as if it
/// had never promised anything.
const BEGUN: &str = "begun";

/// The log's files, and the vote beside them.
pub struct DiskLog {
    log: Log,
    folder: Folder,
    begun: AtomicBool,
}

impl DiskLog {
    /// Queues entries; `done` is called when they are on disk.
    pub fn append(
        &self,
        entries: &[Entry],
        done: impl FnOnce(io::Result<()>) + Send + 'static,
    ) -> io::Result<()> {
        if !self.begun.load(Relaxed) && !entries.is_empty() {
            self.folder.write(BEGUN, &[]).map_err(io::Error::other)?;
            self.begun.store(true, Relaxed);
        }
        let records = entries.iter().map(record_of).collect::<Result<_, _>>().map_err(invalid)?;
        self.log.append(records, Box::new(done));
        Ok(())
    }

    /// Blocks until everything that was queued is on disk, and the vote after it.
    pub async fn save_vote(&self, vote: &Vote) -> io::Result<()> {
        let (tx, rx) = tokio::sync::oneshot::channel();
        self.log.append(Vec::new(), Box::new(move |r| _ = tx.send(r)));
        rx.await.map_err(|_| io::Error::other("the log's writer has ended"))??;
        let (folder, bytes) = (self.folder.clone(), wire::encode(vote).map_err(invalid)?);
        blocking(move || folder.write("vote", &bytes).map_err(io::Error::other)).await
    }

    /// Drops every entry after `last`.
    pub async fn truncate_after(&self, last: Option<u64>) -> io::Result<()> {
        let log = self.log.clone();
        blocking(move || log.truncate_after(last)).await
    }

    /// Drops every entry up to `upto`.
    pub async fn purge(&self, upto: LogId) -> io::Result<()> {
        let (log, tag) = (self.log.clone(), wire::encode(&upto).map_err(invalid)?);
        blocking(move || log.purge(upto.index, tag)).await
    }
}

/// The state that a log on disk begins after. Replaced as a whole.
pub struct SnapshotFile {
    disk: Arc<dyn Disk>,
    path: PathBuf,
    dir: PathBuf,
}

impl SnapshotFile {
    /// Writes while the state goes on changing; durable when it returns.
    pub async fn write(self: &Arc<Self>, meta: SnapshotMeta, image: Arc<RawImage>) -> io::Result<()> {
        let this = self.clone();
        blocking(move || {
            this.disk.create_dir_all(&this.dir)?;
            let head = wire::encode(&(&meta, &image.head[..])).map_err(invalid)?;
            let mut file = SnapshotWriter::create(this.disk.clone(), &this.path)?;
            file.push(&head.into())?;
            for part in &image.parts {
                file.push(part)?;
            }
            file.finish().map(drop)
        })
        .await
    }

    /// The stored snapshot.
    pub async fn read(self: &Arc<Self>) -> io::Result<Option<Snapshot>> {
        let this = self.clone();
        blocking(move || {
            let found = read_snapshot(this.disk.clone(), &this.path).map_err(invalid)?;
            Ok(found.map(|(meta, image)| Snapshot { meta, snapshot: Arc::new(image) }))
        })
        .await
    }
}

/// The last entry that a snapshot file holds; the bulk is not read. `None` where there is none.
fn snapshot_end(disk: Arc<dyn Disk>, path: &Path) -> Result<Option<LogId>, String> {
    let Some(mut chunks) = open_snapshot(&*disk, path)? else { return Ok(None) };
    Ok(snapshot_head(&mut chunks, path)?.0.last_log_id)
}

fn open_snapshot(disk: &dyn Disk, path: &Path) -> Result<Option<SnapshotReader>, String> {
    match SnapshotReader::open(disk, path) {
        Ok(chunks) => Ok(Some(chunks)),
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e.to_string()),
    }
}

fn snapshot_head(chunks: &mut SnapshotReader, path: &Path) -> Result<(SnapshotMeta, Vec<u8>), String> {
    let at = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    let head = chunks.next().ok_or_else(|| at(&"it is empty"))?.map_err(|e| e.to_string())?;
    wire::decode(&head).map_err(|e| at(&e))
}

/// Reads a snapshot file; `None` where there is none.
pub(super) fn read_snapshot(
    disk: Arc<dyn Disk>,
    path: &Path,
) -> Result<Option<(SnapshotMeta, RawImage)>, String> {
    let Some(mut chunks) = open_snapshot(&*disk, path)? else { return Ok(None) };
    let (meta, head) = snapshot_head(&mut chunks, path)?;
    let parts = chunks.map(|c| c.map(Payload::from)).collect::<Result<_, _>>().map_err(|e| e.to_string())?;
    Ok(Some((meta, RawImage { head: head.into(), parts })))
}

async fn blocking<T: Send + 'static>(f: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(f).await.map_err(io::Error::other)?
}
