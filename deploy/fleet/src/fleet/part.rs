//! The part of a fleet that one task of an engine runs: its worker, and perhaps a server. Other tasks run the other parts.

use super::{Fleet, Settings};
use crate::{failure::Failure, process::Audience, script::Rendezvous};
use paraft_worker::Job;
use std::path::Path;

impl Fleet {
    /// A part without processes yet; the job file is in the folder.
    pub(crate) fn part(run_dir: &Path) -> Result<Self, Failure> {
        Self::empty(Settings::Job, run_dir, None)
    }

    /// Starts this task's server, which waits for the list of all servers. Returns its address.
    pub(crate) fn part_server(&mut self, id: u32, host: &str) -> Result<String, Failure> {
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_string() };
        let mut server = self.server(id, &format!("{host}:0"), true)?;
        let listens = server.first_line()?;
        self.servers.push(server);
        Ok(listens)
    }

    /// Sets the addresses of all servers. This task's server, if it has one, begins.
    pub(crate) fn part_meets(&mut self, addresses: Vec<String>) -> Result<(), Failure> {
        let list = addresses.join(",");
        self.addresses = addresses;
        self.servers.iter_mut().try_for_each(|server| server.tell(&list))
    }

    /// Starts a rank of this task's worker: a script with its place, or `paraft worker`. Engines show the output of each
    /// task.
    pub(crate) fn part_rank(
        &mut self,
        job: &Job,
        rank: u32,
        at: Option<&Rendezvous>,
        resume: Option<&Path>,
    ) -> Result<(), Failure> {
        self.resume = resume.map(Path::to_path_buf);
        let worker = match at {
            Some(at) => self.script(job, rank, at, Audience::User)?,
            None => self.worker(job, rank)?,
        };
        self.workers.push(worker);
        Ok(())
    }
}
