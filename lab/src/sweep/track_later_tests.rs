//! Tests of `track_later`.

use super::{
    super::{log::Log, search::Rule},
    *,
};
use serde_json::json;

#[test]
fn a_sweep_log_lists_trials_and_the_best_when_all_end() {
    let folder = tempfile::tempdir().expect("scratch");
    let dir = folder.path();
    let about = json!({
        "job": "", "metric": "loss", "search": "halving", "points": ["a=0", "a=1"], "epochs": [1, 4], "eta": 2,
    });
    let mut search = Search::new(Rule::Halving, 2, 2, 2);
    let mut log = Log::open(&dir.join(LOG_FILE), &about, &mut search, |_| None).expect("begun");
    let trains = |log: &mut Log, trial: usize, rung: usize, value: f64| {
        for _try in 0..2 {
            log.begin(trial, rung, &[format!("a={trial}")]).expect("written");
        }
        let (why, dir) = (String::new(), String::new());
        let ended_ms = 1000 * (1 + trial as u64);
        let value = Some(value);
        log.end(&TrialEnd {
            trial,
            rung,
            value,
            seconds: 1.0,
            start_seconds: None,
            tries: 2,
            why,
            beside: None,
            stopped: None,
            dir,
            ended_ms,
        })
        .expect("written");
    };
    trains(&mut log, 0, 0, 0.5);
    trains(&mut log, 1, 0, 0.25);
    let found = || SweepFiles::of(&LogContent::read(&dir.join(LOG_FILE)).expect("a log")).expect("a sweep's");
    assert_eq!((found().best, found().status()), (None, Status::Failed), "trial 1 has yet to go on");
    trains(&mut log, 1, 1, 0.125);
    let best = Best { key: "eval/loss", value: 0.125, wall: 2.0, set: vec!["a=1".into()] };
    assert_eq!((found().best, found().status()), (Some(best), Status::Finished));
    assert_eq!(found().trials, ["trial-0000/epochs-1", "trial-0001/epochs-1", "trial-0001/epochs-4"]);
    // A resumed or moved sweep keeps its identity.
    let id = LogContent::read(&dir.join(LOG_FILE)).expect("a log").id(Path::new("/elsewhere"));
    drop(log);
    let again = Log::open(&dir.join(LOG_FILE), &about, &mut search, |_| None).expect("goes on");
    assert_eq!(again.id, id);
    let trial = dir.join("trial-0000/epochs-1");
    std::fs::create_dir_all(&trial).expect("a folder");
    std::fs::write(trial.join(METRICS_FILE), "").expect("a file");
    let whole = dir.canonicalize().ok();
    assert_eq!((of(dir), of(&trial), of(trial.parent().expect("above"))), (whole.clone(), whole, None));
}
