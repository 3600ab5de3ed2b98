//! Groups of ranks: real processes die, and the worker continues.

use crate::common::{Fleet, Launcher, contains, digits, job, paraft, pid_of, processes, run, text, wait};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::{Child, Stdio},
};

fn grouped(workers: u32, size: u32, epochs: u64) -> String {
    let with = format!("workers = {workers}\ngroup_size = {size}\n[cluster]");
    digits("bsp", 3, epochs).replace("[cluster]", &with)
}

fn log(dir: &Path, name: &str) -> String {
    fs::read_to_string(dir.join(format!("{name}.log"))).unwrap_or_default()
}

/// Waits for a group of these ranks, as a rank's log has it; returns the log.
fn stands(dir: &Path, name: &str, ranks: &str) -> String {
    wait(&format!("ranks {ranks} in the log of {name}"), || {
        let log = log(dir, name);
        let stood = log.lines().filter(|l| l.contains("the group stands")).any(|l| l.contains(ranks));
        if stood { Ok(log) } else { Err(log) }
    })
}

#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn a_worker_outlives_the_ranks_of_its_group_and_their_leader() {
    let l = Launcher::training(&grouped(1, 3, 200), 2);
    kill(pid_of(&l.run_dir, "--rank 1"), Signal::SIGKILL).expect("SIGKILL");
    stands(&l.run_dir, "worker-0-rank-2", "[0, 2]");
    kill(pid_of(&l.run_dir, "--rank 0"), Signal::SIGKILL).expect("SIGKILL");
    let said = stands(&l.run_dir, "worker-0-rank-2", "[2]");
    contains(&said, &["rank 1 of the group is gone", "rank 0 of the group is gone", "its process has ended"]);
    let (code, out, err) = l.output();
    assert_eq!(code, Some(0), "{err}");
    contains(&err, &["worker-0-rank-1 was ended by SIGKILL", "worker-0-rank-0"]);
    let summary: Value = serde_json::from_str(out.trim()).expect("summary");
    assert_eq!((&summary["workers_lost"], &summary["ranks_lost"]), (&0.into(), &2.into()), "{summary}");
    assert!(summary["final_accuracy"].as_f64().expect("accuracy") > 0.9, "{summary}");
}

/// Each rank holds a stage of the model, and is killed: those who are left take its stages over, and give them up when it is back.
#[test]
fn a_pipeline_outlives_each_of_its_ranks() {
    // With one server there is a shard for each stage all the same.
    let body = digits("bsp", 1, 50).replace("[cluster]", "workers = 2\n[parallel]\npipeline = 2\n[cluster]")
        + "max_restarts = 2\n";
    let l = Launcher::training(&body, 2);
    kill(pid_of(&l.run_dir, "--rank 1"), Signal::SIGKILL).expect("SIGKILL");
    let alone = stands(&l.run_dir, "worker-0-rank-0", "[0]");
    contains(&alone, &["rank 1 of the group is gone", "\"stages\":\"0..1\""]);
    stands(&l.run_dir, "worker-0-rank-1", "[0, 1]");
    wait("a rank with both stages", || {
        let log = log(&l.run_dir, "worker-0-rank-0");
        if log.contains("\"stages\":\"0..2\"") { Ok(()) } else { Err(log) }
    });
    // The leader of the other worker, which has the first stage.
    kill(pid_of(&l.run_dir, "--rank 2"), Signal::SIGKILL).expect("SIGKILL");
    stands(&l.run_dir, "worker-1-rank-1", "[1]");
    stands(&l.run_dir, "worker-1-rank-1", "[1, 0]");
    let (code, out, err) = l.output();
    assert_eq!(code, Some(0), "{err}");
    contains(&err, &["stage 0  layers 0 to", "worker-0-rank-1", "worker-1-rank-0", "started again"]);
    let summary: Value = serde_json::from_str(out.trim()).expect("summary");
    assert_eq!((&summary["workers_lost"], &summary["ranks_lost"]), (&0.into(), &2.into()), "{summary}");
    assert!(summary["final_accuracy"].as_f64().expect("accuracy") > 0.9, "{summary}");
}

#[test]
fn ranks_rejoin_and_the_former_leader_leads() {
    let body = grouped(2, 2, 70) + "max_restarts = 1\n";
    let l = Launcher::training(&body, 2);
    kill(pid_of(&l.run_dir, "--rank 1"), Signal::SIGKILL).expect("SIGKILL");
    kill(pid_of(&l.run_dir, "--rank 2"), Signal::SIGKILL).expect("SIGKILL");
    stands(&l.run_dir, "worker-0-rank-0", "[0, 1]");
    // The other worker's leader was killed: its follower leads, and remains the leader.
    stands(&l.run_dir, "worker-1-rank-1", "[1, 0]");
    let out = run(&["status", "--fleet", l.run_dir.to_str().expect("utf-8"), "--json"]);
    let said = text(&out.stdout);
    let groups: Vec<Value> = said
        .lines()
        .filter_map(|l| serde_json::from_str::<Value>(l).ok())
        .filter_map(|v| v["groups"].as_array().cloned())
        .flatten()
        .collect();
    let leaders: Vec<_> =
        groups.iter().map(|g| (g["worker"].as_u64(), g["ranks"][0]["rank"].as_u64())).collect();
    assert_eq!(leaders, [(Some(0), Some(0)), (Some(1), Some(1))], "{said}");
    let (code, out, err) = l.output();
    assert_eq!(code, Some(0), "{err}");
    contains(&err, &["worker-0-rank-1", "worker-1-rank-0", "started again"]);
    let summary: Value = serde_json::from_str(out.trim()).expect("summary");
    assert_eq!(summary["ranks_lost"], 2, "{summary}");
    assert!(summary["final_accuracy"].as_f64().expect("accuracy") > 0.9, "{summary}");
}

/// The other rank is stopped, so that there is no group yet in which the one that is killed could be missed.
#[test]
fn a_rank_killed_before_training_is_restarted() {
    let l = Launcher::training(&(grouped(1, 2, 2) + "max_restarts = 1\n"), 0);
    let of = |rank: &str| {
        let all = processes(&l.run_dir);
        let found = all.iter().find(|(_, line)| line.contains(rank)).map(|(pid, _)| Pid::from_raw(*pid));
        found.ok_or_else(|| format!("{all:?}"))
    };
    let stopped = wait("rank 0", || of("--rank 0"));
    kill(stopped, Signal::SIGSTOP).expect("SIGSTOP");
    let killed = wait("rank 1", || of("--rank 1"));
    kill(killed, Signal::SIGKILL).expect("SIGKILL");
    wait("another rank 1", || {
        of("--rank 1").and_then(|pid| if pid != killed { Ok(pid) } else { Err(format!("{pid}")) })
    });
    kill(stopped, Signal::SIGCONT).expect("SIGCONT");
    let (code, out, err) = l.output();
    assert_eq!(code, Some(0), "{err}");
    contains(&err, &["worker-0-rank-1 was ended by SIGKILL", "started again"]);
    let summary: Value = serde_json::from_str(out.trim()).expect("summary");
    assert_eq!((&summary["workers_lost"], &summary["ranks_lost"]), (&0.into(), &1.into()), "{summary}");
}

/// A rank that is stopped ends nothing: only its silence tells. It is left behind, and taken in when it is there again.
#[test]
fn a_rank_that_is_silent_is_left_behind() {
    let l = Launcher::training(&grouped(1, 2, 2500), 2);
    let stopped = pid_of(&l.run_dir, "--rank 0");
    kill(stopped, Signal::SIGSTOP).expect("SIGSTOP");
    let said = stands(&l.run_dir, "worker-0-rank-1", "[1]");
    contains(&said, &["nothing was heard of it"]);
    kill(stopped, Signal::SIGCONT).expect("SIGCONT");
    stands(&l.run_dir, "worker-0-rank-0", "[1, 0]");
    let lines = l.metrics().len();
    wait("both to go on", || match l.metrics().len() {
        n if n > lines + 5 => Ok(()),
        n => Err(format!("{n} lines after {lines}")),
    });
    kill(Pid::from_raw(l.child.id() as i32), Signal::SIGINT).expect("SIGINT");
    let (code, _, err) = l.output();
    assert_eq!(code, Some(130), "{err}");
}

/// All ranks are started twice, by mistake or as a reserve: the second set waits until the first is silent, and the first, when
/// it is back, until the second is done.
#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn of_two_sets_of_ranks_one_trains_and_one_waits() {
    let scratch = tempfile::tempdir().expect("scratch");
    let fleet = Fleet::start(scratch.path(), Some(&(grouped(1, 2, 200) + "timeout_ms = 600000\n")));
    let dir = scratch.path().join("run");
    fs::create_dir(&dir).expect("a folder");
    let set = |name: &str| {
        [0, 1].map(|rank| {
            let mut c = fleet.worker(rank, &dir);
            c.arg("--log-file").arg(dir.join(format!("{name}-{rank}.log")));
            c.stderr(Stdio::piped()).spawn().expect("a rank")
        })
    };
    let signal = |set: &[Child], s: Signal| {
        set.iter().for_each(|c| kill(Pid::from_raw(c.id() as i32), s).expect("a signal"));
    };
    let first = set("first");
    stands(&dir, "first-1", "[0, 1]");
    let second = set("second");
    signal(&first, Signal::SIGSTOP);
    stands(&dir, "second-1", "[0, 1]");
    let lines = || Launcher::metrics_in(&dir).iter().filter(|e| e["event"] == "train").count();
    let before = lines();
    wait("the second set to train", || match lines() {
        n if n > before => Ok(()),
        n => Err(format!("{n} lines")),
    });
    signal(&first, Signal::SIGCONT);
    for rank in second.into_iter().chain(first) {
        let out = rank.wait_with_output().expect("output");
        let logs = || ["first-0", "second-0"].map(|name| log(&dir, name)).join("\n");
        assert!(out.status.success(), "{}\n{}", text(&out.stderr), logs());
    }
    contains(&log(&dir, "first-0"), &["this rank has lost its group", "the job is done"]);
}

#[test]
fn a_rank_by_hand_waits_and_names_missing_ranks() {
    let scratch = tempfile::tempdir().expect("scratch");
    let fleet = Fleet::start(scratch.path(), Some(&(grouped(1, 2, 3) + "timeout_ms = 2000\n")));
    let dir = scratch.path().join("run");
    fs::create_dir(&dir).expect("a folder");
    let rank = |rank: u32| {
        let file = dir.join(format!("{rank}.log"));
        let mut c = fleet.worker(rank, &dir);
        c.arg("--log-file").arg(&file).stderr(Stdio::piped()).spawn().expect("a rank")
    };
    let out = rank(0).wait_with_output().expect("output");
    assert_eq!(out.status.code(), Some(69));
    contains(&text(&out.stderr), &["1 of 2 ranks of worker 0", "missing: 1", "train.group_size"]);
    // Of another job.
    let other = fleet.worker(0, &dir).args(["--set", "train.batch=8"]).stderr(Stdio::piped()).spawn();
    let both = [other.expect("a rank"), rank(1)].map(|c| c.wait_with_output().expect("output"));
    let said = both.iter().map(|o| text(&o.stderr)).collect::<String>();
    // The second rank must change its job; the first waits for it, and is notified.
    let codes: BTreeSet<_> = both.iter().map(|o| o.status.code()).collect();
    assert_eq!(codes, BTreeSet::from([Some(69), Some(78)]), "{said}");
    assert_eq!(said.matches("different settings").count(), 2, "{said}");
    contains(&said, &["different settings", "rank 0 with batch 8", "batch 16"]);
    // Both, and then one who comes too late.
    for one in [rank(0), rank(1)].map(|c| c.wait_with_output().expect("output")) {
        assert!(one.status.success(), "{}", text(&one.stderr));
    }
    contains(&log(&dir, "0"), &["the group stands", "[0, 1]"]);
    let late = rank(1).wait_with_output().expect("output");
    assert!(late.status.success(), "{}", text(&late.stderr));
    contains(&log(&dir, "1"), &["the job is done"]);
}

fn reducing(size: u32, epochs: u64) -> String {
    grouped(1, size, epochs).replace("group_size", "exchange = \"all-reduce\"\ngroup_size")
}

#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn ranks_without_servers_in_the_step_outlive_their_leader() {
    let l = Launcher::training(&reducing(3, 2000), 2);
    let kept = l.keep();
    kill(pid_of(&l.run_dir, "--rank 0"), Signal::SIGKILL).expect("SIGKILL");
    let said = stands(&l.run_dir, "worker-0-rank-1", "[1, 2]");
    assert!(!said.contains("latest checkpoint"), "the others have what it had: {said}");
    let run_dir = l.run_dir.clone();
    let (code, out, err) = l.output();
    assert_eq!(code, Some(0), "{err}");
    let summary: Value = serde_json::from_str(out.trim()).expect("summary");
    assert_eq!((&summary["ranks_lost"], &summary["bytes_pushed"]), (&1.into(), &0.into()), "{summary}");
    assert!(summary["final_accuracy"].as_f64().expect("accuracy") > 0.9, "{summary}");
    assert!(run_dir.join("model.safetensors").exists());
    drop(kept);
}

#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn ranks_all_killed_resume_from_their_latest_checkpoint() {
    let body = reducing(2, 1500) + "max_restarts = 1\n[checkpoint]\nevery_steps = 500\n";
    let l = Launcher::training(&body, 2);
    let kept = l.keep();
    let newest = |l: &Launcher| {
        let told = l.metrics();
        // One that was not written has an error.
        let all = told.iter().filter(|e| e["event"] == "checkpoint" && e["error"].is_null());
        all.filter_map(|e| e["step"].as_u64()).max()
    };
    let step = wait("a checkpoint", || newest(&l).ok_or_else(|| format!("{:?}", l.metrics().len())));
    for rank in ["--rank 0", "--rank 1"] {
        kill(pid_of(&l.run_dir, rank), Signal::SIGKILL).expect("SIGKILL");
    }
    let from = wait("the job to go on", || {
        let logs = [0, 1].map(|r| log(&l.run_dir, &format!("worker-0-rank-{r}"))).concat();
        let line =
            logs.lines().find(|l| l.contains("going on from the latest checkpoint")).map(str::to_string);
        line.ok_or(logs)
    });
    let line: Value = serde_json::from_str(&from).expect("a line of the log");
    let from = line["fields"]["step"].as_u64().unwrap_or_else(|| panic!("{line}"));
    assert!(from >= step && from.is_multiple_of(500), "from {from}, there was one of {step}");
    let run_dir = l.run_dir.clone();
    let (code, out, err) = l.output();
    assert_eq!(code, Some(0), "{err}");
    let summary: Value = serde_json::from_str(out.trim()).expect("summary");
    assert!(summary["final_accuracy"].as_f64().expect("accuracy") > 0.9, "{summary}");
    // What it wrote is a checkpoint like any other: servers can resume from it.
    let more = job(kept.path(), &grouped(1, 2, 1502));
    let args =
        ["train", more.to_str().expect("utf-8"), "--resume", run_dir.to_str().expect("utf-8"), "--json"];
    let dir = kept.path().join("more");
    let out = run(&[&args[..], &["--run-dir", dir.to_str().expect("utf-8")]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let summary: Value = serde_json::from_slice(&out.stdout).expect("summary");
    assert!(summary["final_accuracy"].as_f64().expect("accuracy") > 0.9, "{summary}");
}

#[test]
fn groups_that_cannot_be_are_refused_with_the_reason() {
    let scratch = tempfile::tempdir().expect("scratch");
    let path = job(scratch.path(), &digits("bsp", 1, 1));
    let path = path.to_str().expect("utf-8");
    for (args, code, words) in [
        (&["--group-size", "0"][..], 2, &["--group-size"][..]),
        (&["--set", "train.group_size=2000"], 78, &["train.group_size", "1 to 1024"]),
        (&["--set", "train.exchange=all-reduce"], 78, &["train.workers", "one group", "train.group_size"]),
        (
            &["--set", "train.exchange=all-reduce", "--set", "train.workers=1", "--set", "train.mode=asp"],
            78,
            &["train.mode", "lock-step"],
        ),
        (&["--group-size", "2", "--set", "train.sampler=leased"], 78, &["train.sampler", "group_size"]),
    ] {
        let out = run(&[&["train", path], args].concat());
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {said}");
        contains(&said, words);
    }
    let out = paraft()
        .args(["worker", path, "--rank", "4", "--group-size", "2", "--fleet", "127.0.0.1:1"])
        .output()
        .expect("paraft starts");
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(78), "{said}");
    contains(&said, &["2 workers of 2 ranks each", "0 to 3"]);
}
