//! Closed fleets: one authority for the process, whose own certificate is a server's and an administrator's.

use anyhow::{Result, anyhow};
use paraft_tls::{Access, Credentials, Role, authority::Authority};
use std::{path::PathBuf, sync::OnceLock, time::Duration};
use tempfile::TempDir;

/// The authority, and its folder.
pub struct Closed {
    folder: TempDir,
    authority: Authority,
}

const DAY: Duration = Duration::from_secs(24 * 3600);

/// The process's authority; from the first call on the process shows its certificate.
pub fn closed() -> &'static Closed {
    static CLOSED: OnceLock<Closed> = OnceLock::new();
    CLOSED.get_or_init(|| {
        let make = || {
            let (folder, authority) = (tempfile::tempdir()?, Authority::new("tests")?);
            let closed = Closed { folder, authority };
            closed.shows(&["peer", "admin"], DAY)?.set();
            closed.issue("peer", &["peer"], DAY)?;
            anyhow::Ok(closed)
        };
        make().unwrap_or_else(|e| panic!("no certificates: {e}"))
    })
}

impl Closed {
    /// The folder of certificates of this name.
    pub fn folder(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Issues a certificate into the folder of this name.
    pub fn issue(&self, name: &str, roles: &[&str], lasting: Duration) -> Result<PathBuf> {
        let folder = self.folder(name);
        self.authority.issue(name, &parsed(roles)?, lasting)?.save(&folder)?;
        Ok(folder)
    }

    /// The access of a process with such a certificate.
    pub fn shows(&self, roles: &[&str], lasting: Duration) -> Result<Access> {
        shows(&self.authority, roles, lasting)
    }
}

/// The access of a process with a certificate of this authority.
pub fn shows(authority: &Authority, roles: &[&str], lasting: Duration) -> Result<Access> {
    let issued = authority.issue("test", &parsed(roles)?, lasting)?;
    Ok(Access::Certificates(Credentials::of_issued(&issued)?))
}

fn parsed(roles: &[&str]) -> Result<Vec<Role>> {
    roles.iter().map(|r| r.parse().map_err(|e| anyhow!("{e}"))).collect()
}
