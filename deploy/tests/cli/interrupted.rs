//! How a run ends that a person interrupts, and the report of one that was killed.

use crate::common::*;
use std::io::{BufRead, BufReader, Read};

fn interrupt(launcher: &Launcher) {
    kill(Pid::from_raw(launcher.child.id() as i32), Signal::SIGINT).expect("SIGINT");
}

/// Waits until the control group knows the job.
fn is_known(dir: &str) {
    wait("the control group to hear of it", || match text(&run(&["jobs", "--fleet", dir]).stdout) {
        said if said.contains("running") => Ok(()),
        said => Err(said),
    });
}

#[test]
fn the_first_ctrl_c_stops_the_job_and_writes_its_report() {
    let l = Launcher::training(&(digits("bsp", 3, 100_000) + "[checkpoint]\nevery_epochs = 5\n"), 2);
    let dir = l.run_dir.display().to_string();
    is_known(&dir);
    wait("a checkpoint", || match l.run_dir.join("checkpoints/latest").exists() {
        true => Ok(()),
        false => Err("none".into()),
    });
    interrupt(&l);
    let (run_dir, scratch) = (l.run_dir.clone(), l.keep());
    let (code, out, err) = l.output();
    assert_eq!(code, Some(130), "{err}");
    contains(
        &err,
        &[
            "stopping t: workers finish their step and the weights are kept",
            "error: interrupted; the job was stopped, its weights and its report are in ",
            "continue from the last checkpoint: ",
            &format!(" train --resume={dir} "),
        ],
    );
    let summary: Value = serde_json::from_str(out.trim()).expect("summary");
    assert!(summary["samples"].as_u64() > Some(0) && summary["workers_lost"] == 0, "{summary}");
    for file in ["report.html", "model.safetensors"] {
        assert!(run_dir.join(file).is_file(), "{file}: {err}");
    }
    let log = fs::read_to_string(run_dir.join("launcher.log")).expect("a log");
    contains(&log, &["the run begins", "stopping t: workers finish their step", "the run has ended"]);
    let metrics = Launcher::metrics_in(&run_dir);
    assert_eq!(metrics.last().map(|e| &e["event"]), Some(&"summary".into()));
    assert!(!text(&run(&["report", &dir]).stderr).contains("no end"));
    drop(scratch);
}

#[test]
fn a_stopped_job_without_a_section_resumes_where_it_ended() {
    let l = Launcher::training(&digits("bsp", 3, 100_000), 2);
    let (run_dir, scratch) = (l.run_dir.clone(), l.keep());
    let dir = run_dir.display().to_string();
    is_known(&dir);
    interrupt(&l);
    let (code, _, err) = l.output();
    assert_eq!(code, Some(130), "{err}");
    contains(&err, &["continue from the last checkpoint: ", &format!(" train --resume={dir} ")]);
    let latest = fs::read_to_string(run_dir.join("checkpoints/latest")).unwrap_or_default();
    let latest = latest.trim();
    let step: u64 = latest.strip_prefix("step-").and_then(|s| s.parse().ok()).expect(latest);
    let weights = |of: &str| format!("{dir}/{of}model.safetensors");
    let same = run(&["checkpoint", "diff", &weights(&format!("checkpoints/{latest}/")), &weights("")]);
    assert_eq!(same.status.code(), Some(0), "{}{}", text(&same.stdout), text(&same.stderr));

    let (on, last) = (scratch.path().join("on"), format!("train.max_steps={}", step + 20));
    let file = run_dir.join("job.toml");
    let words = [file.to_str().expect("utf-8"), "--resume", &dir, "--run-dir", on.to_str().expect("utf-8")];
    let out = run(&[&["train", "--json", "--set", &last][..], &words].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    // One worker may have been a step ahead.
    let from = Launcher::metrics_in(&on)[0]["resumed_step"].as_u64().expect("the step at which it continues");
    assert!((step.saturating_sub(1)..=step).contains(&from) && from > 0, "{from} of {step}");
}

#[test]
fn a_stopped_job_that_keeps_no_checkpoint_leaves_none() {
    let l = Launcher::training(&(digits("bsp", 1, 100_000) + "[checkpoint]\nkeep = 0\n"), 2);
    let (run_dir, _scratch) = (l.run_dir.clone(), l.keep());
    is_known(&run_dir.display().to_string());
    interrupt(&l);
    let (code, _, err) = l.output();
    assert_eq!(code, Some(130), "{err}");
    contains(&err, &["there is no checkpoint to continue from; checkpoint.keep = 0"]);
    assert!(!run_dir.join("checkpoints").exists() && run_dir.join("model.safetensors").is_file(), "{err}");
}

#[test]
fn a_second_ctrl_c_ends_a_run_that_does_not_stop() {
    let mut l = Launcher::training(&digits("bsp", 1, 100_000), 2);
    let dir = l.run_dir.display().to_string();
    is_known(&dir);
    kill(pid_of(&l.run_dir, "--rank 1"), Signal::SIGSTOP).expect("SIGSTOP");
    interrupt(&l);
    // The reader stays open until the end: the launcher still writes to it.
    let mut stderr = BufReader::new(l.child.stderr.take().expect("piped"));
    let mut said = String::new();
    while !said.contains("stopping t: ") {
        assert!(stderr.read_line(&mut said).expect("utf-8") > 0, "it ended: {said}");
    }
    interrupt(&l);
    stderr.read_to_string(&mut said).expect("utf-8");
    let (run_dir, scratch) = (l.run_dir.clone(), l.keep());
    let (code, out, _) = l.output();
    assert_eq!((code, out.as_str()), (Some(130), ""), "{said}");
    contains(
        &said,
        &[
            "error: interrupted; the fleet has ended",
            "there is no checkpoint to continue from yet; checkpoint.every_steps or",
            &format!("paraft report {dir}"),
        ],
    );
    assert!(!run_dir.join("report.html").exists(), "{said}");
    drop(scratch);
}

#[test]
fn a_killed_launchers_folder_gives_a_report() {
    let Launcher { mut child, run_dir, scratch } = Launcher::training(&digits("bsp", 1, 100_000), 2);
    child.kill().expect("SIGKILL");
    child.wait().expect("it is gone");
    wait_for_the_end(&run_dir);
    wait_for_closed_ports(&run_dir);
    let dir = run_dir.to_str().expect("utf-8");
    let out = run(&["report", dir]);
    let err = text(&out.stderr);
    assert!(out.status.success(), "{err}");
    contains(
        &err,
        &["note: The record has no end, at step ", ": the launcher was killed.", "what the servers count"],
    );
    contains(&text(&out.stdout), &["bsp", "report.html"]);
    let page = fs::read_to_string(run_dir.join("report.html")).expect("report");
    assert!(page.contains("bsp"));
    let out = run(&["report", dir, "--json"]);
    let summary: Value = serde_json::from_str(text(&out.stdout).trim()).expect("one object");
    let record = paraft_record::RunRecord::load(&run_dir).expect("record");
    let mut wanted = serde_json::to_value(record.summarize()).expect("json");
    (wanted["state"], wanted["reason"]) = ("no-end".into(), Value::Null);
    assert_eq!(summary, wanted);
    drop(scratch);
}

#[test]
fn a_folder_without_a_whole_record_is_refused_with_advice() {
    let scratch = tempfile::tempdir().expect("scratch");
    let record = |folder: &str, text: &str| {
        let dir = scratch.path().join(folder);
        fs::create_dir_all(&dir).expect("a folder");
        fs::write(dir.join("metrics.jsonl"), text).expect("a record");
    };
    record("empty", "");
    record("damaged", "this is no event\n");
    record("several/bsp", "");
    for (folder, words) in [
        ("nowhere", ["nowhere/metrics.jsonl", "name the folder of a run"]),
        ("empty", ["empty/metrics.jsonl: no `run` event", "ended before it began"]),
        ("damaged", ["damaged/metrics.jsonl:1: not an event", "sed -i 1d"]),
        ("several", ["several/metrics.jsonl", "holds several runs"]),
    ] {
        let out = run(&["report", scratch.path().join(folder).to_str().expect("utf-8")]);
        assert_eq!(out.status.code(), Some(65), "{folder}: {}", text(&out.stderr));
        contains(&text(&out.stderr), &words);
        assert!(!scratch.path().join(folder).join("report.html").exists(), "{folder}");
    }
}
