//! Tests of `curve`.

use super::*;
use crate::{Event, Run, Train, Worker};
use paraft_common::WorkerId;

fn line(worker: u32, seconds: f64, samples: u64, loss: f64) -> Event {
    let worker = WorkerId(worker);
    Event::Train(Train { worker, seconds, samples, loss, ..Train::default() })
}

fn record(lines: Vec<Event>) -> RunRecord {
    RunRecord::from_events([Event::Run(Run::default())].into_iter().chain(lines)).unwrap()
}

#[test]
fn a_window_is_the_mean_over_workers_weighted_by_samples() {
    let r = record(vec![line(0, 1.0, 100, 4.0), line(1, 1.0, 300, 2.0)]);
    assert_eq!(train_loss(&r), [LossPoint { seconds: 1.0, samples: 400.0, loss: 2.5 }]);
}

#[test]
fn throughput_sums_to_the_samples_when_a_worker_stops_early() {
    let mut lines: Vec<_> = (1..=40).map(|i| line(0, i as f64 * 0.5, i * 10, 1.0)).collect();
    lines.extend((1..=20).map(|i| line(1, i as f64 * 0.5, i * 30, 1.0)));
    lines.push(Event::Worker(Worker {
        worker: WorkerId(0),
        seconds: 20.5,
        samples: 410,
        ..Default::default()
    }));
    let rates = throughput(&record(lines));
    let width = 20.5 / rates.len() as f64;
    let total: f64 = rates.iter().map(|r| r.samples_per_s * width).sum();
    assert!((total - 1010.0).abs() < 1e-6, "{total}");
    assert!((rates[0].samples_per_s - 80.0).abs() < 1e-9 && rates.last().unwrap().samples_per_s < 21.0);
}

#[test]
fn long_runs_are_thinned_and_empty_ones_are_empty() {
    let r = record((1..=5000).map(|i| line(0, i as f64, i, 1.0 / i as f64)).collect());
    assert_eq!((train_loss(&r).len(), throughput(&r).len()), (LOSS_WINDOWS, RATE_WINDOWS));
    let r = record(vec![]);
    assert!(train_loss(&r).is_empty() && throughput(&r).is_empty());
    let r = record(vec![line(0, 0.0, 0, 0.5)]);
    assert!(train_loss(&r)[0].loss == 0.5 && throughput(&r).is_empty());
}

#[test]
fn a_worker_without_loss_has_no_line_a_diverging_one_has() {
    let silent = [line(0, 1.0, 100, f64::NAN), line(0, 2.0, 200, f64::NAN)];
    assert!(train_loss(&record(silent.to_vec())).is_empty());
    let other = [line(1, 1.0, 100, 3.0), line(1, 2.0, 200, f64::NAN)];
    let points = train_loss(&record([silent, other].concat()));
    assert_eq!(points[0].loss, 3.0);
    assert!(points[1].loss.is_nan());
}
