//! `paraft verify` and `paraft chaos` as a user meets them: short versions of what docs/failure-model.md publishes.

use crate::common::*;
use std::sync::Mutex;

/// One fleet at a time: what is proven under load is not proven better by two fleets on the same cores.
static ONE: Mutex<()> = Mutex::new(());

fn ledger(args: &[&str]) -> (Value, Output) {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let floor: &[&str] = if args.contains(&"--pushes-floor") { &[] } else { &["--pushes-floor", "10"] };
    let out = run(&[&["verify", "ledger", "--json"], floor, args].concat());
    let json = serde_json::from_slice(&out.stdout);
    (json.unwrap_or_else(|e| panic!("{args:?}: {e}\n{}", text(&out.stderr))), out)
}

/// The promise held, under as many kills as were asked for.
fn held(args: &[&str], kills: u64) -> Value {
    let (json, out) = ledger(args);
    assert_eq!(out.status.code(), Some(0), "{args:?}: {json:#}\n{}", text(&out.stderr));
    assert_eq!((json["kills"].as_u64(), json["doubled"].as_u64()), (Some(kills), Some(0)), "{json:#}");
    assert!(json["acknowledged"].as_u64() > Some(100), "{json:#}");
    // Every shard that a killed server led is a gap for each of two clients.
    assert!(json["unavailable_samples"].as_u64() >= Some(2 * kills), "{json:#}");
    assert!(json["unavailable_p99_s"].as_f64() >= json["unavailable_p50_s"].as_f64(), "{json:#}");
    json
}

#[test]
fn memory_durability_loses_no_acknowledged_push() {
    for mode in ["bsp", "ssp:2", "asp"] {
        let json = held(&["--kills", "5", "--mode", mode], 5);
        assert_eq!(json["lost"], 0, "{json:#}");
    }
}

#[test]
fn disk_durability_loses_no_acknowledged_push() {
    for mode in ["bsp", "ssp:2", "asp"] {
        let args = ["--kills", "5", "--mode", mode, "--durability", "quorum-disk"];
        assert_eq!(held(&args, 5)["lost"], 0);
    }
}

#[test]
fn rows_of_a_table_are_the_pushes_that_named_them() {
    for (mode, durability) in [("bsp", "quorum-memory"), ("asp", "quorum-disk")] {
        let args = ["--kills", "3", "--mode", mode, "--durability", durability, "--sparse", "120000"];
        let json = held(&args, 3);
        assert_eq!(json["lost"], 0, "{json:#}");
        assert!(json["rows"].as_u64() >= Some(120_000), "each row was named: {json:#}");
    }
}

#[test]
fn leader_durability_loses_at_most_its_reported_bound() {
    let json = held(&["--kills", "3", "--mode", "asp", "--durability", "leader"], 3);
    assert!(json["lost"].as_u64() <= json["pushes_lost"].as_u64(), "{json:#}");
    assert!(json["pushes_lost"].as_u64() <= json["bound"].as_u64(), "{json:#}");
}

#[test]
fn every_fault_at_once_loses_nothing() {
    let faults = "kill,pause,reset,partition,slow-link,disk-full,slow-disk,drain";
    let args = ["--kills", "8", "--seed", "5", "--faults", faults, "--durability", "quorum-disk"];
    let json = held(&args, 8);
    assert_eq!(json["lost"], 0, "{json:#}");
    let kinds = json["faults"].as_object().expect("counts");
    assert_eq!(kinds.len(), 8, "each kind has come: {json:#}");
}

/// Everything that can run out, runs out, on one server, on two and on all, between kills; and strangers speak meanwhile.
fn exhausted_resources_lose_nothing(durability: &str, seed: &str) {
    let kinds = "fds,memory,disk-full-all,eio,readonly,votes,slow-all,clock,stranger";
    let args = ["--kills", "8", "--seed", seed, "--faults", kinds, "--durability", durability];
    let json = held(&args, 8);
    assert_eq!(json["lost"], 0, "{json:#}");
    let came = json["faults"].as_object().expect("counts");
    assert_eq!(came.len(), 10, "each kind has come, and kills: {json:#}");
}

#[test]
fn exhausted_resources_that_recover_lose_nothing_on_disks() {
    exhausted_resources_lose_nothing("quorum-disk", "3");
}

#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn exhausted_resources_that_recover_lose_nothing_in_memory() {
    exhausted_resources_lose_nothing("quorum-memory", "4");
}

#[test]
fn a_run_with_too_few_pushes_does_not_count() {
    let (json, out) = ledger(&["--kills", "1", "--pushes-floor", "1000000"]);
    assert_eq!(out.status.code(), Some(75), "{json:#}");
    assert_eq!((&json["verdict"], &json["lost"]), (&"does not count".into(), &0.into()));
}

#[test]
fn an_impossible_promise_is_refused_before_the_start() {
    let out = run(&["verify", "ledger", "--mode", "bsp", "--durability", "leader"]);
    assert_eq!(out.status.code(), Some(2), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("bsp promises the weights of one process"), "{}", text(&out.stderr));
    // A fleet that takes minutes to elect a leader is given up before it is whole.
    let out = run(&["verify", "ledger", "--election-ms", "60000"]);
    assert_eq!(out.status.code(), Some(2), "{}", text(&out.stderr));
    contains(&text(&out.stderr), &["60000", "50..=2000"]);
}

#[test]
fn synchronous_training_equals_one_process_bit_for_bit() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let out = run(&["verify", "sync", "--workers", "3", "--steps", "30", "--json"]);
    assert_eq!(out.status.code(), Some(0), "{}{}", text(&out.stdout), text(&out.stderr));
    let json: Value = serde_json::from_slice(&out.stdout).expect("json");
    assert_eq!((&json["verdict"], &json["values_that_differ"]), (&"held".into(), &0.into()));
}

#[test]
fn too_few_steps_to_learn_anything_are_no_broken_promise() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let out = run(&["verify", "sync", "--workers", "2", "--steps", "1"]);
    assert_eq!(out.status.code(), Some(75), "{}{}", text(&out.stdout), text(&out.stderr));
    contains(&text(&out.stdout), &["0 values differ", "does not count", "use more --steps"]);
}

// ---- chaos ----

struct Training(Child);

impl Drop for Training {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.0.id() as i32), Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

fn train(dir: &Path, epochs: u32, fault_points: bool) -> Training {
    let job = dir.join("job.toml");
    let body = format!(
        "name = \"t\"\n[model]\nkind = \"mlp\"\nhidden = [32]\n[data]\nkind = \"digits\"\n[train]\nmode = \"bsp\"\n\
         batch = 16\nepochs = {epochs}\n[cluster]\nservers = 3\n"
    );
    fs::write(&job, body).expect("job file");
    let mut c = Command::new(env!("CARGO_BIN_EXE_paraft"));
    c.arg("train").arg(&job).arg("--run-dir").arg(dir.join("run"));
    if fault_points {
        c.arg("--faults");
    }
    let child =
        c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    let mut training = Training(child);
    let metrics = dir.join("run/metrics.jsonl");
    let began = Instant::now();
    while !fs::read_to_string(&metrics).unwrap_or_default().contains("\"train\"") {
        assert!(training.0.try_wait().expect("a child").is_none(), "the training ended before it began");
        assert!(began.elapsed() < DEADLINE, "the training does not begin");
        std::thread::sleep(Duration::from_millis(20));
    }
    training
}

fn servers(run: &Path) -> usize {
    let of = run.to_string_lossy().into_owned();
    let pids = fs::read_dir("/proc").expect("/proc").flatten();
    pids.filter_map(|e| fs::read(e.path().join("cmdline")).ok())
        .filter(|c| text(c).contains(&of) && text(c).contains("\0server\0"))
        .count()
}

#[test]
fn a_training_survives_chaos_and_nothing_of_it_is_left() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().expect("a folder");
    let mut training = train(dir.path(), 100_000, true);
    let run_dir = dir.path().join("run");
    let args = [
        "chaos",
        "--fleet",
        run_dir.to_str().expect("a path"),
        "--rate",
        "120",
        "--lasting",
        "0.5",
        "--restart-after",
        "0.2",
        "--faults",
        "kill,pause,reset,partition",
        "--duration",
        "8",
    ];
    let out = run(&args);
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{said}{}", text(&out.stderr));
    for kind in ["kill", "restart"] {
        assert!(said.lines().any(|l| l.contains(&format!(" s  {kind} "))), "no {kind} in:\n{said}");
    }
    let times = |what: &str| said.lines().filter(|l| l.contains(&format!(" s  {what} "))).count();
    assert_eq!(times("kill"), times("restart"), "who was killed is started again:\n{said}");
    assert_eq!(times("pause"), times("resume"), "{said}");
    assert!(!fs::read_to_string(run_dir.join("faults.json")).expect("fault points").contains("[0"), "healed");
    assert_eq!(servers(&run_dir), 3, "{said}");
    assert!(training.0.try_wait().expect("a child").is_none(), "the training has ended:\n{said}");
    // It still trains: its clock moves.
    let lines = || fs::read_to_string(run_dir.join("metrics.jsonl")).unwrap_or_default().lines().count();
    let (before, began) = (lines(), Instant::now());
    while lines() <= before {
        assert!(began.elapsed() < DEADLINE, "no step since the chaos:\n{said}");
        std::thread::sleep(Duration::from_millis(20));
    }
    // What was started again ends with the launcher too, though no pipe connects the two.
    drop(training);
    let began = Instant::now();
    while servers(&run_dir) > 0 {
        assert!(began.elapsed() < DEADLINE, "{} servers outlive their launcher", servers(&run_dir));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_paused_server_resumes_in_time_during_a_drain() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().expect("a folder");
    let fleet = Fleet::start(dir.path(), None);
    fleet.all("serving");
    let args = ["--faults", "pause,drain", "--rate", "240", "--lasting", "1", "--duration", "8"];
    let out = fleet.ask(&[&["chaos"][..], &args].concat());
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{said}{}", text(&out.stderr));
    // A query of the fleet while a server hangs would delay its release.
    let mut paused = 0;
    for line in said.lines().filter_map(|l| l.split(" s  ").nth(1)) {
        match line.split_whitespace().next() {
            Some("pause") => paused += 1,
            Some("resume") => paused -= 1,
            Some("drain" | "undo") => assert_eq!(paused, 0, "{said}"),
            _ => {}
        }
    }
    contains(&said, &[" s  pause ", " s  drain ", " s  undo "]);
}

/// Ends what `paraft chaos` has started again: no launcher owns its processes.
struct Swept<'a>(&'a Path);

impl Drop for Swept<'_> {
    fn drop(&mut self) {
        for (pid, _) in processes(self.0) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

#[test]
fn only_named_servers_get_faults_and_the_job_continues() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().expect("a folder");
    let run_dir = dir.path().join("run");
    fs::create_dir(&run_dir).expect("a folder");
    let _swept = Swept(dir.path());
    let mut fleet = Fleet::start(dir.path(), Some(&digits("bsp", 3, 100_000)));
    let start = |rank| Held(fleet.worker(rank, &run_dir).stderr(Stdio::null()).spawn().expect("worker"));
    let mut workers: Vec<_> = (0..2).map(start).collect();
    let mut trains = || {
        let lines = || Launcher::metrics_in(&run_dir).iter().filter(|e| e["event"] == "train").count();
        let before = lines();
        wait("the job to go on", || {
            let ended = workers.iter_mut().filter_map(|w| w.0.try_wait().ok().flatten()).next();
            assert!(ended.is_none(), "a worker has ended: {ended:?}");
            if lines() > before { Ok(()) } else { Err(format!("{before} lines")) }
        });
    };
    trains();
    fleet.all("serving");

    let (named, other) = (fleet.addresses[..2].join(","), &fleet.addresses[2]);
    let args = ["--rate", "120", "--lasting", "0.5", "--restart-after", "0.2", "--duration", "8"];
    let out = run(&[&["chaos", "--fleet", &named], &args[..]].concat());
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{said}{}", text(&out.stderr));
    let lines = |what: &str| {
        let mark = format!(" s  {what} ");
        said.lines().filter(|l| l.contains(&mark)).collect::<Vec<_>>()
    };
    let (kills, pauses) = (lines("kill"), lines("pause"));
    assert!(!kills.is_empty() && kills.len() == lines("restart").len(), "{said}");
    assert_eq!(pauses.len(), lines("resume").len(), "{said}");
    for fault in kills.iter().chain(&pauses) {
        let at = |a: &&String| fault.contains(&format!("({a}, process "));
        assert!(fleet.addresses.iter().find(at).is_some_and(|a| a != other), "{fault}");
    }
    // As the kernel sees it: one that was named is gone, the one that was not is the process it was.
    let mut ended = |id: usize| fleet.servers[id].as_mut().is_some_and(|s| s.ended().is_some());
    assert!((ended(0) || ended(1)) && !ended(2), "{said}");
    trains();
    fleet.all("serving");
}

#[test]
fn a_fleet_without_doors_has_its_links_left_alone_and_says_so() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().expect("a folder");
    let _training = train(dir.path(), 100_000, false);
    let run_dir = dir.path().join("run");
    let out = run(&["chaos", "--fleet", run_dir.to_str().expect("a path"), "--faults", "kill,partition"]);
    assert_eq!(out.status.code(), Some(78), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("no fault points for partition"), "{}", text(&out.stderr));
    assert_eq!(servers(&run_dir), 3);
}
