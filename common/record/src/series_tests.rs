//! Tests of `series`.

use super::*;
use crate::{Eval, Leave, Run, Train, Worker};
use paraft_common::Step;

fn line(worker: u32, wall: f64, samples: u64, loss: f64) -> Event {
    let worker = WorkerId(worker);
    Event::Train(Train { wall, worker, samples, seconds: wall - 100.0, loss, ..Train::default() })
}

fn run() -> Event {
    Event::Run(Run { wall: 100.0, workers: 2, batch: 10, ..Run::default() })
}

fn of(events: &[Event]) -> Vec<Point> {
    let mut series = Series::default();
    let mut points: Vec<_> = events.iter().flat_map(|e| series.follow(e)).collect();
    points.extend(series.end());
    points
}

fn numbers(points: &[Point], wanted: &str) -> Vec<(u64, f64)> {
    let of = points.iter().filter(|p| p.tag == wanted);
    let number = |p: &Point| match p.value {
        Value::Number(x) => Some((p.step, x)),
        Value::Delays(_) | Value::Text(_) => None,
    };
    of.filter_map(number).collect()
}

#[test]
fn a_window_averages_by_samples_and_sums_rates() {
    let points = of(&[run(), line(0, 101.0, 100, 9.0), line(0, 101.5, 200, 4.0), line(1, 102.0, 300, 2.0)]);
    // The first line covers one worker only; the second window has both.
    assert_eq!(numbers(&points, "train/loss"), [(100, 9.0), (200, 4.0), (500, 2.0)]);
    let both = of(&[
        run(),
        line(0, 101.0, 100, 9.0),
        line(1, 101.01, 0, 9.0),
        line(1, 103.0, 300, 2.0),
        line(0, 103.0, 300, 4.0),
    ]);
    // 1 sample's worth of worker 1's first line, 300 of its second, 200 of worker 0's.
    assert_eq!(numbers(&both, "train/loss")[1], (600, (9.0 + 300.0 * 2.0 + 200.0 * 4.0) / 501.0));
    let (step, rate) = numbers(&both, "perf/samples_per_s")[1];
    assert!(step == 600 && (rate - (100.0 + 100.0)).abs() < 1e-9, "{step} {rate}");
}

#[test]
fn a_gone_or_silent_worker_holds_no_window_open() {
    let two = [run(), line(0, 101.0, 100, 1.0), line(1, 101.0, 100, 1.0), line(1, 101.2, 200, 1.0)];
    let then = |event: Option<Event>, until: f64| {
        let more = (1..).map(|i| 101.2 + f64::from(i) * 0.2).take_while(|w| *w < until);
        let more = more.enumerate().map(|(i, w)| line(1, w, 300 + i as u64, 1.0));
        let events: Vec<_> = two.iter().cloned().chain(event).chain(more).collect();
        let mut series = Series::default();
        events.iter().flat_map(|e| series.follow(e)).filter(|p| p.tag == "train/loss").count()
    };
    let waits = then(None, 105.0);
    let left = Event::Leave(Leave { worker: WorkerId(0), ..Leave::default() });
    let ended = Event::Worker(Worker { wall: 101.2, worker: WorkerId(0), ..Worker::default() });
    assert!(then(Some(left), 105.0) > waits + 10);
    assert!(then(Some(ended), 105.0) > waits + 10);
    assert!(then(None, 130.0) > waits, "it is silent for long");
}

#[test]
fn a_long_run_has_few_thousand_points_and_no_two_at_one_step() {
    let week = 7.0 * 86_400.0;
    let lines = (1..).map(|i: u64| (i, i as f64 * 0.5)).take_while(|(_, s)| *s < week);
    let events = [run()].into_iter().chain(lines.map(|(i, s)| line(0, 100.0 + s, i, 1.0)));
    let mut series = Series::default();
    let losses: Vec<_> = events.flat_map(|e| series.follow(&e)).filter(|p| p.tag == "train/loss").collect();
    assert!((300..4000).contains(&losses.len()), "{}", losses.len());
    assert!(losses.windows(2).all(|w| w[0].step < w[1].step));
}

#[test]
fn one_evaluation_is_one_point_and_the_final_if_it_differs() {
    let eval = |epoch, loss, is_final| {
        let accuracy = Some(1.0 - loss);
        Event::Eval(Eval { wall: 103.0, epoch, samples: 7, loss, accuracy, is_final, ..Eval::default() })
    };
    let train = line(0, 101.0, 100, 1.0);
    let same = of(&[run(), train.clone(), eval(1, 0.5, false), eval(1, 0.5, false), eval(1, 0.5, true)]);
    assert_eq!(numbers(&same, "eval/loss"), [(100, 0.5)]);
    assert_eq!(numbers(&same, "eval/accuracy"), [(100, 0.5)]);
    let other = of(&[run(), train, eval(1, 0.5, false), eval(1, 0.25, true)]);
    assert_eq!(numbers(&other, "eval/loss"), [(100, 0.5), (100, 0.25)]);
    // A fleet without workers that write lines here.
    assert_eq!(numbers(&of(&[run(), eval(1, 0.5, true)]), "eval/loss"), [(7, 0.5)]);
}

#[test]
fn a_resumed_run_continues_at_its_samples() {
    let resumed = Event::Run(Run {
        wall: 100.0,
        workers: 2,
        batch: 10,
        resumed_step: Some(Step(50)),
        ..Run::default()
    });
    // The servers still report the checkpoint's evaluation, before any training.
    let known = Event::Eval(Eval { wall: 100.5, epoch: 1, samples: 7, loss: 0.5, ..Eval::default() });
    let points = of(&[resumed, known, line(0, 101.0, 30, 1.0)]);
    assert_eq!(numbers(&points, "eval/loss"), [(1007, 0.5)]);
    assert_eq!(numbers(&points, "train/loss"), [(1030, 1.0)]);
}

#[test]
fn a_worker_without_loss_has_no_line_a_diverging_one_has() {
    let silent = [run(), line(0, 101.0, 100, f64::NAN)];
    assert_eq!(numbers(&of(&silent), "train/loss"), []);
    let diverged = of(&[run(), line(0, 101.0, 100, 1.0), line(0, 102.0, 200, f64::NAN)]);
    assert!(numbers(&diverged, "train/loss")[1].1.is_nan());
}

#[test]
fn values_by_name_have_curves_of_their_own() {
    let with = |wall, samples, value| match line(0, wall, samples, 1.0) {
        Event::Train(t) => Event::Train(Train { values: [("half".to_string(), value)].into(), ..t }),
        other => other,
    };
    let points = of(&[run(), with(101.0, 100, 2.0), line(0, 102.0, 200, 1.0), with(103.0, 300, 4.0)]);
    assert_eq!(numbers(&points, "train/half"), [(100, 2.0), (300, 4.0)]);
    assert_eq!(numbers(&points, "train/loss").len(), 3);
}

#[test]
fn evaluations_within_an_epoch_are_points_of_their_own() {
    let at = |step, wall, loss| {
        Event::Eval(Eval {
            wall,
            epoch: 1,
            step: Some(Step(step)),
            loss,
            samples: step * 10,
            ..Eval::default()
        })
    };
    let twice = [at(20, 101.0, 3.0), at(20, 101.1, 3.0), at(30, 102.0, 2.0)];
    let points = of(&[&[run()][..], &twice].concat());
    assert_eq!(numbers(&points, "eval/loss"), [(200, 3.0), (300, 2.0)]);
}

#[test]
fn what_happens_is_a_text_at_the_samples_of_its_moment() {
    let left = Leave { wall: 101.5, worker: WorkerId(0), reason: "was ended".into(), ..Leave::default() };
    let points = of(&[run(), line(0, 101.0, 100, 1.0), Event::Leave(left)]);
    let text = Value::Text("worker 0 has left: was ended".into());
    assert!(
        points.contains(&Point { tag: "events".into(), value: text, step: 100, wall: 101.5 }),
        "{points:?}"
    );
    assert!(of(&[run(), line(0, 101.0, 100, 1.0)]).iter().all(|p| p.tag != "events"));
}
