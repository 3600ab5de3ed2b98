//! Tests of `merge`.

use super::*;
use crate::{Moment, Pass, Stage, Stages, file::Process};
use paraft_common::{BucketId, ShardId, Step, Version, WorkerId};
use serde_json::{Value, json};

fn process(name: &str, boot: &str, epoch: i64) -> Value {
    json!({"process": Process { name: name.into(), pid: 7, boot: boot.into(), epoch }})
}

fn span(stage: Stage, begin: u64, end: u64) -> Span {
    let (shard, bucket) = (ShardId(1), Some(BucketId(5)));
    let worker = Some(WorkerId(0)).filter(|_| !matches!(stage, Stage::Apply | Stage::Replicate));
    let (begin, end) = (Moment(begin), Moment(end));
    let pass = matches!(stage, Stage::Forward | Stage::Backward)
        .then_some(Pass { micro_batch: 6, version: Version(2) });
    Span { stage, begin, end, step: Step(3), shard, bucket, worker, bytes: 40, pass }
}

fn write(folder: &Path, name: &str, lines: &[Value]) {
    let text: String = lines.iter().map(|l| format!("{l}\n")).collect();
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join(name), text).unwrap();
}

fn merged(folder: &Path) -> (Merged, Vec<Value>) {
    let merged = merge(folder, None).unwrap();
    let all: Value = serde_json::from_slice(&fs::read(&merged.path).unwrap()).unwrap();
    (merged, all["traceEvents"].as_array().unwrap().clone())
}

fn of_kind<'a>(events: &'a [Value], ph: &str) -> Vec<&'a Value> {
    events.iter().filter(|e| e["ph"] == ph).collect()
}

#[test]
fn spans_of_processes_lie_on_named_tracks_without_overlap() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join(TRACE_FOLDER);
    let spans = |list: &[(Stage, u64, u64)]| {
        list.iter().map(|&(s, b, e)| json!({"span": span(s, b, e)})).collect::<Vec<_>>()
    };
    let worker = [
        (Stage::Ready, 1000, 2000),
        (Stage::Ready, 2000, 2000),
        (Stage::Copy, 2000, 2100),
        (Stage::Push, 2100, 5000),
        (Stage::Encode, 2100, 2300),
        (Stage::Push, 2300, 4000),
        (Stage::Push, 5000, 5500),
        (Stage::Pull, 900, 4200),
        (Stage::Decode, 4200, 4300),
        (Stage::Forward, 1000, 1400),
        (Stage::Backward, 1400, 2000),
    ];
    let server = [
        (Stage::Queue, 2500, 2600),
        (Stage::Replicate, 2600, 3900),
        (Stage::Apply, 3000, 3800),
        (Stage::Publish, 3900, 3950),
    ];
    write(&folder, "worker-0.jsonl", &[vec![process("worker-0", "x", 50)], spans(&worker)].concat());
    write(&folder, "server-0.jsonl", &[vec![process("server-0", "x", 70)], spans(&server)].concat());
    let (m, events) = merged(scratch.path());
    assert_eq!((m.processes, m.spans, m.missing), (2, 15, 0));
    assert_eq!(m.path, scratch.path().join(TRACE_FILE));
    let slices = of_kind(&events, "X");
    assert_eq!(slices.len(), 15);
    for stage in Stage::ALL {
        let e = slices.iter().find(|e| e["name"] == stage.name()).unwrap();
        assert_eq!(e["args"]["step"], 3);
        assert_eq!(e["args"]["bucket"], 5);
        assert_eq!(e["args"]["shard"], 1);
        assert_eq!(e["args"]["bytes"], 40);
    }
    // Microseconds from the first span on; processes of one host share a clock, whatever their wall
    // clocks say.
    let at = |stage: &str| slices.iter().find(|e| e["name"] == stage).unwrap();
    assert_eq!((&at("pull")["ts"], &at("pull")["dur"]), (&json!(0.0), &json!(3.3)));
    assert_eq!((&at("apply")["ts"], &at("apply")["dur"]), (&json!(2.1), &json!(0.8)));
    assert_eq!(at("apply")["args"].get("worker"), None);
    assert_eq!(at("push")["args"]["worker"], 0);
    let of = |stage: &str| [&at(stage)["args"]["micro_batch"], &at(stage)["args"]["version"]];
    assert_eq!((of("backward"), of("push")), ([&json!(6), &json!(2)], [&Value::Null, &Value::Null]));
    let mut tracks: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
    for e in &slices {
        let n = |key: &str| e[key].as_f64().unwrap();
        let track = tracks.entry((n("pid") as u64, n("tid") as u64)).or_default();
        track.push((n("ts"), n("ts") + n("dur")));
    }
    for spans in tracks.values_mut() {
        spans.sort_by(|a, b| a.partial_cmp(b).unwrap());
        assert!(spans.windows(2).all(|w| w[0].1 <= w[1].0 + 1e-6), "{spans:?}");
    }
    let names: Vec<_> = of_kind(&events, "M")
        .iter()
        .filter(|e| e["name"] == "thread_name" || e["name"] == "process_name")
        .map(|e| e["args"]["name"].as_str().unwrap().to_string())
        .collect();
    let expected = [
        "worker-0 (pid 7)",
        "training",
        "micro-batches",
        "push",
        "push, 2",
        "pull",
        "server-0 (pid 7)",
        "shard 1 queue",
        "shard 1 replicate",
        "shard 1 apply",
        "shard 1 publish",
    ];
    assert_eq!(names, expected);
    assert_eq!(tracks.len(), 9, "each has its name");
}

#[test]
fn an_arrow_links_a_push_its_apply_and_the_next_pull() {
    let scratch = tempfile::tempdir().unwrap();
    let line = |s| json!({ "span": s });
    let worker = [span(Stage::Push, 10_000, 50_000), span(Stage::Pull, 9000, 70_000)].map(line).to_vec();
    let leader = [span(Stage::Apply, 30_000, 40_000), span(Stage::Replicate, 20_000, 45_000)];
    let follower = [span(Stage::Apply, 29_000, 31_000)].map(line).to_vec();
    let write = |name: &str, spans: Vec<Value>| {
        write(scratch.path(), &format!("{name}.jsonl"), &[vec![process(name, "x", 1)], spans].concat());
    };
    write("worker-0", worker);
    write("server-0", leader.map(line).to_vec());
    write("server-1", follower);
    let to = scratch.path().join("out.json");
    merge(scratch.path(), Some(&to)).unwrap();
    let all: Value = serde_json::from_slice(&fs::read(&to).unwrap()).unwrap();
    let events = all["traceEvents"].as_array().unwrap();
    let (s, t, f) = (of_kind(events, "s"), of_kind(events, "t"), of_kind(events, "f"));
    assert_eq!((s.len(), t.len(), f.len()), (1, 1, 1));
    assert!(s[0]["id"] == t[0]["id"] && t[0]["id"] == f[0]["id"]);
    // Each arrow's end lies in its slice.
    for (flow, stage, pids) in [(s[0], "push", 1), (t[0], "apply", 2), (f[0], "pull", 1)] {
        assert_eq!(flow["pid"], pids, "{flow}");
        let slice =
            events.iter().find(|e| e["ph"] == "X" && e["name"] == stage && e["pid"] == flow["pid"]).unwrap();
        assert_eq!(slice["tid"], flow["tid"]);
        let (ts, at) = (slice["ts"].as_f64().unwrap(), flow["ts"].as_f64().unwrap());
        assert!(ts <= at && at <= ts + slice["dur"].as_f64().unwrap(), "{flow} is not in {slice}");
    }
}

#[test]
fn processes_of_other_hosts_lie_as_their_wall_clocks_say() {
    let scratch = tempfile::tempdir().unwrap();
    let one = json!({"span": span(Stage::Push, 1_000_000, 2_000_000)});
    // The second host was started 5 ms after the first.
    write(scratch.path(), "a.jsonl", &[process("a", "x", 1_000_000_000), one.clone()]);
    write(scratch.path(), "b.jsonl", &[process("b", "y", 1_005_000_000), one.clone()]);
    write(scratch.path(), "c.jsonl", &[process("c", "y", 9_999_000_000), one]);
    let to = scratch.path().join("out");
    merge(scratch.path(), Some(&to)).unwrap();
    let all: Value = serde_json::from_slice(&fs::read(&to).unwrap()).unwrap();
    let events = all["traceEvents"].as_array().unwrap();
    let starts: Vec<_> = of_kind(events, "X").iter().map(|e| e["ts"].as_f64().unwrap()).collect();
    assert_eq!(starts, [0.0, 5000.0, 5000.0]);
}

#[test]
fn a_killed_process_keeps_its_spans_and_appends_after_restart() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("worker-0.jsonl");
    let one = json!({"span": span(Stage::Push, 1, 2)});
    let torn = format!("{}\n{one}\n{one}\n{{\"missing\":4}}\n{{\"span\":{{\"st", process("worker-0", "x", 1));
    fs::write(&path, &torn).unwrap();
    let all = merge(scratch.path(), Some(&scratch.path().join("out"))).unwrap();
    assert_eq!((all.processes, all.spans, all.missing), (1, 2, 4));
    let again = Stages::default();
    again.trace(scratch.path(), "worker-0", 10).unwrap();
    again.note(span(Stage::Push, 3, 4));
    again.flush();
    let all = merge(scratch.path(), Some(&scratch.path().join("out"))).unwrap();
    assert_eq!((all.processes, all.spans, all.missing), (2, 3, 4));
}

#[test]
fn what_is_no_trace_is_refused_with_its_line() {
    let scratch = tempfile::tempdir().unwrap();
    assert!(matches!(merge(&scratch.path().join("no"), None), Err(TraceError::Io(..))));
    assert!(matches!(merge(scratch.path(), None), Err(TraceError::Empty(_))));
    let head = process("a", "x", 1).to_string();
    let one = json!({"span": span(Stage::Push, 1, 2)}).to_string();
    let path = scratch.path().join("a.jsonl");
    for (text, line) in [
        (format!("{one}\n{head}\n"), 1),
        (format!("{head}\nrubbish\n{one}\n"), 2),
        (format!("{head}\n{one}\n{{\"event\":\"train\"}}\n{{}}\n"), 4),
        ("{}\n".into(), 1),
    ] {
        fs::write(&path, &text).unwrap();
        match merge(scratch.path(), None) {
            Err(TraceError::Malformed { line: at, .. }) => {
                assert!(at == line || at + 1 == line, "{text}")
            }
            other => panic!("{other:?} for {text}"),
        }
    }
}
