//! How the processes on an engine come by connections: the one place that knows the flags that say so.
//!
//! What it is not: the certificates. A folder has `ca.crt`, `tls.crt` and `tls.key`; who makes them, and what they mean, is
//! elsewhere.

use crate::Role;

/// By what they know each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Certs {
    /// By certificates that each finds in the run's folder, which they share.
    #[default]
    InRun,
    /// By one for each role, which it is told of.
    Each {
        /// Of servers: a folder, or a Secret's name where the engine has Secrets.
        server: String,
        /// Of workers, likewise.
        worker: String,
    },
    /// By nothing: they speak plain text.
    Insecure,
}

/// The files of a folder of certificates; the keys of a Secret of type kubernetes.io/tls.
pub(crate) const FILES: [&str; 3] = ["ca.crt", "tls.crt", "tls.key"];

impl Certs {
    /// That of a role, where it is told of one.
    pub fn of(&self, role: Role) -> Option<&str> {
        match (self, role) {
            (Self::Each { server, .. }, Role::Server) => Some(server),
            (Self::Each { worker, .. }, Role::Worker) => Some(worker),
            (Self::InRun | Self::Insecure, _) => None,
        }
    }

    /// The flags of a process that finds its own in this folder.
    pub(crate) fn words(&self, folder: &str) -> Vec<String> {
        match self {
            Self::InRun => Vec::new(),
            Self::Each { .. } => vec!["--certs".into(), folder.into()],
            Self::Insecure => vec!["--insecure".into()],
        }
    }
}
