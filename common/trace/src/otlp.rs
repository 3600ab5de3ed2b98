//! The spans of several processes as OpenTelemetry has them: requests of OTLP over HTTP, in JSON.
//!
//! <https://opentelemetry.io/docs/specs/otlp/#otlphttp>. Each step is a trace of its own. A worker's part of it is a span `step`, in which
//! its stages are; what servers do for a push lies in the push.

use crate::{
    Span, Stage, TraceError,
    merge::{Incarnation, gather},
};
use paraft_common::{BucketId, ShardId, Step, WorkerId};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};
use xxhash_rust::xxh3::xxh3_64;

/// Spans of a request: a few hundred kilobytes of JSON.
const SPANS: usize = 1000;
/// Of OTLP's kinds: a call that another process answers, and the answer; anything else.
const INTERNAL: u8 = 1;
const SERVER: u8 = 2;
const CLIENT: u8 = 3;

/// Gives `send` the requests for `/v1/traces` with what is in `folder`, which may also be a run's folder, one after the other; the spans
/// that they held.
///
/// # Errors
/// As of [`crate::merge`], or `send`'s.
pub fn requests<E: From<TraceError>>(
    folder: &Path,
    send: impl FnMut(&Value, usize) -> Result<(), E>,
) -> Result<usize, E> {
    let (_, incarnations) = gather(folder)?;
    of(&incarnations, send)
}

/// A worker's push or pull of a bucket.
type BucketPath = (Step, ShardId, BucketId);

/// When it was, whose, and the id of its span.
type SpanStart = (u64, u64, Option<WorkerId>, String);

fn of<E>(
    incarnations: &[Incarnation],
    mut send: impl FnMut(&Value, usize) -> Result<(), E>,
) -> Result<usize, E> {
    let Some(first) = incarnations.first() else { return Ok(0) };
    let (epoch, run) =
        (first.process.epoch, hash(&[first.process.epoch as u64, u64::from(first.process.pid)]));
    let nanos = |at: u64| epoch.saturating_add_unsigned(at).to_string();
    let trace = |step: Step| format!("{run:016x}{:016x}", hash(&[run, step.0]));
    let id = |process: usize, n: u64| format!("{:016x}", hash(&[run, process as u64, n]) | 1);

    // A step in each worker, and its ways to the servers and back.
    let mut steps: BTreeMap<(Step, usize), (u64, u64)> = BTreeMap::new();
    let (mut pushes, mut pulls) =
        (HashMap::<BucketPath, Vec<SpanStart>>::new(), HashMap::<BucketPath, Vec<SpanStart>>::new());
    let number = |i: usize| i as u64 + 1;
    for (process, incarnation) in incarnations.iter().enumerate() {
        for (i, s) in incarnation.spans.iter().enumerate().filter(|(_, s)| is_of_worker(s.stage)) {
            let step = steps.entry((s.step, process)).or_insert((s.begin.0, s.end.0));
            *step = (step.0.min(s.begin.0), step.1.max(s.end.0));
            let trips = match s.stage {
                Stage::Push => &mut pushes,
                Stage::Pull => &mut pulls,
                _ => continue,
            };
            if let Some(bucket) = s.bucket {
                let trip = (s.begin.0, s.end.0, s.worker, id(process, number(i)));
                trips.entry((s.step, s.shard, bucket)).or_default().push(trip);
            }
        }
    }
    let step_id = |process: usize, step: Step| id(process, step.0 | 1 << 63);
    let any = |step: Step| {
        let of_step = steps.range((step, 0)..=(step, usize::MAX)).next();
        of_step.map(|((step, process), _)| step_id(*process, *step))
    };
    // What a server did for somebody lies in what that one waited for; of an update of several workers, in one of their pushes.
    let served = |s: &Span| {
        let trips = if s.stage == Stage::Publish { &pulls } else { &pushes };
        let trips = trips.get(&(s.step, s.shard, s.bucket?))?;
        let while_it = |t: &&SpanStart| t.0 <= s.begin.0 && s.begin.0 <= t.1;
        let of = |t: &&SpanStart| s.worker.is_none() || s.worker == t.2;
        trips.iter().filter(of).filter(while_it).max_by_key(|t| t.0).map(|t| t.3.clone())
    };

    let mut all = 0;
    for (process, incarnation) in incarnations.iter().enumerate() {
        let own = steps.iter().filter(|((_, p), _)| *p == process);
        let roots = own.map(|((step, _), (begin, end))| {
            json!({
                "traceId": trace(*step), "spanId": step_id(process, *step), "name": "step", "kind": INTERNAL,
                "startTimeUnixNano": nanos(*begin), "endTimeUnixNano": nanos(*end),
                "attributes": [number_of("paraft.step", step.0)],
            })
        });
        let stages = incarnation.spans.iter().enumerate().map(|(i, s)| {
            let (kind, parent) = match (s.stage, is_of_worker(s.stage)) {
                (Stage::Push | Stage::Pull, _) => (CLIENT, Some(step_id(process, s.step))),
                (_, true) => (INTERNAL, Some(step_id(process, s.step))),
                (_, false) => (SERVER, served(s).or_else(|| any(s.step))),
            };
            let mut span = json!({
                "traceId": trace(s.step), "spanId": id(process, number(i)), "name": s.stage.name(), "kind": kind,
                "startTimeUnixNano": nanos(s.begin.0), "endTimeUnixNano": nanos(s.end.0),
                "attributes": attributes(s),
            });
            if let Some(parent) = parent {
                span["parentSpanId"] = parent.into();
            }
            span
        });
        let mut spans = roots.chain(stages).peekable();
        while spans.peek().is_some() {
            let some: Vec<Value> = spans.by_ref().take(SPANS).collect();
            all += some.len();
            send(&request(incarnation, &some), some.len())?;
        }
    }
    Ok(all)
}

/// Whether a worker notes it, for itself.
fn is_of_worker(stage: Stage) -> bool {
    !matches!(stage, Stage::Queue | Stage::Replicate | Stage::Apply | Stage::Publish)
}

fn request(of: &Incarnation, spans: &[Value]) -> Value {
    // `worker-0`, `worker-0-rank-1`, `server-2`.
    let service = of.process.name.split('-').next().unwrap_or_default();
    let resource = [
        text_of("service.namespace", "paraft"),
        text_of("service.name", &format!("paraft-{service}")),
        text_of("service.instance.id", &of.process.name),
        number_of("process.pid", u64::from(of.process.pid)),
    ];
    json!({ "resourceSpans": [{
        "resource": { "attributes": resource },
        "scopeSpans": [{ "scope": { "name": "paraft", "version": env!("CARGO_PKG_VERSION") }, "spans": spans }],
    }] })
}

fn attributes(s: &Span) -> Vec<Value> {
    let mut all = vec![
        number_of("paraft.step", s.step.0),
        number_of("paraft.shard", u64::from(s.shard.0)),
        number_of("paraft.bytes", s.bytes),
    ];
    all.extend(s.bucket.map(|b| number_of("paraft.bucket", u64::from(b.0))));
    all.extend(s.worker.map(|w| number_of("paraft.worker", u64::from(w.0))));
    if let Some(pass) = s.pass {
        all.push(number_of("paraft.micro_batch", u64::from(pass.micro_batch)));
        all.push(number_of("paraft.version", pass.version.0));
    }
    all
}

/// In protobuf's JSON a number of 64 bits is a text.
fn number_of(key: &str, n: u64) -> Value {
    json!({ "key": key, "value": { "intValue": n.to_string() } })
}

fn text_of(key: &str, text: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": text } })
}

/// Ids have to differ, in whatever they differ.
fn hash(words: &[u64]) -> u64 {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    xxh3_64(&bytes)
}

#[cfg(test)]
mod tests {
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
        let requests = requests.iter().map(|r| {
            serde_json::from_value::<ExportTraceServiceRequest>(r.clone()).expect("a request of OTLP")
        });
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
        let number =
            |key: &str| match forward.iter().find(|a| a.key == key).and_then(|a| a.value.clone()?.value) {
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
}
