//! Starts the replicas that earlier incarnations of this server left on disk.

use super::{
    Replicas, Stopped, blocking,
    folder::{METADATA, read_metadata, shard_of_folder},
    quarantine::{quarantine_folder, shard_of_aside},
};
use crate::raft::{Folder, FolderError, ReplicaId};
use paraft_common::JobShard;
use std::collections::BTreeMap;

impl Replicas {
    /// Starts the replicas that earlier incarnations of this server left on disk, in the order of the shards:
    /// if there is room for some only, for the same ones each time. A damaged folder is quarantined: the
    /// other replicas have its state, and it will be replaced. A replica that cannot be read at present, or
    /// finds no room, waits.
    pub async fn reopen(&self) -> Result<(), FolderError> {
        let at = FolderError::at(&self.options.data);
        let (mut found, mut aside) = (BTreeMap::new(), Vec::new());
        let listed = std::fs::read_dir(&self.options.data);
        for folder in listed.and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(at)? {
            let path = folder.path();
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            aside.extend(shard_of_aside(name).map(|_| self.folder_at(&path)));
            found.extend(shard_of_folder(name).map(|shard| (shard, path)));
        }
        for folder in aside {
            // An incarnation of this server may have ended before.
            if let Err(e) = blocking(move || folder.release_log()).await {
                tracing::warn!(error = %e, "the log keeps records of a folder that was quarantined");
            }
        }
        for (shard, path) in found {
            let folder = self.folder_at(&path);
            let Err(e) = self.reopen_one(shard, &folder).await else { continue };
            let put = if e.is_damage() { quarantine_folder(&folder).await } else { Err(e.clone()) };
            match put {
                Ok(()) => {
                    tracing::error!(%shard, error = %e, "a replica on disk is damaged; it will be replaced")
                }
                Err(waits) => {
                    tracing::error!(%shard, error = %waits, "a replica on disk waits; it is tried again");
                    let metadata =
                        read_metadata(&folder).ok().flatten().map(|c| (ReplicaId(c.node), c.founding));
                    self.waiting.write().insert(shard, Stopped::new(metadata, waits.to_string()));
                }
            }
        }
        self.read_quarantine();
        Ok(())
    }

    /// Starts the replica of one folder. `false`: there is nothing to start.
    pub(super) async fn reopen_one(&self, shard: JobShard, folder: &Folder) -> Result<bool, FolderError> {
        let Some(metadata) = read_metadata(folder)? else {
            // Without metadata the folder is empty, unless the metadata was lost.
            return match folder.names()?.iter().any(|n| !n.ends_with(".tmp")) {
                false => Ok(false),
                true => Err(FolderError::damage(format!(
                    "{}: the file `{}`, which says whose it is, is gone",
                    folder.path().display(),
                    METADATA.name()
                ))),
            };
        };
        let node = ReplicaId(metadata.node);
        if node.server() != self.options.server {
            return Err(FolderError::passing(format!(
                "{} belongs to {}",
                folder.path().display(),
                node.server()
            )));
        }
        // Reserve room before reading: the log alone may need more than there is.
        let aside =
            self.room_for_known(shard, metadata.founding, Some(folder)).map_err(FolderError::passing)?;
        self.start(shard, metadata.shards, node, metadata.founding, Some(folder.clone()), aside).await?;
        tracing::info!(%shard, replica = %node, "found on disk");
        Ok(true)
    }
}
