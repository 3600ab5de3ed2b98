//! The spans of several processes as OpenTelemetry has them: requests of OTLP over HTTP, in JSON.
//!
//! <https://opentelemetry.io/docs/specs/otlp/#otlphttp>. Each step is a trace of its own. A worker's part of it is a span `step`, in which
//! its stages are; what servers do for a push lies in the push.

use crate::{Span, Stage, TraceError, file::Incarnation, merge::gather};
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
    // A server's span is a child of the worker's span that waited for it. An update of several workers is a child of one of their
    // pushes.
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
#[path = "otlp_tests.rs"]
mod tests;
