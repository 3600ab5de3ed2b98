//! A replica's files: its name, its vote, its part of the log, its last snapshot.
//!
//! ```text
//! <data>/log/     the log of all groups here (`logs.rs`)
//! <data>/shard-3/
//!   replica     name of this replica, and of its founding
//!   vote        the vote, in two copies
//!   begun       the log has had entries
//!   log-place   where its log lies, and under which key
//!   log/        its log, while the folder is quarantined
//!   snapshot    the state that the log begins after
//!   need        what its job needs of the server's memory (`replicas/needs.rs`)
//! ```

use paraft_changes::ReplicaId;
use paraft_store::files::DataFile;

use super::{
    logs::{Logs, Place},
    records::entry_of,
    snapshot::{SnapshotFile, open_snapshot, snapshot_end, snapshot_head},
    storage::FolderError,
    types::{Entry, LogId, Vote},
    wire,
};
use paraft_store::{
    Disk, Log, PairContents, PairFile, Record, Recovered, SharedLog, read_pair, read_small, write_small,
};
use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Bound on the terms since the last entry: elections raise a term by one. Less than one message may raise it.
const MAX_TERMS_AHEAD: u64 = 1 << 20;

/// A replica's folder. Cheap to clone.
#[derive(Clone)]
pub struct Folder {
    disk: Arc<dyn Disk>,
    path: PathBuf,
    logs: Logs,
}

/// The state of a log on disk when it was opened, besides its entries.
#[derive(Default)]
pub struct StoredLog {
    /// The id of the last entry.
    pub last: Option<LogId>,
    pub purged: Option<LogId>,
    pub vote: Option<Vote>,
    /// The log is known to have had entries.
    pub begun: bool,
}

impl Folder {
    /// A folder, which need not exist yet, without a running server: no server uses the log beside it.
    pub fn new(disk: Arc<dyn Disk>, path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let logs = Logs::new(disk, path.parent().unwrap_or(Path::new("")));
        Self::within(&logs, path)
    }

    /// A folder, which need not exist yet, of a server with this log.
    pub fn within(logs: &Logs, path: impl Into<PathBuf>) -> Self {
        Self { disk: logs.disk().clone(), path: path.into(), logs: logs.clone() }
    }

    /// The server's log.
    #[cfg(test)]
    pub(super) fn logs(&self) -> &Logs {
        &self.logs
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads a small file; the error names it.
    pub fn read(&self, file: DataFile) -> Result<Option<Vec<u8>>, FolderError> {
        Ok(read_small(&*self.disk, &self.path.join(file.name()))?)
    }

    /// Replaces a small file, durably.
    pub fn write(&self, file: DataFile, bytes: &[u8]) -> Result<(), FolderError> {
        let path = self.path.join(file.name());
        self.disk.create_dir_all(&self.path).map_err(FolderError::at(&path))?;
        write_small(&*self.disk, &path, bytes).map_err(FolderError::at(&path))
    }

    /// The vote's bytes.
    fn vote(&self) -> Result<Option<PairContents>, FolderError> {
        Ok(read_pair(&*self.disk, &self.path.join(DataFile::Vote.name()))?)
    }

    /// Replaces the vote's file, durably.
    pub(super) fn create_vote(&self, bytes: &[u8]) -> io::Result<PairFile> {
        self.disk.create_dir_all(&self.path)?;
        PairFile::create(&*self.disk, &self.path.join(DataFile::Vote.name()), bytes)
    }

    /// Renames the folder within its parent; its content does not change.
    pub fn rename(&self, name: &str) -> Result<PathBuf, FolderError> {
        let to = self.path.with_file_name(name);
        self.disk.rename(&self.path, &to).map_err(FolderError::at(&self.path))?;
        let above = self.path.parent().unwrap_or(Path::new("."));
        self.disk.sync_dir(above).map_err(FolderError::at(above))?;
        Ok(to)
    }

    /// Names of the files in it, unordered; empty if there is no such folder.
    pub fn names(&self) -> Result<Vec<String>, FolderError> {
        match self.disk.list(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            listed => listed.map_err(FolderError::at(&self.path)),
        }
    }

    /// Reads and checks everything: the vote, the snapshot, and every entry of the log. Returns the last log index,
    /// or 0. Changes nothing. A missing or damaged vote is no error: it contains nothing that was acknowledged.
    pub fn check(&self) -> Result<u64, FolderError> {
        Ok(self.read_all()?.1.map_or(0, |l| l.index))
    }

    /// As [`Self::check`], for a folder that will be used again. If its vote is gone, it votes for itself in a term
    /// that no election has reached, so that it cannot vote twice in any earlier term. Returns whether the vote was
    /// gone.
    pub fn check_and_vote(&self, me: ReplicaId) -> Result<bool, FolderError> {
        let (vote, last) = self.read_all()?;
        let Some(last) = last.filter(|l| vote.is_none() && l.index > 0) else { return Ok(false) };
        let vote = Vote::new(last.committed_leader_id().term + MAX_TERMS_AHEAD, me.0);
        let vote = wire::encode(&vote).map_err(FolderError::passing)?;
        self.create_vote(&vote).map_err(FolderError::at(&self.path))?;
        Ok(true)
    }

    fn read_all(&self) -> Result<(Option<Vote>, Option<LogId>), FolderError> {
        let vote: Option<Vote> = match self.vote() {
            Err(e) if e.is_damage() => None,
            vote => {
                let decoded = vote?.map(|v| wire::decode(&v.bytes)).transpose();
                decoded.map_err(|e| FolderError::passing(format!("{}: {e}", self.path.display())))?
            }
        };
        let path = self.path.join(DataFile::Snapshot.name());
        let mut last: Option<LogId> = None;
        if let Some(mut chunks) = open_snapshot(&*self.disk, &path)? {
            let (meta, _) = snapshot_head(&mut chunks, &path)?;
            last = meta.last_log_id;
            chunks.try_for_each(|c| c.map(drop))?;
        }
        self.inspect(&mut |entry| last = last.max(Some(entry.log_id)))?;
        Ok((vote, last))
    }

    /// Opens the log and passes every entry to `each`, in order. On an error the caller must forget these entries.
    pub(super) fn open_log(&self, each: &mut dyn FnMut(Entry)) -> Result<(Log, StoredLog), FolderError> {
        let path = &self.path;
        // Its checksums are correct: an entry that cannot be decoded was written by another build.
        let unknown = |e: wire::WireError| FolderError::passing(format!("{}: {e}", path.display()));
        let damage = |e: &dyn fmt::Display| FolderError::damage(format!("{}: {e}", path.display()));
        let (mut last, mut unreadable) = (None, None);
        let mut record = |r| match entry_of(r) {
            Ok(entry) => {
                last = Some(entry.log_id);
                each(entry);
            }
            Err(e) => _ = unreadable.get_or_insert(e),
        };
        let (log, found) = self.open_part(&self.logs.get()?, &mut record)?;
        if let Some(e) = unreadable {
            return Err(unknown(e));
        }
        let purged = found.purged.map(|(_, tag)| wire::decode::<LogId>(&tag)).transpose();
        let purged = purged.map_err(unknown)?;
        let found = self.vote()?;
        // The process ended while it wrote a vote, which may not be durable.
        if let Some(PairContents { bytes, agree: false }) = &found {
            self.create_vote(bytes).map_err(FolderError::at(path))?;
        }
        let vote = found.map(|v| wire::decode(&v.bytes)).transpose().map_err(unknown)?;
        // The founding entry is written before any vote; every later entry follows from a vote.
        let promised = purged.is_some() || last.is_some_and(|l| l.index > 0);
        if vote.is_none() && promised {
            let vote = self.path.join(DataFile::Vote.name());
            return Err(FolderError::damage(format!(
                "{}: it is gone, though the log has held entries: a replica that forgot its vote must not vote",
                vote.display()
            )));
        }
        if let Some(purged) = &purged {
            self.holds(purged)?;
        }
        let (begun, empty) = (self.read(DataFile::Begun)?.is_some(), last.is_none() && purged.is_none());
        if begun && empty {
            return Err(damage(&LOST_LOG));
        }
        // The process ended between the first entry and the marker. From here on the entry may be acknowledged.
        if !begun && !empty {
            self.write(DataFile::Begun, &[])?;
        }
        let begun = !empty;
        Ok((log, StoredLog { last, purged, vote, begun }))
    }

    fn place(&self) -> Result<Option<Place>, FolderError> {
        let unknown = |e: wire::WireError| {
            FolderError::passing(format!("{}: {e}", self.path.join(DataFile::LogPlace.name()).display()))
        };
        self.read(DataFile::LogPlace)?.map(|bytes| wire::decode(&bytes).map_err(unknown)).transpose()
    }

    fn write_place(&self, place: Place) -> Result<(), FolderError> {
        self.write(DataFile::LogPlace, &wire::encode(&place).map_err(FolderError::passing)?)
    }

    /// The path of a log of its own.
    fn own_log(&self) -> PathBuf {
        self.path.join("log")
    }

    /// This replica's part of the shared log; a log of its own is imported first. At any moment the file names the
    /// place of the complete log.
    fn open_part(
        &self,
        shared: &SharedLog,
        each: &mut dyn FnMut(Record),
    ) -> Result<(Log, Recovered), FolderError> {
        let (place, own) = (self.place()?, self.own_log());
        let new = rand::random::<u64>() >> 1;
        match place {
            Some(Place { own: None, shared: Some(key) }) => {
                self.delete_own_log()?;
                Ok(shared.group(key, each)?)
            }
            None => {
                self.write_place(Place { own: None, shared: Some(new) })?;
                Ok((shared.begin(new)?, Recovered::default()))
            }
            Some(Place { own: there, shared: left }) => {
                let there = there.unwrap_or_default();
                if let Some(left) = left {
                    shared.remove(left).map_err(FolderError::at(self.logs.path()))?;
                }
                self.write_place(Place { own: Some(there), shared: Some(new) })?;
                shared.import(new, &own, there)?;
                self.write_place(Place { own: None, shared: Some(new) })?;
                self.delete_own_log()?;
                tracing::info!(path = %self.path.display(), "the replica's log was imported into the server's log");
                Ok(shared.group(new, each)?)
            }
        }
    }

    /// Deletes the log of its own, which is obsolete.
    fn delete_own_log(&self) -> Result<(), FolderError> {
        let own = self.own_log();
        Log::clear(&*self.disk, &own)?;
        // An empty log is harmless.
        let _ = self.disk.remove_dir_all(&own);
        Ok(())
    }

    /// Copies the log into the folder, which then has all of it, damaged or not.
    pub(super) fn export_log(&self) -> Result<(), FolderError> {
        match self.place() {
            Ok(Some(Place { own: None, shared: Some(key) })) => {
                self.logs.get()?.keep(key, &self.own_log())?;
                self.write_place(Place { own: Some(key), shared: Some(key) })
            }
            Ok(_) => Ok(()),
            // A damaged log does not tell which part is this replica's.
            Err(e) if e.is_damage() => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Releases from the shared log what this folder has completely.
    pub fn release_log(&self) -> Result<(), FolderError> {
        match self.place() {
            Ok(Some(Place { own: Some(_), shared: Some(key) })) => {
                let shared = self.logs.get()?;
                match shared.has(key) {
                    true => shared.remove(key).map_err(FolderError::at(self.logs.path())),
                    false => Ok(()),
                }
            }
            Ok(_) => Ok(()),
            Err(e) if e.is_damage() => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Quarantines the folder: renames it within its parent, with all of its log in it. Waits for the disk until
    /// the log is copied.
    pub fn quarantine(&self, name: &str) -> Result<PathBuf, FolderError> {
        self.export_log()?;
        let to = self.rename(name)?;
        if let Err(e) = Self::within(&self.logs, &to).release_log() {
            tracing::warn!(path = %to.display(), error = %e, "the server's next start releases the replica's log");
        }
        Ok(to)
    }

    /// Fails unless the snapshot contains what the log has purged.
    fn holds(&self, purged: &LogId) -> Result<(), FolderError> {
        let path = self.path.join(DataFile::Snapshot.name());
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

    /// The last entry in the snapshot; `None` if there is no snapshot. Does not read its bulk.
    pub(super) fn snapshot_end(&self) -> Result<Option<LogId>, FolderError> {
        snapshot_end(self.disk.clone(), &self.path.join(DataFile::Snapshot.name()))
    }

    /// Reads the entries of the log that a replica left here, in order, without changing it. On an error the caller
    /// must ignore what `each` got.
    pub(super) fn inspect(&self, each: &mut dyn FnMut(Entry)) -> Result<(), FolderError> {
        let at = |e: wire::WireError| FolderError::passing(format!("{}: {e}", self.path.display()));
        let (mut unreadable, mut empty) = (None, true);
        let mut record = |r| match entry_of(r) {
            Ok(entry) => {
                empty = false;
                each(entry);
            }
            Err(e) => _ = unreadable.get_or_insert(e),
        };
        let (place, own) = (self.place()?, self.own_log());
        let found = match place {
            Some(Place { own: None, shared: Some(key) }) => {
                Log::inspect(&*self.disk, self.logs.path(), key, &mut record)?
            }
            Some(Place { own: there, .. }) => {
                Log::inspect(&*self.disk, &own, there.unwrap_or_default(), &mut record)?
            }
            None => Recovered::default(),
        };
        if let Some((_, tag)) = &found.purged {
            self.holds(&wire::decode(tag).map_err(at)?)?;
        }
        if let Some(e) = unreadable {
            return Err(at(e));
        }
        let lost = empty && found.purged.is_none() && self.read(DataFile::Begun)?.is_some();
        match lost {
            true => Err(FolderError::damage(format!("{}: {LOST_LOG}", self.path.display()))),
            false => Ok(()),
        }
    }

    /// The snapshot's file.
    pub(super) fn snapshot(&self) -> SnapshotFile {
        SnapshotFile::new(self.disk.clone(), &self.path)
    }

    /// Deletes the replica, its folder and its part of the log. Waits for the disk.
    pub fn remove(&self) -> io::Result<()> {
        // First the part that could not be found without the folder.
        if let Some(key) = self.place().map_err(io::Error::other)?.and_then(|p| p.shared) {
            self.logs.get()?.remove(key)?;
        }
        match self.disk.remove_dir_all(&self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

/// For a log that had entries ([`DataFile::Begun`]) and is empty: it was lost, and its replica must not vote as if
/// it had never promised anything.
const LOST_LOG: &str = "its log is gone, though it has held entries: a lost log must not vote";
