//! Tests of `run_dir`.

use super::*;
use paraft_common::Step;
use paraft_record::{Event, MetricsWriter, TENSORBOARD_FOLDER, Train};

#[test]
fn one_launcher_has_a_folder_and_it_is_free_when_that_has_ended() {
    let scratch = tempfile::tempdir().expect("scratch");
    let dir = scratch.path().join("run");
    drop(RunDir::new(Some(&dir), "t").expect("free"));
    assert!(!dir.exists(), "nothing has begun in it");
    let refused = RunDir::new(Some(&dir), "t").expect("free");
    fs::create_dir(dir.join(CHECKPOINTS)).expect("it was tried out");
    drop(refused);
    assert!(!dir.exists(), "nothing has begun in it");
    drop(RunDir::new(Some(scratch.path()), "t").expect("free"));
    assert!(scratch.path().exists(), "it is somebody's");
    let held = RunDir::new(Some(&dir), "t").expect("free");
    fs::write(dir.join(METRICS_FILE), "{}").expect("a record");
    for again in [RunDir::again(&dir), RunDir::new(Some(&dir), "t")] {
        let why = again.expect_err("taken");
        let said = why.message();
        assert!(said.contains("going on in") && said.contains(&dir.display().to_string()), "{said}");
    }
    assert!(dir.join(METRICS_FILE).exists(), "the record of the live run stays where it is");
    drop(held);
    for again in [RunDir::new(Some(&dir), "t"), RunDir::of_comparison(Some(&dir), "t")] {
        let why = again.expect_err("it holds a run");
        assert!(why.message().contains("holds another run"), "{}", why.message());
    }
    drop(RunDir::of_comparison(Some(scratch.path()), "t").expect("its runs lie below"));
    let why = RunDir::new(Some(scratch.path()), "t").expect_err("a comparison");
    assert!(why.message().contains("holds a comparison"), "{}", why.message());
    let aside = dir.join("metrics.1.jsonl");
    let resumed = RunDir::again(&dir).expect("the lock file alone takes nothing");
    assert!(aside.exists() && !dir.join(METRICS_FILE).exists());
    drop(resumed);
    assert!(!aside.exists() && dir.join(METRICS_FILE).exists(), "nothing has begun");
    let killed = [
        Event::Run(Default::default()),
        Event::Train(Train { step: Step(1), loss: 1.0, ..Train::default() }),
    ];
    fs::remove_file(dir.join(METRICS_FILE)).expect("the one before");
    let mut record = MetricsWriter::append(dir.join(METRICS_FILE)).expect("a record");
    killed.iter().for_each(|e| record.write(e).expect("written"));
    drop(record);
    drop(RunDir::again(&dir).expect("it was killed"));
    let files = fs::read_dir(dir.join(TENSORBOARD_FOLDER)).expect("event files").count();
    assert_eq!(files, 1, "TensorBoard hears what it had not");
    let resumed = RunDir::again(&dir).expect("the lock file alone takes nothing");
    fs::write(dir.join(METRICS_FILE), "{}").expect("it has begun");
    drop(resumed);
    assert!(aside.exists() && dir.join(METRICS_FILE).exists());
    fs::remove_file(dir.join(METRICS_FILE)).expect("as if it was killed before it had begun");
    let why = RunDir::new(Some(&dir), "t").expect_err("it holds a run");
    assert!(why.message().contains("holds another run"), "{}", why.message());
}
