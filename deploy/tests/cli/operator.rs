//! The output for a user who runs a fleet by hand, including errors.

use crate::common::*;
use std::{
    io::{BufRead, BufReader},
    sync::mpsc,
};

#[test]
fn the_same_job_runs_by_hand() {
    let scratch = tempfile::tempdir().expect("scratch");
    let ports = free_addresses(4);
    let (metrics, servers) = ports.split_first().expect("ports");
    let body = digits("ssp:1", 3, 10) + &format!("addresses = {servers:?}\n");
    let path = job(scratch.path(), &body);
    let fleet: Vec<_> = (0..3)
        .map(|id| {
            let mut c = paraft();
            c.env("PARAFT_INSECURE", "1")
                .arg("server")
                .arg(&path)
                .args(["--id", &id.to_string()])
                .stderr(Stdio::null());
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

    let out = run(&["status", "--fleet", path.to_str().expect("utf-8"), "--json", "--digest"]);
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
        // The others may not have applied the last of it yet.
        let led = copies.iter().find(|s| s["role"] == "leader").expect("one leads");
        assert!(led["members"].as_array().expect("members").iter().all(|m| m["finished"] == true), "{led}");
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
        assert_eq!(s.0.wait().expect("server").code(), Some(143), "a server ends in order, of SIGTERM");
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
    let free = free_addresses(1).remove(0);
    let body = digits("bsp", 1, 1) + &format!("addresses = [\"{free}\"]\ntimeout_ms = 700\n");
    let path = job(scratch.path(), &body);
    let out = run(&["worker", path.to_str().expect("utf-8"), "--rank", "0", "--insecure"]);
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(69), "{err}");
    assert!(err.contains(&free) && err.contains("refused"), "{err}");
}

#[test]
fn a_server_that_the_majority_needs_is_not_called_stoppable() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut fleet = Fleet::start(scratch.path(), None);
    fleet.all("serving");
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
fn a_control_group_without_majority_is_explained() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut fleet = Fleet::start(scratch.path(), None);
    fleet.all("serving");
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
    joins
        .env("PARAFT_INSECURE", "1")
        .args(["server", "--listen", "127.0.0.1:0", "--join", "--fleet", &fleet.list(), "--data"])
        .arg(fleet.data(3));
    let mut joins = Held(joins.stderr(Stdio::piped()).spawn().expect("server"));
    let (tell, said) = mpsc::channel();
    let lines = BufReader::new(joins.0.stderr.take().expect("stderr")).lines().map_while(Result::ok);
    // Read to its end: a server must not find its standard error closed.
    std::thread::spawn(move || lines.for_each(|l| _ = tell.send(l)));
    let word = said.iter().find(|l| l.contains("It keeps asking")).expect("it says why it waits");
    contains(&word, &["control group", &answers, &fleet.addresses[1]]);
    // It continues: the fleet restarts, and accepts it.
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
    assert_eq!(joins.0.wait().expect("server").code(), Some(143), "it ends in order");
}

#[test]
fn an_order_reaches_a_leader_outside_the_given_servers() {
    let scratch = tempfile::tempdir().expect("scratch");
    let fleet = Fleet::start(scratch.path(), None);
    fleet.all("serving");
    let out = fleet.ask(&["status", "--json"]);
    let known: Value =
        text(&out.stdout).lines().last().and_then(|l| serde_json::from_str(l).ok()).expect("the fleet");
    let leader = known["leader"].as_str().expect("it has a leader");
    // It leads nothing, and is all that the operator names: as after the leadership went to a server that joined.
    let given = fleet.addresses.iter().find(|a| *a != leader).expect("another server");
    for (order, said) in
        [(&["drain", "s2"][..], "It can be stopped"), (&["drain", "s2", "--undo"], "takes part")]
    {
        let out = run(&[order, &["--fleet", given]].concat());
        assert!(out.status.success(), "{}", text(&out.stderr));
        contains(&text(&out.stdout), &[said]);
    }
}

#[test]
fn draining_a_second_server_names_the_combined_loss() {
    let scratch = tempfile::tempdir().expect("scratch");
    let fleet = Fleet::start(scratch.path(), None);
    fleet.all("serving");
    let out = fleet.ask(&["drain", "s0"]);
    contains(&text(&out.stdout), &["It can be stopped: the others continue"]);
    let out = fleet.ask(&["drain", "s1"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let both =
        "not together with s0, which is drained too: without both there is no majority for the control group";
    contains(&text(&out.stdout), &["It can be stopped, but ", both, "shard 0"]);
}

#[test]
fn a_failure_without_output_shows_in_the_exit_code() {
    for (args, code) in
        [(&["worker", "missing.toml", "--rank", "0"][..], 78), (&["status", "--fleet", "127.0.0.1:1"], 69)]
    {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("every Linux has it");
        let ended =
            paraft().args(args).env("PARAFT_INSECURE", "1").stderr(full).status().expect("paraft starts");
        assert_eq!(ended.code(), Some(code), "{args:?}");
    }
}

/// A small job on the digits, in a folder; with a checkpoint at its end.
fn small(dir: &Path, more: &str) -> PathBuf {
    let body = "name = \"t\"\n[model]\nkind = \"logistic-regression\"\n[data]\nkind = \"digits\"\n[train]\nworkers = 1\n\
                [cluster]\nservers = 1\nreplicas = 1\n[checkpoint]\n";
    job(dir, &format!("{body}{more}"))
}

#[test]
fn an_unwritable_checkpoint_folder_is_refused_at_the_start() {
    let scratch = tempfile::tempdir().expect("scratch");
    let file = scratch.path().join("taken");
    fs::write(&file, "").expect("file");
    for dir in ["taken", "taken/below", "/proc/checkpoints"] {
        let job = small(scratch.path(), &format!("dir = \"{dir}\"\n"));
        let run = scratch.path().join("run");
        let train =
            paraft().arg("train").arg(&job).arg("--run-dir").arg(&run).output().expect("paraft starts");
        assert!(
            !run.join("metrics.jsonl").exists() && !run.join("server-0.log").exists(),
            "nothing may start"
        );
        // No server listens there: a worker that tries to train reports that, with another code.
        let mut worker = paraft();
        worker.arg("worker").arg(&job).args(["--rank", "0", "--fleet", "127.0.0.1:1"]);
        for out in [train, worker.output().expect("paraft starts")] {
            let err = text(&out.stderr);
            assert_eq!(out.status.code(), Some(74), "{dir}: {err}");
            contains(&err, &["checkpoints cannot be written to", dir, "checkpoint.dir"]);
            assert!(dir.starts_with('/') || err.contains("taken is a file, not a folder"), "{err}");
        }
    }
}

#[test]
fn resume_takes_the_newest_run_with_a_whole_checkpoint() {
    let scratch = tempfile::tempdir().expect("scratch");
    let job = small(scratch.path(), "");
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
            "resuming from step",
            "runs/t-1/checkpoints",
        ],
    );
}

/// The points of the lines `train/loss` that TensorBoard would show, which are the record's.
fn losses(run: &Path) -> Vec<u64> {
    let points = paraft_record::follow::points(run).expect("a record");
    points.iter().filter(|p| p.tag == "train/loss").map(|p| p.step).collect()
}

#[test]
fn only_a_restart_at_a_checkpoint_begins_a_new_record() {
    let scratch = tempfile::tempdir().expect("scratch");
    let run = scratch.path().join("runs/by-hand");
    let base = digits("bsp", 3, 100_000)
        .replace("[cluster]", "[checkpoint]\nevery_epochs = 5\n[cluster]\ngrace_ms = 1000");
    let mut fleet = Fleet::start(scratch.path(), Some(&base));
    let start = |fleet: &Fleet, rank, more: &[&str]| {
        Held(fleet.worker(rank, &run).args(more).stderr(Stdio::null()).spawn().expect("worker"))
    };
    let records = || {
        let names = fs::read_dir(&run).expect("the run's folder").flatten().map(|e| e.file_name());
        let names = names.map(|n| n.to_string_lossy().into_owned());
        names.filter(|n| n.starts_with("metrics.")).collect::<BTreeSet<_>>()
    };
    let trained = |worker: u32| {
        let of = |e: &&Value| e["event"] == "train" && e["worker"] == worker;
        Launcher::metrics_in(&run).iter().filter(of).count()
    };
    let more_of = |workers: &[u32]| {
        let before: Vec<_> = workers.iter().map(|w| trained(*w)).collect();
        wait("all to train", || {
            let now: Vec<_> = workers.iter().map(|w| trained(*w)).collect();
            match before.iter().zip(&now).all(|(before, now)| now > before) {
                true => Ok(()),
                false => Err(format!("{now:?}")),
            }
        });
    };
    let first: Vec<_> = (0..2).map(|rank| start(&fleet, rank, &[])).collect();
    let whole_ones = || {
        let all = fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten().map(|e| e.path());
        all.filter(|p| p.join("checkpoint.json").exists()).max()
    };
    wait("a checkpoint", || whole_ones().ok_or_else(String::new));
    more_of(&[0, 1]);
    drop(first);
    (0..3).for_each(|id| fleet.kill(id));
    let whole = fs::read(run.join("metrics.jsonl")).expect("the record of the first try");
    // A worker that rejoins names the checkpoint that the job started with.
    let checkpoint = scratch.path().join("checkpoint");
    fs::rename(whole_ones().expect("a checkpoint"), &checkpoint).expect("moved");
    let resume = ["--resume", checkpoint.to_str().expect("utf-8")];

    (0..3).for_each(|id| {
        fs::remove_dir_all(fleet.data(id)).expect("its folder");
        fleet.serve(id);
    });
    let (_zero, one) = (start(&fleet, 0, &resume), start(&fleet, 1, &resume));
    wait("a new record", || match records() {
        two if two.len() == 2 && trained(0) > 0 && trained(1) > 0 => Ok(()),
        other => Err(format!("{other:?}")),
    });
    let kept = fs::read(run.join("metrics.1.jsonl")).expect("the first try's");
    assert!(kept == whole, "as it was when its last process ended");
    let lines = Launcher::metrics_in(&run);
    assert_eq!(lines.iter().filter(|e| e["event"] == "run").count(), 1, "one of the two has begun it");
    let begun = lines[0]["resumed_step"].as_u64().expect("the first line says from where");
    let (at, points) = (begun * 2 * 16, losses(&run));
    assert!(begun > 0 && points.iter().all(|step| *step > at), "{at}: {points:?}");

    drop(one);
    let _one = start(&fleet, 1, &resume);
    more_of(&[0, 1]);
    assert_eq!(records().len(), 2, "who comes back goes on in it");
    assert_eq!(Launcher::metrics_in(&run)[0]["resumed_step"], begun);
}

#[test]
fn a_worker_says_which_folder_it_cannot_make() {
    let scratch = tempfile::tempdir().expect("scratch");
    let job = small(scratch.path(), "");
    fs::write(scratch.path().join("file"), "").expect("a file");
    let run = scratch.path().join("file/run");
    let mut worker = paraft();
    worker.arg("worker").arg(&job).args(["--rank", "0", "--fleet", "127.0.0.1:1", "--run-dir"]).arg(&run);
    let out = worker.output().expect("paraft starts");
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(74), "{err}");
    contains(&err, &["file/run: the run's folder cannot be made", "Not a directory"]);
}

/// Of a job whose leases last for a minute.
#[test]
fn a_worker_on_sigterm_returns_its_lease_and_exits_143() {
    let scratch = tempfile::tempdir().expect("scratch");
    let body = digits("bsp", 3, 100_000) + "grace_ms = 60000\n";
    let fleet = Fleet::start(scratch.path(), Some(&body));
    fleet.all("serving");
    let start =
        |rank| Held(fleet.worker(rank, scratch.path()).stderr(Stdio::null()).spawn().expect("worker"));
    let members = || -> Vec<Vec<u64>> {
        let said = text(&fleet.ask(&["status", "--json"]).stdout);
        let replies = said.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
        let led = replies.flat_map(|r| r["shards"].as_array().cloned().unwrap_or_default());
        let led = led.filter(|s| s["role"] == "leader");
        let of = |s: Value| {
            s["members"].as_array().into_iter().flatten().filter_map(|m| m["worker"].as_u64()).collect()
        };
        led.map(of).collect()
    };
    let (_stays, mut goes) = (start(0), start(1));
    let both = |m: &Vec<Vec<u64>>| m.len() == 3 && m.iter().all(|m| m == &[0, 1]);
    wait("both to be members of every shard", || {
        Some(members()).filter(both).ok_or_else(|| format!("{:?}", members()))
    });
    kill(Pid::from_raw(goes.0.id() as i32), Signal::SIGTERM).expect("SIGTERM");
    assert_eq!(goes.0.wait().expect("worker").code(), Some(143));
    assert_eq!(members(), [[0], [0], [0]], "it has left before it has ended");
}

#[test]
fn a_run_scaled_down_still_trains_every_sample() {
    let body = digits("asp", 1, 500).replace("[train]\n", "[train]\nsampler = \"leased\"\n");
    let l = Launcher::training(&body, 2);
    let (keep, run_dir) = (l.keep(), l.run_dir.clone());
    let dir = run_dir.to_str().expect("utf-8");
    let scale = |n: &str| run(&["fleet", "scale", dir, "--workers", n]);
    let left = || Launcher::metrics_in(&run_dir).iter().filter(|e| e["event"] == "leave").count();
    let trained = |worker: u64| {
        let of = |e: &&Value| e["event"] == "chunk" && e["worker"] == worker;
        Launcher::metrics_in(&run_dir).iter().filter(of).count()
    };
    let more = |worker: u64, what: &str| {
        let before = trained(worker);
        wait(what, || match trained(worker) {
            n if n > before + 5 => Ok(()),
            n => Err(format!("{n} chunks, {before} before")),
        });
    };
    for (n, words) in [("0", "one at least"), ("3", "the job has 2")] {
        let out = scale(n);
        assert_eq!(out.status.code(), Some(2), "{}", text(&out.stderr));
        contains(&text(&out.stderr), &[words]);
    }
    assert!(scale("1").status.success());
    wait("worker 1 to leave", || match left() {
        1 => Ok(()),
        n => Err(format!("{n} have left")),
    });
    more(0, "worker 0 to go on alone");
    let alone = trained(1);
    more(0, "worker 0 to go on alone still");
    assert_eq!(trained(1), alone, "worker 1 is away");
    assert!(scale("2").status.success());
    more(1, "worker 1 to be back");
    let (code, _, err) = l.output();
    assert_eq!(code, Some(0), "{err}");
    contains(&err, &["worker-1 leaves; workers wanted: 1", "worker-1 comes back; workers wanted: 2"]);
    let events = Launcher::metrics_in(&run_dir);
    let chunks = events.iter().filter(|e| e["event"] == "chunk");
    let whole: BTreeSet<_> = chunks.map(|e| (e["epoch"].as_u64(), e["chunk"].as_u64())).collect();
    // Of 16 minibatches of 16.
    assert_eq!(whole.len() as u64, 500 * TRAINED.div_ceil(256), "every chunk of every epoch");
    let over = scale("1");
    assert_eq!(over.status.code(), Some(69), "{}", text(&over.stderr));
    contains(&text(&over.stderr), &["no launcher follows"]);
    drop(keep);
}

#[test]
fn a_worker_that_is_away_takes_the_place_of_one_that_is_lost() {
    let l = Launcher::training(&digits("asp", 1, 100_000).replace("[train]\n", "[train]\nworkers = 3\n"), 3);
    let keep = l.keep();
    let dir = l.run_dir.clone();
    let scale = |n: &str| run(&["fleet", "scale", dir.to_str().expect("utf-8"), "--workers", n]);
    let left = |worker: u64, how: &str| {
        let events = Launcher::metrics_in(&dir);
        let of = |e: &&Value| e["event"] == "leave" && e["worker"] == worker;
        events.iter().filter(of).any(|e| e["reason"].as_str().is_some_and(|r| r.contains(how)))
    };
    let wait_for = |what: &str, so: &dyn Fn() -> bool| {
        wait(what, || match so() {
            true => Ok(()),
            false => Err("not so".into()),
        });
    };
    let worker = |n: u32| format!("--rank {n} ");
    let lines = |worker: u64| {
        Launcher::metrics_in(&dir).iter().filter(|e| e["event"] == "train" && e["worker"] == worker).count()
    };
    assert!(scale("1").status.success());
    wait_for("two to leave", &|| [1, 2].iter().all(|w| left(*w, "fewer workers are wanted")));
    // Of the one that is there and the others nobody is wanted less than one.
    let (before, alone) = (lines(1), lines(0));
    wait_for("the first to train alone", &|| lines(0) > alone + 3);
    assert_eq!(lines(1), before);
    kill(pid_of(&dir, &worker(0)), Signal::SIGKILL).expect("killed");
    wait_for("the second to come back", &|| lines(1) > before + 3);
    assert!(left(0, "SIGKILL"), "it is lost");
    // Lost workers also return when a user sets the number; present workers stay.
    assert!(scale("2").status.success());
    let first = lines(0);
    wait_for("the first to come back", &|| lines(0) > first + 3);
    assert!(processes(&dir).iter().all(|(_, l)| !l.contains(&worker(2))), "two were wanted");
    assert!(scale("3").status.success());
    let third = lines(2);
    wait_for("the third to come back", &|| lines(2) > third + 3);
    assert!(scale("1").status.success());
    wait_for("two to leave again", &|| {
        processes(&dir).iter().all(|(_, l)| !l.contains(&worker(1)) && !l.contains(&worker(2)))
    });
    let first = lines(0);
    wait_for("the first to go on", &|| lines(0) > first + 3);
    kill(Pid::from_raw(l.child.id() as i32), Signal::SIGTERM).expect("ended");
    let (_, _, err) = l.output();
    assert!(!err.contains("all workers are lost"), "{err}");
    drop(keep);
}

#[test]
fn a_drain_is_recorded_until_it_is_taken_back() {
    let l = Launcher::training(&digits("bsp", 3, 100_000), 2);
    let (keep, dir) = (l.keep(), l.run_dir.clone());
    let at = dir.to_str().expect("utf-8");
    for (args, undo) in [(&[][..], false), (&["--undo"], true)] {
        let out = run(&[&["drain", "2", "--fleet", at][..], args].concat());
        assert!(out.status.success(), "{}", text(&out.stderr));
        wait("the record to have it", || {
            let all = Launcher::metrics_in(&dir);
            let is = |e: &Value| e["what"] == "server_drained" && e["server"] == 2 && e["undo"] == undo;
            if all.iter().any(is) { Ok(()) } else { Err(format!("{} lines", all.len())) }
        });
    }
    assert!(run(&["report", at]).status.success());
    let report = fs::read_to_string(dir.join("report.html")).expect("a report");
    contains(&report, &["S</i>server 2 is drained<", "S</i>server 2 takes part again<"]);
    kill(Pid::from_raw(l.child.id() as i32), Signal::SIGTERM).expect("ended");
    l.output();
    drop(keep);
}
