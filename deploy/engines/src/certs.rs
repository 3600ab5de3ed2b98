//! How the processes on an engine authenticate. This module alone knows the flags for it.
//!
//! A folder of certificates contains `ca.crt`, `tls.crt` and `tls.key`; other modules create and verify
//! them.

use crate::place::Role;

/// How processes authenticate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Certs {
    /// With certificates in the run's folder, which all share.
    #[default]
    InRun,
    /// With one certificate per role.
    Each {
        /// For servers: a folder, or a Secret's name if the engine has Secrets.
        server: String,
        /// For workers: likewise a folder or a Secret's name.
        worker: String,
    },
    /// Not at all: plain text.
    Insecure,
}

/// The files in a folder of certificates, and the keys of a Secret of type kubernetes.io/tls.
pub(crate) const FILES: [&str; 3] = ["ca.crt", "tls.crt", "tls.key"];

impl Certs {
    /// The folder or Secret of a role, if it has its own.
    pub fn of(&self, role: Role) -> Option<&str> {
        match (self, role) {
            (Self::Each { server, .. }, Role::Server) => Some(server),
            (Self::Each { worker, .. }, Role::Worker) => Some(worker),
            (Self::InRun | Self::Insecure, _) => None,
        }
    }

    /// The flags of a process with its certificates in this folder.
    pub(crate) fn words(&self, folder: &str) -> Vec<String> {
        match self {
            Self::InRun => Vec::new(),
            Self::Each { .. } => vec!["--certs".into(), folder.into()],
            Self::Insecure => vec!["--insecure".into()],
        }
    }
}
