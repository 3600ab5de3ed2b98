//! What a fleet knows of its jobs and checkpoints, from any server, while servers die: real processes, real signals.

use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    io::Read,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

const DEADLINE: Duration = Duration::from_secs(90);
const EPOCHS: u64 = 60;
/// Steps of a worker: 44 in each epoch of the 1,437 embedded images.
const STEPS: u64 = 44 * EPOCHS;

fn paraft() -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_paraft"));
    c.stdin(Stdio::null()).env_remove("PARAFT_SERVERS");
    c
}

/// What a command prints; it must succeed.
fn printed(args: &[&str]) -> String {
    let out = paraft().args(args).output().expect("paraft starts");
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Waits for a condition; says what it last saw when it gives up.
fn wait<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let began = Instant::now();
    loop {
        match look() {
            Ok(t) => return t,
            Err(last) => assert!(began.elapsed() < DEADLINE, "gave up waiting for {what}: {last}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Kills what it holds, so that a failed test leaves nothing behind.
struct Held(Child);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.kill(); // SIGKILL
        let _ = self.0.wait();
    }
}

/// What the control group knows, asked at one server: the last line of its status.
fn known(address: &str) -> Result<Value, String> {
    let out = paraft().args(["status", address, "--json"]).output().expect("paraft starts");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let last = text.lines().next_back().unwrap_or_default();
    let line: Value = serde_json::from_str(last).map_err(|e| format!("{e}: {text}"))?;
    if line.get("jobs").is_some() { Ok(line) } else { Err(text) }
}

/// Its only job.
fn job_at(address: &str) -> Result<Value, String> {
    let line = known(address)?;
    match line["jobs"].as_array().map(Vec::as_slice) {
        Some([job]) => Ok(job.clone()),
        _ => Err(line.to_string()),
    }
}

struct Fleet {
    job: PathBuf,
    data: PathBuf,
    addresses: Vec<String>,
    servers: Vec<Option<Held>>,
}

impl Fleet {
    fn new(folder: &Path, more: &str) -> Self {
        // Ports that were free a moment ago, each in its own listener so that they differ.
        let listeners: Vec<_> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").expect("port")).collect();
        let addresses: Vec<_> =
            listeners.iter().map(|l| l.local_addr().expect("address").to_string()).collect();
        let body = format!(
            "name = \"t\"\n[model]\nkind = \"mlp\"\nhidden = [32]\n[data]\nkind = \"digits\"\n[train]\nmode = \"bsp\"\n\
             batch = 16\nepochs = {EPOCHS}\n[cluster]\nservers = 3\nreplicas = 3\nelection_ms = 200\n\
             addresses = {addresses:?}\n{more}"
        );
        let job = folder.join("job.toml");
        fs::write(&job, body).expect("job file");
        let mut fleet = Self { job, data: folder.into(), addresses, servers: vec![None, None, None] };
        drop(listeners);
        (0..3).for_each(|id| fleet.start(id));
        fleet
    }

    fn start(&mut self, id: usize) {
        let mut c = paraft();
        c.arg("server").arg(&self.job).args(["--id", &id.to_string()]).stderr(Stdio::null());
        c.arg("--data").arg(self.data.join(format!("s{id}")));
        self.servers[id] = Some(Held(c.spawn().expect("server")));
    }

    fn kill(&mut self, id: usize) {
        self.servers[id] = None;
    }

    fn worker(&self, rank: u32, run_dir: &Path) -> Child {
        let mut c = paraft();
        c.arg("worker").arg(&self.job).args(["--rank", &rank.to_string(), "--run-dir"]).arg(run_dir);
        c.stderr(Stdio::piped()).spawn().expect("worker")
    }

    /// The server that leads the control group.
    fn leader(&self) -> usize {
        wait("a leader of the control group", || {
            let lines: Vec<_> = self.addresses.iter().filter_map(|a| known(a).ok()).collect();
            let named = |l: &Value| self.addresses.iter().position(|a| l["leader"] == a.as_str());
            lines.iter().find_map(named).ok_or_else(|| format!("{lines:?}"))
        })
    }
}

fn names(job: &Value) -> BTreeSet<String> {
    let all = job["checkpoints"].as_array().expect("a list").iter();
    all.map(|c| c["path"].as_str().expect("a path").to_string()).collect()
}

#[test]
fn any_server_tells_of_jobs_and_checkpoints_also_when_the_control_groups_leader_was_killed() {
    let scratch = tempfile::tempdir().expect("scratch");
    let run_dir = scratch.path().join("run");
    fs::create_dir(&run_dir).expect("run folder");
    let checkpoint = "[checkpoint]\nevery_steps = 100\nnum_to_keep = 2\n";
    let mut fleet = Fleet::new(scratch.path(), checkpoint);
    let workers: Vec<_> = (0..2).map(|rank| Held(fleet.worker(rank, &run_dir))).collect();
    let job = wait("a checkpoint to be listed", || match job_at(&fleet.addresses[0])? {
        job if job["latest"].is_object() => Ok(job),
        job => Err(job.to_string()),
    });
    for (key, value) in [("job", "t"), ("mode", "bsp"), ("durability", "quorum-memory"), ("log", "auto")] {
        assert_eq!(job[key], value, "{job}");
    }
    assert_eq!(job["workers"], 2, "{job}");

    let killed = fleet.leader();
    fleet.kill(killed);
    for mut w in workers {
        let status = w.0.wait().expect("worker");
        let mut said = String::new();
        w.0.stderr.take().expect("piped").read_to_string(&mut said).expect("what it said");
        assert!(status.success(), "{status}: {said}");
    }
    // No worker is left. Each of the others tells the same, asked by itself.
    let others: Vec<String> =
        (0..3).filter(|id| *id != killed).map(|id| fleet.addresses[id].clone()).collect();
    let folder = run_dir.join("checkpoints");
    let on_disk: BTreeSet<String> = fs::read_dir(&folder)
        .expect("checkpoints")
        .flatten()
        .filter(|e| e.path().is_dir())
        .map(|e| e.path().display().to_string())
        .collect();
    let pointed = |name: &str| {
        let text = fs::read_to_string(folder.join(name)).expect("a pointer");
        folder.join(text.lines().next().unwrap_or_default()).display().to_string()
    };
    for address in &others {
        let job = wait("the job to have finished", || match job_at(address)? {
            job if job["state"] == "finished" => Ok(job),
            job => Err(job.to_string()),
        });
        assert_eq!(names(&job), on_disk, "what num_to_keep removed is not listed");
        assert_eq!(job["latest"]["step"], STEPS, "{job}");
        assert_eq!(job["latest"]["path"], pointed("latest").as_str(), "{job}");
        assert_eq!(job["best"]["path"], pointed("best").as_str(), "{job}");
        assert!(job["best"]["loss"].as_f64().is_some_and(|l| l > 0.0 && l < 1.0), "{job}");
        assert!(job["latest"]["worker"].is_u64() && job["latest"]["bytes"].as_u64() > Some(1000), "{job}");
        assert_eq!(job["latest"]["versions"], serde_json::json!([STEPS, STEPS]), "{job}");
        let text = printed(&["status", address]);
        let shown = format!("latest: step {STEPS}");
        let both = format!("latest, best: step {STEPS}");
        assert!(text.contains("job t  finished  bsp  2 workers"), "{text}");
        assert!(text.contains(&shown) || text.contains(&both), "{text}");
        let list = printed(&["checkpoint", "list", address]);
        assert!(on_disk.iter().all(|path| list.contains(path)), "{list}");
        let list: Value =
            serde_json::from_str(&printed(&["checkpoint", "list", address, "--json"])).expect("json");
        assert_eq!(list["jobs"][0], job);
    }

    // Without a majority nobody is elected, and the last server still tells what was agreed.
    let second = fleet.leader();
    fleet.kill(second);
    let last = (0..3).find(|id| *id != killed && *id != second).expect("one of three");
    let last = fleet.addresses[last].as_str();
    let job = wait("the last server to lead nothing", || match known(last)? {
        line if line["leader"].is_null() => Ok(line["jobs"][0].clone()),
        line => Err(line.to_string()),
    });
    assert_eq!((&job["state"], names(&job)), (&"finished".into(), on_disk.clone()));

    // The whole fleet dies and comes back: the weights were in memory, what is agreed is on disk.
    (0..3).for_each(|id| fleet.kill(id));
    (0..3).for_each(|id| fleet.start(id));
    let leader = fleet.leader();
    let job = job_at(&fleet.addresses[leader]).expect("its job");
    assert_eq!((&job["state"], names(&job)), (&"finished".into(), on_disk));
}
