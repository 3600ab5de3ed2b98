//! Shards rebuilt from servers' data folders.

use crate::{
    raft::{self, Folder, ReplayResult},
    replicas,
    replicated::Hosted,
    room::Room,
    server,
    shard::Shard,
};
use paraft_common::JobShard;
use paraft_store::Disk;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// One replica, replayed.
pub struct Replica {
    /// Its folder.
    pub path: PathBuf,
    /// The founding of its state.
    pub founding: u64,
    /// Number of shards of the model.
    pub shards: u32,
    /// How it went.
    pub replayed: ReplayResult,
    /// The state at its end.
    pub shard: Arc<Shard>,
}

/// The replicas in a server's data folder: the shards and their folders. Empty if none is on disk.
pub fn find(data: &Path) -> Result<Vec<(JobShard, PathBuf)>, String> {
    let folders = std::fs::read_dir(data).map_err(|e| format!("{}: {e}", data.display()))?;
    let mut found: Vec<_> = folders
        .flatten()
        .filter_map(|f| Some((replicas::shard_of_folder(f.file_name().to_str()?)?, f.path())))
        .collect();
    found.sort();
    Ok(found)
}

/// The fleet of the server with this data folder; `None` if it was not admitted, or this is not a server's
/// folder. `Err`: names the file that cannot be read.
pub fn fleet_of(disk: Arc<dyn Disk>, data: &Path) -> Result<Option<u64>, String> {
    let identity = server::remembered(&Folder::new(disk, data)).map_err(|e| e.to_string())?;
    Ok(identity.map(|i| i.fleet).filter(|fleet| *fleet != 0))
}

/// Replays one replica up to and including the log entry `upto`; changes nothing on disk. Refused while a
/// server runs on the folder, since that holds its lock.
pub fn replay(disk: Arc<dyn Disk>, id: JobShard, path: &Path, upto: u64) -> Result<Replica, String> {
    let folder = Folder::new(disk, path);
    let metadata = replicas::read_metadata(&folder)?
        .ok_or_else(|| format!("{}: it holds no replica (the file `replica` is missing)", path.display()))?;
    let shard = Arc::new(Shard::within(Room::unlimited(), id, metadata.shards));
    let replayed = raft::replay(&folder, &Hosted(shard.clone()), upto)?;
    Ok(Replica {
        path: path.to_path_buf(),
        founding: metadata.founding,
        shards: metadata.shards,
        replayed,
        shard,
    })
}
