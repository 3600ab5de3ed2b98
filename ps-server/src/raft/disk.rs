//! What a replica keeps on disk: its name, its vote, its log, its last snapshot.
//!
//! ```text
//! <data>/shard-3/
//!   replica     who this replica is, and of which founding
//!   vote        the vote, replaced as a whole
//!   begun       the log has had entries
//!   log/        segments
//!   snapshot    the state that the log begins after
//!   need        what its job needs of the server's memory (`replicas/needs.rs`)
//! ```

use super::{
    machine::Replicated,
    replica::ReplicaId,
    types::{Entry, LogId, SnapshotMeta, Vote},
    wire,
};
use bytes::Bytes;
use openraft::EntryPayload;
use paraft_common::Payload;
use paraft_store::{
    Disk, Log, LogOptions, Record, SnapshotReader, SnapshotWriter, StoreError, read_small, said, write_small,
};
use parking_lot::Mutex;
use std::{
    cell::Cell,
    fmt, io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// A segment of the log: a snapshot lets whole segments go.
const SEGMENT_BYTES: u64 = 64 << 20;
/// Elections move a term by one; there were not so many since the last entry. Less than one message may move it.
const TERMS_AHEAD: u64 = 1 << 20;

/// Why a replica cannot be started from what its folder holds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct FolderError {
    what: String,
    damage: bool,
}

impl FolderError {
    /// What was written is gone, or is not what was written: it will not come back by itself.
    pub fn damage(what: impl fmt::Display) -> Self {
        Self { what: what.to_string(), damage: true }
    }

    /// Nothing is known to be wrong with what is there: it may be read later, or by another build.
    pub fn passing(what: impl fmt::Display) -> Self {
        Self { what: what.to_string(), damage: false }
    }

    /// Whether it is damage.
    pub fn is_damage(&self) -> bool {
        self.damage
    }

    fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |e| Self {
            what: format!("{}: {}", path.display(), said(&e)),
            damage: paraft_store::is_damage(&e),
        }
    }
}

impl From<StoreError> for FolderError {
    fn from(e: StoreError) -> Self {
        Self { damage: e.is_damage(), what: e.to_string() }
    }
}

impl From<FolderError> for String {
    fn from(e: FolderError) -> Self {
        e.what
    }
}

/// A replica's folder. Cheap to clone.
#[derive(Clone)]
pub struct Folder {
    disk: Arc<dyn Disk>,
    path: PathBuf,
}

/// What a log on disk held when it was opened, besides its entries.
#[derive(Default)]
pub struct Stored {
    /// Of the last entry.
    pub last: Option<LogId>,
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
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, FolderError> {
        Ok(read_small(&*self.disk, &self.path.join(name))?)
    }

    /// Replaces a small file, durably.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), FolderError> {
        let path = self.path.join(name);
        self.disk.create_dir_all(&self.path).map_err(FolderError::at(&path))?;
        write_small(&*self.disk, &path, bytes).map_err(FolderError::at(&path))
    }

    /// Gives the folder another name beside its own; nothing in it changes.
    pub fn rename(&self, name: &str) -> Result<PathBuf, FolderError> {
        let to = self.path.with_file_name(name);
        self.disk.rename(&self.path, &to).map_err(FolderError::at(&self.path))?;
        let above = self.path.parent().unwrap_or(Path::new("."));
        self.disk.sync_dir(above).map_err(FolderError::at(above))?;
        Ok(to)
    }

    /// Names of what is in it, in no order; empty where there is no such folder.
    pub fn names(&self) -> Result<Vec<String>, FolderError> {
        match self.disk.list(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            listed => listed.map_err(FolderError::at(&self.path)),
        }
    }

    /// Reads and checks everything: the vote, the snapshot, and every entry of the log. Gives the last log index that is there, 0
    /// where there is none. Changes nothing. A vote that is gone or damaged is no hindrance: nothing of what was acknowledged is in it.
    pub fn check(&self) -> Result<u64, FolderError> {
        Ok(self.read_all()?.1.map_or(0, |l| l.index))
    }

    /// As [`Self::check`], of a folder that is to be used again. Where its vote is gone, it votes for itself in a term that no
    /// election has come to, so that it cannot vote twice in any that there was. Gives whether it was gone.
    pub fn check_and_vote(&self, me: ReplicaId) -> Result<bool, FolderError> {
        let (vote, last) = self.read_all()?;
        let Some(last) = last.filter(|l| vote.is_none() && l.index > 0) else { return Ok(false) };
        let vote = Vote::new(last.committed_leader_id().term + TERMS_AHEAD, me.0);
        self.write("vote", &wire::encode(&vote).map_err(FolderError::passing)?)?;
        Ok(true)
    }

    fn read_all(&self) -> Result<(Option<Vote>, Option<LogId>), FolderError> {
        let vote: Option<Vote> = match self.read("vote") {
            Err(e) if e.is_damage() => None,
            vote => {
                let decoded = vote?.map(|v| wire::decode(&v)).transpose();
                decoded.map_err(|e| FolderError::passing(format!("{}: {e}", self.path.display())))?
            }
        };
        let path = self.path.join("snapshot");
        let mut last: Option<LogId> = None;
        if let Some(mut chunks) = open_snapshot(&*self.disk, &path)? {
            let (meta, _) = snapshot_head(&mut chunks, &path)?;
            last = meta.last_log_id;
            chunks.try_for_each(|c| c.map(drop))?;
        }
        self.look(&mut |entry| last = last.max(Some(entry.log_id)))?;
        Ok((vote, last))
    }

    /// Opens the log; every entry that it holds goes through `each`, in order. On an error forget what was given.
    pub(super) fn open_log(&self, each: &mut dyn FnMut(Entry)) -> Result<(DiskLog, Stored), FolderError> {
        let path = self.path.join("log");
        // Its checksums fit: what cannot be decoded all the same is for another build to read.
        let unknown = |e: wire::WireError| FolderError::passing(format!("{}: {e}", path.display()));
        let damage = |e: &dyn fmt::Display| FolderError::damage(format!("{}: {e}", path.display()));
        self.disk.create_dir_all(&path).map_err(FolderError::at(&path))?;
        let options = LogOptions { segment_bytes: SEGMENT_BYTES, sync: true };
        let (mut last, mut unreadable) = (None, None);
        let mut record = |r| match entry_of(r) {
            Ok(entry) => {
                last = Some(entry.log_id);
                each(entry);
            }
            Err(e) => _ = unreadable.get_or_insert(e),
        };
        let (log, found) = Log::open(self.disk.clone(), &path, options, &mut record)?;
        if let Some(e) = unreadable {
            return Err(unknown(e));
        }
        if found.torn_bytes > 0 {
            tracing::warn!(path = %path.display(), bytes = found.torn_bytes, "the log's torn tail was cut");
        }
        let purged = found.purged.map(|(_, tag)| wire::decode::<LogId>(&tag)).transpose();
        let purged = purged.map_err(unknown)?;
        let vote = self.read("vote")?.map(|b| wire::decode(&b)).transpose().map_err(unknown)?;
        // The founding is written before any vote; everything else is what a vote let in.
        let promised = purged.is_some() || last.is_some_and(|l| l.index > 0);
        if vote.is_none() && promised {
            let vote = self.path.join("vote");
            return Err(FolderError::damage(format!(
                "{}: it is gone, though the log has held entries: a replica that forgot its vote must not vote",
                vote.display()
            )));
        }
        if let Some(purged) = &purged {
            self.holds(purged)?;
        }
        let (begun, empty) = (self.read(BEGUN)?.is_some(), last.is_none() && purged.is_none());
        if begun && empty {
            return Err(damage(
                &"its segments are gone, though it has held entries: a lost log must not vote",
            ));
        }
        // The process ended between the first entry and the mark. From here on the entry may be vouched for.
        if !begun && !empty {
            self.write(BEGUN, &[])?;
        }
        let begun = !empty;
        let disk = DiskLog { log, folder: self.clone(), begun: begun.into() };
        Ok((disk, Stored { last, purged, vote }))
    }

    /// Fails unless the snapshot holds what the log has purged.
    fn holds(&self, purged: &LogId) -> Result<(), FolderError> {
        let path = self.path.join("snapshot");
        let (last, after) = (snapshot_end(self.disk.clone(), &path)?, purged.index);
        match last {
            Some(last) if last.index >= after => Ok(()),
            Some(last) => Err(FolderError::damage(format!(
                "{}: it ends with entry {}, and the log begins after {after}: what is between is gone",
                path.display(),
                last.index
            ))),
            None => Err(FolderError::damage(format!(
                "{}: it is gone, and the log begins after entry {after}",
                path.display()
            ))),
        }
    }

    /// The last entry that the snapshot here holds; `None` where there is none. Its bulk is not read.
    pub(super) fn snapshot_end(&self) -> Result<Option<LogId>, FolderError> {
        snapshot_end(self.disk.clone(), &self.path.join("snapshot"))
    }

    /// The entries of the log that a replica left here, in order, without changing it. What `each` was given counts for
    /// nothing on an error.
    pub(super) fn look(&self, each: &mut dyn FnMut(Entry)) -> Result<(), FolderError> {
        let path = self.path.join("log");
        let at = |e: wire::WireError| FolderError::passing(format!("{}: {e}", path.display()));
        let mut unreadable = None;
        let mut record = |r| match entry_of(r) {
            Ok(entry) => each(entry),
            Err(e) => _ = unreadable.get_or_insert(e),
        };
        let found = Log::look(self.disk.clone(), &path, &mut record)?;
        if let Some((_, tag)) = &found.purged {
            self.holds(&wire::decode(tag).map_err(at)?)?;
        }
        unreadable.map_or(Ok(()), |e| Err(at(e)))
    }

    /// The snapshot's file.
    pub(super) fn snapshot(&self) -> SnapshotFile {
        SnapshotFile {
            disk: self.disk.clone(),
            path: self.path.join("snapshot"),
            dir: self.path.clone(),
            newest: Mutex::default(),
        }
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
        let records = entries.iter().map(record_of).collect::<Result<_, _>>().map_err(invalid)?;
        // Marked after the first entries are on disk and before anyone hears of it: a process that is killed in between has
        // lost nothing. Later entries are said to be there after these.
        if !entries.is_empty() && !self.begun.swap(true, Relaxed) {
            let folder = self.folder.clone();
            let mark = move || folder.write(BEGUN, &[]).map_err(io::Error::other);
            self.log.append(records, Box::new(move |written| done(written.and_then(|()| mark()))));
        } else {
            self.log.append(records, Box::new(done));
        }
        Ok(())
    }

    /// Reads entries back; see [`Log::read`].
    pub async fn read(&self, range: Range<u64>, most: u64) -> io::Result<Vec<Entry>> {
        let log = self.log.clone();
        blocking(move || {
            let records = log.read(range, most).map_err(io::Error::other)?;
            records.into_iter().map(entry_of).collect::<Result<_, _>>().map_err(invalid)
        })
        .await
    }

    /// Entries that are written and not purged, and their bytes.
    pub fn length(&self) -> (u64, u64) {
        self.log.length()
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
    /// The last entry of the snapshot that the file holds. Held while one is written: the one that is built and the one
    /// that is installed would else write over each other.
    newest: Mutex<Option<LogId>>,
}

impl SnapshotFile {
    /// Writes while the state goes on changing; durable when it returns. The parts that `order` names first are written
    /// first, and each is let go when it is written: what changes from then on need not be copied for it.
    ///
    /// One is written at a time. Where the file holds a later state by then, that stays: the log may have been purged up
    /// to it.
    pub async fn write(
        self: &Arc<Self>,
        meta: SnapshotMeta,
        head: Bytes,
        parts: Vec<Payload>,
        order: Vec<u32>,
    ) -> io::Result<()> {
        let this = self.clone();
        blocking(move || {
            let mut newest = this.newest.lock();
            if *newest > meta.last_log_id {
                return Ok(());
            }
            this.disk.create_dir_all(&this.dir)?;
            let head = wire::encode(&(&meta, &head[..])).map_err(invalid)?;
            let mut file = SnapshotWriter::create(this.disk.clone(), &this.path)?;
            file.push(&head.into())?;
            let first = file.reserve(parts.iter().map(Payload::len))?;
            let mut parts: Vec<Option<Payload>> = parts.into_iter().map(Some).collect();
            let all = 0..parts.len();
            for place in order.into_iter().map(|place| place as usize).chain(all) {
                if let Some(part) = parts.get_mut(place).and_then(Option::take) {
                    file.fill(first + place as u64, &part)?;
                }
            }
            file.finish()?;
            *newest = meta.last_log_id;
            Ok(())
        })
        .await
    }

    /// Puts the stored snapshot into `state`, part by part as it is read; gives what it is of. `None` where there is
    /// none.
    pub fn restore(&self, state: &dyn Replicated) -> Result<Option<SnapshotMeta>, FolderError> {
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
        // What was read and has its checksum is no damage, whatever the state says to it.
        installed.map_err(|e| {
            let unfit = || FolderError::passing(format!("{}: {e}", self.path.display()));
            unreadable.take().unwrap_or_else(unfit)
        })?;
        *self.newest.lock() = meta.last_log_id;
        Ok(Some(meta))
    }
}

/// The last entry that a snapshot file holds; the bulk is not read. `None` where there is none.
fn snapshot_end(disk: Arc<dyn Disk>, path: &Path) -> Result<Option<LogId>, FolderError> {
    let Some(mut chunks) = open_snapshot(&*disk, path)? else { return Ok(None) };
    Ok(snapshot_head(&mut chunks, path)?.0.last_log_id)
}

fn open_snapshot(disk: &dyn Disk, path: &Path) -> Result<Option<SnapshotReader>, FolderError> {
    match SnapshotReader::open(disk, path) {
        Ok(chunks) => Ok(Some(chunks)),
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn snapshot_head(chunks: &mut SnapshotReader, path: &Path) -> Result<(SnapshotMeta, Vec<u8>), FolderError> {
    let at = path.display();
    let head = chunks.next().ok_or_else(|| FolderError::damage(format!("{at}: it is empty")))??;
    wire::decode(&head).map_err(|e| FolderError::passing(format!("{at}: {e}")))
}

async fn blocking<T: Send + 'static>(f: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(f).await.map_err(io::Error::other)?
}
