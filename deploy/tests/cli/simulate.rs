//! `paraft simulate`: the run's folder, the same bytes for a seed, what is refused, and a prediction beside a real run.

use crate::common::*;

fn simulate(job: &Path, dir: &Path, more: &[&str]) -> Output {
    let mut c = paraft();
    c.arg("simulate").arg(job).arg("--run-dir").arg(dir).args(more);
    c.output().expect("paraft starts")
}

#[test]
fn a_seed_gives_the_same_record_byte_for_byte() {
    let scratch = tempfile::tempdir().expect("scratch");
    let job = job(scratch.path(), &digits("ssp:2", 3, 3));
    let fleet = ["--workers", "12", "--slow", "1:5x", "--mttf-s", "0.3", "--restart-s", "0.1", "--json"];
    let bytes = |name: &str, more: &[&str]| {
        let dir = scratch.path().join(name);
        let out = simulate(&job, &dir, &[&fleet[..], more].concat());
        assert!(out.status.success(), "{}", text(&out.stderr));
        (fs::read(dir.join("metrics.jsonl")).expect("a record"), out, dir)
    };
    let (first, out, dir) = bytes("first", &[]);
    let (again, _, _) = bytes("again", &[]);
    assert!(first == again, "two runs of one seed differ");
    let (other, _, _) = bytes("other", &["--seed", "7"]);
    assert!(first != other, "another seed is another run");

    let record = paraft_record::RunRecord::load(&dir).expect("record");
    assert!(record.run.simulated && record.run.workers == 12);
    let printed: Value = serde_json::from_str(&text(&out.stdout)).expect("one object");
    assert_eq!(serde_json::to_value(record.summarize()).expect("json"), printed);
    assert!(printed["workers_lost"].as_u64() > Some(0), "{printed}");
    contains(&text(&out.stderr), &["12 workers", "largest step lead was 2 steps", "workers failed"]);
    let report = fs::read_to_string(dir.join("report.html")).expect("report");
    contains(&report, &["never: simulated"]);
    for file in ["model.safetensors", "job.toml"] {
        assert!(dir.join(file).exists(), "{file}");
    }
    let taken = simulate(&job, &dir, &[]);
    assert_eq!(taken.status.code(), Some(78), "a run's folder is not used twice");
}

#[test]
fn a_job_with_stages_says_what_each_of_them_came_to() {
    let scratch = tempfile::tempdir().expect("scratch");
    let job = job(scratch.path(), &digits("asp", 3, 2));
    let stages =
        ["parallel.pipeline=3", "model.hidden=[20, 20]", "parallel.schedule=2bw", "train.device=cpu"];
    let set: Vec<&str> = stages.iter().flat_map(|s| ["--set", s]).collect();
    let out = simulate(&job, &scratch.path().join("people"), &set);
    assert!(out.status.success(), "{}", text(&out.stderr));
    contains(&text(&out.stdout), &["stage  layers", "1 to 1", "idle:", "the schedule \"2bw\" alone"]);
    let out = simulate(&job, &scratch.path().join("json"), &[&set[..], &["--json"]].concat());
    let printed = text(&out.stdout);
    let [_, line] = printed.lines().collect::<Vec<_>>()[..] else { panic!("{printed}") };
    let stages: Value = serde_json::from_str(line).expect("an object");
    let stages = stages["stages"].as_array().expect("stages").clone();
    assert_eq!(stages.len(), 3);
    for stage in &stages {
        assert!(stage["pushed"].as_u64() > Some(0) && stage["delay"].as_f64() > Some(1.0), "{stage}");
    }
}

#[test]
fn what_cannot_be_simulated_is_said_with_its_remedy() {
    let scratch = tempfile::tempdir().expect("scratch");
    let job = job(scratch.path(), &digits("asp", 3, 1));
    let cases: [(&[&str], i32, &[&str]); 8] = [
        (&["--set", "train.sampler=leased"], 78, &["leased", "static"]),
        (&["--latency-ms", "-1"], 2, &["latency-ms"]),
        (&["--slow", "9:2x"], 2, &["worker 9"]),
        (&["--slow", "fast"], 2, &["1:5x"]),
        (&["--workers", "0"], 78, &["train.workers"]),
        (&["--mttf-s", "0.001"], 1, &["--restart-s"]),
        (&["--calibrate", "nowhere"], 74, &["nowhere"]),
        (&["--set", "optimizer.kind=sgd", "--set", "optimizer.lr=1e30"], 1, &["diverged"]),
    ];
    for (i, (args, code, words)) in cases.into_iter().enumerate() {
        // A value that begins with a dash is one all the same.
        let args: Vec<String> = match args {
            [flag, value] => vec![format!("{flag}={value}")],
            other => other.iter().map(ToString::to_string).collect(),
        };
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let out = simulate(&job, &scratch.path().join(format!("run-{i}")), &args);
        let err = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {err}");
        contains(&err, words);
        assert!(!err.contains("panicked"), "{err}");
    }
}

#[test]
fn a_prediction_calibrated_on_one_run_is_compared_to_another() {
    let scratch = tempfile::tempdir().expect("scratch");
    let job = job(scratch.path(), &digits("bsp", 1, 4));
    let job_path = job.to_str().expect("utf-8");
    let real = |workers: u32| {
        let dir = scratch.path().join(format!("real-{workers}"));
        let workers = format!("train.workers={workers}");
        let out =
            run(&["train", job_path, "--json", "--set", &workers, "--run-dir", dir.to_str().expect("utf-8")]);
        assert!(out.status.success(), "{}", text(&out.stderr));
        dir
    };
    let (one, two) = (real(1), real(2));
    let paths = ["--calibrate", one.to_str().expect("utf-8"), "--against", two.to_str().expect("utf-8")];
    let out =
        simulate(&job, &scratch.path().join("sim"), &[&paths[..], &["--workers", "2", "--json"]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let lines: Vec<Value> =
        text(&out.stdout).lines().map(|l| serde_json::from_str(l).expect("json")).collect();
    let rows = lines[1]["against"].as_array().expect("rows");
    let row = |figure: &str| {
        rows.iter()
            .find(|r| r["figure"].as_str().is_some_and(|f| f.starts_with(figure)))
            .expect("a row")
            .clone()
    };
    // In lock-step the weights are those of the real run, bit for bit: so is what they are worth.
    for exact in ["final accuracy", "final loss"] {
        assert_eq!(row(exact)["predicted"], row(exact)["measured"], "{exact}");
    }
    for timed in ["seconds", "samples/s"] {
        assert!(
            row(timed)["predicted"].as_f64() > Some(0.0) && row(timed)["error_percent"].is_number(),
            "{timed}"
        );
    }
    let sim = fs::read(scratch.path().join("sim/model.safetensors")).expect("weights");
    assert!(sim == fs::read(two.join("model.safetensors")).expect("weights"), "the same weights");

    let out = simulate(&job, &scratch.path().join("wrong"), &[&paths[..], &["--workers", "3"]].concat());
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(65), "{err}");
    contains(&err, &["workers 2", "3", "--workers"]);
    let simulated = scratch.path().join("sim");
    let out =
        simulate(&job, &scratch.path().join("self"), &["--calibrate", simulated.to_str().expect("utf-8")]);
    assert_eq!(out.status.code(), Some(65), "a simulated run says nothing of a real fleet");
}
