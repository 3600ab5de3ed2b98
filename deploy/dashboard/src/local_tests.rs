//! Tests of `local`.

use super::*;

#[test]
fn only_runs_below_the_folder_of_runs_are_believed_to_be_here() {
    let (run, runs) = (Some("/r/a".into()), Some("/r".into()));
    let here = LocalControl { run, runs, ..LocalControl::default() };
    let of = |run: &str| here.launched(&Job { run: run.into(), ..Job::default() });
    let name = paraft_host::name();
    assert_eq!(of(""), Some("/r/a".into()), "its own");
    assert_eq!(of(&format!("{name}:/r/b")), Some("/r/b".into()));
    for folder in ["/etc", "/r/b/c", "/r/..", "/", "r/b", ""] {
        assert_eq!(of(&format!("{name}:{folder}")), None, "{folder}");
    }
    assert_eq!(of("elsewhere:/r/b"), None);
}

#[test]
fn an_engine_page_controls_only_its_own_run() {
    let runs = tempfile::tempdir().expect("a folder");
    let other = runs.path().join("b");
    std::fs::create_dir(&other).expect("a folder");
    std::fs::write(
        other.join("engine.json"),
        r#"{"engine": "compose", "parts": [["worker", "x"]], "args": ["/bin/false"]}"#,
    )
    .expect("written");
    std::fs::write(
        other.join("job.toml"),
        "[model]\nkind = \"logistic-regression\"\n[data]\nkind = \"digits\"\n",
    )
    .expect("written");
    let here = LocalControl {
        run: Some(other.clone()),
        engine: submitted::most(&other),
        runs: Some(runs.path().into()),
        ..LocalControl::default()
    };
    let theirs = Job { run: format!("{}:{}", paraft_host::name(), other.display()), ..Job::default() };
    assert_eq!((here.most(&theirs), here.most(&Job::default())), (None, Some(2)));
    let refused = here.scale(&theirs, 1).expect_err("refused");
    assert!(refused.contains("no launcher follows"), "{refused}");
}
