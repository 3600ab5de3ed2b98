//! The fleet that faults are injected into.

use crate::{fault_schedule::Kind, health};
use paraft_fleet::{
    failure::Failure,
    faults::{FAULTS_FILE, process},
    targets::FleetArg,
};
use paraft_record::METRICS_FILE;
use paraft_worker::exit;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// A fleet of this machine.
pub struct Target {
    /// The folder of the run's files; `None`: the servers were started by hand.
    run_dir: Option<PathBuf>,
    /// Indexed by place in the list.
    pub addresses: Vec<String>,
}

impl Target {
    /// The fleet of this flag, if all of its servers may be signalled and these faults can be injected.
    pub fn find(fleet: &FleetArg, faults: &[Kind]) -> Result<Self, Failure> {
        let fleet = fleet.to_change()?;
        let addresses = fleet.servers()?;
        let whole = |dir: &Path| {
            fs::canonicalize(dir).map_err(|e| {
                Failure::new(exit::CONFIG, format!("{}: {e}", dir.display())).help("give a run's folder")
            })
        };
        let run_dir = fleet.folder().map(whole).transpose()?;
        let target = Self { run_dir, addresses };
        let points = target.fault_points();
        if let Some(kind) =
            faults.iter().find(|k| k.is_for_verify() && !matches!(k, Kind::Eio | Kind::Readonly))
        {
            return Err(Failure::new(exit::USAGE, format!("{} is for `paraft verify ledger`", kind.name()))
                .help("it takes away from processes what only their parent can give back"));
        }
        let needs = |k: &&Kind| !matches!(k, Kind::Kill | Kind::Pause | Kind::Drain);
        if let Some(kind) = faults.iter().find(needs).filter(|_| points.is_none()) {
            let what = format!("this fleet has no fault points for {}", kind.name());
            return Err(Failure::new(exit::CONFIG, what)
                .help("start it with `paraft train JOB --faults`, or leave the kind out of --faults"));
        }
        let missing = (0..target.addresses.len() as u32).find(|place| target.pid(*place).is_none());
        match missing {
            Some(place) => {
                let what = format!(
                    "server {place} ({}) is no process of this machine that this user may signal",
                    target.addresses[place as usize]
                );
                Err(Failure::new(exit::UNAVAILABLE, what).help("`paraft status` shows which servers answer"))
            }
            None => Ok(target),
        }
    }

    /// The faults file that the fault points poll.
    pub fn fault_points(&self) -> Option<PathBuf> {
        self.run_dir.as_ref().map(|d| d.join(FAULTS_FILE)).filter(|f| f.exists())
    }

    /// The record of the run, if it is one.
    pub fn record(&self) -> Option<PathBuf> {
        self.run_dir.as_ref().map(|d| d.join(METRICS_FILE)).filter(|f| f.exists())
    }

    /// The process of a server, if there is one.
    pub fn pid(&self, place: u32) -> Option<u32> {
        match &self.run_dir {
            Some(dir) => process::servers_of(dir).into_iter().find(|(p, _)| *p == place).map(|(_, pid)| pid),
            None => {
                let port = self.addresses.get(place as usize)?.rsplit(':').next()?.parse().ok()?;
                process::listener(port)
            }
        }
    }

    /// Whether a server may fail without the loss of a majority in any shard.
    pub fn whole(&self) -> Result<(), String> {
        let (fleet, replies) = health::look(&self.addresses)?;
        health::whole(&fleet, &replies)
    }
}
