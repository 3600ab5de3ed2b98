//! The folder of a replica: its name, and the metadata in it.

use crate::{
    files::DataFile,
    header,
    raft::{Folder, FolderError},
};
use paraft_common::JobShard;
use serde::{Deserialize, Serialize};

/// The metadata in a replica's folder.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Metadata {
    pub(super) node: u64,
    pub(crate) founding: u64,
    pub(crate) shards: u32,
}

/// Its file.
pub(super) const METADATA: DataFile = DataFile::Replica;

/// The shard whose replica a folder of this name holds.
pub(crate) fn shard_of_folder(name: &str) -> Option<JobShard> {
    let shard: JobShard = name.strip_prefix("shard-")?.replacen('-', ".", 1).parse().ok()?;
    (folder_name(shard) == name).then_some(shard)
}

/// The folder of a shard's replica: `shard-2` of job 0, `shard-7-2` of job 7.
pub(super) fn folder_name(shard: JobShard) -> String {
    format!("shard-{}", shard.name().to_string().replace('.', "-"))
}

/// The replica of a folder; `None`: it never began.
pub(crate) fn read_metadata(folder: &Folder) -> Result<Option<Metadata>, FolderError> {
    let Some(metadata) = folder.read(METADATA)? else { return Ok(None) };
    let at = folder.path().join(METADATA.name());
    header::decode(&metadata).map(Some).map_err(|e| FolderError::passing(format!("{}: {e}", at.display())))
}
