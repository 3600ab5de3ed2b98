//! Where an engine's processes find their certificates, and the flags that say so: the one place that knows them.
//!
//! What it is not: the certificates. A folder has `ca.crt`, `tls.crt` and `tls.key`; who makes them, and what they mean, is
//! elsewhere.

use crate::Role;

/// One set of certificates for each role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certs {
    /// Of servers: a folder on each host, or a Secret's name where the engine has Secrets.
    pub server: String,
    /// Of workers, likewise.
    pub worker: String,
}

/// The files of a folder of certificates; the keys of a Secret of type kubernetes.io/tls.
pub(crate) const FILES: [&str; 3] = ["ca.crt", "tls.crt", "tls.key"];

impl Certs {
    /// Those of a role.
    pub fn of(&self, role: Role) -> &str {
        match role {
            Role::Server => &self.server,
            Role::Worker => &self.worker,
        }
    }
}

/// The flags of a process that finds its certificates in this folder.
pub(crate) fn credentials(certs: Option<&Certs>, folder: &str) -> Vec<String> {
    match certs {
        Some(_) => vec!["--certs".into(), folder.into()],
        None => Vec::new(),
    }
}
