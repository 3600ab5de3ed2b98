//! What a person who runs a fleet by hand is told when something is amiss.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

const DEADLINE: Duration = Duration::from_secs(60);

fn paraft() -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_paraft"));
    c.stdin(Stdio::null());
    c
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Kills what it holds, so that a failed test leaves nothing behind.
struct Held(Child);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Three servers that were started by hand.
struct Fleet {
    addresses: Vec<String>,
    servers: Vec<Option<Held>>,
    scratch: tempfile::TempDir,
}

impl Fleet {
    fn start() -> Self {
        let scratch = tempfile::tempdir().expect("scratch");
        let listeners: Vec<_> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").expect("port")).collect();
        let addresses = listeners.iter().map(|l| l.local_addr().expect("address").to_string()).collect();
        let mut fleet = Self { addresses, servers: vec![None, None, None], scratch };
        drop(listeners);
        (0..3).for_each(|id| fleet.serve(id));
        fleet.whole();
        fleet
    }

    fn list(&self) -> String {
        self.addresses.join(",")
    }

    fn data(&self, id: usize) -> PathBuf {
        self.scratch.path().join(format!("s{id}"))
    }

    fn serve(&mut self, id: usize) {
        let mut c = paraft();
        c.args(["server", "--election-ms", "200", "--servers", &self.list(), "--id", &id.to_string()]);
        c.arg("--data").arg(self.data(id)).stderr(Stdio::null());
        self.servers[id] = Some(Held(c.spawn().expect("server")));
    }

    /// Ends it as a crash does.
    fn kill(&mut self, id: usize) {
        self.servers[id] = None;
    }

    fn ask(&self, args: &[&str]) -> Output {
        paraft().args(args).args(["--servers", &self.list()]).output().expect("paraft starts")
    }

    /// Waits until every shard serves with all its replicas.
    fn whole(&self) {
        let began = Instant::now();
        loop {
            let out = self.ask(&["status", "--json"]);
            let last: Option<Value> =
                text(&out.stdout).lines().last().and_then(|l| serde_json::from_str(l).ok());
            let serves = |f: &Value| {
                let placed = f["placement"].as_array().filter(|p| !p.is_empty());
                placed.is_some_and(|p| p.iter().all(|s| s["state"] == "serving"))
            };
            if last.as_ref().is_some_and(serves) {
                return;
            }
            assert!(began.elapsed() < DEADLINE, "the fleet is not whole: {last:?} {}", text(&out.stderr));
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn contains(said: &str, words: &[&str]) {
    words.iter().for_each(|w| assert!(said.contains(w), "`{w}` is not in: {said}"));
}

#[test]
fn a_server_that_the_majority_needs_is_not_called_stoppable() {
    let mut fleet = Fleet::start();
    fleet.kill(2);
    let out = fleet.ask(&["drain", "1", "--wait", "4"]);
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(69), "{}{err}", text(&out.stdout));
    let silent = format!("s2 ({}) is silent", fleet.addresses[2]);
    contains(&err, &["do not stop it", &silent, "the control group", "shard 0", "help: start the silent"]);
    fleet.serve(2);
    let out = fleet.ask(&["drain", "1"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    contains(&text(&out.stdout), &["s1 leads nothing any more", "It can be stopped"]);
}

#[test]
fn a_control_group_without_a_majority_is_said_with_who_answers_and_what_to_do() {
    let mut fleet = Fleet::start();
    fleet.kill(1);
    fleet.kill(2);
    let out = fleet.ask(&["status"]);
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(69), "{}{err}", text(&out.stdout));
    let answers = format!("servers that answer: {}", fleet.addresses[0]);
    contains(&err, &["control group", &answers, &fleet.addresses[1], &fleet.addresses[2], "--data"]);
    let out = fleet.ask(&["drain", "1"]);
    assert_eq!(out.status.code(), Some(69), "{}", text(&out.stdout));
    contains(&text(&out.stderr), &["control group", &answers]);

    let mut joins = paraft();
    joins.args(["server", "--listen", "127.0.0.1:0", "--join", &fleet.list(), "--data"]).arg(fleet.data(3));
    let mut joins = Held(joins.stderr(Stdio::piped()).spawn().expect("server"));
    let (tell, said) = mpsc::channel();
    let lines = BufReader::new(joins.0.stderr.take().expect("stderr")).lines().map_while(Result::ok);
    // Read to its end: a server must not find its standard error closed.
    std::thread::spawn(move || lines.for_each(|l| _ = tell.send(l)));
    let word = said.iter().find(|l| l.contains("It goes on asking")).expect("it says why it waits");
    contains(&word, &["control group", &answers, &fleet.addresses[1]]);
    // And goes on: the fleet comes back, and takes it in.
    fleet.serve(1);
    let began = Instant::now();
    loop {
        let out = fleet.ask(&["status"]);
        if text(&out.stdout).lines().any(|l| l.starts_with(" s3 ") && l.contains(" up ")) {
            break;
        }
        assert!(began.elapsed() < DEADLINE, "{}", text(&out.stdout));
        std::thread::sleep(Duration::from_millis(50));
    }
    kill(Pid::from_raw(joins.0.id() as i32), Signal::SIGTERM).expect("SIGTERM");
    assert_eq!(joins.0.wait().expect("server").code(), Some(0), "it ends in order");
}

/// A small job on the digits, in a folder; one checkpoint after each epoch.
fn job(dir: &Path, more: &str) -> PathBuf {
    let path = dir.join("job.toml");
    let body = "name = \"t\"\n[model]\nkind = \"logistic-regression\"\n[data]\nkind = \"digits\"\n[train]\nworkers = 1\n\
                [cluster]\nservers = 1\nreplicas = 1\n[checkpoint]\n";
    fs::write(&path, format!("{body}{more}")).expect("job file");
    path
}

#[test]
fn a_folder_that_can_hold_no_checkpoints_is_refused_before_anything_starts() {
    let scratch = tempfile::tempdir().expect("scratch");
    let file = scratch.path().join("taken");
    fs::write(&file, "").expect("file");
    for dir in ["taken", "taken/below", "/proc/checkpoints"] {
        let job = job(scratch.path(), &format!("dir = \"{dir}\"\n"));
        let run = scratch.path().join("run");
        let train =
            paraft().arg("train").arg(&job).arg("--run-dir").arg(&run).output().expect("paraft starts");
        assert!(
            !run.join("metrics.jsonl").exists() && !run.join("server-0.log").exists(),
            "nothing may start"
        );
        // Nobody listens there: a worker that tries to train says so, with another code.
        let mut worker = paraft();
        worker.arg("worker").arg(&job).args(["--rank", "0", "--servers", "127.0.0.1:1"]);
        for out in [train, worker.output().expect("paraft starts")] {
            let err = text(&out.stderr);
            assert_eq!(out.status.code(), Some(74), "{dir}: {err}");
            contains(&err, &["checkpoints cannot be written to", dir, "checkpoint.dir"]);
            assert!(dir.starts_with('/') || err.contains("taken is a file, not a folder"), "{err}");
        }
    }
}

#[test]
fn resume_takes_the_newest_run_that_has_a_whole_checkpoint_and_names_the_newer_ones() {
    let scratch = tempfile::tempdir().expect("scratch");
    let job = job(scratch.path(), "");
    let train = |args: &[&str]| {
        let mut c = paraft();
        c.current_dir(scratch.path()).arg("train").arg(&job).arg("--json").args(args);
        c.output().expect("paraft starts")
    };
    let out = train(&[]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let runs = scratch.path().join("runs");
    fs::create_dir(runs.join("t-2")).expect("a run that ended before its first checkpoint");
    let whole = fs::read_dir(runs.join("t-1/checkpoints")).expect("checkpoints").flatten();
    let whole = whole.map(|e| e.path()).find(|p| p.is_dir()).expect("a checkpoint");
    let broken = runs.join("t-10/checkpoints").join(whole.file_name().expect("name"));
    fs::create_dir_all(&broken).expect("folder");
    fs::copy(whole.join("checkpoint.json"), broken.join("checkpoint.json")).expect("all that was written");
    let out = train(&["--resume", "--set", "train.epochs=2"]);
    let err = text(&out.stderr);
    assert!(out.status.success(), "{err}");
    contains(
        &err,
        &[
            "passed over runs/t-10: none of its checkpoints is whole",
            "passed over runs/t-2: it holds no checkpoint",
            "going on from step",
            "runs/t-1/checkpoints",
        ],
    );
}
