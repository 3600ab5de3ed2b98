//! The certificates of the fleets that this process starts: created automatically, and valid while the
//! fleet's folder exists.
//!
//! The process has one authority, which is never written to disk: after its end no new certificate can
//! be issued. A process that can read the fleet's folder (its owner's) belongs to the fleet.

use crate::failure::Failure;
use paraft_tls::{
    Access, Credentials, Role,
    access::{As, CERTS, INSECURE},
    authority::{Authority, Issued},
};
use paraft_worker::exit;
use parking_lot::Mutex;
use std::{
    fmt::Display,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// The folder of certificates, in a fleet's folder.
pub const FOLDER: &str = "certs";
/// Their validity: as long as a run may last.
const VALIDITY: Duration = Duration::from_secs(366 * 24 * 3600);

static AUTHORITY: Mutex<Option<Authority>> = Mutex::new(None);

fn not_made(e: impl Display) -> Failure {
    Failure::new(exit::IO, format!("certificates for this fleet: {e}"))
}

/// The access of a process with the certificates of this folder.
fn of(certs: &Path, shows: As) -> Result<Access, Failure> {
    Access::of(Some(certs), false, shows)
        .map_err(|e| Failure::new(exit::CONFIG, format!("the certificates of this fleet: {e}")))
}

/// How the processes of a fleet authenticate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Certs {
    /// Plain text.
    Insecure,
    /// With the certificates of this folder.
    Folder(PathBuf),
    /// With this process's own certificates.
    Ours,
}

impl Certs {
    /// Of a fleet that this process starts in `dir`; `job`: the job of its workers' certificates,
    /// `None`: any.
    pub fn of_own(dir: &Path, job: Option<&str>) -> Result<Self, Failure> {
        if matches!(Access::ours(), Access::Insecure) {
            return Ok(Self::Insecure);
        }
        let certs = dir.join(FOLDER);
        let mut authority = AUTHORITY.lock();
        let authority = match &mut *authority {
            Some(authority) => authority,
            none => none.insert(Authority::new("of one process").map_err(not_made)?),
        };
        let admin = make(authority, &certs, job.unwrap_or("*"))?;
        // This process also queries its fleets.
        Access::Certificates(Credentials::of_issued(&admin).map_err(not_made)?).set();
        // Processes of the fleet may have another working folder.
        Ok(Self::Folder(std::path::absolute(&certs).map_err(not_made)?))
    }

    /// The access of a process of the fleet.
    pub fn access(&self, shows: As) -> Result<Access, Failure> {
        match self {
            Self::Insecure => Ok(Access::Insecure),
            Self::Ours => Ok(Access::ours()),
            Self::Folder(dir) => of(dir, shows),
        }
    }

    /// Checks that child processes can receive these certificates.
    pub fn can_be_told() -> Result<(), Failure> {
        match Access::ours() {
            Access::Certificates(ours) if ours.folder().is_none() => {
                Err(Failure::new(exit::USAGE, "--certs - is for one process, and this starts others")
                    .help("give a folder"))
            }
            _ => Ok(()),
        }
    }

    /// Passes the certificates to a process of the fleet: only the path of the folder.
    pub fn tell(&self, command: &mut Command) {
        match self {
            Self::Insecure => _ = command.env(INSECURE, "1").env_remove(CERTS),
            Self::Folder(dir) => _ = command.env(CERTS, dir).env_remove(INSECURE),
            Self::Ours => match Access::ours() {
                Access::Insecure => Self::Insecure.tell(command),
                Access::Certificates(ours) => {
                    let absolute = ours.folder().and_then(|f| std::path::absolute(f).ok());
                    absolute.into_iter().for_each(|dir| Self::Folder(dir).tell(command));
                }
                Access::Closed => {}
            },
        }
    }
}

/// Creates the certificates of a fleet whose processes find them in its folder, unless they exist or
/// plain text is used.
pub fn make_shared(dir: &Path) -> Result<(), Failure> {
    let certs = dir.join(FOLDER);
    if certs.is_dir() || matches!(Access::ours(), Access::Insecure) {
        return Ok(());
    }
    let new = dir.join(format!("{FOLDER}.{}", rand::random::<u64>()));
    let authority = Authority::new("of a shared folder").map_err(not_made)?;
    // The first process creates them; existing ones are never replaced.
    let placed = make(&authority, &new, "*").and_then(|_| match std::fs::rename(&new, &certs) {
        Err(e) if !certs.is_dir() => Err(not_made(e)),
        _ => Ok(()),
    });
    let _ = std::fs::remove_dir_all(&new);
    placed
}

/// Gives this process the certificates of such a fleet's folder. If the folder has none, it keeps those
/// that it was given.
pub fn of_shared(dir: &Path, shows: As) -> Result<(), Failure> {
    let certs = dir.join(FOLDER);
    match Access::ours() {
        Access::Insecure => return Ok(()),
        Access::Certificates(_) if !certs.is_dir() => return Ok(()),
        Access::Certificates(_) | Access::Closed => make_shared(dir)?,
    }
    of(&certs, shows).map(Access::set)
}

/// Issues a certificate for each kind of process; returns the administrator's.
fn make(authority: &Authority, certs: &Path, job: &str) -> Result<Issued, Failure> {
    let issue = |shows: As, role: Role| {
        let issued = authority.issue(shows.name(), &[role], VALIDITY).map_err(not_made)?;
        issued.save(&certs.join(shows.name())).map_err(not_made)?;
        Ok(issued)
    };
    let worker = format!("worker:{job}").parse::<Role>().map_err(not_made)?;
    issue(As::Peer, Role::Peer)?;
    issue(As::Worker, worker)?;
    issue(As::Admin, Role::Admin)
}

/// Makes this process use the certificates of this folder's fleet, unless it was given others.
pub fn take(dir: &Path, shows: As) -> Result<(), Failure> {
    let certs = dir.join(FOLDER);
    if !matches!(Access::ours(), Access::Closed) || !certs.is_dir() {
        return Ok(());
    }
    of(&certs, shows).map(Access::set)
}
