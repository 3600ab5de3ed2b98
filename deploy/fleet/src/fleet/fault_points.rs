//! The fault points of a fleet.

use super::extras::Extras;
use crate::{
    failure::Failure,
    faults::{FAULTS_FILE, Faults, link::Links, proxy::Proxies},
};
use paraft_worker::exit;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Proxies in front of the servers, for injected faults or simulated links.
pub(super) struct FaultPoints {
    pub proxies: Proxies,
    /// The faults file; `None` for links alone.
    pub file: Option<PathBuf>,
}

impl FaultPoints {
    /// Creates fault points if a feature needs them.
    pub fn open(servers: u32, run_dir: &Path, extras: &Extras) -> Result<Option<Self>, Failure> {
        let links = Links { workers: extras.link, servers: extras.between };
        // A leftover of an earlier run in this folder would set its faults again.
        let _ = fs::remove_file(run_dir.join(FAULTS_FILE));
        if !extras.faults && links == Links::default() {
            return Ok(None);
        }
        let file = extras.faults.then(|| run_dir.join(FAULTS_FILE));
        if let Some(file) = &file {
            Faults::default().write(file).map_err(|e| Failure::write(file, e))?;
        }
        let proxies = Proxies::start(servers, run_dir, links);
        let proxies = proxies.map_err(|e| Failure::new(exit::IO, format!("no proxies: {e}")))?;
        Ok(Some(Self { proxies, file }))
    }
}
