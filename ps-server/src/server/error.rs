//! Why a server does not start, or has stopped.

use crate::raft::FolderError;

/// Why a server does not start or run.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The options contradict each other.
    #[error("{0}")]
    Options(String),
    /// The control group's replica did not start.
    #[error("the control group's replica did not start: {0}")]
    Control(String),
    /// The data folder cannot be used.
    #[error("{0}")]
    Data(String),
    /// The data folder's disk fails at present.
    #[error("{0}. Nothing was changed; start it again when its disk serves")]
    Storage(String),
    /// Its settings differ from its fleet's.
    #[error("{0}")]
    Settings(String),
    /// No fleet has admitted it.
    #[error("no fleet took this server in: {0}")]
    Join(String),
    /// The network failed.
    #[error("the server stopped: {0}")]
    Transport(#[from] tonic::transport::Error),
    /// A socket failed.
    #[error("{0}: {1}")]
    Io(String, std::io::Error),
}

/// A temporary failure is worth another start; damage is not.
pub(crate) fn data_failed(e: FolderError) -> ServerError {
    match e.is_damage() {
        true => ServerError::Data(e.into()),
        false => ServerError::Storage(e.into()),
    }
}

/// Why the replica did not start; for damage, with the remedy.
pub(super) fn control_failed(e: FolderError) -> ServerError {
    match e.is_damage() {
        false => ServerError::Storage(format!("the control group's replica did not start: {e}")),
        true => ServerError::Control(format!(
            "{e}. Nothing was changed. Put a copy of the file back; or, while a majority of the other servers is well, let \
             this server join again (--join) with another --data folder, and `paraft forget` it as it was"
        )),
    }
}
