//! What a task's place is found from: the variables of its process, the user's flags, and its host.

use super::task::Role;
use crate::error::EngineError;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// The user's flags.
#[derive(Clone, Debug, Default)]
pub struct PlaceFlags {
    /// `--role`
    pub role: Option<Role>,
    /// `--index`
    pub index: Option<u32>,
    /// `--workers`
    pub workers: Option<u32>,
    /// `--hostfile`
    pub hostfile: Option<PathBuf>,
}

/// The host's state that is read besides variables.
#[derive(Clone, Debug, Default)]
pub struct HostContext {
    /// `/etc/hosts`
    pub hosts: String,
    /// The content of the file that `--hostfile` names: `host slots=N` in each line.
    pub hostfile: String,
    /// This host's name.
    pub own: String,
    /// The content of the file in which a batch system lists the job's hosts, if it is on this host.
    pub allocation: String,
    /// The process by which hydra, an MPI launcher, has started this one and its other ranks here.
    pub proxy: Option<u32>,
}

/// The variables that name a file with the hosts of a job. PBS and Grid Engine have it on the first host
/// alone.
const HOST_FILES: [&str; 3] = ["PBS_NODEFILE", "PE_HOSTFILE", "LSB_DJOB_HOSTFILE"];
/// The name of hydra's process on each host.
const HYDRA_PROXY: &str = "hydra_pmi_proxy";

/// The nearest process of this name above this one.
fn ancestor(name: &str) -> Option<u32> {
    let mut pid = std::os::unix::process::parent_id();
    while pid > 1 {
        // `PID (NAME) STATE PARENT ...`; a name may contain blanks and brackets.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (named, rest) = stat.rsplit_once(") ")?;
        if named.split_once(" (").is_some_and(|(_, own)| own == name) {
            return Some(pid);
        }
        pid = rest.split(' ').nth(1)?.parse().ok()?;
    }
    None
}

impl HostContext {
    /// The surroundings of this process; `hostfile` is read if the user names one.
    pub fn here(hostfile: Option<&Path>) -> Self {
        let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
        let hostfile = hostfile.map(read).unwrap_or_default();
        let own = read(Path::new("/proc/sys/kernel/hostname")).trim().to_string();
        let listed = HOST_FILES.iter().find_map(std::env::var_os);
        let allocation = listed.map(|path| read(Path::new(&path))).unwrap_or_default();
        let proxy = ancestor(HYDRA_PROXY);
        Self { hosts: read(Path::new("/etc/hosts")), hostfile, own, allocation, proxy }
    }
}

/// The variables of this process that are valid text.
pub fn variables() -> BTreeMap<String, String> {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).collect()
}

/// The variables that are not empty.
pub(super) struct Env<'a> {
    pub variables: &'a BTreeMap<String, String>,
    pub asked: &'a PlaceFlags,
    pub around: &'a HostContext,
}

impl Env<'_> {
    pub fn text(&self, name: &str) -> Option<String> {
        self.variables.get(name).filter(|v| !v.is_empty()).cloned()
    }

    /// Whether a variable is there, even if it is empty.
    pub fn is_set(&self, name: &str) -> bool {
        self.variables.contains_key(name)
    }

    pub fn number(&self, name: &str) -> Result<Option<u32>, EngineError> {
        match self.text(name).map(|text| (text.parse::<u32>(), text)) {
            None => Ok(None),
            Some((Ok(n), _)) => Ok(Some(n)),
            Some((Err(_), text)) => {
                Err(EngineError::usage(format!("{name} is `{text}`; it is a whole number")))
            }
        }
    }

    /// A variable that this engine always sets along with those that identify it.
    pub fn must(&self, engine: &str, name: &str) -> Result<String, EngineError> {
        self.text(name).ok_or_else(|| needs(engine, name))
    }

    pub fn must_number(&self, engine: &str, name: &str) -> Result<u32, EngineError> {
        self.number(name)?.ok_or_else(|| needs(engine, name))
    }

    /// `MASTER_PORT` itself belongs to the script's processes, or to torchrun.
    pub fn beside_master(&self) -> Result<Option<u16>, EngineError> {
        Ok(self.number("MASTER_PORT")?.and_then(|p| u16::try_from(p.saturating_add(1)).ok()))
    }

    /// Comma-separated addresses.
    pub fn list(&self, name: &str) -> Vec<String> {
        let text = self.text(name).unwrap_or_default();
        text.split(',').map(str::trim).filter(|a| !a.is_empty()).map(str::to_string).collect()
    }
}

pub(super) fn needs(engine: &str, name: &str) -> EngineError {
    EngineError::usage(format!("this is {engine}'s task, and {name} is not set, or empty")).help(format!(
        "set {name}, or start it without {engine}'s variables for a fleet on this machine alone"
    ))
}
