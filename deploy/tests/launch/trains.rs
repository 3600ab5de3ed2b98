//! Scripts that train: each runs `paraft worker` at its place.

use crate::{Place, common::*, ended, run_out};

/// A worker configured only by its variables. It reports a checkpoint to resume from.
const WORKS: &str = r#"#!/bin/sh
echo "resume: $PARAFT_RESUME, trace: $PARAFT_TRACE, slow: $PARAFT_SLOW"
exec "$1" worker "$PARAFT_JOB" --rank "$PARAFT_RANK" --fleet "$PARAFT_SERVERS" --run-dir "$PARAFT_RUN_DIR" \
    --device cpu --metrics 127.0.0.1:0 --log-file "$PARAFT_RUN_DIR/worker-$PARAFT_RANK.log" ${PARAFT_RESUME:+--resume "$PARAFT_RESUME"} \
    ${PARAFT_TRACE:+--trace "$PARAFT_RUN_DIR/trace" --trace-steps "$PARAFT_TRACE"} ${PARAFT_SLOW:+--slow "$PARAFT_SLOW"}
"#;

const JOB: &str = "[model]\nkind = \"mlp\"\nhidden = [32]\n[data]\nkind = \"digits\"\n[train]\nbatch = 16\nepochs = 2\n\
                   [checkpoint]\nevery_steps = 20\n[cluster]\nelection_ms = 200\n";

fn working() -> Place {
    let place = Place::new();
    place.script("works.sh", WORKS);
    job(place.scratch.path(), JOB);
    place
}

const PARAFT: &str = env!("CARGO_BIN_EXE_paraft");

#[test]
fn a_script_trains_records_and_resumes_from_its_checkpoint() {
    let place = working();
    let (code, out, err) = run_out(place.launch(&[
        "--job",
        "job.toml",
        "--set",
        "train.epochs=3",
        "--trace",
        "./works.sh",
        PARAFT,
    ]));
    assert_eq!(code, Some(0), "{err}");
    contains(&out, &["final loss", "bsp", "report  ", "run     ", "resume: , trace: 50, ", "trace   "]);
    assert!(!err.contains("no worker came"), "{err}");
    let report = place.read("report.html");
    contains(&report, &["works.sh", "<dt>Workers</dt><dd>2</dd>"]);
    for decided in ["Optimizer", "Learning rate", "Epochs", "Batch of a worker", "Data"] {
        assert!(!report.contains(&format!("<dt>{decided}")), "{decided} is the script's");
    }
    let record = paraft_record::RunRecord::load(place.run_dir()).expect("record");
    assert_eq!((record.run.optimizer.as_str(), record.run.batch, record.run.workers), ("script", 0, 2));
    assert!(record.summarize().final_accuracy.is_some(), "what workers wrote is in it");
    let more = ["--job", "job.toml", "--set", "train.epochs=5", "--resume", "./works.sh", PARAFT];
    let (code, out, err) = run_out(place.launch(&more));
    assert_eq!(code, Some(0), "{err}");
    contains(&out, &["resume: /", "/checkpoints/"]);
    assert!(err.contains("resuming from step"), "{err}");
    place.is_empty();
}

#[test]
fn of_scripts_that_train_one_may_be_killed() {
    let place = working();
    let flags = ["--job", "job.toml", "--mode", "asp", "--set", "train.epochs=300", "./works.sh", PARAFT];
    let child = place.launch(&flags).spawn().expect("paraft starts");
    place.says("metrics.jsonl", "\"event\":\"train\"");
    kill(pid_of(&place.run_dir(), "--rank 1"), Signal::SIGKILL).expect("SIGKILL");
    let (code, out, err) = ended(child);
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains("worker-1 was ended by SIGKILL; the others continue"), "{err}");
    assert!(out.contains("1 worker"), "{out}");
}

#[test]
fn a_job_with_a_script_is_compared_over_modes() {
    let place = working();
    let job = place.scratch.path().join("job.toml");
    fs::write(&job, format!("{JOB}servers = 1\nreplicas = 1\nscript = [\"./works.sh\", \"{PARAFT}\"]\n"))
        .expect("job");
    let compare = |more: &[&str]| {
        let mut c = paraft();
        c.arg("compare").arg(&job).args(["--modes", "bsp,asp", "--slow", "1:2x", "--run-dir"]);
        c.arg(place.scratch.path().join("compared")).args(more).output().expect("paraft starts")
    };
    let out = compare(&[]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    contains(&text(&out.stdout), &["bsp", "asp", "report  ", "resume: , trace: , slow: "]);
    for mode in ["bsp", "asp"] {
        let said = place.scratch.path().join("compared").join(mode).join("worker-1.out");
        assert!(fs::read_to_string(said).expect("output").contains("slow: 2"));
    }
    // Another number of workers needs the data, which only the script has.
    let out = compare(&["--workers", "1,2"]);
    assert!(text(&out.stderr).contains("decides how many samples"), "{}", text(&out.stderr));
}
