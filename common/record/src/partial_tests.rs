//! Tests of `partial`.

use super::*;
use crate::{MetricsWriter, Run, Summary, Train, event::Chunk};
use paraft_common::{Step, WorkerId};
use std::path::PathBuf;

/// A record of two workers with this many steps, and with a chunk for each ten of them.
fn record(steps: u64) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut writer = MetricsWriter::append(&path).unwrap();
    writer.write(&Event::Run(Run { name: "t".into(), ..Run::default() })).unwrap();
    for step in 1..=steps {
        for worker in [0, 1].map(WorkerId) {
            let train = Train { worker, step: Step(step), loss: 0.5, samples_per_s: 1.0, ..Train::default() };
            writer.write(&Event::Train(train)).unwrap();
        }
        if step.is_multiple_of(10) {
            writer.write(&Event::Chunk(Chunk::default())).unwrap();
        }
    }
    writer.write(&Event::Summary(Summary { samples: 7, ..Summary::default() })).unwrap();
    (dir, path)
}

fn steps(events: &[Event]) -> Vec<u64> {
    let of = |event: &Event| if let Event::Train(t) = event { Some(t.step.0) } else { None };
    events.iter().filter_map(of).collect()
}

#[test]
fn a_sampled_record_keeps_both_ends_and_all_rare_lines() {
    let (_dir, path) = record(5000);
    let length = std::fs::metadata(&path).unwrap().len();
    let all = read_sampled_events(&path, length).unwrap();
    assert_eq!((all.len(), steps(&all).len()), (10_002, 10_000), "without chunks");
    let some = read_sampled_events(&path, length / 5).unwrap();
    let kept = steps(&some);
    assert!((1000..5000).contains(&kept.len()), "{}", kept.len());
    assert_eq!((kept.first(), kept.last()), (Some(&1), Some(&5000)));
    assert!(kept.iter().any(|step| (2000..3000).contains(step)), "the middle too");
    assert!(matches!((&some[0], some.last()), (Event::Run(_), Some(Event::Summary(_)))));
    assert_eq!(read_sampled_events(&path, length / 5).unwrap(), some, "the same each time");
}

#[test]
fn the_ends_of_a_record_are_its_first_and_last_lines() {
    let (_dir, path) = record(5000);
    let ends = read_ends(&path, 2000).unwrap();
    let (kept, last) = (steps(&ends), ends.last());
    assert!(matches!((&ends[0], last), (Event::Run(_), Some(Event::Summary(s))) if s.samples == 7));
    assert!((1..20).contains(&kept.len()) && kept.iter().all(|step| *step > 4900), "{kept:?}");
    // A short file is not read twice, and a line without its end does not count.
    let (_dir, path) = record(1);
    assert_eq!(read_ends(&path, 1 << 16).unwrap().len(), 4);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.trim_end()).unwrap();
    assert_eq!(read_ends(&path, 1 << 16).unwrap().len(), 3);
}
