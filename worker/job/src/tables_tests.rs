//! Tests of `tables`.

use super::*;
use paraft_common::TensorSpec;
use std::path::Path;

const MF: &str = "[model]\nkind = \"mf\"\nl2 = 0.1\n[data]\nkind = \"ratings\"\npath = \"a.csv\"\n";
const TABLES: &str = "[[table]]\nname = \"items\"\ndim = 9\nmax_rows = 100\noptimizer = { kind = \"sgd\", lr = 0.1 }\n\
                      [[table]]\nname = \"users\"\ndim = 9\nmax_rows = 100\noptimizer = { kind = \"adagrad\", lr = 0.1 }\n";

fn parse(text: &str, set: &[&str]) -> Result<Job, String> {
    let set: Vec<String> = set.iter().map(ToString::to_string).collect();
    Job::parse(text, Path::new("job.toml"), &set).map_err(|e| e.to_string())
}

#[test]
fn tables_are_read_in_any_order_and_written_again() {
    let job = parse(&format!("{MF}{TABLES}"), &[]).expect("a job");
    let names: Vec<String> = job.tables_of_model().into_iter().map(|t| t.name).collect();
    assert_eq!(names, ["users", "items"]);
    assert!(job.is_sparse() && !job.classifies() && job.device() == DeviceConfig::Cpu);
    let again = parse(&job.to_toml(), &[]).expect("its own text");
    assert_eq!(again.tables, job.tables);
}

#[test]
fn each_key_of_a_table_is_in_the_fingerprint() {
    let print = |text: &str| {
        let job = parse(text, &[]).expect("a job");
        job.server_job(&[TensorSpec::param("bias", &[1])]).fingerprint
    };
    let whole = format!("{MF}{TABLES}");
    let swapped = {
        let at = TABLES.rfind("[[table]]").expect("two");
        format!("{MF}{}{}", &TABLES[at..], &TABLES[..at])
    };
    assert_eq!(print(&whole), print(&swapped), "the order of entries says nothing");
    for more in ["partitions = 4", "seed = 1", "full = \"refuse\"", "init = { kind = \"zeros\" }"] {
        assert_ne!(print(&whole), print(&format!("{whole}{more}\n")), "{more}");
    }
    for (from, to) in [("lr = 0.1", "lr = 0.2"), ("max_rows = 100", "max_rows = 101"), ("dim = 9", "dim = 8")]
    {
        assert_ne!(print(&whole), print(&whole.replace(from, to)), "{to}");
    }
}

#[test]
fn errors_name_the_table_the_key_and_the_line() {
    for (from, to, words) in [
        (
            "max_rows = 100\noptimizer = { kind = \"adagrad\"",
            "max_rows = \"x\"\noptimizer = { kind = \"adagrad\"",
            "job.toml:15: table.max_rows: table `users`: string \"x\"",
        ),
        (
            "dim = 9",
            "dims = 9",
            "table.dims: table `items`: unknown key `dims`; [[table]] takes `name`, `dim`",
        ),
        ("kind = \"sgd\"", "kind = \"sdg\"", "table.optimizer"),
        ("dim = 9", "dim = 0", "job.toml:7: table: table `items`: dim 0 is not within 1 to 1024"),
        ("name = \"users\"", "name = \"items\"", "job.toml:12: table: two tables are named `items`"),
        ("name = \"users\"", "name = \"user\"", "table: table `user`: mf takes `users` and `items`"),
        ("dim = 9", "dim = 1", "table: table `users`: dim 1, and it holds a bias"),
        ("max_rows = 100\n", "", "table: table `items`: missing field `max_rows`"),
    ] {
        let text = format!("{MF}{TABLES}");
        let text = if to.contains("dim = 1") { text.replace(from, to) } else { text.replacen(from, to, 1) };
        let said = parse(&text, &[]).expect_err(to);
        assert!(said.contains(words), "{said}\n{words}");
    }
}

#[test]
fn keys_of_a_table_are_set_by_its_name() {
    let whole = format!("{MF}{TABLES}");
    let job = parse(&whole, &["table.users.optimizer.lr=0.5", "table.items.seed=7"]).expect("a job");
    let [users, items] = &job.tables_of_model()[..] else { panic!("two tables") };
    assert_eq!((users.optimizer.lr(), items.optimizer.lr()), (0.5, 0.1));
    assert_eq!((users.seed, items.seed), (0, 7));
    for (set, words) in [
        ("table.user.seed=1", "no entry of `table` is named `user`"),
        ("table.seed=1", "name the entry: table.NAME.seed"),
        ("table.users.dim=x", "--set table.users.dim=x: table.dim: table `users`: string \"x\""),
        ("table.users.sed=1", "--set table.users.sed=1: table.sed: table `users`: unknown key"),
    ] {
        let said = parse(&whole, &[set]).expect_err(set);
        assert!(said.contains(words), "{said}\n{words}");
    }
    let said = parse(&whole, &["table.users.dim=0"]).expect_err("dim");
    assert!(said.starts_with("job.toml:12: table: table `users`: dim 0"), "{said}");
}

#[test]
fn what_does_not_go_with_tables_is_refused() {
    let whole = format!("{MF}{TABLES}");
    for (set, key) in [
        ("train.device=cuda", "train.device"),
        ("train.exchange=all-reduce", "train.exchange"),
        ("train.group_size=2", "train.group_size"),
        ("train.init=a.safetensors", "train.init"),
        ("train.init=job:other", "train.init"),
        ("local.steps=4", "local.steps"),
        ("memory.resident=2", "memory.resident"),
        ("parallel.pipeline=2", "parallel.pipeline"),
        ("algorithm.kind=gap-aware", "algorithm.kind"),
        ("clip.norm=1.0", "clip.norm"),
        ("cluster.durability=leader", "cluster.durability"),
        ("eval.target_accuracy=0.5", "eval.target_accuracy"),
        ("model.l2=-1.0", "model.l2"),
        ("data={kind=\"digits\"}", "data.kind"),
        ("model={kind=\"logistic-regression\"}", "table"),
    ] {
        let said = parse(&whole, &[set]).expect_err(set);
        assert!(said.contains(&format!("{key}:")), "{set}: {said}");
    }
    let said = parse(
        &format!("[model]\nkind = \"mlp\"\nhidden = []\n{}", &MF[MF.find("[data]").expect("data")..]),
        &[],
    );
    assert!(said.expect_err("sparse data").contains("model.kind: mlp has no tables"));
    assert!(parse(TABLES, &[]).expect_err("no model").contains("only a built-in model"));
    let script = "cluster.script=[\"python3\",\"a.py\"]";
    assert!(parse(&whole, &[script]).expect_err("a script").contains("only a built-in model"));
}
