//! Built-in models with sparse tables, from job files alone.

use crate::common::*;
use paraft_checkpoint::{Checkpoint, Folder};
use paraft_common::{TableSpec, table::RowOptimizer};

const CLUSTER: &str = "[cluster]\nservers = 1\nreplicas = 1\nelection_ms = 200\n";
const LOGISTIC: &str = "[model]\nkind = \"logistic\"\n[data]\nkind = \"libsvm\"\npath = \"train.txt\"\ntest_path = \"test.txt\"\n\
    [[table]]\nname = \"weights\"\ndim = 1\npartitions = 3\nmax_rows = 100\ninit = { kind = \"zeros\" }\n\
    optimizer = { kind = \"adagrad\", lr = 0.5 }\n[optimizer]\nkind = \"sgd\"\nlr = 0.25\n[checkpoint]\nevery_epochs = 2\n\
    [train]\nbatch = 4\nepochs = 2\nshuffle = false\n";

/// 40 samples of three of 30 ids, some with a value that is not 1. Ids below 10 make label 1 likely.
fn samples() -> Vec<(f64, [(u64, f64); 3])> {
    let sample = |i: u64| {
        let ids = [i * 7 % 10, 10 + i * 3 % 10, 20 + i % 10];
        let values = [1.0, 0.5, if i.is_multiple_of(3) { 2.0 } else { 1.0 }];
        let label = f64::from(u8::from(ids[0] < 5));
        (label, [0, 1, 2].map(|f| (ids[f], values[f])))
    };
    (0..40).map(sample).collect()
}

fn as_text(samples: &[(f64, [(u64, f64); 3])]) -> String {
    let line = |(label, ids): &(f64, [(u64, f64); 3])| {
        let ids: Vec<String> = ids.iter().map(|(id, x)| format!("{id}:{x}")).collect();
        format!("{label} {}\n", ids.join(" "))
    };
    samples.iter().map(line).collect()
}

fn train(folder: &Path, body: &str, more: &[&str]) -> Output {
    fs::write(folder.join("train.txt"), as_text(&samples())).expect("samples");
    fs::write(folder.join("test.txt"), as_text(&samples()[..20])).expect("samples");
    let mut c = paraft();
    c.arg("train").arg(job(folder, body)).arg("--run-dir").arg(folder.join("run"));
    c.args(["--json", "--no-dashboard"]).args(more).output().expect("paraft starts")
}

fn summary(out: &Output) -> Value {
    assert!(out.status.success(), "{}", text(&out.stderr));
    serde_json::from_str(text(&out.stdout).trim()).expect("a summary")
}

/// A loop in one process: `bsp` with this many workers.
fn naive(workers: usize) -> (f64, BTreeMap<u64, f64>) {
    let (all, mut bias) = (samples(), 0.0);
    let (mut rows, mut squares) = (BTreeMap::<u64, f64>::new(), BTreeMap::<u64, f64>::new());
    for step in (0..2).flat_map(|_| all.chunks_exact(4 * workers)) {
        let (mut of_bias, mut of_rows) = (0.0, BTreeMap::<u64, f64>::new());
        for (label, ids) in step {
            let score: f64 = bias + ids.iter().map(|(id, x)| x * rows.get(id).unwrap_or(&0.0)).sum::<f64>();
            let slope = (1.0 / (1.0 + (-score).exp()) - label) / step.len() as f64;
            of_bias += slope;
            ids.iter().for_each(|(id, x)| *of_rows.entry(*id).or_default() += slope * x);
        }
        bias -= 0.25 * of_bias;
        for (id, g) in of_rows {
            let sum = squares.entry(id).or_default();
            *sum += g * g;
            *rows.entry(id).or_default() -= 0.5 * g / (sum.sqrt() + 1e-10);
        }
    }
    (bias, rows)
}

#[test]
fn logistic_regression_equals_a_plain_loop() {
    for workers in [1, 2] {
        let scratch = tempfile::tempdir().expect("scratch");
        let body = format!("{LOGISTIC}workers = {workers}\n{CLUSTER}");
        let summary = summary(&train(scratch.path(), &body, &[]));
        let (bias, rows) = naive(workers);
        let folder = Folder::find(&scratch.path().join("run/checkpoints")).expect("a checkpoint");
        let checkpoint = Checkpoint::open(&folder).expect("opens");
        let optimizer = RowOptimizer::Adagrad { lr: 0.5, eps: 1e-10 };
        let table = TableSpec { partitions: 3, optimizer, ..TableSpec::new("weights", 1, 100) };
        let file = checkpoint.table(&table).expect("the table's file");
        let (ids, bytes) = (file.ids(0..file.rows()).expect("ids"), file.read(0..file.rows()).expect("rows"));
        let value = |row: &[u8]| f64::from(f32::from_le_bytes(row[16..20].try_into().expect("four bytes")));
        let saved: BTreeMap<u64, f64> =
            ids.into_iter().zip(bytes.chunks_exact(table.row_bytes() as usize).map(value)).collect();
        assert_eq!(saved.keys().collect::<Vec<_>>(), rows.keys().collect::<Vec<_>>());
        for (id, row) in &rows {
            assert!((saved[id] - row).abs() < 1e-6, "{workers} workers, id {id}: {} and {row}", saved[id]);
        }
        let saved_bias = f64::from(checkpoint.load().expect("weights").weights[0]);
        assert!((saved_bias - bias).abs() < 1e-6, "{workers} workers: {saved_bias} and {bias}");
        // What is measured is that model's: 20 samples, and AUC by its definition.
        let score = |ids: &[(u64, f64); 3]| {
            bias + ids.iter().map(|(id, x)| x * rows.get(id).unwrap_or(&0.0)).sum::<f64>()
        };
        let scores: Vec<(f64, f64)> =
            samples()[..20].iter().map(|(label, ids)| (*label, score(ids))).collect();
        let of = |label: f64| scores.iter().filter(move |s| s.0 == label).map(|s| s.1);
        let pairs = of(1.0).flat_map(|one| of(0.0).map(move |zero| f64::from(u8::from(one > zero))));
        let auc = pairs.clone().sum::<f64>() / pairs.count() as f64;
        let loss = scores
            .iter()
            .map(|(label, s)| (1.0 + (if *label > 0.5 { -s } else { *s }).exp()).ln())
            .sum::<f64>()
            / 20.0;
        let of = |value: &Value| value.as_f64().expect("a number");
        assert!((of(&summary["final_loss"]) - loss).abs() < 1e-5, "{summary}, by hand {loss}");
        assert!((of(&summary["final_metrics"]["auc"]) - auc).abs() < 0.02, "{summary}, by hand {auc}");
    }
}

/// Factorisation machine on clicks that need no file, for long enough to be killed.
fn clicks(mode: &str) -> String {
    format!(
        "[model]\nkind = \"fm\"\n[data]\nkind = \"clicks\"\nsamples = 12000\nmax_categories = 100\n[[table]]\nname = \"weights\"\n\
         dim = 1\nmax_rows = 5000\npartitions = 3\ninit = {{ kind = \"zeros\" }}\noptimizer = {{ kind = \"ftrl\", lr = 0.1 }}\n\
         [[table]]\nname = \"factors\"\ndim = 4\nmax_rows = 5000\npartitions = 3\noptimizer = {{ kind = \"adagrad\", lr = 0.05 }}\n\
         [train]\nmode = \"{mode}\"\nworkers = 2\nbatch = 16\nepochs = 4\n[optimizer]\nkind = \"adagrad\"\nlr = 0.02\n\
         [cluster]\nservers = 3\nreplicas = 3\nelection_ms = 200\n"
    )
}

#[test]
fn recommender_survives_kills_and_a_switched_mode() {
    for mode in ["bsp", "ssp:4", "asp"] {
        let l = Launcher::training(&clicks(mode), 3);
        let dir = l.run_dir.to_str().expect("utf-8").to_string();
        let leader = wait("a leader", || {
            let out = text(&run(&["status", "--fleet", &dir, "--json"]).stdout);
            let servers = out.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
            let leads = |s: &Value| {
                let shards = s["shards"].as_array().into_iter().flatten();
                shards.into_iter().any(|s| s["shard"] == 0 && s["role"] == "leader")
            };
            servers.into_iter().find(leads).and_then(|s| s["server"].as_u64()).ok_or(out)
        });
        if mode == "ssp:4" {
            let out = run(&["mode", "job", "asp", "--fleet", &dir]);
            assert!(out.status.success(), "{}", text(&out.stderr));
        }
        let server =
            processes(&l.run_dir).into_iter().find(|(_, line)| line.contains(&format!("--id {leader} ")));
        let (pid, _) = server.expect("the leader's process");
        kill(Pid::from_raw(pid), Signal::SIGKILL).expect("SIGKILL");
        if mode == "asp" {
            kill(pid_of(&l.run_dir, "--rank 1"), Signal::SIGKILL).expect("SIGKILL");
        }
        let (code, said, errors) = l.output();
        assert_eq!(code, Some(0), "{mode}: {errors}");
        let summary: Value = serde_json::from_str(said.trim()).expect("a summary");
        assert_eq!(summary["servers_lost"], 1, "{mode}: {summary}");
        assert_eq!(summary["switched_to"].as_str(), (mode == "ssp:4").then_some("asp"), "{summary}");
        assert!(summary["final_metrics"]["auc"].as_f64().expect("AUC") > 0.6, "{mode}: {summary}");
    }
}

#[test]
fn a_recommender_resumes_with_its_rows() {
    // On a busy machine a round must not be closed without a worker: it would have another sum.
    let body =
        clicks("bsp").replace("[cluster]", "[checkpoint]\nevery_steps = 100\n[cluster]\ngrace_ms = 120000");
    // Full tables, counted ids and expiring rows: which rows there are depends on all that went before.
    let body = body.replacen("max_rows = 5000", "max_rows = 400\nmin_count = 2", 1);
    let body = body.replacen("max_rows = 5000", "max_rows = 300\nexpire = { after = 60 }", 1);
    let l = Launcher::training(&body, 3);
    let checkpoints = l.run_dir.join("checkpoints");
    wait("a checkpoint", || match checkpoints.join("latest").exists() {
        true => Ok(()),
        false => Err(format!("{} training lines", l.metrics().len())),
    });
    for (pid, _) in processes(&l.run_dir) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL); // one may have followed its launcher already
    }
    let Launcher { mut child, run_dir, scratch } = l;
    child.wait().expect("the launcher is gone");
    assert!(!run_dir.join("model.safetensors").exists(), "it was killed before its end");
    let job = scratch.path().join("job.toml");
    let end = |dir: &Path, more: &[&str]| {
        let mut c = paraft();
        c.arg("train").arg(&job).arg("--run-dir").arg(dir).arg("--json").args(more);
        let summary = summary(&c.output().expect("paraft starts"));
        assert_eq!(summary["workers_lost"], 0, "{summary}");
        (fs::read(dir.join("model.safetensors")).expect("weights"), summary["final_metrics"].clone())
    };
    let resumed = end(&run_dir, &["--resume"]);
    let quiet = end(&scratch.path().join("quiet"), &[]);
    assert_eq!(resumed.1, quiet.1, "the same evaluation, to the bit");
    assert!(resumed.0 == quiet.0, "the same bias");
}

#[test]
fn chunks_are_leased_and_the_mode_is_chosen() {
    let scratch = tempfile::tempdir().expect("scratch");
    let body = clicks("auto").replace("[train]\n", "[train]\nsampler = \"leased\"\n");
    let summary = summary(&train(scratch.path(), &body, &["--set", "train.epochs=1"]));
    assert!(summary["final_metrics"]["auc"].as_f64().expect("AUC") > 0.55, "{summary}");
}

#[test]
fn every_model_of_tables_trains() {
    let ratings: String = (0..200u32)
        .map(|i| {
            format!("{},{},{}\n", i % 10, i * 7 % 20, 3.0 + f64::from(i % 10 % 3) - f64::from(i * 7 % 20 % 2))
        })
        .collect();
    let table = |name: &str, dim: usize| {
        format!(
            "[[table]]\nname = \"{name}\"\ndim = {dim}\nmax_rows = 9000\noptimizer = {{ kind = \"adagrad\", lr = 0.02 }}\n"
        )
    };
    let (pairs, clicks) = (
        "[data]\nkind = \"ratings\"\npath = \"ratings.csv\"\n",
        "[data]\nkind = \"clicks\"\nsamples = 2000\nmax_categories = 20\n",
    );
    for (model, data, tables, metric) in [
        ("kind = \"mf\"\nl2 = 0.01", pairs, [table("users", 5), table("items", 5)].concat(), Some("rmse")),
        ("kind = \"two-tower\"", pairs, [table("users", 4), table("items", 4)].concat(), None),
        (
            "kind = \"wide-deep\"\nhidden = [8]",
            clicks,
            [table("wide", 1), table("deep", 4)].concat(),
            Some("auc"),
        ),
        ("kind = \"dlrm\"\nbottom = [8]\ntop = [8]", clicks, table("embeddings", 4), Some("auc")),
    ] {
        let scratch = tempfile::tempdir().expect("scratch");
        fs::write(scratch.path().join("ratings.csv"), &ratings).expect("ratings");
        let body = format!(
            "[model]\n{model}\n{data}{tables}[train]\nbatch = 10\nepochs = 3\n[optimizer]\nkind = \"adam\"\nlr = 0.01\n{CLUSTER}"
        );
        let summary = summary(&train(scratch.path(), &body, &[]));
        let evaluated: Vec<f64> = Launcher::metrics_in(&scratch.path().join("run"))
            .iter()
            .filter(|e| e["event"] == "eval" && e["final"] == false)
            .map(|e| e["loss"].as_f64().expect("a loss"))
            .collect();
        // So few samples are soon learned by heart, so that the last loss need not be the least.
        let falls = evaluated.iter().skip(1).any(|loss| *loss < evaluated[0]);
        assert!(evaluated.len() == 3 && falls, "{model}: {evaluated:?}");
        let metrics = summary["final_metrics"].as_object();
        assert_eq!(
            metrics.is_some_and(|m| m.contains_key(metric.unwrap_or("none"))),
            metric.is_some(),
            "{summary}"
        );
        assert_eq!(summary["final_accuracy"].is_null(), metric != Some("auc"), "{summary}");
        // A table's rows are in checkpoints, not in a model file.
        let out = run(&["evaluate", scratch.path().join("run").to_str().expect("utf-8")]);
        assert_eq!(out.status.code(), Some(78), "{}", text(&out.stdout));
        contains(&text(&out.stderr), &["sparse tables on the servers"]);
    }
}

#[test]
fn jobs_whose_tables_do_not_fit_end_before_training() {
    for (set, code, words) in [
        ("table=[]", 78, "table `weights` is missing: logistic takes `weights`"),
        (
            "table=[{name=\"weights\",dim=0,max_rows=1,optimizer={kind=\"sgd\",lr=1}}]",
            78,
            "table `weights`: dim 0 is not",
        ),
        (
            "table=[{name=\"w\",dim=1,max_rows=1,optimizer={kind=\"sgd\",lr=1}}]",
            78,
            "table `w`: logistic takes `weights`",
        ),
        (
            "table=[{name=\"weights\",dim=1,max_rows=1,optimizer={kind=\"sdg\"}}]",
            78,
            "table `weights`: `sdg` is none of",
        ),
        (
            "table=[{name=\"weights\",dim=1,max_row=1,optimizer={kind=\"sgd\",lr=1}}]",
            78,
            "unknown key `max_row`; [[table]] takes",
        ),
        ("train.device=cuda", 78, "a model of tables computes on the CPU"),
        ("data={kind=\"digits\"}", 78, "data.kind: digits has no ids"),
        ("data.task=regression", 78, "it learns two classes"),
        ("data.test_fraction=0.5", 65, "test_path names the held-out samples already"),
        ("data.path=none.txt", 65, "none.txt"),
    ] {
        let scratch = tempfile::tempdir().expect("scratch");
        let out = train(scratch.path(), &format!("{LOGISTIC}{CLUSTER}"), &["--set", set]);
        assert_eq!(out.status.code(), Some(code), "{set}: {}", text(&out.stderr));
        contains(&text(&out.stderr), &[words]);
    }
}
