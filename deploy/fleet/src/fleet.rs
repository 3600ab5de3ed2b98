//! Servers and workers as processes of this machine: those of a job ([`Fleet::servers`]), or servers
//! alone that take their settings from flags ([`Fleet::of_flags`]). Workers end before servers.

mod extras;
mod fault_points;
mod part;

pub use crate::files::{JOB_FILE, REPORT_FILE, SERVERS_FILE, server_data, server_log};
use crate::{
    certs::Certs,
    failure::Failure,
    faults::{Faults, proxy::Proxies},
    pages,
    process::{self, Audience, Process},
    script::{self, Rendezvous},
};
pub use extras::Extras;
use fault_points::FaultPoints;
use nix::sys::signal::Signal;
use paraft_tls::{Access, access::As};
use paraft_trace::TRACE_FOLDER;
use paraft_worker::{Job, exit, slow::Straggle};
use std::{
    collections::BTreeMap,
    ffi::OsString,
    io::IsTerminal,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
};

/// A running fleet. Drop ends all of its processes.
pub struct Fleet {
    /// By rank.
    pub workers: Vec<Process>,
    /// By id.
    pub servers: Vec<Process>,
    /// The servers' addresses for servers and workers, in the order of their ids.
    pub addresses: Vec<String>,
    /// The addresses that the servers listen on; with fault points, `addresses` are proxies in front of
    /// these.
    listens: Vec<String>,
    program: PathBuf,
    run_dir: PathBuf,
    settings: Settings,
    /// The checkpoint that the workers resume from.
    resume: Option<PathBuf>,
    /// Steps to trace.
    trace: Option<u64>,
    /// Slow workers, with the factor on their step time.
    slow: BTreeMap<u32, f64>,
    straggle: Option<Straggle>,
    fault_points: Option<FaultPoints>,
    /// The variables that all scripts receive.
    rendezvous: Option<Rendezvous>,
    /// The output of scripts goes to files only.
    quiet: bool,
    certs: Certs,
}

/// The source of the settings that all servers must share.
enum Settings {
    /// The resolved job in the run's folder, so servers and workers need no --set.
    Job,
    /// Flags for all servers, and flags for the founding servers only.
    Flags { all: Vec<String>, founders: Vec<String> },
}

impl Fleet {
    /// Starts the job's servers; returns when all of them listen and know each other.
    pub fn servers(job: &Job, run_dir: &Path, extras: Extras) -> Result<Self, Failure> {
        let fault_points = FaultPoints::open(job.servers(), run_dir, &extras)?;
        let mut fleet = Self::empty(Settings::Job, run_dir, fault_points)?;
        fleet.certs = Certs::of_own(run_dir, Some(&job.name))?;
        (fleet.trace, fleet.slow, fleet.straggle) = (extras.trace, extras.slow, extras.straggle);
        fleet.found(job.servers(), job.cluster.max_restarts)?;
        Ok(fleet)
    }

    /// The workers alone; the servers belong to an existing fleet.
    pub fn on(servers: &[String], run_dir: &Path, extras: Extras) -> Result<Self, Failure> {
        Certs::can_be_told()?;
        let mut fleet = Self::empty(Settings::Job, run_dir, None)?;
        (fleet.trace, fleet.slow, fleet.straggle) = (extras.trace, extras.slow, extras.straggle);
        fleet.addresses = servers.to_vec();
        Ok(fleet)
    }

    /// Starts servers with fault points. All get the flags `all`; the founding ones also get
    /// `founders`. One more server may join ([`Self::join_server`]).
    pub fn of_flags(
        servers: u32,
        all: Vec<String>,
        founders: Vec<String>,
        run_dir: &Path,
    ) -> Result<Self, Failure> {
        let extras = Extras { faults: true, ..Extras::default() };
        let fault_points = FaultPoints::open(servers + 1, run_dir, &extras)?;
        let mut fleet = Self::empty(Settings::Flags { all, founders }, run_dir, fault_points)?;
        fleet.certs = Certs::of_own(run_dir, None)?;
        fleet.found(servers, 0)?;
        Ok(fleet)
    }

    /// Starts a fleet that runs without a job and accepts many. Other processes find its certificates
    /// in the folder.
    pub fn standing(servers: u32, run_dir: &Path) -> Result<Self, Failure> {
        crate::certs::of_shared(run_dir, As::Admin)?;
        // Three replicas by default; two would survive no more failures than one.
        let replicas = if servers < 3 { "1" } else { "3" };
        let founders = ["--shards", "0", "--replicas", replicas].map(String::from).to_vec();
        let mut fleet = Self::empty(Settings::Flags { all: Vec::new(), founders }, run_dir, None)?;
        fleet.found(servers, 0)?;
        Ok(fleet)
    }

    fn empty(settings: Settings, run_dir: &Path, fault_points: Option<FaultPoints>) -> Result<Self, Failure> {
        let program = std::env::current_exe();
        Ok(Fleet {
            workers: Vec::new(),
            servers: Vec::new(),
            addresses: Vec::new(),
            listens: Vec::new(),
            program: program.map_err(|e| Failure::new(exit::IO, format!("own program: {e}")))?,
            run_dir: run_dir.to_path_buf(),
            settings,
            resume: None,
            trace: None,
            slow: BTreeMap::new(),
            straggle: None,
            fault_points,
            rendezvous: None,
            quiet: false,
            certs: Certs::Ours,
        })
    }

    /// Starts all servers and reads their addresses. A server that is killed before it prints its
    /// address is restarted up to `restarts` times.
    fn found(&mut self, servers: u32, restarts: u32) -> Result<(), Failure> {
        for id in 0..servers {
            let server = self.server(id, ANY_PORT, true)?;
            self.servers.push(server);
        }
        for id in 0..servers {
            let mut tries = restarts;
            let direct = loop {
                let server = &mut self.servers[id as usize];
                match server.first_line() {
                    Ok(line) => break line,
                    Err(_) if tries > 0 && server.was_killed() => {
                        tries -= 1;
                        self.servers[id as usize] = self.server(id, ANY_PORT, true)?;
                    }
                    Err(e) => return Err(e),
                }
            };
            let address = self.reach(id, &direct, Proxies::point)?;
            self.listens.push(direct);
            self.addresses.push(address);
        }
        let list = self.addresses.join(",");
        for server in &mut self.servers {
            match server.tell(&list) {
                // The watcher of the fleet handles the killed server.
                Err(_) if server.was_killed() => {}
                told => told?,
            }
        }
        Ok(())
    }

    /// The address of the server that listens on `direct`, for other processes. `lead`: [`Proxies::point`], or
    /// [`Proxies::aim`] if it does not listen yet.
    fn reach(&self, id: u32, direct: &str, lead: fn(&Proxies, u32, SocketAddr)) -> Result<String, Failure> {
        let Some(fault_points) = &self.fault_points else { return Ok(direct.to_string()) };
        let target = direct
            .parse()
            .map_err(|e| Failure::new(exit::FAILED, format!("server-{id} listens on `{direct}`: {e}")))?;
        lead(&fault_points.proxies, id, target);
        Ok(fault_points.proxies.addresses()[id as usize].clone())
    }

    /// The access of a process of this fleet.
    pub fn access(&self, shows: As) -> Result<Access, Failure> {
        self.certs.access(shows)
    }

    /// The addresses that the servers listen on, behind the fault points.
    pub fn listens(&self) -> &[String] {
        &self.listens
    }

    /// Starts a founding server, or one that joins.
    fn server(&self, id: u32, listen: &str, founds: bool) -> Result<Process, Failure> {
        let mut command = Command::new(&self.program);
        command.arg("server");
        match &self.settings {
            Settings::Job => {
                command.arg(self.run_dir.join(JOB_FILE)).args(["--metrics", ANY_PORT]);
                pages::tell(&mut command, id, &self.run_dir);
            }
            Settings::Flags { all, founders } => {
                command.args(all).args(founders.iter().filter(|_| founds));
            }
        }
        command.args(["--supervised", "--listen", listen]);
        if founds {
            command.args(["--id", &id.to_string()]);
        } else {
            let own = self.fault_points.as_ref().map(|d| d.proxies.addresses()[id as usize].clone());
            command.args(["--join", "--fleet", &self.addresses.join(","), "--place", &id.to_string()]);
            own.into_iter().for_each(|own| _ = command.args(["--advertise", &own]));
        }
        command.arg("--log-file").arg(server_log(&self.run_dir, id));
        command.arg("--data").arg(server_data(&self.run_dir, id));
        if let Some(file) = self.fault_points.as_ref().and_then(|d| d.file.as_ref()) {
            command.arg("--faults").arg(file);
        }
        self.trace(&mut command);
        self.certs.tell(&mut command);
        Process::start(format!("server-{id}"), command, &self.run_dir)
    }

    fn trace(&self, command: &mut Command) {
        if let Some(steps) = self.trace {
            command.arg("--trace").arg(self.run_dir.join(TRACE_FOLDER));
            command.arg("--trace-steps").arg(steps.to_string());
        }
    }

    /// Restarts a dead server at its address, with its folder. Returns before the server has rejoined.
    pub fn restart_server(&mut self, id: usize) -> Result<(), Failure> {
        // Behind a proxy any port is fine, and a client may hold the old port by now. Without a proxy
        // the users' addresses must stay valid.
        let listen = match self.settings {
            Settings::Flags { .. } if self.fault_points.is_some() => ANY_PORT,
            _ => &self.listens[id],
        };
        let mut server = self.server(id as u32, listen, id < self.addresses.len())?;
        let direct = server.first_line()?;
        // It listens once it has read its disk.
        self.reach(id as u32, &direct, Proxies::aim)?;
        server.tell(&self.addresses.join(","))?;
        self.listens[id] = direct;
        self.servers[id] = server;
        Ok(())
    }

    /// Starts one more server, which joins the running fleet behind its reserved proxy. It is in none
    /// of the fleet's lists. Call it once at most.
    pub fn join_server(&mut self) -> Result<(), Failure> {
        let id = self.servers.len() as u32;
        let mut server = self.server(id, ANY_PORT, false)?;
        let direct = server.first_line()?;
        self.reach(id, &direct, Proxies::point)?;
        server.tell(&self.addresses.join(","))?;
        self.listens.push(direct);
        self.servers.push(server);
        Ok(())
    }

    /// Replaces the faults of links and disks in a fleet with fault points.
    pub fn put_faults(&self, faults: &Faults) -> Result<(), Failure> {
        let Some((fault_points, file)) = self.fault_points.as_ref().and_then(|d| Some((d, d.file.as_ref()?)))
        else {
            return Err(Failure::new(exit::USAGE, "the fleet has no fault points for faults"));
        };
        faults.write(file).map_err(|e| Failure::write(file, e))?;
        fault_points.proxies.set(faults);
        Ok(())
    }

    /// Restarts a dead worker, which joins in a new session.
    pub fn restart_worker(&mut self, job: &Job, rank: usize) -> Result<(), Failure> {
        self.workers[rank] = self.worker(job, rank as u32)?;
        Ok(())
    }

    /// Starts the job's workers, optionally from a checkpoint. The first script's output goes to the
    /// user, unless `quiet`.
    pub fn start_workers(&mut self, job: &Job, resume: Option<&Path>, quiet: bool) -> Result<(), Failure> {
        self.resume = resume.map(Path::to_path_buf);
        self.quiet = quiet;
        if !job.cluster.script.is_empty() {
            let free = Rendezvous::new(job.ranks());
            self.rendezvous =
                Some(free.map_err(|e| Failure::new(exit::UNAVAILABLE, format!("no port: {e}")))?);
        }
        for rank in 0..job.ranks() {
            let worker = self.worker(job, rank)?;
            self.workers.push(worker);
        }
        Ok(())
    }

    fn worker(&self, job: &Job, rank: u32) -> Result<Process, Failure> {
        if let Some(at) = &self.rendezvous {
            let audience = match (rank, job.ranks()) {
                _ if self.quiet => Audience::LogFile,
                (0, 1) if std::io::stdin().is_terminal() => Audience::Terminal,
                (0, _) => Audience::User,
                _ => Audience::LogFile,
            };
            return self.script(job, rank, at, audience);
        }
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
        self.certs.tell(&mut command);
        command.arg("--fleet").arg(self.addresses.join(",")).arg("--run-dir").arg(dir);
        command.args(["--metrics", "127.0.0.1:0"]);
        if let Some(checkpoint) = &self.resume {
            command.arg("--resume").arg(checkpoint);
        }
        if let Some(factor) = self.slow.get(&(rank / job.ranks_of_worker())) {
            command.arg("--slow").arg(factor.to_string());
        }
        if let Some(straggle) = self.straggle {
            command.arg("--straggle").arg(straggle.to_string());
        }
        self.trace(&mut command);
        let name = match job.ranks_of_worker() {
            1 => format!("worker-{rank}"),
            n => format!("worker-{}-rank-{}", rank / n, rank % n),
        };
        command.arg("--log-file").arg(dir.join(format!("{name}.log")));
        Process::start(name, command, dir)
    }

    /// Starts a user's script as a worker.
    fn script(&self, job: &Job, rank: u32, at: &Rendezvous, audience: Audience) -> Result<Process, Failure> {
        let (dir, name) = (&self.run_dir, format!("worker-{rank}"));
        let mut own: Vec<(_, OsString)> = vec![
            ("PARAFT_JOB", dir.join(JOB_FILE).into()),
            ("PARAFT_SERVERS", self.addresses.join(",").into()),
            ("PARAFT_RUN_DIR", dir.into()),
        ];
        own.extend(self.resume.iter().map(|r| ("PARAFT_RESUME", r.into())));
        let factor = self.slow.get(&rank);
        if factor.is_some() || self.straggle.is_some() {
            let straggle = self.straggle.map(|s| format!(",{s}")).unwrap_or_default();
            own.push(("PARAFT_SLOW", format!("{}{straggle}", factor.unwrap_or(&1.0)).into()));
        }
        own.extend(self.trace.map(|steps| ("PARAFT_TRACE", steps.to_string().into())));
        let mut command = script::command(job, rank, at, own);
        self.certs.tell(&mut command);
        Process::script(name, command, dir, audience)
    }

    /// Applies the faults file to the links; without fault points it does nothing.
    pub fn follow_faults(&self) {
        if let Some(fault_points) = &self.fault_points
            // The servers log an unreadable file.
            && let Some(Ok(faults)) = fault_points.file.as_ref().map(|f| Faults::read(f))
        {
            fault_points.proxies.set(&faults);
        }
    }

    /// Ends all processes: with SIGTERM first, workers before servers, then with SIGKILL.
    pub fn stop(&mut self) {
        self.stop_as(Signal::SIGTERM);
    }

    /// Ends the workers alone; scripts get the user's signal.
    pub fn stop_workers(&mut self, scripts: Signal) {
        process::end(&mut self.workers, scripts);
    }

    /// As [`Self::stop`]; scripts get the user's signal.
    pub fn stop_as(&mut self, scripts: Signal) {
        process::end(&mut self.workers, scripts);
        process::end(&mut self.servers, scripts);
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Any free port, on this machine only.
const ANY_PORT: &str = "127.0.0.1:0";
