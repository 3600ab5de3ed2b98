//! `paraft train` and what belongs to it: a fleet of its own, signals, messages.

use crate::common::*;
use std::net::TcpListener;

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
        // A comparison says beside them which run it is.
        for (key, value) in again.as_object().expect("an object") {
            assert_eq!(&printed[key], value, "{key}: what is printed is what the record gives");
        }
        let events = fs::read_dir(run.join("tensorboard")).expect("tensorboard").count();
        assert_eq!(events, 1);
        assert!(run.join("model.safetensors").exists(), "the trained weights are kept");
        for log in ["server-0.log", "server-2.log", "worker-0.log", "worker-1.log"] {
            assert!(run.join(log).exists(), "{log}");
        }
    }
}

#[test]
fn event_files_exist_during_a_run_and_have_one_writer() {
    let mut launcher = Launcher::training(&digits("bsp", 1, 100_000), 1);
    let folder = launcher.run_dir.join("tensorboard");
    let files = || fs::read_dir(&folder).map(|all| all.flatten().map(|e| e.path()).collect::<Vec<_>>());
    let grown = |from: u64| {
        let files = files().map_err(|e| e.to_string())?;
        let size = files.first().and_then(|f| fs::metadata(f).ok()).map_or(0, |m| m.len());
        if size > from { Ok(size) } else { Err(format!("{size} bytes in {files:?}")) }
    };
    let first = wait("the first points", || grown(200));
    wait("more points", || grown(first));
    assert!(launcher.child.try_wait().expect("its state").is_none(), "it trains");
    kill(Pid::from_raw(launcher.child.id() as i32), Signal::SIGINT).expect("a signal");
    let scratch = launcher.keep();
    assert_eq!(launcher.output().0, Some(130));
    assert_eq!(files().expect("a folder").len(), 1, "workers leave it to the launcher");
    drop(scratch);
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
    let gone = run(&["stop", "t", "--fleet", dir]);
    assert_eq!(gone.status.code(), Some(69));
    contains(&text(&gone.stderr), &["that run has ended, and its servers with it"]);
    let again = run(&["train", path, "--run-dir", dir]);
    assert_eq!(again.status.code(), Some(78), "a run's folder is not used twice");
}

#[test]
fn a_taken_port_is_named_with_the_line_that_asks_for_it() {
    let scratch = tempfile::tempdir().expect("scratch");
    let taken = TcpListener::bind("127.0.0.1:0").expect("port");
    let address = taken.local_addr().expect("address").to_string();
    let path = job(scratch.path(), &(digits("bsp", 1, 1) + &format!("addresses = [\"{address}\"]\n")));
    let out = run(&["server", path.to_str().expect("utf-8"), "--id", "0", "--insecure"]);
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
    wait_for_the_end(&l.run_dir);
}

#[test]
fn a_second_run_in_a_live_folder_is_refused() {
    let l = Launcher::training(&(digits("bsp", 1, 100_000) + "[checkpoint]\nevery_steps = 20\n"), 2);
    let (dir, job) = (l.run_dir.to_str().expect("utf-8"), l.scratch.path().join("job.toml"));
    wait("a checkpoint", || match l.run_dir.join("checkpoints/latest").exists() {
        true => Ok(()),
        false => Err("none yet".into()),
    });
    for resume in [&[][..], &["--resume"][..]] {
        let out = run(&[&["train", job.to_str().expect("utf-8"), "--run-dir", dir][..], resume].concat());
        assert_eq!(out.status.code(), Some(78), "{resume:?}: {}", text(&out.stderr));
        contains(&text(&out.stderr), &["a run is going on in ", dir]);
    }
    assert!(!l.run_dir.join("metrics.1.jsonl").exists(), "the record stays where the live run writes it");
    // The lock ends with the process, however that ends.
    let Launcher { mut child, run_dir, scratch: _scratch } = l;
    child.kill().expect("SIGKILL");
    child.wait().expect("it is gone");
    wait_for_the_end(&run_dir);
    wait_for_closed_ports(&run_dir);
    let dir = run_dir.to_str().expect("utf-8");
    for ask in [
        &["stop", "t", "--fleet", dir][..],
        &["status", "--fleet", dir, "--wait", "whole"],
        &["drain", "0", "--fleet", dir],
    ] {
        let out = run(ask);
        assert_eq!(out.status.code(), Some(69), "{ask:?}: {}", text(&out.stderr));
        contains(&text(&out.stderr), &[dir, "that run has ended, and its servers with it"]);
    }
    let set = ["--set", "train.max_steps=1"];
    let all = [
        &["train", job.to_str().expect("utf-8"), "--run-dir", run_dir.to_str().expect("utf-8")][..],
        &["--resume"],
        &set,
    ];
    let out = run(&all.concat());
    let said = text(&out.stderr);
    contains(&said, &["nothing is left to train"]);
    let is_there = |name| run_dir.join(name).exists();
    assert!(is_there("metrics.jsonl") && !is_there("metrics.1.jsonl"), "it has not begun: {said}");
}

#[test]
fn of_runs_that_are_started_at_once_in_one_folder_one_gets_it() {
    let scratch = tempfile::tempdir().expect("scratch");
    let (path, dir) = (job(scratch.path(), &digits("bsp", 1, 2)), scratch.path().join("run"));
    let start = |_| {
        let mut c = paraft();
        c.arg("train").arg(&path).arg("--run-dir").arg(&dir).stdout(Stdio::null()).stderr(Stdio::piped());
        c.spawn().expect("paraft starts")
    };
    let all: Vec<_> = (0..3).map(start).collect();
    let ends: Vec<_> = all.into_iter().map(|c| c.wait_with_output().expect("output")).collect();
    let codes: BTreeMap<_, usize> = ends.iter().fold(BTreeMap::new(), |mut all, e| {
        *all.entry(e.status.code()).or_default() += 1;
        all
    });
    let said: Vec<_> = ends.iter().map(|e| text(&e.stderr)).collect();
    assert_eq!(codes, BTreeMap::from([(Some(0), 1), (Some(78), 2)]), "{said:?}");
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

#[test]
fn a_killed_worker_that_rejoins_counts_as_lost() {
    let body = digits("asp", 1, 150) + "max_restarts = 1\ngrace_ms = 60000\n";
    let l = Launcher::training(&body, 2);
    kill(pid_of(&l.run_dir, "--rank 1"), Signal::SIGKILL).expect("SIGKILL");
    let (code, out, err) = l.output();
    assert_eq!(code, Some(0), "{err}");
    contains(&err, &["worker-1", "SIGKILL", "started again"]);
    let summary: Value = serde_json::from_str(out.trim()).expect("summary");
    assert_eq!(summary["workers_lost"], 1, "{summary}");
}

/// The first server bootstraps the fleet: a kill at any step of that does not prevent the fleet.
#[test]
fn the_first_server_may_be_killed_at_any_bootstrap_step() {
    for after_ms in (0..80).step_by(8) {
        let body = digits("bsp", 3, 2) + "max_restarts = 3\n";
        let l = Launcher::training(&body, 0);
        let first = wait("server 0", || {
            let all = processes(&l.run_dir);
            let found = all.iter().find(|(_, line)| line.contains("--id 0"));
            found.map(|(pid, _)| Pid::from_raw(*pid)).ok_or_else(|| format!("{all:?}"))
        });
        std::thread::sleep(Duration::from_millis(after_ms));
        kill(first, Signal::SIGKILL).expect("SIGKILL");
        let (code, out, err) = l.output();
        assert_eq!(code, Some(0), "killed after {after_ms} ms: {err}");
        serde_json::from_str::<Value>(out.trim()).unwrap_or_else(|e| panic!("{after_ms} ms: {e}: {out}"));
    }
}

/// A worker that is stopped answers nothing and breaks nothing off: only its lease tells.
#[test]
fn a_stopped_worker_loses_its_lease_and_opens_a_new_session() {
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
    assert!(log.contains("it continues with the others"), "{log}");
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
fn other_workers_train_the_rest_of_a_killed_workers_epoch() {
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
fn stopping_a_run_on_its_own_fleet_stops_the_servers() {
    let l = Launcher::training(&digits("asp", 3, 100_000), 2);
    let dir = l.run_dir.to_str().expect("utf-8");
    wait("the control group to hear of it", || match text(&run(&["jobs", "--fleet", dir]).stdout) {
        said if said.contains("running") => Ok(()),
        said => Err(said),
    });
    let out = run(&["logs", "t", "--fleet", dir]);
    contains(&text(&out.stdout), &["==> worker-0.log <==", "==> worker-1.log <=="]);
    let out = run(&["stop", "t", "--fleet", dir]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    contains(&text(&out.stdout), &["t is stopped"]);
    let (code, _, err) = l.output();
    assert_eq!(code, Some(0), "{err}");
}

#[test]
fn training_survives_a_killed_server_in_every_mode() {
    for mode in ["bsp", "ssp:2", "asp"] {
        let l = Launcher::training(&digits(mode, 3, 60), 25);
        let (_scratch, dir) = (l.keep(), l.run_dir.clone());
        kill(pid_of(&dir, "--id 0"), Signal::SIGKILL).expect("SIGKILL");
        let (code, out, err) = l.output();
        assert_eq!(code, Some(0), "{mode}: {err}");
        let summary: Value = serde_json::from_str(out.trim()).expect("summary");
        assert_eq!(summary["samples"], 60 * 44 * 16 * 2, "{mode}: {summary}");
        assert_eq!(summary["workers_lost"], 0, "{mode}: {summary}");
        assert!(summary["final_accuracy"].as_f64().expect("accuracy") > 0.9, "{mode}: {summary}");
        shows_the_killed_server(&dir, &summary);
    }
}

/// The record of the run in which server 0 was killed has its end and an election; report and table show both.
fn shows_the_killed_server(dir: &Path, summary: &Value) {
    let events = Launcher::metrics_in(dir);
    let incidents: Vec<_> = events.iter().filter(|e| e["event"] == "incident").collect();
    let ended: Vec<_> = incidents.iter().filter(|e| e["what"] == "server_ended").collect();
    assert_eq!(ended.len(), 1, "{incidents:?}");
    assert_eq!((&ended[0]["server"], &ended[0]["signal"]), (&0.into(), &9.into()), "{incidents:?}");
    assert_eq!(ended[0]["restarts"], false, "{incidents:?}");
    let elected: Vec<_> =
        incidents.iter().filter(|e| e["what"] == "leader_changed" && e["from"] == 0).collect();
    assert!(!elected.is_empty(), "{incidents:?}");
    assert!(elected.iter().any(|e| e["to"] != 0 && e["stall_seconds"].as_f64() > Some(0.0)), "{incidents:?}");
    assert_eq!(summary["servers_lost"], 1, "{summary}");
    assert!(summary["leaders_elected"].as_u64() >= Some(1), "{summary}");
    assert!(summary["longest_stall_seconds"].as_f64() > Some(0.0), "{summary}");
    let summary: paraft_record::Summary = serde_json::from_value(summary.clone()).expect("a summary");
    let table = paraft_fleet::table::modes(&[summary]);
    contains(&table, &["servers lost 1, leaders elected ", ", longest stall "]);
    let report = fs::read_to_string(dir.join("report.html")).expect("a report");
    contains(&report, &["What happened", "server 0 was ended by SIGKILL", " instead of server 0"]);
    let letters = ["\"letter\":\"S\"", "\"letter\":\"L\""];
    contains(&report, &letters);
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

#[test]
fn doctor_env_and_completions_answer() {
    let out = run(&["doctor", "--json"]);
    assert!(out.status.success(), "{}", text(&out.stdout));
    for l in text(&out.stdout).lines() {
        let row: Value = serde_json::from_str(l).expect("json");
        assert!(row["check"].is_string() && row["verdict"].is_string());
    }
    assert!(text(&run(&["env"]).stdout).contains("protocol"));
    for (shell, lists) in [
        ("bash", "complete -F _paraft_keys "),
        ("zsh", ":KEY=VALUE:_paraft_keys'"),
        ("fish", "-r -f -a \"(__fish_paraft_keys)\""),
    ] {
        let script = text(&run(&["completions", shell]).stdout);
        for part in [lists, " train.mode ", " checkpoint.every_steps "] {
            assert!(script.contains(part), "no `{part}` for {shell}");
        }
    }
    assert_eq!(run(&["trian"]).status.code(), Some(2));
}

#[test]
fn a_path_too_long_for_a_socket_costs_only_the_socket() {
    let scratch = tempfile::tempdir().expect("scratch");
    let long = scratch.path().join("y".repeat(80));
    fs::create_dir(&long).expect("a folder");
    let file = job(scratch.path(), &digits("bsp", 3, 1));
    let mut trains = paraft();
    trains.arg("train").arg(file).args(["--run-dir"]).arg(scratch.path().join("run")).env("TMPDIR", &long);
    let out = trains.output().expect("paraft starts");
    assert!(out.status.success(), "{}", text(&out.stderr));
    let out = paraft().args(["doctor", "--json"]).env("TMPDIR", &long).output().expect("paraft starts");
    let rows = text(&out.stdout);
    let row = rows.lines().find(|l| l.contains("Unix sockets")).expect("a row");
    assert!(row.contains("\"warn\"") || row.contains("WARN"), "{row}");
    assert_eq!(
        fs::read_dir(&long)
            .expect("read")
            .filter(|e| { e.as_ref().is_ok_and(|e| e.file_name().to_string_lossy().starts_with(".tmp")) })
            .count(),
        0,
        "doctor leaves nothing"
    );
}

#[test]
fn vector_instructions_are_forced_shown_or_refused() {
    let doctor = |set: &str| paraft().args(["doctor", "--json"]).env("PARAFT_SIMD", set).output();
    for isa in paraft_simd::Isa::ALL {
        let out = doctor(isa.name()).expect("paraft starts");
        if isa.level().is_none() {
            assert_eq!(out.status.code(), Some(2));
            assert!(text(&out.stderr).contains("this machine doesn't have it"), "{}", text(&out.stderr));
            continue;
        }
        let rows = text(&out.stdout);
        let row = rows.lines().find(|l| l.contains("vector unit")).expect("a row");
        let row: Value = serde_json::from_str(row).expect("json");
        assert_eq!((&row["found"], &row["verdict"]), (&isa.name().into(), &"OK".into()));
        assert_eq!(row["means"], "forced by PARAFT_SIMD");
    }
    let out = doctor("sse9").expect("paraft starts");
    assert_eq!((out.status.code(), text(&out.stdout).as_str()), (Some(2), ""));
    let said = text(&out.stderr);
    assert!(said.contains("PARAFT_SIMD=sse9") && said.contains("avx512, avx2 or portable"), "{said}");
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
fn a_job_evaluates_and_stops_within_an_epoch() {
    let scratch = tempfile::tempdir().expect("scratch");
    let rule = "[eval]\nevery_steps = 20\nearly_stop = { patience = 2, min_delta = 100.0 }\n";
    let path = job(scratch.path(), &(digits("bsp", 1, 1000) + rule));
    let dir = scratch.path().join("run");
    let out = paraft().arg("train").arg(path).arg("--run-dir").arg(&dir).output().expect("paraft starts");
    assert!(out.status.success(), "{}", text(&out.stderr));
    contains(
        &text(&out.stderr),
        &["before its end, after step 44 or later", "in 2 evaluations (eval.early_stop)"],
    );
    // An epoch has 44 steps, and no evaluation beats the first by 100.
    let record = paraft_record::RunRecord::load(&dir).expect("record");
    let steps = record.evals.iter().filter(|e| !e.is_final).map(|e| e.step.map(|s| s.0));
    assert_eq!(steps.collect::<Vec<_>>(), [Some(20), Some(40), Some(44)]);
    let last = record.final_eval().expect("final");
    assert!(last.is_final && last.step.is_some_and(|s| (44..60).contains(&s.0)), "{last:?}");
}

#[test]
fn a_job_stops_when_the_held_out_loss_no_longer_falls() {
    let scratch = tempfile::tempdir().expect("scratch");
    let rule = "[eval]\nearly_stop = { patience = 2, min_delta = 100.0 }\n";
    for mode in ["bsp", "asp"] {
        let path = job(scratch.path(), &(digits(mode, 1, 1000) + rule));
        let dir = scratch.path().join(mode);
        let out = paraft().arg("train").arg(path).arg("--run-dir").arg(&dir).output().expect("paraft starts");
        assert!(out.status.success(), "{}", text(&out.stderr));
        contains(&text(&out.stderr), &["t has stopped before its end", "in 2 evaluations (eval.early_stop)"]);
        let record = paraft_record::RunRecord::load(&dir).expect("record");
        // No evaluation beats the first by 100, so the third is the last that counts.
        let epochs = record.evals.iter().map(|e| e.epoch).max().expect("evaluations");
        assert!((3..30).contains(&epochs), "{mode}: stopped after epoch {epochs} of 1000");
        assert!(record.final_eval().expect("final").is_final, "{mode}");
    }
}

#[test]
fn a_worker_without_a_leader_learns_that_no_disk_serves() {
    let scratch = tempfile::tempdir().expect("scratch");
    let run_dir = scratch.path().join("run");
    let body = digits("asp", 3, 100_000) + "durability = \"quorum-disk\"\ntimeout_ms = 3000\n";
    let mut command = paraft();
    command.arg("train").arg(job(scratch.path(), &body)).arg("--run-dir").arg(&run_dir);
    command.args(["--json", "--faults"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let l = Launcher {
        child: command.spawn().expect("paraft starts"),
        run_dir: run_dir.clone(),
        scratch: scratch.into(),
    };
    wait("training to go on", || match l.metrics().iter().any(|e| e["event"] == "train") {
        true => Ok(()),
        false => Err(format!("{:?}", l.metrics())),
    });
    fs::write(run_dir.join("faults.json"), r#"{"read_only": [0, 1, 2]}"#).expect("the faults file");
    let (code, _, said) = l.output();
    assert_eq!(code, Some(69), "{said}");
    contains(
        &said,
        &["no leader was reached", "this server's replica of shard", "has stopped", "Read-only file system"],
    );
}
