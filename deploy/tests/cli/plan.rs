//! `paraft plan`: what it says fits, and what it says is held.

use crate::common::{contains, run, text};
use serde_json::Value;
use std::fs;

fn job(dir: &std::path::Path, more: &str) -> String {
    let data = dir.join("text.txt");
    fs::write(&data, "the quick brown fox jumps over the lazy dog. ".repeat(400)).expect("a file");
    let job = dir.join("large.toml");
    let body = format!(
        "[model]\nkind = \"transformer\"\nlayers = 6\nheads = 2\nwidth = 128\n[data]\nkind = \"text\"\npath = {data:?}\ncontext = 64\n\
         [train]\ndevice = \"cpu\"\nworkers = 2\nbatch = 16\n{more}"
    );
    fs::write(&job, body).expect("a file");
    job.to_str().expect("utf-8").to_string()
}

#[test]
fn a_plan_says_what_each_way_holds_and_which_fit() {
    let dir = tempfile::tempdir().expect("a folder");
    let job = job(dir.path(), "");
    let out = run(&["plan", &job, "--json"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let ways: Vec<Value> =
        text(&out.stdout).lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let names: Vec<&str> = ways.iter().filter_map(|w| w["way"].as_str()).collect();
    assert_eq!(names[..4], ["whole", "streamed", "2 stages", "3 stages"]);
    // Eight layers, where five stages hold as much as four; two heads, so no more than two slices of each.
    assert_eq!(
        names[4..],
        [
            "4 stages",
            "6 stages",
            "2 slices",
            "2 stages x 2 slices",
            "4 stages x 2 slices",
            "8 stages x 2 slices"
        ]
    );
    let of = |i: usize, key: &str| ways[i][key].as_f64().expect("a number");
    let model = of(0, "weights_bytes");
    assert!(of(1, "weights_bytes") < model / 2.0, "two layers of eight");
    assert!(of(2, "weights_bytes") < 0.7 * model && of(2, "bubble") > 0.1, "{}", ways[2]);
    assert_eq!(
        (of(0, "bubble"), of(0, "between_bytes"), of(0, "with_servers_bytes")),
        (0.0, 0.0, 2.0 * model)
    );
    // Of 16 samples of 64 tokens of 128 values, there and back, and the embedding that is lent.
    let lent = of(2, "between_bytes") - 2.0 * 4.0 * 16.0 * 64.0 * 128.0;
    assert!(lent > 0.0 && lent < model, "{lent}");
    // Two slices, of each its half: a sum of all values goes between them four times a block, once behind the
    // embedding and once before the last norm, with three numbers of each token's logits; and half of the model there, and back.
    let (edge, tokens) = (16.0 * 64.0 * 128.0, 16.0 * 64.0);
    let between = 4.0 * 2.0 * ((6.0 * 4.0 + 2.0) * edge + 3.0 * tokens) + model;
    assert_eq!(of(6, "between_bytes"), between, "{}", ways[6]);
    assert!((0.5..0.6).contains(&(of(6, "weights_bytes") / model)) && of(6, "bubble") == 0.0, "{}", ways[6]);
    assert_eq!((of(7, "processes"), of(8, "processes")), (8.0, 16.0));
    // Three meshes: their weights are sent to two of them, and two gradients are returned.
    let out = run(&["plan", &job, "--json", "--set", "train.group_size=3"]);
    let thrice: Vec<Value> =
        text(&out.stdout).lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let there = |way: &str| thrice.iter().find(|w| w["way"] == way).expect("a way").clone();
    let sent = |way: &str| there(way)["between_bytes"].as_f64().expect("a number");
    assert_eq!(sent("whole"), 6.0 * model);
    assert_eq!(sent("2 stages"), 3.0 * of(2, "between_bytes") + 4.0 * model);
    assert_eq!(sent("2 slices"), 3.0 * (between - model) + model + 4.0 * model);
    assert_eq!(there("2 stages x 2 slices")["processes"].as_u64(), Some(24));
    contains(&text(&out.stderr), &["left out: streamed", "train.group_size = 1"]);
    let holds = |i: usize| of(i, "total_bytes");
    let memory = format!("{}B", (holds(1).max(holds(2)) as u64).min(holds(0) as u64 - 1));
    let out = run(&["plan", &job, "--memory", &memory]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let rows = text(&out.stdout);
    let row = |way: &str| rows.lines().find(|l| l.trim_start().starts_with(way)).expect(way).to_string();
    assert!(row("whole").contains(" no "), "{rows}");
    contains(&row("2 stages"), &[" yes ", "parallel.pipeline = 2"]);
    // What `train` refuses is left out, and why is said.
    let out = run(&["plan", &job, "--set", "train.mode=auto"]);
    let (rows, said) = (text(&out.stdout), text(&out.stderr));
    assert!(out.status.success() && !rows.contains("parallel.") && rows.contains("streamed"), "{rows}");
    contains(&said, &["left out: stages and slices: train.mode"]);
    let out = run(&["plan", &job, "--memory", "1MiB"]);
    assert_eq!(out.status.code(), Some(1));
    contains(&text(&out.stderr), &["no process of 1.0 MiB", "the least is", "train.batch"]);
}
