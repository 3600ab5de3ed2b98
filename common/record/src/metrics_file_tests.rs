//! Tests of `metrics_file`.

use super::*;
use crate::{Leave, Train};
use paraft_common::WorkerId;

fn leave(worker: u32) -> Event {
    Event::Leave(Leave { wall: 1.5, worker: WorkerId(worker), rank: None, reason: "killed\nby hand".into() })
}

#[test]
fn writers_side_by_side_never_mix_their_lines() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS_FILE);
    std::thread::scope(|s| {
        for worker in 0..4 {
            let path = &path;
            s.spawn(move || {
                let mut w = MetricsWriter::append(path).unwrap();
                for step in 0..200 {
                    let (worker, step) = (WorkerId(worker), paraft_common::Step(step));
                    w.write(&Event::Train(Train { worker, step, ..Train::default() })).unwrap();
                }
            });
        }
    });
    let events = read_events(&path).unwrap();
    for worker in 0..4 {
        let steps = events.iter().filter_map(|e| match e {
            Event::Train(t) if t.worker == WorkerId(worker) => Some(t.step.0),
            _ => None,
        });
        assert!(steps.eq(0..200), "worker {worker}: every line, in order");
    }
}

#[test]
fn a_tail_returns_each_line_once_when_it_is_complete() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS_FILE);
    let mut tail = Tail::new(&path);
    assert_eq!(tail.poll().unwrap(), []);
    MetricsWriter::append(&path).unwrap().write(&leave(0)).unwrap();
    assert_eq!(tail.poll().unwrap(), [leave(0)]);
    assert_eq!(tail.poll().unwrap(), []);

    let line = serde_json::to_string(&leave(1)).unwrap();
    let (head, rest) = line.split_at(20);
    let mut file = OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(head.as_bytes()).unwrap();
    assert_eq!(tail.poll().unwrap(), []);
    assert_eq!(read_events(&path).unwrap(), [leave(0)]);
    file.write_all(format!("{rest}\n{line}\n").as_bytes()).unwrap();
    assert_eq!(tail.poll().unwrap(), [leave(1), leave(1)]);

    std::fs::write(&path, "").unwrap();
    assert!(matches!(tail.poll(), Err(RecordError::Shrunk { now: 0, .. })));
}

#[test]
fn a_damaged_line_is_named_with_file_and_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS_FILE);
    let good = serde_json::to_string(&leave(0)).unwrap();
    std::fs::write(&path, format!("{good}\n\n{{\"event\":\"train\"}}\n{good}\n")).unwrap();
    let told = read_events(&path).unwrap_err().to_string();
    assert!(told.contains("metrics.jsonl:3: not an event: missing field"), "{told}");

    let mut tail = Tail::new(&path);
    tail.poll().unwrap_err();
    MetricsWriter::append(&path).unwrap().write(&leave(2)).unwrap();
    assert_eq!(tail.poll().unwrap(), [leave(2)], "it continues after the damage");
}

#[test]
fn a_kind_of_a_later_version_is_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS_FILE);
    let good = serde_json::to_string(&leave(0)).unwrap();
    std::fs::write(&path, format!("{{\"event\":\"meteor\",\"size\":3}}\n{good}\n")).unwrap();
    assert_eq!(read_events(&path).unwrap(), [leave(0)]);
}
