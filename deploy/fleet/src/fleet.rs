//! Servers and workers as processes of this machine: a job's ([`Fleet::servers`]), or servers alone that take their settings from
//! flags ([`Fleet::of_flags`]). They end in order: workers, then servers.

mod part;

pub use crate::files::{JOB_FILE, SERVERS_FILE};
use crate::{
    certs::Certs,
    failure::Failure,
    faults::{
        FAULTS_FILE, Faults,
        link::{Link, Links},
        proxy::Proxies,
    },
    pages,
    process::{self, Audience, Process},
    script::{self, Rendezvous},
    standing::On,
};
use nix::sys::signal::Signal;
use paraft_tls::{Access, access::As};
use paraft_trace::TRACE_FOLDER;
use paraft_worker::{Job, exit, slow::Straggle};
use std::{
    collections::BTreeMap,
    ffi::OsString,
    io::IsTerminal,
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
    /// Where the servers listen themselves; with fault points it is these that stand behind `addresses`.
    listens: Vec<String>,
    program: PathBuf,
    run_dir: PathBuf,
    settings: Settings,
    /// What the workers go on from.
    resume: Option<PathBuf>,
    /// Steps to record.
    trace: Option<u64>,
    /// Workers that are made slower, by how much.
    slow: BTreeMap<u32, f64>,
    straggle: Option<Straggle>,
    fault_points: Option<FaultPoints>,
    /// What all workers are told alike, where they are scripts.
    rendezvous: Option<Rendezvous>,
    /// What scripts say is kept and not passed on.
    quiet: bool,
    certs: Certs,
}

/// From what servers take what they must agree on.
enum Settings {
    /// The job as it was resolved, in the run's folder, so that servers and workers need no --set.
    Job,
    /// Flags; of them, those of the founders alone.
    Flags { all: Vec<String>, founders: Vec<String> },
}

/// What a fleet has beside its job.
#[derive(Clone, Debug, Default)]
pub struct Extras {
    /// Fault points.
    pub faults: bool,
    /// Each process records the stages of so many steps, in [`TRACE_FOLDER`] of the run's folder.
    pub trace: Option<u64>,
    /// Workers that are made slower, by how much: each step takes so many times as long.
    pub slow: BTreeMap<u32, f64>,
    /// Steps of all workers that take longer than others, now and then.
    pub straggle: Option<Straggle>,
    /// What the workers' connections to the servers are like; needs `cluster.transport = "tcp"`.
    pub link: Option<Link>,
    /// What the servers' connections to each other are like.
    pub between: Option<Link>,
    /// The servers are those of a fleet that stands already.
    pub on: Option<On>,
    /// It is one of many: its notes are the same each time, and not said.
    pub of_many: bool,
    /// The run is a trial of this sweep, for trackers.
    pub of: Option<std::sync::Arc<crate::track::Sweep>>,
}

/// Proxies before the servers: for faults on purpose, or for a link of another kind.
struct FaultPoints {
    proxies: Proxies,
    /// The faults file; none: there are no faults to come.
    file: Option<PathBuf>,
}

impl Fleet {
    /// Starts the job's servers; returns when all listen and know each other.
    pub fn servers(job: &Job, run_dir: &Path, extras: Extras) -> Result<Self, Failure> {
        let fault_points = FaultPoints::open(job.servers(), run_dir, &extras)?;
        let mut fleet = Self::empty(Settings::Job, run_dir, fault_points)?;
        fleet.certs = Certs::of_own(run_dir, Some(&job.name))?;
        (fleet.trace, fleet.slow, fleet.straggle) = (extras.trace, extras.slow, extras.straggle);
        fleet.found(job.servers(), job.cluster.max_restarts)?;
        Ok(fleet)
    }

    /// The workers alone: the servers are those of a fleet that stands already.
    pub fn on(servers: &[String], run_dir: &Path, extras: Extras) -> Result<Self, Failure> {
        Certs::can_be_told()?;
        let mut fleet = Self::empty(Settings::Job, run_dir, None)?;
        (fleet.trace, fleet.slow, fleet.straggle) = (extras.trace, extras.slow, extras.straggle);
        fleet.addresses = servers.to_vec();
        Ok(fleet)
    }

    /// Starts so many servers with fault points for faults, which get these flags: `all` of them, and `founders` those that are
    /// there from the start. One more may join ([`Self::join_server`]).
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

    /// Starts so many servers that are founded for no job and take many. Other processes find its certificates in the folder.
    pub fn standing(servers: u32, run_dir: &Path) -> Result<Self, Failure> {
        crate::certs::of_shared(run_dir, As::Admin)?;
        // Three replicas, as usual, where there are so many servers; two would survive no more than one does.
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

    /// Starts all, then hears where each listens; one that is killed before it says so is started again so often.
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
            let address = self.reach(id, &direct)?;
            self.listens.push(direct);
            self.addresses.push(address);
        }
        let list = self.addresses.join(",");
        for server in &mut self.servers {
            match server.tell(&list) {
                // Who watches the fleet sees that it is gone.
                Err(_) if server.was_killed() => {}
                told => told?,
            }
        }
        Ok(())
    }

    /// By which address others reach a server that listens there.
    fn reach(&self, id: u32, direct: &str) -> Result<String, Failure> {
        let Some(fault_points) = &self.fault_points else { return Ok(direct.to_string()) };
        let target = direct
            .parse()
            .map_err(|e| Failure::new(exit::FAILED, format!("server-{id} listens on `{direct}`: {e}")))?;
        fault_points.proxies.point(id, target);
        Ok(fault_points.proxies.addresses()[id as usize].clone())
    }

    /// How a process of it comes by connections.
    pub fn access(&self, shows: As) -> Result<Access, Failure> {
        self.certs.access(shows)
    }

    /// Where the servers listen themselves, without fault points.
    pub fn listens(&self) -> &[String] {
        &self.listens
    }

    /// Starts a server that is there from the start, or one that joins.
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
            command.args(["--join", &self.addresses.join(","), "--place", &id.to_string()]);
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

    /// Starts a dead server again, at its address and with its folder; it has told nobody yet that it is back.
    pub fn restart_server(&mut self, id: usize) -> Result<(), Failure> {
        // Behind a door any port will do, and somebody's connection may have its old one by now. A job's servers and those that
        // stand have no door, or a person looks for them where they listened first.
        let listen = match self.settings {
            Settings::Flags { .. } if self.fault_points.is_some() => ANY_PORT,
            _ => &self.listens[id],
        };
        let mut server = self.server(id as u32, listen, id < self.addresses.len())?;
        let direct = server.first_line()?;
        self.reach(id as u32, &direct)?;
        self.listens[id] = direct;
        server.tell(&self.addresses.join(","))?;
        self.servers[id] = server;
        Ok(())
    }

    /// A server more, which joins the running fleet, behind the door that was left for it. It is in none of the fleet's
    /// lists. Once.
    pub fn join_server(&mut self) -> Result<(), Failure> {
        let id = self.servers.len() as u32;
        let mut server = self.server(id, ANY_PORT, false)?;
        let direct = server.first_line()?;
        self.reach(id, &direct)?;
        server.tell(&self.addresses.join(","))?;
        self.listens.push(direct);
        self.servers.push(server);
        Ok(())
    }

    /// Replaces the faults of links and disks; of a fleet with fault points for them.
    pub fn put_faults(&self, faults: &Faults) -> Result<(), Failure> {
        let Some((fault_points, file)) = self.fault_points.as_ref().and_then(|d| Some((d, d.file.as_ref()?)))
        else {
            return Err(Failure::new(exit::USAGE, "the fleet has no fault points for faults"));
        };
        faults.write(file).map_err(|e| Failure::write(file, e))?;
        fault_points.proxies.set(faults);
        Ok(())
    }

    /// Starts a dead worker again; it joins in a new session.
    pub fn restart_worker(&mut self, job: &Job, rank: usize) -> Result<(), Failure> {
        self.workers[rank] = self.worker(job, rank as u32)?;
        Ok(())
    }

    /// Starts the job's workers, from a checkpoint where there is one. Of scripts the first one's output is for the user,
    /// unless it is `quiet`.
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
                _ if self.quiet => Audience::Nobody,
                (0, 1) if std::io::stdin().is_terminal() => Audience::Terminal,
                (0, _) => Audience::User,
                _ => Audience::Nobody,
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
        // The job file has what this process was told, by a flag or by the variable.
        command.env_remove("PARAFT_DEVICE").env_remove("PARAFT_GROUP_SIZE");
        self.certs.tell(&mut command);
        command.arg("--servers").arg(self.addresses.join(",")).arg("--run-dir").arg(dir);
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

    /// A worker that is a user's script.
    fn script(&self, job: &Job, rank: u32, at: &Rendezvous, audience: Audience) -> Result<Process, Failure> {
        let (dir, name) = (&self.run_dir, format!("worker-{rank}"));
        let mut own: Vec<(_, OsString)> = vec![
            ("PARAFT_JOB", dir.join(JOB_FILE).into()),
            ("PARAFT_SERVERS", self.addresses.join(",").into()),
            ("PARAFT_RUN_DIR", dir.into()),
            ("PARAFT_LOG_FILE", dir.join(format!("{name}.log")).into()),
        ];
        own.extend(self.resume.iter().map(|r| ("PARAFT_RESUME", r.into())));
        own.extend(self.slow.get(&rank).map(|f| ("PARAFT_SLOW", f.to_string().into())));
        own.extend(self.straggle.map(|s| ("PARAFT_STRAGGLE", s.to_string().into())));
        if let Some(steps) = self.trace {
            own.push(("PARAFT_TRACE", dir.join(TRACE_FOLDER).into()));
            own.push(("PARAFT_TRACE_STEPS", steps.to_string().into()));
        }
        let mut command = script::command(job, rank, at, own);
        self.certs.tell(&mut command);
        Process::script(name, command, dir, audience)
    }

    /// Does to the links what the faults file says; nothing in a fleet without fault points.
    pub fn follow_faults(&self) {
        if let Some(fault_points) = &self.fault_points
            // One that cannot be read says so in the servers' logs.
            && let Some(Ok(faults)) = fault_points.file.as_ref().map(|f| Faults::read(f))
        {
            fault_points.proxies.set(&faults);
        }
    }

    /// Ends everything that still runs: first kindly, workers before servers, then not.
    pub fn stop(&mut self) {
        self.stop_as(Signal::SIGTERM);
    }

    /// As [`Self::stop`]; scripts get the signal that the user has sent.
    pub fn stop_as(&mut self, scripts: Signal) {
        process::end(&mut self.workers, scripts);
        process::end(&mut self.servers, scripts);
    }
}

impl FaultPoints {
    /// Where something needs them.
    fn open(servers: u32, run_dir: &Path, extras: &Extras) -> Result<Option<Self>, Failure> {
        let links = Links { workers: extras.link, servers: extras.between };
        // Of a run before, in a folder that is used again: this one's fault points follow none.
        let _ = std::fs::remove_file(run_dir.join(FAULTS_FILE));
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

impl Drop for Fleet {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Where a server of a run keeps its identity and its logs.
pub fn server_data(run_dir: &Path, id: u32) -> PathBuf {
    run_dir.join(format!("server-{id}"))
}

/// Where a server that is launched here logs; it stays when the run has ended.
pub fn server_log(run_dir: &Path, id: u32) -> PathBuf {
    run_dir.join(format!("server-{id}.log"))
}

/// Any port that is free, of this machine alone.
const ANY_PORT: &str = "127.0.0.1:0";
