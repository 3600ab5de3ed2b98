//! Tests of `stages`.

use super::*;
use crate::Moment;
use paraft_common::{BucketId, ShardId, Step, WorkerId};

fn span(stage: Stage, step: u64) -> Span {
    Span {
        stage,
        begin: Moment(1000 * step),
        end: Moment(1000 * step + 250),
        step: Step(step),
        shard: ShardId(0),
        bucket: Some(BucketId(3)),
        worker: Some(WorkerId(1)),
        bytes: 12,
        pass: None,
    }
}

#[test]
fn sums_are_of_all_spans_and_the_trace_is_of_so_many_steps() {
    let scratch = tempfile::tempdir().unwrap();
    let stages = Stages::default();
    stages.note(span(Stage::Apply, 4));
    stages.trace(&scratch.path().join("t"), "server-7", 3).unwrap();
    for step in [0, 5, 6, 7, 8, 9] {
        // The weights before the first push are of no step that is recorded.
        stages.note(span(Stage::Pull, step));
        if step > 0 {
            stages.note(span(Stage::Push, step));
            stages.note(span(Stage::Decode, step));
        }
    }
    stages.flush();
    let text = std::fs::read_to_string(scratch.path().join("t/server-7.jsonl")).unwrap();
    let steps = |stage: &str| {
        let of = text.lines().filter(|l| l.contains(&format!("\"stage\":\"{stage}\"")));
        of.map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()["span"]["step"].as_u64().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(steps("push"), [5, 6, 7]);
    assert_eq!(steps("decode"), [5, 6, 7]);
    assert_eq!(steps("pull"), [6, 7], "that of step 5 came before its push");
    assert_eq!(steps("apply"), [0; 0]);
    let total = |stage: Stage| stages.totals()[stage as usize];
    let expected = |stage, spans| Total { stage, time: Duration::from_nanos(250 * spans), spans };
    assert_eq!(total(Stage::Push), expected(Stage::Push, 5));
    assert_eq!(total(Stage::Pull), expected(Stage::Pull, 6));
    assert_eq!(total(Stage::Apply), expected(Stage::Apply, 1));
    assert_eq!(total(Stage::Queue), expected(Stage::Queue, 0));
}
