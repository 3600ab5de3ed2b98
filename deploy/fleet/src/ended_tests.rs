//! Tests of `ended`.

use super::*;
use crate::{run_dir::RunDir, shared::JobEnd};
use paraft_common::{Step, WorkerId};
use paraft_record::{Diverged, End, EndKind, Eval, MetricsWriter, Train};

/// A run of 100 steps with two workers, of which this many are trained, with these last lines.
fn run_of(steps: u64, last: &[Event]) -> tempfile::TempDir {
    let scratch = tempfile::tempdir().expect("scratch");
    let run = Run {
        name: "t".into(),
        mode: "bsp".into(),
        workers: 2,
        batch: 16,
        samples_budget: 100 * 16 * 2,
        epochs: 1,
        ..Run::default()
    };
    let train = |worker| Train {
        worker: WorkerId(worker),
        step: Step(steps),
        samples: steps * 16,
        ..Train::default()
    };
    let mut writer = MetricsWriter::append(scratch.path().join(METRICS_FILE)).expect("a record");
    writer.write(&Event::Run(run)).expect("written");
    (0..2).for_each(|worker| writer.write(&Event::Train(train(worker))).expect("written"));
    last.iter().for_each(|event| writer.write(event).expect("written"));
    scratch
}

#[test]
fn the_end_of_the_record_decides_how_a_run_ended() {
    let summary = Event::Summary(Summary::default());
    let end = |how| Event::End(End { wall: 0.0, how, reason: "why".into() });
    let nan = Event::Diverged(Diverged { wall: 0.0, reason: "a NaN".into() });
    // What a worker evaluates at its end, in the epoch that it is in.
    let last_eval = Event::Eval(Eval { epoch: 1, is_final: true, ..Eval::default() });
    for (steps, last, state) in [
        (100, vec![summary.clone()], EndState::Finished),
        (40, vec![last_eval, summary.clone()], EndState::Stopped),
        (40, vec![end(EndKind::Failed)], EndState::Failed("why".into())),
        (40, vec![end(EndKind::Interrupted)], EndState::Interrupted("why".into())),
        (40, vec![nan.clone()], EndState::Failed("a NaN".into())),
        (40, vec![nan, summary], EndState::Failed("a NaN".into())),
        (100, vec![], EndState::NoEnd),
    ] {
        let scratch = run_of(steps, &last);
        let run = EndedRun::read(scratch.path()).expect("a run");
        assert_eq!((run.steps, run.total_steps), (steps, Some(100)));
        assert_eq!(has_end(scratch.path()), state != EndState::NoEnd, "{state:?}");
        assert_eq!(run.state, state);
        assert!(run.resume().is_none(), "there is no checkpoint");
    }
}

#[test]
fn a_report_has_the_state_and_a_sentence_for_people() {
    let end = |how| Event::End(End { wall: 0.0, how, reason: "why".into() });
    let noted = |scratch: &tempfile::TempDir| {
        let events = read_events(scratch.path().join(METRICS_FILE)).expect("a record");
        let recorded = RecordedEnd::of(&events);
        let mut record = RunRecord::from_events(events).expect("a run");
        recorded.note(scratch.path(), &mut record);
        let end = record.end.expect("noted");
        (end.state, end.reason, end.sentence)
    };
    let why = || Some("why".to_string());
    for (steps, last, state, reason, sentence) in [
        (100, Some(Event::Summary(Summary::default())), "finished", None, ""),
        (
            40,
            Some(Event::Summary(Summary::default())),
            "stopped",
            None,
            "The run was stopped before its end, at step 40 of 100.",
        ),
        (40, Some(end(EndKind::Failed)), "failed", why(), "The run failed at step 40 of 100: why."),
        (
            40,
            Some(end(EndKind::Interrupted)),
            "interrupted",
            why(),
            "The run was interrupted at step 40 of 100: why.",
        ),
        (40, None, "no-end", None, "The record has no end, at step 40 of 100: the launcher was killed."),
    ] {
        let scratch = run_of(steps, last.as_slice());
        assert_eq!(noted(&scratch), (state, reason, Some(sentence.to_string()).filter(|s| !s.is_empty())));
    }
    let scratch = run_of(40, &[]);
    let _held = RunDir::for_another(Some(scratch.path()), "t", true).expect("a folder");
    let says = "The run is still going on, at step 40 of 100.".to_string();
    assert_eq!(noted(&scratch), ("running", None, Some(says)));
}

#[test]
fn a_run_of_an_engine_ends_as_its_workers_recorded() {
    let failed = |said: &str| JobEnd::Failed { worker: 1, node: "n2".into(), code: 1, said: said.into() };
    for (ended, steps, state) in [
        (JobEnd::Done, 100, EndState::Finished),
        (JobEnd::Done, 40, EndState::Stopped),
        (
            failed("Traceback:\nValueError: no"),
            40,
            EndState::Failed("worker w1 on n2, code 1: ValueError: no".into()),
        ),
    ] {
        let scratch = run_of(steps, &[]);
        let text = serde_json::to_string(&ended).expect("text");
        fs::write(scratch.path().join("ended"), text).expect("written");
        assert_eq!(EndedRun::read(scratch.path()).expect("a run").state, state);
    }
}

#[test]
fn a_run_without_a_beginning_is_refused_with_its_file() {
    let scratch = tempfile::tempdir().expect("scratch");
    fs::write(scratch.path().join(METRICS_FILE), "").expect("an empty record");
    assert!(!has_end(scratch.path()));
    let failure = EndedRun::read(scratch.path()).err().expect("no run");
    assert_eq!(failure.code(), exit::DATA);
    assert!(failure.message().contains("metrics.jsonl: no `run` event"), "{}", failure.message());
}
