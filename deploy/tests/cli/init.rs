//! `paraft init`: questions, and the job file of the answers.

use crate::common::*;
use std::io::Write as _;

fn init(folder: &Path, args: &[&str], answers: &str) -> (Option<i32>, String) {
    let mut c = paraft();
    c.arg("init").args(args).current_dir(folder);
    let mut child =
        c.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
    // It may have ended without reading.
    let _ = child.stdin.take().expect("piped").write_all(answers.as_bytes());
    let out = child.wait_with_output().expect("it ends");
    (out.status.code(), text(&out.stdout) + &text(&out.stderr))
}

#[test]
fn init_writes_a_job_that_trains() {
    let scratch = tempfile::tempdir().expect("scratch");
    let folder = scratch.path();
    let rows: String = (0..40).map(|i| format!("{},{},{}\n", i % 7, i % 5, ["low", "high"][i % 2])).collect();
    fs::write(folder.join("table.csv"), format!("a,b,class\n{rows}")).expect("written");
    // A wrong answer is asked again, an empty one is the default.
    let (code, said) = init(folder, &["sub.toml"], "excel\ncsv\nmissing.csv\ntable.csv\n\n\n0\n1\nasp\n1\n");
    assert_eq!(code, Some(0), "{said}");
    contains(
        &said,
        &[
            "Data: digits, csv, idx, text? [digits]",
            "`excel` is none of",
            "missing.csv does not exist",
            "`0` is no number",
            "paraft train sub.toml",
        ],
    );
    let out =
        paraft().current_dir(folder).args(["train", "sub.toml", "--json"]).output().expect("paraft starts");
    assert!(out.status.success(), "{}", text(&out.stderr));
    let job = fs::read_to_string(folder.join("sub.toml")).expect("written");
    contains(
        &job,
        &["name = \"sub\"", "kind = \"csv\"", "table.csv", "mode = \"asp\"", "workers = 1", "epochs = 1"],
    );

    let (code, said) = init(folder, &["sub.toml"], "\n\n\n\n\n");
    assert_eq!(code, Some(2));
    contains(&said, &["exists already", "paraft init other.toml"]);
    assert_eq!(fs::read_to_string(folder.join("sub.toml")).expect("there"), job);
}

#[test]
fn init_without_all_answers_writes_nothing() {
    let scratch = tempfile::tempdir().expect("scratch");
    let (code, said) = init(scratch.path(), &[], "digits\nmlp\n");
    assert_eq!(code, Some(2));
    contains(&said, &["ended before the last answer; nothing is written"]);
    // Its rows are of unequal length.
    fs::write(scratch.path().join("bad.csv"), "1,2\n3\n").expect("written");
    let (code, said) = init(scratch.path(), &[], "csv\nbad.csv\n\n\n\n\n\n");
    assert_eq!(code, Some(65), "{said}");
    contains(&said, &["bad.csv"]);
    assert!(!scratch.path().join("job.toml").exists());
}

#[test]
fn init_asks_whether_a_table_has_classes_or_numbers() {
    let scratch = tempfile::tempdir().expect("scratch");
    let rows: String =
        (0..40).map(|i| format!("{},{},{:.3}\n", i % 7, i % 5, f64::from(i) * 0.113)).collect();
    fs::write(scratch.path().join("prices.csv"), format!("a,b,price\n{rows}")).expect("written");
    let (code, said) = init(scratch.path(), &[], "csv\nprices.csv\nnumber\n\n1\n\n1\n");
    assert_eq!(code, Some(0), "{said}");
    let job = fs::read_to_string(scratch.path().join("job.toml")).expect("written");
    contains(&job, &["task = \"regression\"", "kind = \"mlp\""]);
}
