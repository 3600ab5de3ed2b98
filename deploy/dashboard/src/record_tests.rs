//! Tests of `record`.

use super::*;
use paraft_common::{ServerId, ShardId, Step, WorkerId};
use paraft_record::{
    End, EndKind, Eval, Incident, IncidentKind, MetricsWriter, Run, Train, Worker, event::Checkpoint,
};

fn run() -> Event {
    Event::Run(Run {
        wall: 100.0,
        name: "t".into(),
        mode: "asp".into(),
        workers: 2,
        batch: 10,
        epochs: 2,
        samples_budget: 200,
        ..Run::default()
    })
}

/// A worker's line at this time after the beginning of the run.
fn train(worker: u32, after: f64, step: u64, loss: f64) -> Event {
    Event::Train(Train {
        wall: 100.0 + after,
        worker: WorkerId(worker),
        step: Step(step),
        epoch: 1 + (step - 1) / 5,
        samples: step * 10,
        seconds: after,
        loss,
        samples_per_s: 10.0,
        ..Train::default()
    })
}

fn eval(after: f64, epoch: u64) -> Event {
    Event::Eval(Eval { wall: 100.0 + after, epoch, loss: 0.25, accuracy: Some(0.875), ..Eval::default() })
}

#[test]
fn points_have_all_places_on_the_x_axis() {
    let recorded = Recorded::of(&[
        run(),
        train(0, 1.0, 1, 2.0),
        train(1, 1.0, 1, 1.0),
        train(0, 2.0, 7, f64::NAN),
        train(1, 2.0, 4, 1.0),
        eval(2.5, 1),
    ]);
    assert_eq!(recorded.begin, 100_000);
    let places: Vec<_> = recorded.points.iter().map(|p| (p.at, p.step, p.epoch, p.done)).collect();
    assert_eq!(places, [(101_000, 1, 1, 10), (102_000, 7, 2, 80), (102_500, 7, 2, 110)]);
    let losses: Vec<_> = recorded.points.iter().map(|p| p.loss).collect();
    assert_eq!(losses, [Some(2.0), None, Some(1.0)], "NaN is a gap");
    let wanted = EvaluationPoint {
        at: 102_500,
        step: 7,
        epoch: 1,
        done: 110,
        loss: Some(0.25),
        accuracy: Some(0.875),
    };
    assert_eq!(recorded.evaluations, [wanted]);
}

#[test]
fn further_values_are_points_of_their_own() {
    let valued = |event, value| match event {
        Event::Train(t) => Event::Train(Train { values: [("norm".to_string(), value)].into(), ..t }),
        other => other,
    };
    let events = [run(), train(0, 1.0, 1, 2.0), valued(train(0, 2.0, 7, 1.0), 1.5)];
    let recorded = Recorded::of(&events);
    let values: Vec<_> = recorded.points.iter().map(|p| p.numbers.get("norm").copied()).collect();
    assert_eq!(values, [None, Some(1.5)]);
    let json = serde_json::to_string(&recorded.points).expect("JSON");
    assert_eq!(json.matches("numbers").count(), 1, "{json}");
}

#[test]
fn a_long_record_has_bounded_curves_with_both_ends() {
    let mut events = vec![run()];
    for i in 1..20_000u64 {
        events.push(train(0, i as f64, i, 1.0));
        events.push(eval(i as f64, i));
        let checkpoint = Checkpoint { wall: 100.0 + i as f64, ..Checkpoint::default() };
        events.push(Event::Checkpoint(checkpoint));
    }
    let elected = IncidentKind::LeaderChanged {
        shard: ShardId(0),
        from: ServerId(0),
        to: ServerId(1),
        term: 2,
        stall_seconds: Some(0.5),
        handed_over: false,
    };
    events.push(Event::Incident(Incident { wall: 101.0, what: elected }));
    let recorded = Recorded::of(&events);
    assert!((MAX_POINTS / 2..=MAX_POINTS).contains(&recorded.points.len()), "{}", recorded.points.len());
    assert!((1..=MAX_EVALUATIONS).contains(&recorded.evaluations.len()));
    assert_eq!(recorded.evaluations.last().map(|e| e.at), Some(20_099_000));
    assert_eq!(recorded.points.last().map(|p| (p.at, p.step)), Some((20_099_000, 19_999)));
    let moments: Vec<_> = recorded.moments.iter().map(|m| (m.at, m.letter, m.cost.as_str())).collect();
    assert_eq!(moments.len() + recorded.more_moments, 20_000);
    assert_eq!(moments[0], (101_000, "L", "stall of 0.50 s"));
    assert_eq!((moments.len(), moments[1].1), (2, "C"), "the last checkpoint");
    let json = serde_json::to_string(&recorded).expect("JSON");
    assert!(json.len() < 300_000, "{}", json.len());
}

#[test]
fn the_end_is_that_of_the_record() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut writer = MetricsWriter::append(dir.path().join(METRICS_FILE)).expect("a record");
    let mut state = |event: &Event| {
        writer.write(event).expect("written");
        let end = Recorded::read(dir.path())?.end.expect("no launcher holds it");
        Ok::<_, String>((end.state, end.reason, end.summary.samples))
    };
    assert!(state(&train(0, 1.0, 1, 2.0)).is_err_and(|why| why.contains("no first line")));
    assert_eq!(state(&run()), Ok(("no-end", None, 10)));
    let worker = Worker { worker: WorkerId(0), steps: 3, samples: 30, seconds: 2.0, ..Worker::default() };
    assert_eq!(state(&Event::Worker(worker)), Ok(("no-end", None, 30)));
    let why = "a signal".to_string();
    let end = End { wall: 103.0, how: EndKind::Interrupted, reason: why.clone() };
    assert_eq!(state(&Event::End(end)), Ok(("interrupted", Some(why), 30)));
    let summary = Summary { samples: 30, ..Summary::default() };
    assert_eq!(state(&Event::Summary(summary)), Ok(("stopped", None, 30)));
    let summary = Summary { samples: 200, ..Summary::default() };
    assert_eq!(state(&Event::Summary(summary)), Ok(("finished", None, 200)));
    assert!(Recorded::read(&dir.path().join("none")).is_err());
}
