//! Tests of `jobs`.

use super::*;
use paraft_common::{Durability, Mode};

fn told(paths: &[&str]) -> NoteCheckpointsRequest {
    let held = paths.iter().map(|p| CheckpointInfo { path: p.to_string(), ..CheckpointInfo::default() });
    NoteCheckpointsRequest { job: 1, folder: "/c".into(), held: held.collect() }
}

#[test]
fn what_is_told_is_bounded_and_in_its_folder() {
    assert_eq!(held_in(told(&["/c/a", "/c/b"])).expect("as it should be").len(), 2);
    let long = format!("/c/{}", "a".repeat(MAX_PATH_BYTES));
    for path in ["/d/a", "/c/a/b", "/c", "", "/", long.as_str()] {
        assert!(held_in(told(&[path])).is_err(), "{path}");
    }
    assert!(held_in(told(&vec!["/c/a"; MAX_KNOWN_CHECKPOINTS])).is_ok());
    assert!(held_in(told(&vec!["/c/a"; MAX_KNOWN_CHECKPOINTS + 1])).is_err());
    // A loss that is not equal to itself would be agreed on for ever.
    let mut nan = told(&["/c/a"]);
    nan.held[0].loss = Some(f64::NAN);
    assert_eq!(held_in(nan).expect("the rest counts")[0].loss, None);
}

#[test]
fn a_job_reads_back_as_it_was_told() {
    let name = "a".repeat(JobFacts::NAME_CHARS);
    let durability = Durability::Leader;
    let facts = JobFacts { name, mode: Mode::Ssp(3).into(), workers: 2, durability };
    let auto = Some(crate::rpc::auto::tests::report());
    let job = JobReport { facts, shards: 3, finished: true, auto };
    assert_eq!(from_report(to_report(&job)), Some(job));
    assert_eq!(from_report(paraft_proto::JobReport::default()), None, "no mode that this build knows");
}
