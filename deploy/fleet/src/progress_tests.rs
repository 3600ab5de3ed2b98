//! Tests of `progress`.

use super::*;
use paraft_common::{Step, WorkerId};
use paraft_record::{Eval, Evaluating, Leave, Train};

#[test]
fn a_run_whose_workers_are_all_lost_goes_at_no_negative_rate() {
    let mut progress = Progress::new(&Run { samples_budget: 100, ..Run::default() }, false, true);
    let worker = WorkerId(0);
    let trained = Train { worker, step: Step(1), samples: 50, seconds: 2.0, loss: 0.5, ..Train::default() };
    progress.update(&[Event::Train(trained)]);
    assert_eq!(progress.text(Duration::ZERO), (50, "loss 0.500  25 samples/s".to_string()));
    progress.update(&[Event::Leave(Leave { worker, ..Leave::default() })]);
    assert_eq!(progress.text(Duration::ZERO), (50, "loss -  0 samples/s".to_string()));
    let still = progress.text(Duration::from_secs(34));
    assert_eq!(still, (50, "loss -  nothing trained for 34 s".to_string()));
}

#[test]
fn an_evaluation_that_takes_long_is_seen_until_it_is_over() {
    let mut progress = Progress::new(&Run { samples_budget: 100, ..Run::default() }, false, true);
    let evaluating = |worker, epoch, done| {
        let worker = WorkerId(worker);
        Event::Evaluating(Evaluating { worker, epoch, done, of: 200, ..Evaluating::default() })
    };
    progress.update(&[evaluating(0, 1, 100), evaluating(1, 1, 50), evaluating(0, 1, 150)]);
    assert!(
        progress.text(Duration::ZERO).1.ends_with("  evaluating 50%"),
        "{}",
        progress.text(Duration::ZERO).1
    );
    // The next evaluation starts before the line of this one.
    progress.update(&[evaluating(1, 2, 20), Event::Eval(Eval { epoch: 1, ..Eval::default() })]);
    assert!(
        progress.text(Duration::ZERO).1.ends_with("  evaluating 10%"),
        "{}",
        progress.text(Duration::ZERO).1
    );
    progress.update(&[Event::Eval(Eval { epoch: 2, ..Eval::default() })]);
    assert!(!progress.text(Duration::ZERO).1.contains("evaluating"), "{}", progress.text(Duration::ZERO).1);
}
