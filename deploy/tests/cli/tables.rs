//! Training on tables as people have them: a header, classes by name, numbers to predict.

use crate::common::*;

const FLEET: &str =
    "[optimizer]\nkind = \"adam\"\nlr = 0.05\n[cluster]\nservers = 1\nreplicas = 1\nelection_ms = 200\n";
const NAMES: &str = "[model]\nkind = \"mlp\"\nhidden = [16]\n[data]\nkind = \"csv\"\npath = \"table.csv\"\nlabel = \"species\"\n\
                     ignore = [\"id\"]\n[train]\nworkers = 2\nbatch = 8\nepochs = 40\n";
const PRICES: &str = "[model]\nkind = \"mlp\"\nhidden = []\n[data]\nkind = \"csv\"\npath = \"table.csv\"\nlabel = \"price\"\n\
                      task = \"regression\"\n[train]\nworkers = 1\nbatch = 10\nepochs = 120\n";

/// Three species apart in both measures; the ids would drown them.
fn species() -> String {
    let row = |i: usize| {
        let (class, jitter) = (i % 3, (i * 7 % 10) as f64 / 25.0);
        let name = ["setosa", "versicolor", "virginica"][class];
        format!("{name},{},{:.2},{:.2}\r\n", 100_000 + i, class as f64 + jitter, 2.0 - class as f64 + jitter)
    };
    "species,id,petal,sepal\r\n".to_owned() + &(0..120).map(row).collect::<String>()
}

fn price(i: usize) -> (f64, f64, f64) {
    let (area, rooms) = ((i * 7 % 20) as f64 / 20.0, (i * 3 % 7) as f64 / 7.0);
    (3.0 * area - 2.0 * rooms + 5.0, area, rooms)
}

fn prices() -> String {
    let row = |i: usize| {
        let (price, area, rooms) = price(i);
        format!("{price},{area},{rooms}\n")
    };
    "price,area,rooms\n".to_owned() + &(0..100).map(row).collect::<String>()
}

fn train(folder: &Path, body: &str, table: &str, more: &[&str]) -> Output {
    fs::write(folder.join("table.csv"), table).expect("a table");
    let mut c = paraft();
    c.arg("train").arg(job(folder, &format!("{body}{FLEET}"))).arg("--run-dir").arg(folder.join("run"));
    c.args(["--json", "--no-dashboard"]).args(more).output().expect("paraft starts")
}

fn summary(out: &Output) -> Value {
    assert!(out.status.success(), "{}", text(&out.stderr));
    serde_json::from_str(text(&out.stdout).trim()).expect("a summary")
}

#[test]
fn mlp_trains_on_columns_and_classes_by_name() {
    let scratch = tempfile::tempdir().expect("scratch");
    let summary = summary(&train(scratch.path(), NAMES, &species(), &[]));
    assert!(summary["final_accuracy"].as_f64().expect("accuracy") > 0.9, "{summary}");
    let resolved = fs::read_to_string(scratch.path().join("run/job.toml")).expect("a resolved job");
    let resolved: toml::Table = resolved.parse().expect("TOML");
    assert_eq!(resolved["data"]["label"].as_str(), Some("species"));
    assert_eq!(resolved["data"]["ignore"][0].as_str(), Some("id"));
}

#[test]
fn regression_beats_the_mean_and_has_no_accuracy() {
    let scratch = tempfile::tempdir().expect("scratch");
    let summary = summary(&train(scratch.path(), PRICES, &prices(), &[]));
    // Every fifth row is held out.
    let held_out: Vec<f64> = (4..100).step_by(5).map(|i| price(i).0).collect();
    let mean = held_out.iter().sum::<f64>() / held_out.len() as f64;
    let variance = held_out.iter().map(|p| (p - mean).powi(2)).sum::<f64>() / held_out.len() as f64;
    let loss = summary["final_loss"].as_f64().expect("a loss");
    assert!(loss < variance / 10.0, "{loss}, and the mean alone has {variance}: {summary}");
    assert!(summary["final_accuracy"].is_null(), "{summary}");
}

#[test]
fn tables_and_jobs_that_do_not_fit_end_before_training() {
    for (body, table, set, code, words) in [
        (NAMES, species(), "data.label=kind", 65, "the header has `species`, `id`, `petal`, `sepal`"),
        (NAMES, species().replacen("1.00", "", 1), "name=t", 65, "(`petal`) is ``, not a number"),
        (PRICES, prices(), "eval.target_accuracy=0.5", 78, "eval.target_accuracy"),
        (PRICES, prices(), "model={kind=\"logistic-regression\"}", 78, "model.kind = \"mlp\""),
    ] {
        let scratch = tempfile::tempdir().expect("scratch");
        let out = train(scratch.path(), body, &table, &["--set", set]);
        assert_eq!(out.status.code(), Some(code), "{set}: {}", text(&out.stderr));
        contains(&text(&out.stderr), &[words]);
    }
}
