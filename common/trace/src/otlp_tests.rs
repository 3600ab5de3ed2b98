//! Tests of `otlp`.

use super::*;
use crate::{Moment, Pass, file::Process};
use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest, common::v1::any_value, trace::v1,
};
use paraft_common::Version;
use std::collections::HashSet;

fn span(stage: Stage, step: u64, worker: Option<u32>, begin: u64) -> Span {
    let pass = (stage == Stage::Forward).then_some(Pass { micro_batch: 4, version: Version(9) });
    let (begin, end) = (Moment(begin), Moment(begin + 10));
    let (shard, bucket, worker) = (ShardId(1), Some(BucketId(5)), worker.map(WorkerId));
    Span { stage, begin, end, step: Step(step), shard, bucket, worker, bytes: 40, pass }
}

fn incarnation(name: &str, pid: u32, spans: Vec<Span>) -> Incarnation {
    let process = Process { name: name.into(), pid, boot: "x".into(), epoch: 1_700_000_000_000_000_000 };
    Incarnation { process, spans, missing: 0 }
}

fn all(incarnations: &[Incarnation]) -> Vec<Value> {
    let mut requests = Vec::new();
    let keep = |request: &Value, _| -> Result<(), TraceError> {
        requests.push(request.clone());
        Ok(())
    };
    of(incarnations, keep).expect("kept");
    requests
}

/// Read back by OpenTelemetry's own types.
fn read(requests: &[Value]) -> Vec<(String, v1::Span)> {
    let requests = requests
        .iter()
        .map(|r| serde_json::from_value::<ExportTraceServiceRequest>(r.clone()).expect("a request of OTLP"));
    let text = |all: &[opentelemetry_proto::tonic::common::v1::KeyValue], key: &str| {
        let value = all.iter().find(|a| a.key == key)?.value.clone()?.value?;
        match value {
            any_value::Value::StringValue(text) => Some(text),
            _ => None,
        }
    };
    let mut spans = Vec::new();
    for all in requests.flat_map(|r| r.resource_spans) {
        let resource = all.resource.expect("a resource").attributes;
        let of = text(&resource, "service.instance.id").expect("an instance");
        spans.extend(all.scope_spans.into_iter().flat_map(|s| s.spans).map(|s| (of.clone(), s)));
    }
    spans
}

#[test]
fn otlp_export_nests_stages_and_server_spans_in_steps() {
    let worker = [Stage::Ready, Stage::Copy, Stage::Push, Stage::Pull, Stage::Forward];
    let at = |w: u32, step: u64| {
        worker.iter().enumerate().map(move |(i, s)| span(*s, step, Some(w), 100 * step + i as u64))
    };
    let server = [
        span(Stage::Queue, 1, Some(1), 105),
        span(Stage::Apply, 1, None, 105),
        span(Stage::Apply, 1, None, 900),
        span(Stage::Publish, 1, Some(0), 106),
        span(Stage::Publish, 7, Some(0), 700),
    ];
    let requests = all(&[
        incarnation("worker-0", 1, at(0, 1).chain(at(0, 2)).collect()),
        incarnation("worker-1", 2, at(1, 1).collect()),
        incarnation("server-0", 3, server.to_vec()),
    ]);
    let spans = read(&requests);
    assert_eq!(spans.len(), 3 + 15 + 5, "three steps in workers, and their spans");
    let find = |of: &str, name: &str, nth: usize| {
        let all = spans.iter().filter(|(o, s)| o == of && s.name == name);
        all.map(|(_, s)| s).nth(nth).expect("a span")
    };
    let [one, other] = [find("worker-0", "step", 0), find("worker-0", "step", 1)];
    assert!(one.trace_id.len() == 16 && one.span_id.len() == 8 && one.trace_id != other.trace_id);
    assert!(one.parent_span_id.is_empty(), "it is the top of its trace");
    assert_eq!(one.start_time_unix_nano, 1_700_000_000_000_000_100);
    assert_eq!(one.end_time_unix_nano, 1_700_000_000_000_000_114);
    assert_eq!(find("worker-1", "step", 0).trace_id, one.trace_id, "of the same step");
    assert_eq!(find("worker-0", "ready", 0).parent_span_id, one.span_id);
    assert_eq!(find("worker-0", "pull", 1).parent_span_id, other.span_id);
    assert_eq!(find("server-0", "queue", 0).parent_span_id, find("worker-1", "push", 0).span_id);
    let pushes = [0, 1].map(|w| find(&format!("worker-{w}"), "push", 0).span_id.clone());
    assert!(pushes.contains(&find("server-0", "apply", 0).parent_span_id), "an update of several");
    assert_eq!(find("server-0", "apply", 1).parent_span_id, one.span_id, "a follower's, behind the ack");
    assert_eq!(find("server-0", "publish", 0).parent_span_id, find("worker-0", "pull", 0).span_id);
    assert!(find("server-0", "publish", 1).parent_span_id.is_empty(), "no worker recorded that step");
    assert_eq!(find("worker-0", "push", 0).kind(), v1::span::SpanKind::Client);
    assert_eq!(find("server-0", "queue", 0).kind(), v1::span::SpanKind::Server);
    assert_eq!(find("worker-0", "copy", 0).kind(), v1::span::SpanKind::Internal);
    let forward = &find("worker-0", "forward", 0).attributes;
    let number = |key: &str| match forward.iter().find(|a| a.key == key).and_then(|a| a.value.clone()?.value)
    {
        Some(any_value::Value::IntValue(n)) => n,
        other => panic!("{key}: {other:?}"),
    };
    let keys = ["step", "shard", "bucket", "worker", "bytes", "micro_batch", "version"];
    assert_eq!(keys.map(|k| number(&format!("paraft.{k}"))), [1, 1, 5, 0, 40, 4, 9]);
    let ids: HashSet<_> = spans.iter().map(|(_, s)| s.span_id.clone()).collect();
    assert_eq!(ids.len(), spans.len(), "no two have one id");
}

#[test]
fn many_spans_are_sent_in_several_requests() {
    let many = (0..2500).map(|step| span(Stage::Ready, step, Some(0), step)).collect();
    let requests = all(&[incarnation("worker-0", 1, many)]);
    assert_eq!(requests.len(), 5, "2500 spans, and 2500 steps");
    let spans = read(&requests);
    let ids: HashSet<_> = spans.iter().map(|(_, s)| s.span_id.clone()).collect();
    assert_eq!((spans.len(), ids.len()), (5000, 5000));
    assert!(all(&[]).is_empty());
}
