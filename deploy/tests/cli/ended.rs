//! Runs that have ended: their folders answer for their servers.

use crate::common::*;

const CHECKPOINTS: &str = "[checkpoint]\nevery_steps = 20\n";

/// What a command prints about an ended run; it must succeed.
fn printed(args: &[&str]) -> String {
    let out = run(args);
    assert_eq!(out.status.code(), Some(0), "{args:?}: {}{}", text(&out.stdout), text(&out.stderr));
    text(&out.stdout)
}

fn object(args: &[&str]) -> Value {
    serde_json::from_str(printed(args).trim()).expect("one object")
}

/// The folder of a run that has finished, in `runs/` of the scratch folder.
fn finished(scratch: &Path) -> PathBuf {
    let dir = scratch.join("runs/t-1");
    let file = job(scratch, &(digits("bsp", 1, 1) + CHECKPOINTS));
    let (file, at) = (file.to_str().expect("utf-8"), dir.to_str().expect("utf-8"));
    let out = run(&["train", file, "--run-dir", at, "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    dir
}

/// All commands that ask an ended run, and the state that each shows.
fn asked(dir: &str, state: &str, words: &str) {
    contains(&printed(&["status", "--fleet", dir]), &[dir, "t, 2 workers, bsp", words]);
    let one = object(&["status", "--fleet", dir, "--json"]);
    assert_eq!(
        (&one["state"], &one["job"], &one["workers"]),
        (&state.into(), &"t".into(), &2.into()),
        "{one}"
    );
    assert_eq!(object(&["status", "t", "--fleet", dir, "--json"]), one);
    let another = run(&["status", "another", "--fleet", dir]);
    assert_eq!(another.status.code(), Some(78));
    contains(&text(&another.stderr), &["no job `another`", "its job was `t`"]);

    contains(&printed(&["jobs", "--fleet", dir]), &["t ", state, "bsp", dir]);
    let jobs = object(&["jobs", "--fleet", dir, "--json"]);
    assert_eq!(
        (&jobs["jobs"][0]["state"], &jobs["jobs"][0]["mode_in_force"]),
        (&state.into(), &"bsp".into())
    );

    let list = printed(&["checkpoint", "list", "--fleet", dir]);
    contains(&list, &[&format!("job t  {state}"), "latest", &format!("{dir}/checkpoints/step-")]);
    let list = object(&["checkpoint", "list", "--fleet", dir, "--json"]);
    assert_eq!(list["jobs"][0]["latest"]["step"], one["latest"]["step"], "{list}");

    let logs = printed(&["logs", "t", "--fleet", dir, "-n", "0"]);
    contains(&logs, &["==> server-0.log <==", "==> worker-0.log <==", "==> worker-1.log <==", " INFO "]);
    contains(&logs, &["==> launcher.log <==", "the run begins: workers 2, servers 1, bsp"]);
    assert!(!logs.contains("\"timestamp\""), "lines are for people: {logs}");
    assert_eq!(printed(&["logs", "--fleet", dir, "-n", "0", "--follow"]), logs, "it is of the run's job");
    assert!(printed(&["logs", "--fleet", dir, "--json"]).contains("\"timestamp\""));

    contains(
        &printed(&["top", "--fleet", dir]),
        &[dir, "has ended", words, &format!("paraft status --fleet {dir}")],
    );
}

#[test]
fn a_finished_run_is_shown_from_its_folder() {
    let scratch = tempfile::tempdir().expect("scratch");
    let dir = finished(scratch.path());
    let at = dir.to_str().expect("utf-8");
    asked(at, "finished", "finished");
    let said = printed(&["status", "--fleet", at]);
    contains(&said, &["44 of 44", "loss ", "accuracy ", "report.html", "model.safetensors", "checkpoints"]);
    assert!(!said.contains("--resume"), "nothing is left to train: {said}");
    let one = object(&["status", "--fleet", at, "--json"]);
    assert_eq!((&one["steps"], &one["steps_total"], &one["resume"]), (&44.into(), &44.into(), &Value::Null));

    // Without an argument it is the newest run.
    for ask in [&["status"][..], &["jobs"], &["checkpoint", "list"], &["logs"], &["top"]] {
        let out = paraft().current_dir(scratch.path()).args(ask).output().expect("paraft starts");
        assert_eq!(out.status.code(), Some(0), "{ask:?}: {}", text(&out.stderr));
        contains(&text(&out.stderr), &["runs/t-1, the newest run in runs/"]);
    }
    let elsewhere = tempfile::tempdir().expect("scratch");
    let out = paraft().current_dir(elsewhere.path()).arg("status").output().expect("paraft starts");
    assert_eq!(out.status.code(), Some(2));
    contains(&text(&out.stderr), &["which fleet?", "--fleet takes"]);
    // An ended run is nothing to change, and a folder is no job.
    let out = paraft().current_dir(scratch.path()).args(["stop", "t"]).output().expect("paraft starts");
    assert_eq!(out.status.code(), Some(2));
    contains(&text(&out.stderr), &["No run in runs/ is going on", "--fleet takes"]);
    let out = run(&["status", at]);
    assert_eq!(out.status.code(), Some(2));
    contains(&text(&out.stderr), &["cannot be a job's name", "--fleet"]);
}

#[test]
fn evaluate_shows_what_the_run_ended_with() {
    let scratch = tempfile::tempdir().expect("scratch");
    let dir = finished(scratch.path());
    let at = |inner: &str| dir.join(inner).to_str().expect("utf-8").to_string();
    let ended = object(&["status", "--fleet", &at(""), "--json"]);
    // The last step's checkpoint has the final weights.
    for model in [at(""), at("model.safetensors"), at("checkpoints"), at("checkpoints/step-0000000044")] {
        let e = object(&["evaluate", &model, "--json"]);
        assert_eq!((&e["samples"], &e["accuracy"]), (&360.into(), &ended["final_accuracy"]), "{model}: {e}");
        let (loss, final_loss) = (e["loss"].as_f64(), ended["final_loss"].as_f64());
        let apart = (loss.expect("a loss") - final_loss.expect("a loss")).abs();
        assert!(apart < 1e-6, "{model}: {e}, {ended}");
    }
    contains(&printed(&["evaluate", &at("")]), &["loss ", "accuracy ", " of 360) on 360 samples"]);
    let alone = scratch.path().join("elsewhere/alone.safetensors");
    fs::create_dir(scratch.path().join("elsewhere")).expect("a folder");
    fs::copy(at("model.safetensors"), &alone).expect("copied");
    let alone = alone.to_str().expect("utf-8");
    let with = at("job.toml");
    contains(&printed(&["evaluate", alone, "--job", &with]), &["loss "]);
    for (args, code, words) in [
        (&[alone][..], 2, &["does not say which model", "--job job.toml"][..]),
        (&[alone, "--job", &with, "--set", "model.hidden=[3]"], 65, &["alone.safetensors", "0.weight"]),
        (&[&at(""), "--data", "x.csv"], 2, &["data.kind = \"digits\"", "a CSV file"]),
        (&["nowhere"], 65, &["nowhere", "a run's folder"]),
    ] {
        let out = run(&[&["evaluate"], args].concat());
        assert_eq!(out.status.code(), Some(code), "{args:?}: {}", text(&out.stderr));
        contains(&text(&out.stderr), words);
    }
}

#[test]
fn a_stopped_run_is_shown_with_the_way_to_go_on() {
    let l = Launcher::training(&(digits("bsp", 1, 100_000) + CHECKPOINTS), 2);
    let (scratch, dir) = (l.keep(), l.run_dir.clone());
    let at = dir.to_str().expect("utf-8");
    wait("a checkpoint", || match dir.join("checkpoints/latest").exists() {
        true => Ok(()),
        false => Err("none yet".into()),
    });
    // A live fleet answers itself.
    contains(&printed(&["status", "--fleet", at]), &["connections "]);
    assert_eq!(object(&["report", at, "--json"])["state"], "running");
    wait("the control group to know the job", || match text(&run(&["jobs", "--fleet", at]).stdout) {
        jobs if jobs.contains("running") => Ok(()),
        jobs => Err(jobs),
    });
    let out = run(&["stop", "t", "--fleet", at]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert_eq!(l.output().0, Some(0));
    asked(at, "stopped", "stopped before its end");
    let report = fs::read_to_string(dir.join("report.html")).expect("a report");
    contains(&report, &["The run was stopped before its end, at step "]);
    let out = run(&["report", at, "--json"]);
    contains(&text(&out.stdout), &["\"state\":\"stopped\"", "\"reason\":null"]);
    contains(&text(&out.stderr), &["note: The run was stopped before its end, at step "]);
    let goes_on = format!("paraft train {at}/job.toml --resume {at}");
    contains(&printed(&["status", "--fleet", at]), &["report.html", &goes_on]);
    assert_eq!(object(&["status", "--fleet", at, "--json"])["resume"], goes_on.as_str());
    let on = scratch.path().join("on");
    let mut words: Vec<&str> = goes_on.split(' ').skip(1).collect();
    words.extend(["--run-dir", on.to_str().expect("utf-8"), "--json", "--set", "train.max_steps=1"]);
    let out = run(&words);
    contains(&text(&out.stderr), &["nothing is left to train"]);
}

#[test]
fn a_run_whose_launcher_was_killed_is_shown_without_an_end() {
    let mut l = Launcher::training(&(digits("bsp", 1, 100_000) + CHECKPOINTS), 2);
    let dir = l.run_dir.clone();
    let at = dir.to_str().expect("utf-8");
    wait("a checkpoint", || match dir.join("checkpoints/latest").exists() {
        true => Ok(()),
        false => Err("none yet".into()),
    });
    for (pid, _) in processes(&dir) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL); // one may have followed its launcher already
    }
    l.child.wait().expect("the launcher is gone");
    wait_for_the_end(&dir);
    wait_for_closed_ports(&dir);
    asked(at, "no-end", "its launcher is gone and the record has no end");
    contains(&printed(&["status", "--fleet", at]), &[&format!("paraft train {at}/job.toml --resume {at}")]);
    printed(&["report", at]);
    let report = fs::read_to_string(dir.join("report.html")).expect("a report");
    contains(&report, &["The record has no end, at step ", "the launcher was killed"]);
    // Its fleet will never be whole.
    let out = run(&["status", "--fleet", at, "--wait", "whole"]);
    assert_eq!(out.status.code(), Some(69), "{}", text(&out.stderr));
}

#[test]
fn a_folder_without_a_readable_record_is_refused_by_name() {
    let scratch = tempfile::tempdir().expect("scratch");
    let none = scratch.path().to_str().expect("utf-8");
    let out = run(&["status", "--fleet", none]);
    assert_eq!(out.status.code(), Some(78));
    contains(&text(&out.stderr), &[none, "holds no run"]);

    let dir = finished(scratch.path());
    let (at, record) = (dir.to_str().expect("utf-8"), dir.join("metrics.jsonl"));
    let out = run(&["status", "--fleet", none]);
    assert_eq!(out.status.code(), Some(78));
    contains(&text(&out.stderr), &["is no run, but holds some", at]);
    let whole = fs::read(&record).expect("a record");
    // A last line that was cut is no end.
    fs::write(&record, &whole[..whole.len() - 9]).expect("cut");
    let one = object(&["status", "--fleet", at, "--json"]);
    assert_eq!((&one["state"], &one["steps"]), (&"no-end".into(), &44.into()), "{one}");

    fs::remove_file(&record).expect("removed");
    let out = run(&["status", "--fleet", at]);
    assert_eq!(out.status.code(), Some(78), "{}", text(&out.stderr));
    contains(&text(&out.stderr), &["its record metrics.jsonl is gone", "--resume"]);

    let damaged = [&b"{}\n"[..], &whole[..]].concat();
    for (bytes, words) in
        [(&b""[..], ["no `run` event", "*.log"]), (&damaged[..], ["metrics.jsonl:1", "remove that line"])]
    {
        fs::write(&record, bytes).expect("written");
        for ask in [
            &["status", "--fleet", at][..],
            &["jobs", "--fleet", at],
            &["checkpoint", "list", "--fleet", at],
            &["logs", "--fleet", at],
            &["top", "--fleet", at],
        ] {
            let out = run(ask);
            let err = text(&out.stderr);
            assert_eq!(out.status.code(), Some(65), "{ask:?}: {err}");
            contains(&err, &["metrics.jsonl"]);
            contains(&err, &words);
        }
    }
}
