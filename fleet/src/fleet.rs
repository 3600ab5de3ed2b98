//! Servers and workers of a job as processes of this machine. They end in order: workers, then servers.

use crate::{
    failure::Failure,
    faults::{FAULTS_FILE, Faults, link::Link, proxy::Proxies},
    process::{self, Process},
};
use paraft_trace::TRACE_FOLDER;
use paraft_worker::{Job, exit, slow::Straggle};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

/// A running fleet. Dropping it ends everything.
pub struct Fleet {
    /// By rank.
    pub workers: Vec<Process>,
    /// By id.
    pub servers: Vec<Process>,
    /// By which servers and workers reach the servers, in the order of their ids.
    pub addresses: Vec<String>,
    /// Where the servers listen themselves; with doors it is these that stand behind `addresses`.
    listens: Vec<String>,
    program: PathBuf,
    run_dir: PathBuf,
    /// What the workers go on from.
    resume: Option<PathBuf>,
    /// Steps to record.
    trace: Option<u64>,
    /// Workers that are made slower, by how much.
    slow: BTreeMap<u32, f64>,
    straggle: Option<Straggle>,
    doors: Option<Doors>,
}

/// What a fleet has beside its job.
#[derive(Clone, Debug, Default)]
pub struct Extras {
    /// Doors for faults on purpose.
    pub faults: bool,
    /// Each process records the stages of so many steps, in [`TRACE_FOLDER`] of the run's folder.
    pub trace: Option<u64>,
    /// Workers that are made slower, by how much: each step takes so many times as long.
    pub slow: BTreeMap<u32, f64>,
    /// Steps of all workers that take longer than others, now and then.
    pub straggle: Option<Straggle>,
    /// What the workers' connections to the servers are like; needs `cluster.transport = "tcp"`.
    pub link: Option<Link>,
}

/// Proxies before the servers: for faults on purpose, or for a link of another kind.
struct Doors {
    proxies: Proxies,
    /// The faults file; none: there are no faults to come.
    file: Option<PathBuf>,
}

impl Fleet {
    /// Starts the job's servers; returns when all listen and know each other.
    pub fn servers(job: &Job, run_dir: &Path, extras: Extras) -> Result<Self, Failure> {
        let program =
            std::env::current_exe().map_err(|e| Failure::new(exit::IO, format!("own program: {e}")))?;
        let mut fleet = Fleet {
            workers: Vec::new(),
            servers: Vec::new(),
            addresses: Vec::new(),
            listens: Vec::new(),
            program,
            run_dir: run_dir.to_path_buf(),
            resume: None,
            trace: extras.trace,
            slow: extras.slow.clone(),
            straggle: extras.straggle,
            doors: Doors::open(job.servers(), run_dir, &extras)?,
        };
        for id in 0..job.servers() {
            let server = fleet.server(id, "127.0.0.1:0")?;
            fleet.servers.push(server);
        }
        for id in 0..job.servers() {
            let mut tries = job.cluster.max_restarts;
            let direct = loop {
                let server = &mut fleet.servers[id as usize];
                match server.first_line() {
                    Ok(line) => break line,
                    Err(_) if tries > 0 && server.was_killed() => {
                        tries -= 1;
                        fleet.servers[id as usize] = fleet.server(id, "127.0.0.1:0")?;
                    }
                    Err(e) => return Err(e),
                }
            };
            fleet.listens.push(direct.clone());
            let address = match &fleet.doors {
                None => direct,
                Some(doors) => {
                    let target = direct.parse().map_err(|e| {
                        Failure::new(exit::FAILED, format!("server-{id} listens on `{direct}`: {e}"))
                    })?;
                    doors.proxies.point(id, target);
                    doors.proxies.addresses()[id as usize].clone()
                }
            };
            fleet.addresses.push(address);
        }
        let list = fleet.addresses.join(",");
        for server in &mut fleet.servers {
            match server.tell(&list) {
                // Who watches the fleet sees that it is gone.
                Err(_) if server.was_killed() => {}
                told => told?,
            }
        }
        Ok(fleet)
    }

    fn server(&self, id: u32, listen: &str) -> Result<Process, Failure> {
        let mut command = Command::new(&self.program);
        // The job as it was resolved, so that servers and workers need no --set.
        command.arg("server").arg(self.run_dir.join(JOB_FILE)).args([
            "--supervised",
            "--listen",
            listen,
            "--id",
        ]);
        command.arg(id.to_string()).arg("--log-file").arg(self.run_dir.join(format!("server-{id}.log")));
        command.args(["--metrics", "127.0.0.1:0"]).arg("--data").arg(server_data(&self.run_dir, id));
        if let Some(file) = self.doors.as_ref().and_then(|d| d.file.as_ref()) {
            command.arg("--faults").arg(file);
        }
        self.trace(&mut command);
        Process::start(format!("server-{id}"), command, &self.run_dir)
    }

    fn trace(&self, command: &mut Command) {
        if let Some(steps) = self.trace {
            command.arg("--trace").arg(self.run_dir.join(TRACE_FOLDER));
            command.arg("--trace-steps").arg(steps.to_string());
        }
    }

    /// Starts a dead server again, at its address and with its folder; it has told nobody yet that it is back.
    pub fn restart_server(&mut self, id: usize) -> Result<(), Failure> {
        let address = self.listens[id].clone();
        let mut server = self.server(id as u32, &address)?;
        server.first_line()?;
        server.tell(&self.addresses.join(","))?;
        self.servers[id] = server;
        Ok(())
    }

    /// Starts a dead worker again; it joins in a new session.
    pub fn restart_worker(&mut self, job: &Job, rank: usize) -> Result<(), Failure> {
        self.workers[rank] = self.worker(job, rank as u32)?;
        Ok(())
    }

    /// Starts the job's workers, from a checkpoint where there is one.
    pub fn start_workers(&mut self, job: &Job, resume: Option<&Path>) -> Result<(), Failure> {
        self.resume = resume.map(Path::to_path_buf);
        for rank in 0..job.ranks() {
            let worker = self.worker(job, rank)?;
            self.workers.push(worker);
        }
        Ok(())
    }

    fn worker(&self, job: &Job, rank: u32) -> Result<Process, Failure> {
        let mut command = match job.cluster.worker_command.as_slice() {
            [] => {
                let mut c = Command::new(&self.program);
                c.arg("worker");
                c
            }
            [own, rest @ ..] => {
                let at = job.base_dir.join(own);
                let mut c = Command::new(if own.contains('/') { at } else { own.into() });
                c.args(rest);
                c
            }
        };
        let dir = &self.run_dir;
        command.arg(dir.join(JOB_FILE)).arg("--supervised").arg("--rank").arg(rank.to_string());
        // The job file has what this process was told, by a flag or by the variable.
        command.env_remove("PARAFT_DEVICE").env_remove("PARAFT_GROUP_SIZE");
        command.arg("--servers").arg(self.addresses.join(",")).arg("--run-dir").arg(dir);
        command.args(["--metrics", "127.0.0.1:0"]);
        if let Some(checkpoint) = &self.resume {
            command.arg("--resume").arg(checkpoint);
        }
        if let Some(factor) = self.slow.get(&(rank / job.train.group_size)) {
            command.arg("--slow").arg(factor.to_string());
        }
        if let Some(straggle) = self.straggle {
            command.arg("--straggle").arg(straggle.to_string());
        }
        self.trace(&mut command);
        let name = match job.train.group_size {
            1 => format!("worker-{rank}"),
            n => format!("worker-{}-rank-{}", rank / n, rank % n),
        };
        command.arg("--log-file").arg(dir.join(format!("{name}.log")));
        Process::start(name, command, dir)
    }

    /// Does to the links what the faults file says; nothing in a fleet without doors.
    pub fn follow_faults(&self) {
        if let Some(doors) = &self.doors
            // One that cannot be read says so in the servers' logs.
            && let Some(Ok(faults)) = doors.file.as_ref().map(|f| Faults::read(f))
        {
            doors.proxies.set(&faults);
        }
    }

    /// Ends everything that still runs: first kindly, workers before servers, then not.
    pub fn stop(&mut self) {
        process::end(&mut self.workers);
        process::end(&mut self.servers);
    }
}

impl Doors {
    /// Where something needs them.
    fn open(servers: u32, run_dir: &Path, extras: &Extras) -> Result<Option<Self>, Failure> {
        if !extras.faults && extras.link.is_none() {
            return Ok(None);
        }
        let file = extras.faults.then(|| run_dir.join(FAULTS_FILE));
        if let Some(file) = &file {
            Faults::default().write(file).map_err(|e| Failure::write(file, e))?;
        }
        let proxies = Proxies::start(servers, run_dir, extras.link);
        let proxies = proxies.map_err(|e| Failure::new(exit::IO, format!("no proxies: {e}")))?;
        Ok(Some(Self { proxies, file }))
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Where a server of a run keeps its identity and its logs.
pub fn server_data(run_dir: &Path, id: u32) -> PathBuf {
    run_dir.join(format!("server-{id}"))
}

/// The resolved job, in the run's folder.
pub const JOB_FILE: &str = "job.toml";
