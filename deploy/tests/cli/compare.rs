//! `paraft compare`: the matrix, what is left out, runs that diverge, what is not run again, stragglers and links, and that
//! `compare.json` follows from the records.

use crate::common::*;
use paraft_record::RunRecord;

fn compare(job: &Path, dir: &Path, more: &[&str]) -> Output {
    let mut c = paraft();
    c.arg("compare").arg(job).arg("--run-dir").arg(dir).args(more);
    c.output().expect("paraft starts")
}

fn compared(dir: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(dir.join("compare.json")).expect("compare.json")).expect("json")
}

const WITH_TARGET: &str = "[optimizer]\nkind = \"sgd\"\nlr = 0.1\n[eval]\ntarget_accuracy = 0.5\n";

#[test]
fn a_simulated_matrix_reports_its_records_numbers() {
    let scratch = tempfile::tempdir().expect("scratch");
    let job = job(scratch.path(), &(digits("bsp", 3, 2) + WITH_TARGET));
    let dir = scratch.path().join("cmp");
    let axes = ["--simulate", "--modes", "bsp,asp", "--workers", "2,4", "--seeds", "2", "--slow", "1:5x"];
    let algorithms = ["--algorithms", "asgd,dc-asgd-c,dana-zero", "--algorithm", "slow: optimizer.lr=0.01"];
    let args = [&axes[..], &algorithms[..]].concat();
    let out = compare(&job, &dir, &args);
    let err = text(&out.stderr);
    assert!(out.status.success(), "{err}");
    contains(&err, &["left out: bsp, dana-zero with 4 workers: optimizer.kind"]);
    contains(&text(&out.stdout), &["Fastest to 50.0", "bsp slow ×4", "report"]);

    let json = compared(&dir);
    let of = |key: &str| json[key].as_array().unwrap_or_else(|| panic!("{key}")).clone();
    // Two modes × three algorithms × two numbers of workers.
    assert_eq!((of("groups").len(), of("cells").len(), of("left_out").len()), (12, 24, 4));
    assert!(
        json["conditions"]["simulated"].as_bool() == Some(true) && json["conditions"]["slow"]["1"] == 5.0
    );
    for cell in of("cells") {
        let record = RunRecord::load(dir.join(cell["dir"].as_str().expect("dir"))).expect("record");
        assert_eq!(
            cell["summary"],
            serde_json::to_value(record.summarize()).expect("json"),
            "{}",
            cell["dir"]
        );
        assert_eq!(
            (cell["workers"].as_u64(), cell["seed"].as_u64()),
            (Some(record.run.workers.into()), Some(record.run.seed))
        );
        let step = record.run.batch * u64::from(record.run.workers);
        let budget = 2 * (TRAINED / 32) * 32;
        assert!(record.run.samples_budget <= budget && budget - record.run.samples_budget < step, "{budget}");
    }
    // The mean and the deviation again, by another way.
    for group in of("groups") {
        let key = |v: &Value| (v["mode"].clone(), v["workers"].clone(), v["algorithm"].clone());
        let own: Vec<f64> = of("cells")
            .iter()
            .filter(|c| key(c) == key(&group))
            .map(|c| c["summary"]["final_accuracy"].as_f64().expect("accuracy"))
            .collect();
        let figure = &group["figures"]["final_accuracy"];
        let near = |key: &str, wanted: f64| (figure[key].as_f64().expect(key) - wanted).abs() < 1e-12;
        assert_eq!(own.len(), 2);
        assert!(
            near("mean", (own[0] + own[1]) / 2.0) && near("deviation", (own[0] - own[1]).abs() / 2f64.sqrt()),
            "{figure}"
        );
    }
    let page = fs::read_to_string(dir.join("report.html")).expect("report");
    contains(
        &page,
        &[
            "Paraft comparison",
            "How the verdict comes about",
            "Waiting workers",
            "Left out",
            "Momentum against workers",
        ],
    );
}

#[test]
fn complete_runs_are_not_rerun_or_confused_with_others() {
    let scratch = tempfile::tempdir().expect("scratch");
    let path = job(scratch.path(), &digits("bsp", 3, 2));
    let dir = scratch.path().join("cmp");
    let first = compare(&path, &dir, &["--simulate", "--modes", "bsp,asp", "--seeds", "2"]);
    assert!(first.status.success(), "{}", text(&first.stderr));
    let metrics = |run: &str| dir.join(run).join("metrics.jsonl");
    let before = fs::metadata(metrics("bsp")).and_then(|m| m.modified()).expect("a record");
    let kept = fs::read(metrics("asp_s2")).expect("a record");
    // One run is as an interrupted comparison leaves it: without its summary.
    let cut = text(&kept)
        .lines()
        .filter(|l| !l.contains("\"summary\""))
        .map(|l| format!("{l}\n"))
        .collect::<String>();
    fs::write(metrics("asp_s2"), cut).expect("cut");

    let again = compare(&path, &dir, &["--simulate", "--modes", "bsp,asp", "--seeds", "3"]);
    let err = text(&again.stderr);
    assert!(again.status.success(), "{err}");
    contains(&err, &["3 of 6 runs are complete already", "[3/6] bsp_s3", "[5/6] asp_s2"]);
    assert_eq!(fs::metadata(metrics("bsp")).and_then(|m| m.modified()).expect("a record"), before);
    assert_eq!(fs::read(metrics("asp_s2")).expect("a record"), kept, "the same seed is the same run");
    assert!(dir.join("asp_s2/metrics.1.jsonl").exists(), "what was there stays beside it");
    assert_eq!(compared(&dir)["cells"].as_array().map(Vec::len), Some(6));

    for (more, file) in [(["--set", "train.epochs=3"], "job.toml"), (["--slow", "0:2x"], "conditions.json")] {
        let out = compare(&path, &dir, &[&["--simulate", "--modes", "bsp"][..], &more].concat());
        let err = text(&out.stderr);
        assert_eq!(out.status.code(), Some(78), "{err}");
        contains(&err, &[file, "--run-dir"]);
    }
}

#[test]
fn a_run_that_diverges_is_a_result() {
    let scratch = tempfile::tempdir().expect("scratch");
    let path = job(scratch.path(), &digits("bsp", 1, 2));
    let wild = "wild: optimizer.kind=sgd, optimizer.lr=1e30";
    let args = ["--modes", "bsp", "--algorithms", "job", "--algorithm", wild];
    for (name, more) in [("real", &[][..]), ("simulated", &["--simulate"][..])] {
        let dir = scratch.path().join(name);
        let out = compare(&path, &dir, &[&args[..], more].concat());
        let err = text(&out.stderr);
        assert!(out.status.success(), "{name}: {err}");
        contains(&text(&out.stdout), &["1 diverged", "Diverged: bsp wild (1 of 1 runs)", "Use bsp job"]);
        let json = compared(&dir);
        assert_eq!(
            (json["cells"][0]["ended"].as_str(), json["cells"][1]["ended"].as_str()),
            (Some("done"), Some("diverged"))
        );
        let why = json["cells"][1]["diverged"].as_str().expect("why");
        assert!(why.contains("diverged") || why.contains("NaN"), "{why}");
        assert!(json["groups"][1]["figures"]["final_loss"].is_null(), "no figures of what does not count");
        let again = compare(&path, &dir, &[&args[..], more].concat());
        contains(&text(&again.stderr), &["2 of 2 runs are complete already"]);
    }
}

#[test]
fn a_straggler_makes_the_others_wait_in_bsp_and_not_in_asp() {
    let scratch = tempfile::tempdir().expect("scratch");
    let path = job(scratch.path(), &digits("bsp", 1, 4));
    let dir = scratch.path().join("cmp");
    // So slow that what else this machine does is small beside it.
    let out = compare(&path, &dir, &["--modes", "bsp,asp", "--slow", "worker=1:60x", "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let shares = |mode: &str| RunRecord::load(dir.join(mode)).expect("record").wait_shares();
    let (bsp, asp) = (shares("bsp"), shares("asp"));
    let [fast, slow] = [0, 1].map(paraft_common::WorkerId);
    assert!(bsp[&fast] > 2.0 * bsp[&slow], "{bsp:?}");
    assert!(bsp[&fast] > 0.5 && bsp[&fast] > asp[&fast], "{bsp:?} {asp:?}");
    let lines: Vec<Value> =
        text(&out.stdout).lines().map(|l| serde_json::from_str(l).expect("json")).collect();
    assert_eq!(lines.iter().map(|l| l["ended"].as_str().unwrap_or("")).collect::<Vec<_>>(), ["done", "done"]);
}

#[test]
fn a_link_holds_every_pull_back() {
    let scratch = tempfile::tempdir().expect("scratch");
    let path = job(scratch.path(), &digits("bsp", 3, 1));
    let dir = scratch.path().join("cmp");
    let out = compare(&path, &dir, &["--modes", "bsp", "--delay-ms", "15", "--bandwidth", "50", "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let record = RunRecord::load(dir.join("bsp")).expect("record");
    for w in &record.workers {
        // A step's pull cannot be answered before its push has come, and its answer comes back over the same link.
        assert!(w.steps >= 44 && w.wait_seconds > 0.030 * (w.steps - 1) as f64, "{w:?}");
    }
    assert_eq!(compared(&dir)["conditions"]["bandwidth_mbit"], 50.0);
}

#[test]
fn what_is_no_comparison_is_refused_with_what_to_write() {
    let scratch = tempfile::tempdir().expect("scratch");
    let path = job(scratch.path(), &digits("bsp", 1, 1));
    let cases: [(&[&str], i32, &[&str]); 15] = [
        (&["--modes", "bsp,bsp"], 2, &["--modes bsp twice"]),
        (&["--algorithms", "dcasgd"], 2, &["dcasgd", "dc-asgd-c", "--algorithm '"]),
        (&["--algorithm", "x: seed=3"], 2, &["comparison's own"]),
        (&["--seeds", "0"], 2, &["which (4,7,9)"]),
        (&["--workers", "0"], 2, &["--workers"]),
        (&["--parallel", "64"], 2, &["cores", "--share-cores"]),
        (&["--compute-ms", "3"], 2, &["--slow and --straggle are for real runs"]),
        (&["--slow", "0:0.5x"], 2, &["1x to 1000x"]),
        (&["--simulate", "--delay-ms", "3"], 2, &["--latency-ms"]),
        (&["--slow", "0:2x", "--slow", "0:3x"], 2, &["twice"]),
        (&["--straggle", "0.5:0.5x"], 2, &["1x to 1000x"]),
        (&["--algorithm", "x: optimizr.lr=3"], 78, &["algorithm x", "optimizr"]),
        (&["--bandwidth", "0"], 2, &["Mbit/s"]),
        (&["--slow", "7:2x"], 78, &["nothing is left", "worker 7"]),
        (&["--set", "train.sampler=leased", "--simulate"], 78, &["nothing is left", "leased"]),
    ];
    for (i, (args, code, words)) in cases.into_iter().enumerate() {
        let out = compare(&path, &scratch.path().join(format!("c{i}")), args);
        let err = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {err}");
        contains(&err, words);
        assert!(!err.contains("panicked"), "{err}");
    }
}
