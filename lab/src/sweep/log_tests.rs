//! Tests of `log`.

use super::{
    super::search::{Next, Rule},
    *,
};

fn ended(trial: usize, value: Option<f64>) -> TrialEnd {
    let (why, dir) = (String::new(), format!("trial-{trial}"));
    TrialEnd {
        trial,
        rung: 0,
        value,
        seconds: 1.5,
        start_seconds: Some(0.1),
        tries: 1,
        why,
        stopped: None,
        beside: Some("other".into()),
        dir,
        ended_ms: 5,
    }
}

#[test]
fn a_sweep_resumes_from_a_log_with_a_torn_last_line() {
    let folder = tempfile::tempdir().expect("scratch");
    let path = folder.path().join("sweep.jsonl");
    let sweep = json!({ "seed": 1, "job": "x" });
    let fresh = || Search::new(Rule::Once, 3, 1, 2);
    let open = |sweep: &Value| {
        let mut search = fresh();
        Log::open(&path, sweep, &mut search, |e| e.value).map(|log| (log, search))
    };
    {
        let (mut log, _) = open(&sweep).expect("begun");
        for trial in 0..2 {
            log.begin(trial, 0, &["a=1".into()]).expect("written");
        }
        log.end(&ended(0, Some(0.5))).expect("written");
    }
    let whole = std::fs::read(&path).expect("there");
    for cut in [whole.len(), whole.len() - 1, whole.len() - 20] {
        std::fs::write(&path, &whole[..cut]).expect("cut");
        let (log, mut search) = open(&sweep).expect("goes on");
        let all = cut == whole.len();
        assert_eq!(log.ended, if all { vec![ended(0, Some(0.5))] } else { Vec::new() });
        assert_eq!(search.unfinished().len(), if all { 1 } else { 2 });
        assert_eq!(search.next(), Next::Train { trial: 2, rung: 0 });
    }
    let other = open(&json!({ "seed": 2, "job": "x" })).err().expect("another sweep's");
    assert!(other.message().contains("seed differs"), "{}", other.message());
    std::fs::write(&path, "nonsense\n").expect("written");
    assert!(open(&sweep).is_err_and(|e| e.message().contains("no line of a sweep")));
}
