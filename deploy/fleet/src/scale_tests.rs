//! Tests of `scale`.

use super::*;

#[test]
fn a_scale_request_needs_a_running_launcher() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    assert_eq!(most(dir), None);
    assert_eq!(set(dir, 1).map_err(|e| e.code()), Err(exit::UNAVAILABLE), "nobody is there");
    let mut job = Job::parse(
        "[model]\nkind = \"logistic-regression\"\n[data]\nkind = \"digits\"\n",
        Path::new("job.toml"),
        &[],
    )
    .expect("a job");
    job.train.workers = 3;
    let mut wanted = Wanted::of(&job, dir).expect("it can have fewer");
    assert_eq!((most(dir), wanted.now()), (Some(3), (3, 0)));
    for n in [0, 4] {
        assert_eq!(set(dir, n).map_err(|e| e.code()), Err(exit::USAGE));
    }
    set(dir, 1).expect("taken");
    wanted.looked = None;
    assert_eq!((most(dir), wanted.now()), (Some(3), (1, 1)));
    set(dir, 1).expect("said again");
    fs::write(dir.join(FILE), "rubbish").expect("written");
    wanted.looked = None;
    assert_eq!((most(dir), wanted.now()), (None, (1, 1)), "as it was");
    drop(wanted);
    // A killed launcher leaves the file; no process has its id.
    Scale { workers: 3, said: 0, most: 3, launcher: i32::MAX }.write(dir).expect("written");
    assert_eq!((most(dir), set(dir, 1).map_err(|e| e.code())), (None, Err(exit::UNAVAILABLE)));
    job.train.workers = 1;
    assert!(Wanted::of(&job, dir).is_none() && !dir.join(FILE).exists());
}
