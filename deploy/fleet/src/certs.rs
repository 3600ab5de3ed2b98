//! The certificates of fleets that this process starts: made without a question, for as long as the fleet's folder is there.
//!
//! One authority for the process, which nobody writes down: when the process has ended, nobody can be let in who was not. Whoever
//! reads the fleet's folder, which is its owner, is of it.

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

/// Their folder in a fleet's.
pub const FOLDER: &str = "certs";
/// They last as long as a run may.
const LASTING: Duration = Duration::from_secs(366 * 24 * 3600);

static AUTHORITY: Mutex<Option<Authority>> = Mutex::new(None);

fn not_made(e: impl Display) -> Failure {
    Failure::new(exit::IO, format!("certificates for this fleet: {e}"))
}

/// As what somebody comes by connections who takes those of this folder.
fn of(certs: &Path, shows: As) -> Result<Access, Failure> {
    Access::of(Some(certs), false, shows)
        .map_err(|e| Failure::new(exit::CONFIG, format!("the certificates of this fleet: {e}")))
}

/// How the processes of a fleet come by connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Certs {
    /// In plain text.
    Insecure,
    /// With those of this folder.
    Folder(PathBuf),
    /// As this process was told.
    Ours,
}

impl Certs {
    /// Of a fleet that this process starts, in its folder; `job`: whom its workers are for, `None`: for any.
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
        // This process asks its fleets.
        Access::Certificates(Credentials::of_issued(&admin).map_err(not_made)?).set();
        // Processes of the fleet may have another folder to work in.
        Ok(Self::Folder(std::path::absolute(&certs).map_err(not_made)?))
    }

    /// How a process of the fleet comes by connections.
    pub fn access(&self, shows: As) -> Result<Access, Failure> {
        match self {
            Self::Insecure => Ok(Access::Insecure),
            Self::Ours => Ok(Access::ours()),
            Self::Folder(dir) => of(dir, shows),
        }
    }

    /// Whether processes that this one starts can be told of its certificates.
    pub fn can_be_told() -> Result<(), Failure> {
        match Access::ours() {
            Access::Certificates(ours) if ours.folder().is_none() => {
                Err(Failure::new(exit::USAGE, "--certs - is for one process, and this starts others")
                    .help("give a folder"))
            }
            _ => Ok(()),
        }
    }

    /// What a process of the fleet is told. A folder's path and nothing of what it has.
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

/// Makes the certificates of a fleet whose processes find them in its folder, unless they are there, or plain text is spoken.
pub fn make_shared(dir: &Path) -> Result<(), Failure> {
    let certs = dir.join(FOLDER);
    if certs.is_dir() || matches!(Access::ours(), Access::Insecure) {
        return Ok(());
    }
    let new = dir.join(format!("{FOLDER}.{}", rand::random::<u64>()));
    let authority = Authority::new("of a shared folder").map_err(not_made)?;
    // Whoever is first has made them; what is there is never replaced.
    let placed = make(&authority, &new, "*").and_then(|_| match std::fs::rename(&new, &certs) {
        Err(e) if !certs.is_dir() => Err(not_made(e)),
        _ => Ok(()),
    });
    let _ = std::fs::remove_dir_all(&new);
    placed
}

/// Of such a fleet this process is one: it shows itself as that. One that was told of other certificates, where the folder has none,
/// shows those.
pub fn of_shared(dir: &Path, shows: As) -> Result<(), Failure> {
    let certs = dir.join(FOLDER);
    match Access::ours() {
        Access::Insecure => return Ok(()),
        Access::Certificates(_) if !certs.is_dir() => return Ok(()),
        Access::Certificates(_) | Access::Closed => make_shared(dir)?,
    }
    of(&certs, shows).map(Access::set)
}

/// A certificate for each kind of process; that of whoever administers.
fn make(authority: &Authority, certs: &Path, job: &str) -> Result<Issued, Failure> {
    let issue = |shows: As, role: Role| {
        let issued = authority.issue(shows.name(), &[role], LASTING).map_err(not_made)?;
        issued.save(&certs.join(shows.name())).map_err(not_made)?;
        Ok(issued)
    };
    let worker = format!("worker:{job}").parse::<Role>().map_err(not_made)?;
    issue(As::Peer, Role::Peer)?;
    issue(As::Worker, worker)?;
    issue(As::Admin, Role::Admin)
}

/// From now on this process asks the fleet of this folder as one of its own, where it was told nothing else.
pub fn take(dir: &Path) -> Result<(), Failure> {
    let certs = dir.join(FOLDER);
    if !matches!(Access::ours(), Access::Closed) || !certs.is_dir() {
        return Ok(());
    }
    of(&certs, As::Admin).map(Access::set)
}
