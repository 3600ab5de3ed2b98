//! Shared by the tests.

pub use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
pub use paraft_fleet::process::Process;
pub use serde_json::Value;
pub use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};
use std::{
    io::ErrorKind,
    net::{TcpListener, TcpStream},
};

/// Training images of the embedded digits; the others are held out.
pub const TRAINED: u64 = 1437;
pub const DEADLINE: Duration = Duration::from_secs(180);

pub fn paraft() -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_paraft"));
    c.stdin(Stdio::null())
        .env_remove("PARAFT_SERVERS")
        .env_remove("PARAFT_CERTS")
        .env_remove("PARAFT_INSECURE");
    // The tests compare bits, which differ on a GPU.
    c.env("CUDA_VISIBLE_DEVICES", "");
    c
}

pub fn run(args: &[&str]) -> Output {
    paraft().args(args).output().expect("paraft starts")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Waits for a condition; on timeout it prints the last observation.
pub fn wait<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let began = Instant::now();
    loop {
        match look() {
            Ok(t) => return t,
            Err(last) => assert!(began.elapsed() < DEADLINE, "gave up waiting for {what}: {last}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn job(dir: &Path, body: &str) -> PathBuf {
    let path = dir.join("job.toml");
    fs::write(&path, body).expect("job file");
    path
}

/// Digits on a small fleet; long enough to be interrupted unless `epochs` is small.
pub fn digits(mode: &str, servers: u32, epochs: u64) -> String {
    format!(
        "name = \"t\"\n[model]\nkind = \"mlp\"\nhidden = [32]\n[data]\nkind = \"digits\"\n[train]\nmode = \"{mode}\"\nbatch = 16\nepochs = {epochs}\n[cluster]\nservers = {servers}\nreplicas = {servers}\nelection_ms = 200\n"
    )
}

/// Processes whose command line names this folder.
pub fn processes(folder: &Path) -> Vec<(i32, String)> {
    let name = folder.to_string_lossy().into_owned();
    let own = std::process::id() as i32;
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
        let line = text(&fs::read(entry.path().join("cmdline")).unwrap_or_default()).replace('\0', " ");
        if pid != own && line.contains(&name) {
            found.push((pid, line));
        }
    }
    found
}

/// Waits until no process is left whose command line names this folder.
pub fn wait_for_the_end(folder: &Path) {
    wait("every process to end", || match processes(folder) {
        left if left.is_empty() => Ok(()),
        left => Err(format!("{left:?}")),
    });
}

/// Waits until these servers' ports are closed: a process that is killed has no command line before that.
pub fn wait_for_closed_ports(run_dir: &Path) {
    let servers = fs::read_to_string(run_dir.join("servers")).expect("a list of servers");
    for address in servers.split([',', '\n']).map(str::trim).filter(|a| !a.is_empty()) {
        wait("a port to close", || match TcpStream::connect(address) {
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => Ok(()),
            other => Err(format!("{address}: {other:?}")),
        });
    }
}

pub fn pid_of(folder: &Path, what: &str) -> Pid {
    let all = processes(folder);
    let (pid, _) =
        all.iter().find(|(_, l)| l.contains(what)).unwrap_or_else(|| panic!("no {what} in {all:?}"));
    Pid::from_raw(*pid)
}

pub struct Launcher {
    pub child: Child,
    pub run_dir: PathBuf,
    pub scratch: std::sync::Arc<tempfile::TempDir>,
}

impl Launcher {
    /// `paraft train` on a fleet of its own, up to the point where `steps` training lines are written.
    pub fn training(body: &str, lines: usize) -> Self {
        let scratch = tempfile::tempdir().expect("scratch");
        let run_dir = scratch.path().join("run");
        let child = paraft()
            .arg("train")
            .arg(job(scratch.path(), body))
            .arg("--run-dir")
            .arg(&run_dir)
            .arg("--json")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("paraft starts");
        let mut me = Self { child, run_dir, scratch: scratch.into() };
        wait("training to go on", || {
            if let Ok(Some(status)) = me.child.try_wait() {
                panic!("the launcher ended early: {status}");
            }
            let seen = me.metrics().iter().filter(|e| e["event"] == "train").count();
            if seen >= lines { Ok(()) } else { Err(format!("{seen} training lines")) }
        });
        me
    }

    pub fn metrics(&self) -> Vec<Value> {
        Self::metrics_in(&self.run_dir)
    }

    pub fn metrics_in(run_dir: &Path) -> Vec<Value> {
        let lines = fs::read_to_string(run_dir.join("metrics.jsonl")).unwrap_or_default();
        lines.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
    }

    /// Keeps the run's folder beyond [`Self::output`].
    pub fn keep(&self) -> std::sync::Arc<tempfile::TempDir> {
        self.scratch.clone()
    }

    pub fn output(mut self) -> (Option<i32>, String, String) {
        wait("the launcher to end", || match self.child.try_wait() {
            Ok(Some(_)) => Ok(()),
            other => Err(format!("{other:?}; {:?}", processes(&self.run_dir))),
        });
        let run_dir = self.run_dir.clone();
        let out = self.child.wait_with_output().expect("output");
        wait_for_the_end(&run_dir);
        (out.status.code(), text(&out.stdout), text(&out.stderr))
    }
}

/// Kills its child on drop, so a failed test leaves no process behind.
pub struct Held(pub Child);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Three servers started by hand, which can be killed and restarted with their folders.
pub struct Fleet {
    pub addresses: Vec<String>,
    pub folder: PathBuf,
    /// The job file of their settings; `None`: the defaults.
    pub job: Option<PathBuf>,
    /// The limit of file descriptors of each; `None`: that of this process.
    pub descriptors: Option<u32>,
    pub servers: Vec<Option<Process>>,
}

impl Fleet {
    /// `job` is the job file's text, to which the servers' addresses are added; its last table must be `[cluster]`.
    pub fn start(folder: &Path, job: Option<&str>) -> Self {
        Self::begin(folder, job, None)
    }

    /// As [`Self::start`], with this limit of file descriptors.
    pub fn with_descriptors(folder: &Path, job: &str, descriptors: Option<u32>) -> Self {
        Self::begin(folder, Some(job), descriptors)
    }

    fn begin(folder: &Path, job: Option<&str>, descriptors: Option<u32>) -> Self {
        let addresses = free_addresses(3);
        let job = job.map(|text| self::job(folder, &format!("{text}addresses = {addresses:?}\n")));
        let servers = vec![None, None, None];
        let mut fleet = Self { addresses, folder: folder.into(), job, descriptors, servers };
        (0..3).for_each(|id| fleet.serve(id));
        fleet
    }

    pub fn list(&self) -> String {
        self.addresses.join(",")
    }

    pub fn data(&self, id: usize) -> PathBuf {
        self.folder.join(format!("s{id}"))
    }

    pub fn serve(&mut self, id: usize) {
        let mut c = match self.descriptors {
            None => paraft(),
            Some(n) => {
                let mut c = Command::new("sh");
                c.args(["-c", &format!("ulimit -n {n}; exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_paraft")]);
                c.stdin(Stdio::null());
                c
            }
        };
        c.arg("server").env("PARAFT_INSECURE", "1");
        match &self.job {
            Some(job) => c.arg(job),
            None => c.args(["--election-ms", "200", "--servers", &self.list()]),
        };
        c.args(["--id", &id.to_string()]).arg("--data").arg(self.data(id));
        let server = Process::start(format!("server-{id}"), c, &self.folder).expect("server");
        self.servers[id] = Some(server);
    }

    /// The command of a worker of the fleet's job.
    pub fn worker(&self, rank: u32, run_dir: &Path) -> Command {
        let mut c = paraft();
        c.env("PARAFT_INSECURE", "1").arg("worker").arg(self.job.as_ref().expect("a job"));
        c.args(["--rank", &rank.to_string(), "--run-dir"]).arg(run_dir);
        c
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self, id: usize) {
        self.servers[id] = None;
    }

    pub fn ask(&self, args: &[&str]) -> Output {
        paraft().args(args).args(["--fleet", &self.list()]).output().expect("paraft starts")
    }

    /// Waits until every shard is in this state.
    pub fn all(&self, state: &str) {
        wait(&format!("every shard to be {state}"), || {
            let out = self.ask(&["status", "--json"]);
            let last: Option<Value> =
                text(&out.stdout).lines().last().and_then(|l| serde_json::from_str(l).ok());
            let is = |f: &Value| {
                let placed = f["placement"].as_array().filter(|p| !p.is_empty());
                placed.is_some_and(|p| p.iter().all(|s| s["state"] == state))
            };
            match last.as_ref().is_some_and(is) {
                true => Ok(()),
                false => Err(format!("{last:?} {}", text(&out.stderr))),
            }
        });
    }
}

/// Ports that were free a moment ago, each in its own listener so that they differ.
pub fn free_addresses(count: usize) -> Vec<String> {
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").expect("port")).collect();
    listeners.iter().map(|l| l.local_addr().expect("address").to_string()).collect()
}

pub fn contains(said: &str, words: &[&str]) {
    words.iter().for_each(|w| assert!(said.contains(w), "`{w}` is not in: {said}"));
}
