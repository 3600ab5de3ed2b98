//! Tests of `begin`.

use super::*;
use crate::{Train, read_events};
use paraft_common::Step;

fn run(founding: &str, resumed: Option<u64>) -> Run {
    Run { founding: founding.into(), batch: 4, workers: 2, resumed_step: resumed.map(Step), ..Run::default() }
}

fn train(samples: u64) -> Event {
    Event::Train(Train { samples, ..Train::default() })
}

/// The records in the folder, the current one first: the `founding` of each, if any, and its number
/// of lines.
fn records(dir: &Path) -> Vec<(String, usize)> {
    let all = [METRICS_FILE, "metrics.1.jsonl", "metrics.2.jsonl"];
    let said = |name: &str| {
        let events = read_events(dir.join(name)).unwrap();
        let founding = events.iter().find_map(|e| match e {
            Event::Run(r) => Some(r.founding.clone()),
            _ => None,
        });
        (founding.unwrap_or_default(), events.len())
    };
    all.into_iter().filter(|name| dir.join(name).exists()).map(said).collect()
}

#[test]
fn of_workers_that_come_at_any_time_one_begins_the_record() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let worker = |founding: &str, resumed| join(dir, &run(founding, resumed)).unwrap().write(&train(1));
    let come = |founding: &str, resumed| {
        std::thread::scope(|s| {
            (0..8).for_each(|_| _ = s.spawn(|| worker(founding, resumed).unwrap()));
        });
    };
    let one = |founding: &str, lines| (founding.to_string(), lines);
    come("a", None);
    assert_eq!(records(dir), [one("a", 9)]);
    // The servers are new: the run restarts from a checkpoint.
    come("b", Some(10));
    assert_eq!(records(dir), [one("b", 9), one("a", 9)]);
    // A worker that rejoins appends, whatever its flags.
    come("b", Some(10));
    come("b", None);
    assert_eq!(records(dir), [one("b", 25), one("a", 9)]);
    // A fleet has lost its state without a checkpoint.
    come("c", None);
    assert_eq!(records(dir), [one("c", 9), one("a", 9), one("b", 25)]);
}

#[test]
fn a_record_without_bootstrap_is_replaced_without_a_launcher() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let write = |event| MetricsWriter::append(dir.join(METRICS_FILE)).unwrap().write(&event).unwrap();
    write(Event::Run(Run::default()));
    let lock = File::create(dir.join(LAUNCHER_LOCK)).unwrap();
    lock.try_lock().unwrap();
    join(dir, &run("a", Some(10))).unwrap();
    assert_eq!(records(dir), [(String::new(), 1)], "the launcher lives");
    drop(lock);
    join(dir, &run("a", None)).unwrap();
    assert_eq!(records(dir), [(String::new(), 1)], "no process begins again");
    join(dir, &run("a", Some(10))).unwrap();
    assert_eq!(records(dir), [("a".into(), 1), (String::new(), 1)], "the launcher was killed");
    std::fs::remove_file(dir.join(METRICS_FILE)).unwrap();
    write(train(1));
    join(dir, &run("b", Some(10))).unwrap();
    assert_eq!(records(dir).len(), 3, "of workers that wrote no `run` line");
}
