//! The binary as a user meets it: real processes, real sockets, real signals.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

/// Images of the embedded digits that are trained; the others are held out.
const TRAINED: u64 = 1437;
const DEADLINE: Duration = Duration::from_secs(90);

fn paraft() -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_paraft"));
    c.stdin(Stdio::null());
    c
}

fn run(args: &[&str]) -> Output {
    paraft().args(args).output().expect("paraft starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Waits for a condition; says what it last saw when it gives up.
fn wait<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let began = Instant::now();
    loop {
        match look() {
            Ok(t) => return t,
            Err(last) => assert!(began.elapsed() < DEADLINE, "gave up waiting for {what}: {last}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn job(dir: &Path, body: &str) -> PathBuf {
    let path = dir.join("job.toml");
    fs::write(&path, body).expect("job file");
    path
}

/// Digits on a small fleet; long enough to be interrupted unless `epochs` is small.
fn digits(mode: &str, servers: u32, epochs: u64) -> String {
    format!(
        "name = \"t\"\n[model]\nkind = \"mlp\"\nhidden = [32]\n[data]\nkind = \"digits\"\n[train]\nmode = \"{mode}\"\nbatch = 16\nepochs = {epochs}\n[cluster]\nservers = {servers}\nreplicas = {servers}\nelection_ms = 200\n"
    )
}

/// Processes whose command line names this folder.
fn processes(folder: &Path) -> Vec<(i32, String)> {
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

fn pid_of(folder: &Path, what: &str) -> Pid {
    let all = processes(folder);
    let (pid, _) =
        all.iter().find(|(_, l)| l.contains(what)).unwrap_or_else(|| panic!("no {what} in {all:?}"));
    Pid::from_raw(*pid)
}

struct Launcher {
    child: Child,
    run_dir: PathBuf,
    scratch: std::sync::Arc<tempfile::TempDir>,
}

impl Launcher {
    /// `paraft train` on a fleet of its own, up to the point where `steps` training lines are written.
    fn training(body: &str, lines: usize) -> Self {
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

    fn metrics(&self) -> Vec<Value> {
        Self::metrics_in(&self.run_dir)
    }

    fn metrics_in(run_dir: &Path) -> Vec<Value> {
        let lines = fs::read_to_string(run_dir.join("metrics.jsonl")).unwrap_or_default();
        lines.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
    }

    /// Keeps the run's folder beyond [`Self::output`].
    fn keep(&self) -> std::sync::Arc<tempfile::TempDir> {
        self.scratch.clone()
    }

    fn output(mut self) -> (Option<i32>, String, String) {
        wait("the launcher to end", || match self.child.try_wait() {
            Ok(Some(_)) => Ok(()),
            other => Err(format!("{other:?}; {:?}", processes(&self.run_dir))),
        });
        let run_dir = self.run_dir.clone();
        let out = self.child.wait_with_output().expect("output");
        wait("every process to end", || match processes(&run_dir) {
            left if left.is_empty() => Ok(()),
            left => Err(format!("{left:?}")),
        });
        (out.status.code(), text(&out.stdout), text(&out.stderr))
    }
}

#[test]
fn the_demo_prints_both_modes_and_writes_a_report() {
    let scratch = tempfile::tempdir().expect("scratch");
    let dir = scratch.path().join("demo");
    let out = run(&["demo", "--json", "--set", "train.epochs=20", "--run-dir", dir.to_str().expect("utf-8")]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let lines: Vec<Value> =
        text(&out.stdout).lines().map(|l| serde_json::from_str(l).expect("one object a line")).collect();
    assert_eq!(lines.iter().map(|l| l["mode"].as_str().unwrap_or("")).collect::<Vec<_>>(), ["bsp", "asp"]);
    for l in &lines {
        for key in [
            "mode",
            "workers",
            "samples",
            "seconds",
            "samples_per_s",
            "final_loss",
            "final_accuracy",
            "seconds_to_target",
            "delay_p50",
            "delay_p99",
        ] {
            assert!(l.get(key).is_some(), "{key} is missing in {l}");
        }
        assert_eq!(l["workers"], 2);
        assert_eq!(l["samples"], 20 * 22 * 32 * 2, "the whole budget");
        assert!(l["final_accuracy"].as_f64().expect("accuracy") > 0.9, "{l}");
    }
    assert_eq!(lines[0]["delay_p99"], 0, "lock-step has no delay");
    let report = fs::read_to_string(dir.join("report.html")).expect("report");
    assert!(report.contains("bsp") && report.contains("asp") && !report.contains("src=\"http"));
    for mode in ["bsp", "asp"] {
        let run = dir.join(mode);
        let record = paraft_record::RunRecord::load(&run).expect("record");
        let printed = lines.iter().find(|l| l["mode"] == mode).expect("printed");
        let again = serde_json::to_value(record.summarize()).expect("json");
        assert_eq!(&again, printed, "what is printed is what the record gives");
        let events = fs::read_dir(run.join("tensorboard")).expect("tensorboard").count();
        assert_eq!(events, 1);
        assert!(run.join("model.safetensors").exists(), "the trained weights are kept");
        for log in ["server-0.log", "server-2.log", "worker-0.log", "worker-1.log"] {
            assert!(run.join(log).exists(), "{log}");
        }
    }
}

#[test]
fn what_is_wrong_with_a_job_is_said_with_file_line_and_remedy() {
    let scratch = tempfile::tempdir().expect("scratch");
    let base = digits("bsp", 3, 1);
    let cases = [
        (base.replace("epochs", "epocs"), 78, vec!["job.toml:10", "epocs", "epochs"]),
        (base.replace("replicas = 3", "replicas = 5"), 78, vec!["job.toml:13", "cluster.replicas", "help"]),
        (base.replace("replicas = 3", "replicas = 2"), 78, vec!["job.toml:13", "odd"]),
        (base.replace("\"bsp\"", "\"sync\""), 78, vec!["job.toml:", "sync", "ssp:S"]),
        (base.replace("batch = 16", "batch = 1500"), 78, vec!["1437 training samples", "train.batch"]),
        (base.replace("[32]", "[0]"), 78, vec!["mlp"]),
        (base.replace("kind = \"digits\"", "kind = \"idx\"\npath = \"nowhere\""), 65, vec!["nowhere"]),
        (base.replace("kind = \"mlp\"\nhidden = [32]", "kind = \"mlpp\""), 78, vec!["mlpp"]),
        (base.clone() + "addresses = [\"a:1\", \"a:1\"]\n", 78, vec!["cluster.addresses"]),
        (base.clone() + "[optimizer]\nkind = \"sgd\"\nlr = -1.0\n", 78, vec!["lr"]),
        (base.clone() + "[optimizer]\nkind = \"sgd\"\nmomentun = 0.9\n", 78, vec!["momentun"]),
    ];
    for (body, code, words) in cases {
        let path = job(scratch.path(), &body);
        let dir = scratch.path().join("run");
        let out = paraft().arg("train").arg(path).arg("--run-dir").arg(&dir).output().expect("paraft starts");
        let err = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{body}\n{err}");
        for w in words {
            assert!(err.contains(w), "`{w}` is not in: {err}\n{body}");
        }
        assert!(!dir.join("worker-0.log").exists(), "no worker may start: {err}");
        assert!(!err.contains("panicked"), "{err}");
    }
}

#[test]
fn a_set_that_is_wrong_is_named_and_a_right_one_wins() {
    let scratch = tempfile::tempdir().expect("scratch");
    let path = job(scratch.path(), &digits("bsp", 3, 1));
    let path = path.to_str().expect("utf-8");
    let dir = scratch.path().join("run");
    let dir = dir.to_str().expect("utf-8");
    let out = run(&["train", path, "--run-dir", dir, "--set", "train.batchh=3"]);
    assert_eq!(out.status.code(), Some(78));
    assert!(text(&out.stderr).contains("--set train.batchh=3"), "{}", text(&out.stderr));
    let sets = ["--set", "cluster.servers=1", "--set", "cluster.replicas=1", "--set", "train.mode=ssp:2"];
    let out = run(&[&["train", path, "--run-dir", dir, "--json"][..], &sets[..]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(text(&out.stdout).contains("\"mode\":\"ssp:2\""));
    let again = run(&["train", path, "--run-dir", dir]);
    assert_eq!(again.status.code(), Some(78), "a run's folder is not used twice");
}

#[test]
fn a_taken_port_is_named_with_the_line_that_asks_for_it() {
    let scratch = tempfile::tempdir().expect("scratch");
    let taken = TcpListener::bind("127.0.0.1:0").expect("port");
    let address = taken.local_addr().expect("address").to_string();
    let path = job(scratch.path(), &(digits("bsp", 1, 1) + &format!("addresses = [\"{address}\"]\n")));
    let out = run(&["server", path.to_str().expect("utf-8"), "--id", "0"]);
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(78), "{err}");
    for w in ["job.toml:15", address.as_str(), "in use", "help"] {
        assert!(err.contains(w), "`{w}` is not in: {err}");
    }
}

#[test]
fn no_process_is_left_when_the_launcher_is_killed() {
    let mut l = Launcher::training(&digits("asp", 3, 100_000), 2);
    assert_eq!(processes(&l.run_dir).len(), 6, "launcher, 3 servers, 2 workers: {:?}", processes(&l.run_dir));
    l.child.kill().expect("SIGKILL");
    let _ = l.child.wait();
    wait("every process to end", || match processes(&l.run_dir) {
        left if left.is_empty() => Ok(()),
        left => Err(format!("{left:?}")),
    });
}

#[test]
fn ctrl_c_ends_the_whole_fleet() {
    let l = Launcher::training(&digits("bsp", 3, 100_000), 2);
    kill(Pid::from_raw(l.child.id() as i32), Signal::SIGINT).expect("SIGINT");
    let (code, _, err) = l.output();
    assert_eq!(code, Some(130), "{err}");
    assert!(err.contains("interrupted"), "{err}");
}

#[test]
fn a_killed_worker_does_not_stop_the_others_in_any_mode() {
    for mode in ["bsp", "ssp:2", "asp"] {
        let l = Launcher::training(&digits(mode, 1, 150), 2);
        kill(pid_of(&l.run_dir, "--rank 1"), Signal::SIGKILL).expect("SIGKILL");
        let (code, out, err) = l.output();
        assert_eq!(code, Some(0), "{mode}: {err}");
        let summary: Value = serde_json::from_str(out.trim()).expect("summary");
        assert_eq!(summary["workers_lost"], 1, "{mode}: {summary}");
        assert!(err.contains("worker-1") && err.contains("SIGKILL"), "{mode}: {err}");
        assert!(summary["final_accuracy"].as_f64().expect("accuracy") > 0.9, "{mode}: {summary}");
    }
}

/// A worker that is stopped answers nothing and breaks nothing off: only its lease tells.
#[test]
fn a_stopped_worker_loses_its_lease_and_comes_back_in_a_new_session() {
    let l = Launcher::training(&(digits("bsp", 1, 400) + "grace_ms = 1000\n"), 2);
    let stopped = pid_of(&l.run_dir, "--rank 1");
    kill(stopped, Signal::SIGSTOP).expect("SIGSTOP");
    let lines =
        |l: &Launcher| l.metrics().iter().filter(|e| e["event"] == "train" && e["worker"] == 0).count();
    // What worker 0 had written, and some more: in lock-step it gets on only when the other is out.
    let before = lines(&l);
    wait("the other to go on", || match lines(&l) {
        n if n > before + 5 => Ok(()),
        n => Err(format!("{n} lines of worker 0 after {before}")),
    });
    kill(stopped, Signal::SIGCONT).expect("SIGCONT");
    let run_dir = l.run_dir.clone();
    let log = wait("the stopped one to hear of it", || {
        let log = fs::read_to_string(run_dir.join("worker-1.log")).unwrap_or_default();
        if log.contains("had been taken out") { Ok(log) } else { Err(log) }
    });
    assert!(log.contains("it goes on with the others"), "{log}");
    let (code, out, err) = l.output();
    assert_eq!(code, Some(0), "{err}");
    let summary: Value = serde_json::from_str(out.trim()).expect("summary");
    assert_eq!(summary["workers_lost"], 0, "its process lives: {summary}");
    assert!(summary["final_accuracy"].as_f64().expect("accuracy") > 0.9, "{summary}");
}

/// The chunks of each epoch that workers have trained, how often each, and the samples in them.
fn chunks(metrics: &[Value]) -> BTreeMap<(u64, u64), (usize, u64)> {
    let mut seen = BTreeMap::new();
    for e in metrics.iter().filter(|e| e["event"] == "chunk") {
        let n = |key: &str| e[key].as_u64().unwrap_or_else(|| panic!("{key} in {e}"));
        let chunk = seen.entry((n("epoch"), n("chunk"))).or_insert((0, n("samples")));
        chunk.0 += 1;
        assert_eq!(chunk.1, n("samples"), "a chunk is the same for everyone");
    }
    seen
}

#[test]
fn what_a_killed_worker_leaves_of_an_epoch_is_trained_by_the_others() {
    const EPOCHS: u64 = 60;
    for mode in ["bsp", "asp"] {
        let body =
            digits(mode, 1, EPOCHS).replace("[cluster]", "workers = 3\nsampler = \"leased\"\n[cluster]");
        let l = Launcher::training(&body, 2);
        let run_dir = l.run_dir.clone();
        wait("worker 1 to train a chunk", || {
            match l.metrics().iter().find(|e| e["event"] == "chunk" && e["worker"] == 1) {
                Some(_) => Ok(()),
                None => Err("none yet".into()),
            }
        });
        kill(pid_of(&run_dir, "--rank 1"), Signal::SIGKILL).expect("SIGKILL");
        let scratch = l.keep();
        let (code, out, err) = l.output();
        assert_eq!(code, Some(0), "{mode}: {err}");
        let summary: Value = serde_json::from_str(out.trim()).expect("summary");
        assert_eq!(summary["workers_lost"], 1, "{mode}: {summary}");
        let seen = chunks(&Launcher::metrics_in(&run_dir));
        drop(scratch);
        for epoch in 1..=EPOCHS {
            // 1,437 images to train with (the rest is held out), in chunks of 16 minibatches of 16.
            let of_epoch = seen.range((epoch, 0)..(epoch + 1, 0)).map(|(_, (_, samples))| *samples);
            assert_eq!(of_epoch.sum::<u64>(), TRAINED, "{mode}: epoch {epoch} in {seen:?}");
        }
        let again = seen.values().filter(|(times, _)| *times > 1).count();
        assert!(again <= 1, "{mode}: only the chunk that the dead one had just finished may come twice");
    }
}

#[test]
fn training_survives_a_killed_server_in_every_mode() {
    for mode in ["bsp", "ssp:2", "asp"] {
        let l = Launcher::training(&digits(mode, 3, 150), 2);
        kill(pid_of(&l.run_dir, "--id 0"), Signal::SIGKILL).expect("SIGKILL");
        let (code, out, err) = l.output();
        assert_eq!(code, Some(0), "{mode}: {err}");
        let summary: Value = serde_json::from_str(out.trim()).expect("summary");
        assert_eq!(summary["samples"], 150 * 44 * 16 * 2, "{mode}: {summary}");
        assert_eq!(summary["workers_lost"], 0, "{mode}: {summary}");
        assert!(summary["final_accuracy"].as_f64().expect("accuracy") > 0.9, "{mode}: {summary}");
    }
}

#[test]
fn a_diverging_run_names_worker_and_step_and_fails() {
    let scratch = tempfile::tempdir().expect("scratch");
    let body = digits("bsp", 1, 5) + "[optimizer]\nkind = \"sgd\"\nlr = 1e30\n";
    let path = job(scratch.path(), &body);
    let dir = scratch.path().join("run");
    let out = paraft().arg("train").arg(path).arg("--run-dir").arg(&dir).output().expect("paraft starts");
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{err}");
    assert!(err.contains("worker-") && err.contains("step "), "{err}");
    assert!(err.contains("NaN") || err.contains("inf"), "{err}");
}

/// Kills what it holds, so that a failed test leaves nothing behind.
struct Held(Child);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_same_job_runs_by_hand() {
    let scratch = tempfile::tempdir().expect("scratch");
    // Ports that were free a moment ago, each in its own listener so that they differ.
    let listeners: Vec<_> = (0..4).map(|_| TcpListener::bind("127.0.0.1:0").expect("port")).collect();
    let ports: Vec<_> = listeners.iter().map(|l| l.local_addr().expect("address").to_string()).collect();
    drop(listeners);
    let (metrics, servers) = ports.split_first().expect("ports");
    let body = digits("ssp:1", 3, 10) + &format!("addresses = {servers:?}\n");
    let path = job(scratch.path(), &body);
    let fleet: Vec<_> = (0..3)
        .map(|id| {
            let mut c = paraft();
            c.arg("server").arg(&path).args(["--id", &id.to_string()]).stderr(Stdio::null());
            c.arg("--data").arg(scratch.path().join(format!("s{id}")));
            if id == 0 {
                c.args(["--metrics", metrics]);
            }
            Held(c.spawn().expect("server"))
        })
        .collect();
    let weights = |rank: u32| scratch.path().join(format!("w{rank}.safetensors"));
    let workers: Vec<_> = (0..2)
        .map(|rank: u32| {
            let mut c = paraft();
            c.arg("worker").arg(&path).args(["--rank", &rank.to_string(), "--weights"]).arg(weights(rank));
            c.arg("--run-dir").arg(scratch.path()).stderr(Stdio::piped()).spawn().expect("worker")
        })
        .collect();
    for w in workers {
        let out = w.wait_with_output().expect("worker");
        assert!(out.status.success(), "{}", text(&out.stderr));
    }
    let (a, b) = (fs::read(weights(0)).expect("weights"), fs::read(weights(1)).expect("weights"));
    assert!(!a.is_empty() && a == b, "both pulled the same final weights");
    let lines = fs::read_to_string(scratch.path().join("metrics.jsonl")).expect("record");
    assert!(lines.contains("\"final\":true"), "one of them evaluated the final weights");

    let out = run(&["status", path.to_str().expect("utf-8"), "--json", "--digest"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let replies: Vec<Value> =
        text(&out.stdout).lines().map(|l| serde_json::from_str(l).expect("json")).collect();
    let (fleet_line, replies) = replies.split_last().expect("lines");
    assert_eq!(replies.len(), 3);
    assert_eq!(fleet_line["shape"]["replicas"], 3, "the last line is the fleet's: {fleet_line}");
    assert!(fleet_line["placement"].as_array().is_some_and(|p| p.iter().all(|s| s["state"] == "serving")));
    for shard in 0..3 {
        let copies: Vec<&Value> = replies.iter().map(|r| &r["shards"][shard]).collect();
        assert_eq!(copies.iter().filter(|s| s["role"] == "leader").count(), 1, "{copies:?}");
        let same = copies
            .iter()
            .all(|s| s["applied_index"] != copies[0]["applied_index"] || s["digest"] == copies[0]["digest"]);
        assert!(same, "replicas are bit-identical: {copies:?}");
        assert!(copies[0]["members"].as_array().expect("members").iter().all(|m| m["finished"] == true));
    }
    let page = http_get(metrics, "/metrics");
    for name in [
        "paraft_pushes_total",
        "paraft_push_delay_versions_bucket",
        "paraft_raft_term",
        "le=\"+Inf\"",
        "# EOF",
    ] {
        assert!(page.contains(name), "{name} is not in: {page}");
    }
    for mut s in fleet {
        kill(Pid::from_raw(s.0.id() as i32), Signal::SIGTERM).expect("SIGTERM");
        assert_eq!(s.0.wait().expect("server").code(), Some(0), "a server ends in order");
    }
}

fn http_get(address: &str, path: &str) -> String {
    use std::io::{Read, Write};
    let mut s = std::net::TcpStream::connect(address).expect("metrics port");
    write!(s, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").expect("request");
    let mut page = String::new();
    s.read_to_string(&mut page).expect("answer");
    page
}

#[test]
fn a_worker_that_finds_no_servers_says_so_for_each_address() {
    let scratch = tempfile::tempdir().expect("scratch");
    let free = TcpListener::bind("127.0.0.1:0").expect("port").local_addr().expect("address").to_string();
    let body = digits("bsp", 1, 1) + &format!("addresses = [\"{free}\"]\npatience_ms = 700\n");
    let path = job(scratch.path(), &body);
    let out = run(&["worker", path.to_str().expect("utf-8"), "--rank", "0"]);
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(69), "{err}");
    assert!(err.contains(&free) && err.contains("refused"), "{err}");
}

#[test]
fn doctor_env_and_completions_answer() {
    let out = run(&["doctor", "--json"]);
    assert!(out.status.success(), "{}", text(&out.stdout));
    for l in text(&out.stdout).lines() {
        let row: Value = serde_json::from_str(l).expect("json");
        assert!(row["check"].is_string() && row["verdict"].is_string());
    }
    assert!(text(&run(&["env"]).stdout).contains("protocol"));
    for shell in ["bash", "zsh", "fish"] {
        assert!(text(&run(&["completions", shell]).stdout).contains("paraft"));
    }
    assert_eq!(run(&["trian"]).status.code(), Some(2));
}

#[test]
fn compare_runs_the_modes_it_is_given() {
    let scratch = tempfile::tempdir().expect("scratch");
    let path = job(scratch.path(), &digits("bsp", 1, 3));
    let dir = scratch.path().join("cmp");
    let (path, dir) = (path.to_str().expect("utf-8"), dir.to_str().expect("utf-8"));
    let out = run(&["compare", path, "--modes", "bsp,ssp:4,asp", "--run-dir", dir, "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let modes: Vec<Value> =
        text(&out.stdout).lines().map(|l| serde_json::from_str(l).expect("json")).collect();
    assert_eq!(
        modes.iter().map(|m| m["mode"].as_str().unwrap_or("")).collect::<Vec<_>>(),
        ["bsp", "ssp:4", "asp"]
    );
    assert_eq!(run(&["compare", path, "--modes", "bsp,sync"]).status.code(), Some(2));
}

#[test]
fn bench_train_gives_ratios_within_one_run() {
    let out = run(&["bench", "train", "--models", "logreg", "--repeats", "1", "--epochs", "1", "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let lines: Vec<Value> =
        text(&out.stdout).lines().map(|l| serde_json::from_str(l).expect("json")).collect();
    for key in ["bench", "case", "value", "unit", "reference", "ratio", "spread"] {
        assert!(lines.iter().all(|l| l.get(key).is_some()), "{key}: {lines:?}");
    }
    assert!(lines.iter().any(|l| l["case"] == "logreg/bsp" && l["ratio"].is_number()), "{lines:?}");
}

#[test]
fn a_job_stops_when_the_held_out_loss_no_longer_falls() {
    let scratch = tempfile::tempdir().expect("scratch");
    let rule = "[eval]\nearly_stop = { patience = 2, min_delta = 100.0 }\n";
    for mode in ["bsp", "asp"] {
        let path = job(scratch.path(), &(digits(mode, 1, 1000) + rule));
        let dir = scratch.path().join(mode);
        let out = paraft()
            .arg("train")
            .arg(path)
            .arg("--json")
            .arg("--run-dir")
            .arg(&dir)
            .output()
            .expect("paraft starts");
        assert!(out.status.success(), "{}", text(&out.stderr));
        let record = paraft_record::RunRecord::load(&dir).expect("record");
        // No evaluation beats the first by 100, so the third is the last that counts.
        let epochs = record.evals.iter().map(|e| e.epoch).max().expect("evaluations");
        assert!((3..30).contains(&epochs), "{mode}: stopped after epoch {epochs} of 1000");
        assert!(record.final_eval().expect("final").is_final, "{mode}");
    }
}

/// A job with everything that has a memory, long enough to be killed in the middle.
fn with_checkpoints(epochs: u64) -> String {
    digits("bsp", 3, epochs)
        + "[optimizer]\nkind = \"adam\"\nlr = 0.002\n[schedule]\nkind = \"cosine\"\nsteps = 4000\nwarmup = 40\n"
        + "[clip]\nnorm = 0.5\n[checkpoint]\nevery_steps = 100\nevery_epochs = 1\n"
}

#[test]
fn a_job_whose_whole_fleet_was_killed_goes_on_bit_for_bit() {
    let body = with_checkpoints(30);
    let l = Launcher::training(&body, 2);
    let checkpoints = l.run_dir.join("checkpoints");
    wait("a third checkpoint", || {
        let latest = fs::read_to_string(checkpoints.join("latest")).unwrap_or_default();
        let step = latest.trim().strip_prefix("step-").and_then(|s| s.parse::<u64>().ok()).unwrap_or(0);
        if step >= 100 { Ok(()) } else { Err(latest) }
    });
    for (pid, _) in processes(&l.run_dir) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL); // one may have followed its launcher already
    }
    let Launcher { mut child, run_dir, scratch } = l;
    child.wait().expect("the launcher is gone");
    let (job, dir) = (scratch.path().join("job.toml"), run_dir.to_str().expect("utf-8"));
    let job = job.to_str().expect("utf-8");
    let model = |dir: &Path| dir.join("model.safetensors");
    assert!(!model(&run_dir).exists(), "it was killed before its end");
    let out = run(&["train", job, "--run-dir", dir, "--resume", "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("going on from step "), "{}", text(&out.stderr));
    assert!(run_dir.join("metrics.1.jsonl").exists(), "the record so far is kept");
    let quiet = scratch.path().join("quiet");
    let out = run(&["train", job, "--run-dir", quiet.to_str().expect("utf-8"), "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let (a, b) = (fs::read(model(&run_dir)).expect("weights"), fs::read(model(&quiet)).expect("weights"));
    assert!(a == b, "the run that was killed ends with the weights of the one that was not");
    // The last three, and the best one where that is older.
    let folders = fs::read_dir(&checkpoints).expect("checkpoints").flatten().filter(|e| e.path().is_dir());
    let mut kept: Vec<_> = folders.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    kept.sort();
    let best = fs::read_to_string(checkpoints.join("best")).expect("best");
    let others = kept.iter().rev().skip(3).filter(|k| !best.starts_with(k.as_str())).count();
    assert!(kept.len() >= 3 && others == 0, "{kept:?}, best {best}");
    // The new fleet did not begin with what the old one left; and it left nothing itself, having ended in order.
    assert!(run_dir.join("server-0.1").exists() && !run_dir.join("server-0").exists());
}

#[test]
fn checkpoints_are_shown_compared_exported_and_refused() {
    let scratch = tempfile::tempdir().expect("scratch");
    let at = |name: &str| scratch.path().join(name).to_str().expect("utf-8").to_string();
    let path = job(scratch.path(), &with_checkpoints(3));
    let path = path.to_str().expect("utf-8");
    let none = run(&["train", path, "--run-dir", &at("none"), "--resume"]);
    assert_eq!(none.status.code(), Some(65), "{}", text(&none.stderr));
    assert!(text(&none.stderr).contains("no such checkpoint"), "{}", text(&none.stderr));
    let out = run(&["train", path, "--run-dir", &at("run"), "--json", "--set", "checkpoint.every_steps=88"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let folder = |step: u64| at(&format!("run/checkpoints/step-{step:010}"));

    let out = run(&["checkpoint", "inspect", &at("run"), "--json"]);
    let shown: Value = serde_json::from_str(text(&out.stdout).trim()).expect("one object");
    assert_eq!((&shown["step"], &shown["versions"]), (&132.into(), &"132".into()), "{shown}");
    assert_eq!(shown["tensors"].as_array().expect("tensors").len(), 4 + 8, "{shown}");
    let table = text(&run(&["checkpoint", "inspect", &folder(132)]).stdout);
    assert!(table.contains("exp_avg_sq.0.weight") && table.contains("32x64"), "{table}");

    let to = at("out.safetensors");
    assert!(run(&["checkpoint", "export", &at("run"), "--to", &to]).status.success());
    let same = run(&["checkpoint", "diff", &to, &at("run/model.safetensors")]);
    assert_eq!(same.status.code(), Some(0), "{}", text(&same.stdout));
    assert!(run(&["checkpoint", "export", &at("run"), "--to", &to, "--dtype", "f16"]).status.success());
    let other = run(&["checkpoint", "diff", &to, &at("run/model.safetensors"), "--json"]);
    assert_eq!(other.status.code(), Some(1));
    assert!(text(&other.stdout).contains("\"equal\":false"), "{}", text(&other.stdout));

    // A model file begins a job; one of another shape does not, and no process starts.
    let init = format!("train.init={to}");
    let begun = run(&["train", path, "--run-dir", &at("begun"), "--json", "--set", &init]);
    assert!(begun.status.success(), "{}", text(&begun.stderr));
    let wrong =
        run(&["train", path, "--run-dir", &at("wrong"), "--set", &init, "--set", "model.hidden=[16]"]);
    let err = text(&wrong.stderr);
    assert_eq!(wrong.status.code(), Some(65), "{err}");
    assert!(err.contains("`0.weight` is [32, 64], the model's is [16, 64]"), "{err}");
    assert!(!scratch.path().join("wrong/server-0.log").exists(), "no process may start");

    // The latest is cut off: it is named, and the one before it is offered.
    let piece = scratch.path().join("run/checkpoints/step-0000000132/optimizer.safetensors");
    let whole = fs::read(&piece).expect("optimizer state");
    fs::write(&piece, &whole[..whole.len() / 2]).expect("cut");
    let set = ["--set", "train.epochs=4"];
    let cut = run(&[&["train", path, "--run-dir", &at("cut"), "--resume", &at("run")][..], &set].concat());
    let err = text(&cut.stderr);
    assert_eq!(cut.status.code(), Some(65), "{err}");
    for words in ["optimizer.safetensors is cut off", "help: the newest whole one is", "step-0000000088"] {
        assert!(err.contains(words), "`{words}` is not in: {err}");
    }
    let resumed = run(&[
        &["train", path, "--run-dir", &at("on"), "--json", "--resume", &folder(88)][..],
        &set,
    ]
    .concat());
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
}

#[test]
fn the_logs_of_a_run_replay_to_its_weights_bit_for_bit() {
    let scratch = tempfile::tempdir().expect("scratch");
    let body = digits("bsp", 3, 3)
        + "durability = \"quorum-disk\"\nparity_ms = 100\n[optimizer]\nkind = \"adam\"\nlr = 0.003\n";
    let path = job(scratch.path(), &body);
    let dir = scratch.path().join("run");
    let at = dir.to_str().expect("utf-8");
    let out = run(&["train", path.to_str().expect("utf-8"), "--run-dir", at, "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let to = scratch.path().join("replayed.safetensors");
    let replay = |args: &[&str]| run(&[&["replay", at], args].concat());
    let out = replay(&["--to", to.to_str().expect("utf-8"), "--json"]);
    assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
    let (a, b) =
        (fs::read(&to).expect("replayed"), fs::read(dir.join("model.safetensors")).expect("trained"));
    assert!(a == b, "the replayed weights are the trained ones");
    let told: serde_json::Value = serde_json::from_slice(&out.stdout).expect("json");
    assert_eq!(told["replicas"].as_array().map(Vec::len), Some(9), "three shards on three servers: {told}");

    // A replay that stops early has other weights, and says where it stopped.
    let out = replay(&["--shard", "0", "--index", "20", "--json"]);
    let told: serde_json::Value = serde_json::from_slice(&out.stdout).expect("json");
    assert_eq!(told["replicas"][0]["index"], 20, "{told}");

    // A log that was damaged is refused by name.
    let log = dir.join("server-1/shard-2/log");
    let segment = fs::read_dir(&log).expect("log").flatten().map(|f| f.path());
    let segment = segment.filter(|p| p.extension().is_some_and(|e| e == "log")).min().expect("a segment");
    let mut bytes = fs::read(&segment).expect("segment");
    bytes[600] ^= 1;
    fs::write(&segment, bytes).expect("damage");
    let out = replay(&[]);
    assert_eq!(out.status.code(), Some(65), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains(segment.to_str().expect("utf-8")), "{}", text(&out.stderr));
}
