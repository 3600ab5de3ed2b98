//! Tests of `recorder`.

use super::*;
use paraft_record::read_events;

#[test]
fn numbers_of_a_script_are_means_up_to_a_count_of_names() {
    let dir = tempfile::tempdir().expect("a folder");
    let run = event::Run { name: "t".into(), ..event::Run::default() };
    let mut recorder =
        Recorder::new(WorkerId(1), Some(dir.path()), Arc::default(), run, 7).expect("a recorder");
    for value in [1.0, f64::NAN, 2.0] {
        assert!(recorder.number("norm", value));
    }
    let progress =
        |step| Progress { step: Step(step), epoch: 1, samples: 8, seconds: 1.0, wait_seconds: 0.0 };
    recorder.step(progress(1), 0.5, true).expect("written");
    // Nothing was counted since.
    recorder.step(progress(2), 0.5, true).expect("written");
    let names: Vec<String> = (1..MAX_NAMES).map(|i| i.to_string()).collect();
    assert!(names.iter().all(|name| recorder.number(name, 1.0)));
    assert!(!recorder.number("one more", 1.0) && recorder.number("norm", 1.0));
    let events = read_events(dir.path().join(METRICS_FILE)).expect("a record");
    let numbers: Vec<_> = events
        .iter()
        .filter_map(|e| match e {
            Event::Numbers(n) => Some((n.worker, n.step, n.values.clone())),
            _ => None,
        })
        .collect();
    let values = BTreeMap::from([("norm".to_string(), 1.5)]);
    assert_eq!(numbers, [(WorkerId(1), Step(1), values)]);
}
