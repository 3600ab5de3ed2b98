//! `--workers`, `--epochs` and `--name`, the short forms of `--set`.

use crate::common::*;

#[test]
fn short_flags_set_their_keys_for_train() {
    let scratch = tempfile::tempdir().expect("scratch");
    let job = job(scratch.path(), &digits("bsp", 1, 9));
    let run_dir = scratch.path().join("run");
    let short = ["--workers", "1", "--epochs", "1", "--name", "5", "--no-dashboard", "--json"];
    let out = paraft().arg("train").arg(job).arg("--run-dir").arg(&run_dir).args(short).output();
    let out = out.expect("paraft starts");
    assert!(out.status.success(), "{}", text(&out.stderr));
    let resolved: toml::Table =
        fs::read_to_string(run_dir.join("job.toml")).expect("a resolved job").parse().expect("TOML");
    assert_eq!(resolved["name"].as_str(), Some("5"));
    assert_eq!(resolved["train"]["workers"].as_integer(), Some(1));
    assert_eq!(resolved["train"]["epochs"].as_integer(), Some(1));
    assert_eq!(resolved["checkpoint"]["keep"].as_integer(), Some(3), "checkpoints by default");
}

#[test]
fn a_short_flag_with_set_of_its_key_is_refused() {
    let scratch = tempfile::tempdir().expect("scratch");
    let job = job(scratch.path(), &digits("bsp", 1, 1));
    let file = job.to_str().expect("utf-8");
    let engine = ["submit", file, "--on", "slurm", "--dry-run", "--workers", "3", "--set", "train.workers=2"];
    let launch = ["launch", "--mode", "asp", "--set", "train.mode=bsp", "true"];
    for (args, words) in [
        (
            &["train", file, "--workers", "3", "--set", "train.workers=2"][..],
            ["--workers", "train.workers=2"],
        ),
        (&["train", file, "--epochs", "3", "--set", "train={ epochs = 2 }"], ["--epochs", "train.epochs"]),
        (&["train", file, "--name", "a", "--set", "name=b"], ["--name", "name=b"]),
        (&engine, ["--workers", "train.workers=2"]),
        (&launch, ["--mode", "train.mode=bsp"]),
    ] {
        let out = paraft().current_dir(scratch.path()).args(args).output().expect("paraft starts");
        assert_eq!(out.status.code(), Some(2), "{args:?}: {}", text(&out.stderr));
        contains(&text(&out.stderr), &words);
        contains(&text(&out.stderr), &["both set", "give one of them"]);
    }
}
