//! Servers and workers as processes of this machine.
//!
//! Every child ends with this process, however that ends: each holds a pipe on its standard input whose other
//! end is here (see `paraft_host::lifeline`). They run in process groups of their own, so that Ctrl-C reaches
//! only the launcher, which then ends them in order: workers, then servers.

use crate::{
    failure::Failure,
    faults::{FAULTS_FILE, Faults, link::Link, proxy::Proxies},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use paraft_trace::TRACE_FOLDER;
use paraft_worker::{Job, exit, slow::Straggle};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// How long a process may take to end by itself.
const END_PATIENCE: Duration = Duration::from_secs(3);

/// A process and its lifeline.
pub struct Process {
    /// For messages and file names: `server-0`, `worker-1`.
    pub name: String,
    child: Child,
    stderr: PathBuf,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts it; what it says on standard error is added to a file in `run_dir`.
    pub fn start(name: String, mut command: Command, run_dir: &Path) -> Result<Self, Failure> {
        let stderr = run_dir.join(format!("{name}.stderr"));
        let file = File::options().create(true).append(true).open(&stderr);
        let file = file.map_err(|e| Failure::write(&stderr, e))?;
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(file)
            .process_group(0)
            .spawn()
            .map_err(|e| Failure::new(exit::CONFIG, format!("{name}: `{program}` does not start: {e}")))?;
        Ok(Self { name, child, stderr, ended: None })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The exit status, once there is one.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().ok().flatten();
        }
        self.ended
    }

    /// The first line that a supervised server says: where it listens.
    pub fn first_line(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        let out = self.child.stdout.take();
        let read = out.map(|o| BufReader::new(o).read_line(&mut line));
        if line.trim().is_empty() {
            self.ended = self.child.wait().ok();
            let end = self.end();
            let mut what = format!("{} {end}", self.name);
            if let Some(Err(e)) = read {
                what += &format!(" ({e})");
            }
            return Err(Failure::new(exit::FAILED, what));
        }
        Ok(line.trim().to_string())
    }

    /// Says one line to its standard input, which stays open.
    pub fn tell(&mut self, line: &str) -> Result<(), Failure> {
        let Some(stdin) = &mut self.child.stdin else { return Ok(()) };
        writeln!(stdin, "{line}").map_err(|e| Failure::new(exit::FAILED, format!("{}: {e}", self.name)))
    }

    /// Ends it as a crash does, and waits until it is gone.
    pub fn kill(&mut self) {
        if self.ended().is_none() {
            let _ = self.child.kill();
            self.ended = self.child.wait().ok();
        }
    }

    /// Sends it a signal, if it lives.
    pub fn signal(&self, signal: Signal) {
        if self.ended.is_none() {
            let _ = kill(Pid::from_raw(self.child.id() as i32), signal);
        }
    }

    /// The last thing it said before it ended.
    pub fn last_words(&self) -> String {
        let text = std::fs::read_to_string(&self.stderr).unwrap_or_default();
        let from = text.rfind("error: ").map_or(text.len().saturating_sub(400), |at| at + "error: ".len());
        text.get(from..).unwrap_or("").trim().to_string()
    }

    /// How it ended, and what it said then.
    pub fn end(&mut self) -> String {
        let (how, words) = (self.obituary(), self.last_words());
        if words.is_empty() { how } else { format!("{how}: {words}") }
    }

    /// Whether a signal ended it.
    pub fn was_killed(&mut self) -> bool {
        self.ended().is_some_and(|s| s.signal().is_some())
    }

    /// How it ended, in words.
    pub fn obituary(&mut self) -> String {
        match self.ended() {
            None => "is running".into(),
            Some(s) => match (s.signal(), s.code()) {
                (Some(n), _) => {
                    let name = Signal::try_from(n).map_or(n.to_string(), |s| s.to_string());
                    format!("was ended by {name}")
                }
                (_, Some(code)) => format!("ended with exit code {code}"),
                _ => "ended".into(),
            },
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended().is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// A running fleet. Dropping it ends everything.
pub struct Fleet {
    pub workers: Vec<Process>,
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
        for group in [&mut self.workers, &mut self.servers] {
            for p in group.iter_mut() {
                p.ended();
                p.signal(Signal::SIGTERM);
            }
            let deadline = Instant::now() + END_PATIENCE;
            while group.iter_mut().any(|p| p.ended().is_none()) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            for p in group.iter_mut() {
                p.signal(Signal::SIGKILL);
                let _ = p.child.wait();
            }
        }
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
