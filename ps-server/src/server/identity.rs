//! The identity that a server keeps in its data folder.

use super::{ServerError, data_failed};
use crate::{
    control::Identity,
    files::DataFile,
    header,
    raft::{Folder, FolderError},
    replicas::shard_of_folder,
};

/// The file of a data folder that names its server.
pub const IDENTITY: &str = DataFile::Identity.name();

/// The server's identity from an earlier run, if any.
pub(crate) fn remembered(folder: &Folder) -> Result<Option<Identity>, ServerError> {
    let Some(bytes) = folder.read(DataFile::Identity).map_err(data_failed)? else {
        return Ok(None);
    };
    let identity = header::decode(&bytes);
    identity
        .map(Some)
        .map_err(|e| ServerError::Data(format!("{}: {e}", folder.path().join(IDENTITY).display())))
}

/// Keeps the identity in the data folder.
pub(super) fn remember(folder: &Folder, identity: Identity) -> Result<(), FolderError> {
    let bytes = header::encode(&identity).map_err(FolderError::passing)?;
    // A file that exists needs no room.
    match folder.read(DataFile::Identity)?.is_some_and(|there| there[..] == bytes[..]) {
        true => Ok(()),
        false => folder.write(DataFile::Identity, &bytes),
    }
}

/// Files in the data folder of a server without an identity.
pub(super) fn files_without_identity(folder: &Folder) -> Result<Option<String>, ServerError> {
    let names = folder.names().map_err(data_failed)?;
    Ok(names.into_iter().find(|n| n == "control" || n == "log" || shard_of_folder(n).is_some()))
}
