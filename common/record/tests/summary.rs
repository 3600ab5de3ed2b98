//! The summary's numbers follow from the events.
#![allow(clippy::unwrap_used)]

use paraft_common::{ServerId, ShardId, Step, WorkerId};
use paraft_record::{
    Eval, Event, Leave, METRICS_FILE, MetricsWriter, RecordError, Run, RunRecord, Shard, Train, Worker,
};

fn run() -> Event {
    Event::Run(Run {
        name: "t".into(),
        mode: "ssp:4".into(),
        workers: 3,
        target_accuracy: Some(0.9),
        ..Run::default()
    })
}

fn eval(epoch: u64, seconds: f64, accuracy: f64, is_final: bool) -> Event {
    let (samples, accuracy, loss) = (epoch * 1000, Some(accuracy), 1.0 - accuracy);
    Event::Eval(Eval { epoch, samples, seconds, accuracy, loss, is_final, ..Eval::default() })
}

fn train(worker: u32, samples: u64, seconds: f64, wait_seconds: f64) -> Event {
    let (worker, step, loss) = (WorkerId(worker), Step(samples / 10), f64::from(worker));
    Event::Train(Train { worker, step, samples, seconds, wait_seconds, loss, ..Train::default() })
}

fn worker(worker: u32, samples: u64, seconds: f64) -> Event {
    let (worker, cpu_seconds, wait_seconds) = (WorkerId(worker), seconds * 2.0, 0.5);
    let (bytes_pushed, bytes_pulled) = (samples * 4, samples * 8);
    Event::Worker(Worker {
        worker,
        samples,
        seconds,
        wait_seconds,
        cpu_seconds,
        bytes_pushed,
        bytes_pulled,
        ..Worker::default()
    })
}

fn shard(server: u64, delay: Vec<u64>) -> Event {
    let (server, bytes_pushed) = (ServerId(server), 20_000);
    Event::Shard(Shard { shard: ShardId(0), server, delay, bytes_pushed, ..Shard::default() })
}

/// Three workers; the third was killed. Evaluations come from two workers. Server 0 wrote its counts twice,
/// then server 1 led.
fn events() -> Vec<Event> {
    vec![
        run(),
        train(0, 500, 2.0, 0.1),
        train(2, 300, 2.5, 0.25),
        eval(1, 5.0, 0.8, false),
        eval(1, 5.5, 0.7, false),
        shard(0, vec![1]),
        Event::Leave(Leave { worker: WorkerId(2), reason: "its lease ended".into(), ..Leave::default() }),
        eval(2, 9.0, 0.92, false),
        eval(3, 13.0, 0.91, false),
        shard(0, vec![60, 30]),
        shard(1, vec![9, 0, 0, 0, 0, 1]),
        worker(0, 1500, 14.0),
        worker(1, 1200, 15.0),
        Event::Leave(Leave { worker: WorkerId(0), reason: "done".into(), ..Leave::default() }),
    ]
}

#[test]
fn every_number_follows_from_the_events() {
    let s = RunRecord::from_events(events()).unwrap().summarize();
    assert_eq!((s.mode.as_str(), s.workers), ("ssp:4", 3));
    assert_eq!((s.samples, s.seconds, s.samples_per_s), (3000, 15.0, 200.0), "the killed worker's 300 count");
    assert_eq!(
        (s.final_accuracy, s.seconds_to_target, s.samples_to_target),
        // A worker was lost, so the fleet's samples are those of the training lines: 500 and the killed one's 300.
        (Some(0.91), Some(9.0), Some(800))
    );
    assert!((s.final_loss.unwrap() - 0.09).abs() < 1e-12);
    assert_eq!(
        (s.delay_p50, s.delay_p99, s.delay_max),
        (Some(0), Some(1), Some(5)),
        "69 zeros, 30 ones, a five"
    );
    assert_eq!(s.bytes_pushed, 40_000, "the servers saw the killed worker's bytes too");
    assert_eq!(s.bytes_pulled, 2700 * 8);
    assert!((s.cpu_seconds_per_1000_samples.unwrap() - 58.0 / 2.7).abs() < 1e-12);
    assert_eq!((s.wait_seconds, s.workers_lost), (1.25, 1));
}

#[test]
fn the_first_step_is_the_earliest_by_the_host_clock() {
    let at = |wall, worker| Event::Train(Train { wall, worker: WorkerId(worker), ..Train::default() });
    let of = |begun, simulated, steps: &[Event]| {
        let begins = Event::Run(Run { wall: begun, simulated, ..Run::default() });
        RunRecord::from_events([begins].into_iter().chain(steps.to_vec()))
            .unwrap()
            .summarize()
            .first_step_seconds
    };
    let steps = [at(103.0, 0), at(101.5, 1), at(102.0, 1)];
    assert_eq!(of(100.0, false, &steps), Some(1.5));
    assert_eq!(of(100.0, false, &[]), None, "nothing was trained");
    assert_eq!(of(100.0, true, &steps), None, "there is no such time");
    assert_eq!(of(110.0, false, &steps), None, "the clock was set");
}

#[test]
fn a_worker_that_was_killed_and_came_back_was_lost_each_time() {
    let mut events = events();
    for wall in [3.0, 4.0] {
        events.push(Event::Leave(Leave { wall, worker: WorkerId(1), rank: None, reason: "SIGKILL".into() }));
    }
    let Event::Worker(totals) = worker(1, 1200, 15.0) else { unreachable!("a worker's totals") };
    events.push(Event::Worker(Worker { wall: 9.0, ..totals }));
    let s = RunRecord::from_events(events).unwrap().summarize();
    assert_eq!(s.workers_lost, 3, "twice the one that came back, and the one that did not");
}

#[test]
fn a_group_is_lost_with_the_last_of_its_ranks() {
    let leave = |worker, rank| {
        Event::Leave(Leave { wall: 1.0, worker: WorkerId(worker), rank: Some(rank), reason: String::new() })
    };
    let worker = |w| Event::Worker(Worker { worker: WorkerId(w), wall: 2.0, ..Worker::default() });
    // Of the first a rank was left, which wrote its totals.
    let events = vec![run(), leave(0, 1), leave(1, 0), leave(1, 1), worker(0)];
    let s = RunRecord::from_events(events).unwrap().summarize();
    assert_eq!((s.workers_lost, s.ranks_lost), (1, 3));
}

#[test]
fn the_first_line_of_an_evaluation_counts_and_the_final_wins() {
    let mut events = events();
    events.insert(3, eval(3, 13.5, 0.95, true));
    events.push(eval(3, 13.6, 0.99, true));
    let record = RunRecord::from_events(events).unwrap();
    assert_eq!(record.evals.iter().map(|e| e.seconds).collect::<Vec<_>>(), [5.0, 9.0, 13.0, 13.5]);
    assert_eq!(record.summarize().final_accuracy, Some(0.95));
}

#[test]
fn a_comparison_may_set_its_own_target() {
    let mut record = RunRecord::from_events(events()).unwrap();
    record.target_accuracy = Some(0.75);
    assert_eq!(record.summarize().seconds_to_target, Some(5.0));
    record.target_accuracy = Some(0.99);
    assert_eq!(
        (record.summarize().seconds_to_target, record.summarize().target_accuracy),
        (None, Some(0.99))
    );
}

#[test]
fn a_run_that_has_only_begun_has_a_summary() {
    let s = RunRecord::from_events([run()]).unwrap().summarize();
    assert_eq!((s.samples, s.samples_per_s, s.final_loss, s.delay_max), (0, 0.0, None, None));
    let s =
        RunRecord::from_events([run(), train(1, 10, 1.0, 0.0), train(3, 10, 1.0, 0.0)]).unwrap().summarize();
    assert_eq!(s.final_loss, Some(2.0), "without an evaluation: the mean of the last training losses");
    let silent = train(1, 10, 1.0, 0.0);
    let Event::Train(silent) = silent else { panic!() };
    let silent = Event::Train(Train { loss: f64::NAN, ..silent });
    let s = RunRecord::from_events([run(), silent]).unwrap().summarize();
    assert_eq!(s.final_loss, None, "a script need not say one");
}

#[test]
fn a_record_is_loaded_from_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = MetricsWriter::append(dir.path().join(METRICS_FILE)).unwrap();
    writer.write(&events()[1]).unwrap();
    let told = RunRecord::load(dir.path()).unwrap_err();
    assert!(matches!(told, RecordError::NoRun { .. }), "{told}");
    for event in &events() {
        writer.write(event).unwrap();
    }
    let record = RunRecord::load(dir.path()).unwrap();
    writer.write(&Event::Summary(record.summarize())).unwrap();
    assert_eq!(RunRecord::load(dir.path()).unwrap(), record, "its own summary changes nothing");
}

#[test]
fn a_run_of_which_nothing_is_recorded_has_no_negative_zeros() {
    let dir = tempfile::tempdir().unwrap();
    MetricsWriter::append(dir.path().join(METRICS_FILE)).unwrap().write(&run()).unwrap();
    let summary = RunRecord::load(dir.path()).unwrap().summarize();
    assert!(
        summary.wait_seconds.is_sign_positive() && summary.samples_per_s.is_sign_positive(),
        "{summary:?}"
    );
}

#[test]
fn counts_that_no_run_can_have_do_not_overflow() {
    let many = |worker, samples| Train { worker: WorkerId(worker), samples, ..Train::default() };
    let lives = [many(0, u64::MAX), many(0, 5), many(0, u64::MAX), many(0, 3), many(1, u64::MAX)];
    let shard = Shard { delay: vec![u64::MAX; 3], pushes_lost: u64::MAX, ..Shard::default() };
    let shards = [0, 1].map(|s| Event::Shard(Shard { shard: ShardId(s), ..shard.clone() }));
    let totals = [0, 1].map(|w| worker(w, u64::MAX / 8, 1.0));
    let leave = Event::Leave(Leave { worker: WorkerId(1), reason: "killed".into(), ..Leave::default() });
    let events = [run(), leave].into_iter().chain(lives.map(Event::Train)).chain([eval(1, 1.0, 0.5, false)]);
    let record = RunRecord::from_events(events.chain(shards).chain(totals)).expect("a run");
    let summary = record.summarize();
    assert_eq!((summary.samples, summary.pushes_lost, summary.delay_p50), (u64::MAX, u64::MAX, Some(0)));
    assert_eq!(record.evals[0].samples, u64::MAX);
}
