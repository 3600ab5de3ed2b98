//! Quarantined folders of replicas: kept under a number, never overwritten, and never deleted by a server.
//!
//! ```text
//! shard-3           the replica that runs here, or waits for its storage
//! shard-3.aside-1   an earlier one, unchanged, with its part of the server's log
//! shard-3.aside-2
//! ```

use super::{
    Replicas, blocking,
    folder::{Metadata, folder_name, read_metadata, shard_of_folder},
};
use crate::raft::{Folder, FolderError, Logs, ReplicaId};
use paraft_common::JobShard;
use paraft_store::{Disk, RealDisk, StoreError};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

/// A quarantined folder of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aside {
    /// Its name in the server's data folder.
    pub name: String,
    /// The shard.
    pub shard: JobShard,
    /// The replica, if its folder names it.
    pub node: Option<ReplicaId>,
    /// The founding of the state, if its folder names it.
    pub founding: Option<u64>,
    /// The last log index in it; or why it cannot be read.
    pub last: Result<u64, String>,
}

/// The shard of a quarantined folder of this name.
pub fn shard_of_aside(name: &str) -> Option<JobShard> {
    let (shard, rest) = name.split_once('.')?;
    (!rest.is_empty()).then(|| shard_of_folder(shard)).flatten()
}

/// Quarantines a replica's folder under the next free number; returns the new name.
pub fn put_aside(folder: &Folder) -> Result<String, FolderError> {
    let path = folder.path();
    let own = path.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_string();
    let above = path.parent().unwrap_or(Path::new("."));
    let taken = RealDisk
        .list(above)
        .map_err(|e| FolderError::passing(format!("{}: {}", above.display(), paraft_store::said(&e))))?;
    let number =
        |name: &String| -> Option<u64> { name.strip_prefix(&own)?.strip_prefix(".aside-")?.parse().ok() };
    let next = taken.iter().filter_map(number).max().unwrap_or(0) + 1;
    let name = format!("{own}.aside-{next}");
    folder.quarantine(&name)?;
    tracing::warn!(path = %path.display(), aside = %name, "quarantined; `paraft data list` shows it");
    Ok(name)
}

/// Reads and checks the quarantined folders in a server's data folder: that takes as long as reading all of
/// them.
pub fn asides(disk: &Arc<dyn Disk>, data: &Path) -> Result<Vec<Aside>, String> {
    let mut names = match RealDisk.list(data) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        names => names.map_err(|e| format!("{}: {}", data.display(), paraft_store::said(&e)))?,
    };
    names.sort();
    Ok(names.iter().filter_map(|name| look(disk, data.join(name), name)).collect())
}

/// The metadata of a folder.
fn metadata_of(folder: &Folder) -> Result<Metadata, String> {
    read_metadata(folder)?.ok_or_else(|| "the file `replica`, which says whose it is, is missing".into())
}

fn look(disk: &Arc<dyn Disk>, path: PathBuf, name: &str) -> Option<Aside> {
    let shard = shard_of_aside(name)?;
    let folder = Folder::new(disk.clone(), path);
    let metadata = metadata_of(&folder);
    let (node, founding) = metadata.as_ref().ok().map(|c| (ReplicaId(c.node), c.founding)).unzip();
    let last = metadata.and_then(|_| folder.check().map_err(String::from));
    Some(Aside { name: name.into(), shard, node, founding, last })
}

/// Makes a quarantined folder the shard's own again. A folder of that name is quarantined itself. The server
/// must not run.
pub fn restore(disk: &Arc<dyn Disk>, data: &Path, name: &str) -> Result<(), String> {
    let shard = shard_of_aside(name)
        .ok_or_else(|| format!("`{name}` is no name of a folder that was quarantined"))?;
    let own = folder_name(shard);
    let logs = Logs::new(disk.clone(), data);
    let aside = Folder::within(&logs, data.join(name));
    if !aside.path().is_dir() {
        return Err(format!("{}: there is no such folder", aside.path().display()));
    }
    stopped(&logs, data)?;
    if aside.check_and_vote(ReplicaId(metadata_of(&aside)?.node))? {
        tracing::info!(name, "its vote is gone: it votes for itself in a term far ahead");
    }
    let now = Folder::within(&logs, data.join(&own));
    if now.path().exists() {
        put_aside(&now)?;
    }
    aside.rename(&own)?;
    logs.close();
    Ok(())
}

/// Deletes a quarantined folder for good: only a person may order that, never a server.
pub fn delete(disk: &Arc<dyn Disk>, data: &Path, name: &str) -> Result<(), String> {
    let path = data.join(name);
    if shard_of_aside(name).is_none() || !path.is_dir() {
        return Err(format!("{}: there is no such folder that was quarantined", path.display()));
    }
    disk.remove_dir_all(&path).map_err(|e| format!("{}: {}", path.display(), paraft_store::said(&e)))
}

/// Fails while a server runs on this data folder; none can start until the log is closed.
fn stopped(logs: &Logs, data: &Path) -> Result<(), String> {
    match logs.get() {
        Ok(_) => Ok(()),
        Err(StoreError::Locked { .. }) => Err(format!("a server runs on {}: stop it first", data.display())),
        Err(e) => Err(e.to_string()),
    }
}

/// Quarantines a folder, after copying its log into it.
pub(super) async fn quarantine_folder(folder: &Folder) -> Result<(), FolderError> {
    let folder = folder.clone();
    blocking(move || put_aside(&folder).map(drop)).await
}

impl Replicas {
    /// The quarantined folders; `None` while they are being read.
    pub fn asides(&self) -> Option<Vec<Aside>> {
        (self.looking.load(Relaxed) == 0).then(|| self.aside.read().clone())
    }

    /// Reads the quarantined folders, on a thread of its own: they may be large.
    pub(super) fn read_quarantine(&self) {
        let (disk, data) = (self.options.logs.disk().clone(), self.options.data.clone());
        let (aside, looking) = (self.aside.clone(), self.looking.clone());
        looking.fetch_add(1, Relaxed);
        tokio::task::spawn_blocking(move || {
            let found = loop {
                match asides(&disk, &data) {
                    Ok(found) => break found,
                    Err(e) => tracing::warn!(error = %e, "quarantined folders cannot be listed"),
                }
                std::thread::sleep(Duration::from_secs(1));
                if Arc::strong_count(&looking) == 1 {
                    return; // the server has ended
                }
            };
            *aside.write() = found;
            looking.fetch_sub(1, Relaxed);
        });
    }
}
