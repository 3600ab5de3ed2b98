//! The part of a fleet that one task of an engine has: its worker, and perhaps a server. The other parts are other tasks'.

use super::{Fleet, Settings};
use crate::{failure::Failure, process::Audience, script::Rendezvous};
use paraft_worker::Job;
use std::path::Path;

impl Fleet {
    /// With nothing in it; the job file is in the folder.
    pub(crate) fn part(run_dir: &Path) -> Result<Self, Failure> {
        Self::empty(Settings::Job, run_dir, None)
    }

    /// Starts this task's server, which waits for the list of all; where it listens.
    pub(crate) fn part_server(&mut self, id: u32, host: &str) -> Result<String, Failure> {
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_string() };
        let mut server = self.server(id, &format!("{host}:0"), true)?;
        let listens = server.first_line()?;
        self.servers.push(server);
        Ok(listens)
    }

    /// These are the servers: this task's, where it has one, begins.
    pub(crate) fn part_meets(&mut self, addresses: Vec<String>) -> Result<(), Failure> {
        let list = addresses.join(",");
        self.addresses = addresses;
        self.servers.iter_mut().try_for_each(|server| server.tell(&list))
    }

    /// Starts a rank of the worker that this process is: a script with its place, or `paraft worker`.
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

    /// Starts this task's worker.
    pub(crate) fn part_worker(
        &mut self,
        job: &Job,
        rank: u32,
        at: &Rendezvous,
        resume: Option<&Path>,
    ) -> Result<(), Failure> {
        self.resume = resume.map(Path::to_path_buf);
        // Engines show what each task says.
        let worker = self.script(job, rank, at, Audience::User)?;
        self.workers.push(worker);
        Ok(())
    }
}
