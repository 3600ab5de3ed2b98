//! A server's data folder belongs to one process at a time, whatever an engine believes of the one before.

use crate::failure::Failure;
use paraft_worker::exit;
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Beside the server's own files. The lock goes with the process; over NFS, some time after its host.
const LOCK_FILE: &str = "role.lock";

/// Held until dropped.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Waits for the folder for so long: who had it may be ending.
    pub fn of(data: &Path, timeout: Duration) -> Result<Self, Failure> {
        let path = data.join(LOCK_FILE);
        let io = |e: std::io::Error| Failure::new(exit::IO, format!("{}: {e}", path.display()));
        fs::create_dir_all(data).map_err(io)?;
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(io)?;
        let until = Instant::now() + timeout;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    thread::sleep(Duration::from_millis(100))
                }
                Err(TryLockError::WouldBlock) => {
                    let why = format!("{} belongs to a process that still runs", data.display());
                    return Err(Failure::new(exit::UNAVAILABLE, why)
                        .help("end that server (its host may be cut off from its engine), or give this one another --data"));
                }
                Err(TryLockError::Error(e)) => return Err(io(e)),
            }
        }
    }
}
