//! `paraft train --trace` and `paraft trace`.

use crate::common::*;
use std::io::{BufRead, Read, Write};

const STAGES: [&str; 10] =
    ["ready", "copy", "encode", "push", "queue", "replicate", "apply", "publish", "pull", "decode"];

/// A slice of the trace, times in microseconds.
#[derive(Clone, Debug)]
struct Slice {
    stage: String,
    process: String,
    track: u64,
    begin: f64,
    end: f64,
    args: Value,
}

impl Slice {
    /// Step, bucket and, where it has one, worker.
    fn of(&self) -> (u64, u64, Option<u64>) {
        let n = |key: &str| self.args[key].as_u64().unwrap_or_else(|| panic!("no {key} in {self:?}"));
        (n("step"), n("bucket"), self.args["worker"].as_u64())
    }
}

fn slices(trace: &Path) -> (Vec<Slice>, Vec<Value>) {
    let all: Value = serde_json::from_slice(&fs::read(trace).expect("a trace")).expect("JSON");
    let events = all["traceEvents"].as_array().expect("events").clone();
    let named = |e: &&Value| e["name"] == "process_name";
    let names: BTreeMap<u64, String> = events
        .iter()
        .filter(named)
        .map(|e| (e["pid"].as_u64().expect("pid"), e["args"]["name"].as_str().expect("name").into()))
        .collect();
    let f = |e: &Value, key: &str| e[key].as_f64().unwrap_or_else(|| panic!("no {key} in {e}"));
    let slices = events.iter().filter(|e| e["ph"] == "X").map(|e| Slice {
        stage: e["name"].as_str().expect("name").into(),
        process: names[&e["pid"].as_u64().expect("pid")].clone(),
        track: e["pid"].as_u64().expect("pid") << 32 | e["tid"].as_u64().expect("tid"),
        begin: f(e, "ts"),
        end: f(e, "ts") + f(e, "dur"),
        args: e["args"].clone(),
    });
    (slices.collect(), events.clone())
}

/// The ConvNet has parameters, which are encoded, and BatchNorm's buffers, which are copied.
fn a_job(dir: &Path, mode: &str) -> PathBuf {
    let text = digits(mode, 3, 1).replace("kind = \"mlp\"\nhidden = [32]", "kind = \"convnet\"");
    let text = text.replace("election_ms = 200", "election_ms = 1000"); // none in between, however busy the machine is
    job(dir, &text.replace("batch = 16", "batch = 16\nencoding = \"bf16\"\nmax_steps = 8"))
}

/// Rounding to the microsecond's third digit.
const SLACK: f64 = 0.002;

#[test]
fn a_trace_has_every_stage_of_each_bucket_in_order() {
    let scratch = tempfile::tempdir().expect("scratch");
    let run_dir = scratch.path().join("run");
    let out = paraft()
        .arg("train")
        .arg(a_job(scratch.path(), "bsp"))
        .args(["--trace", "--trace-steps", "5", "--run-dir"])
        .arg(&run_dir)
        .output()
        .expect("paraft starts");
    assert!(out.status.success(), "{}", text(&out.stderr));
    let said = text(&out.stdout);
    contains(&said, &["trace   ", "trace.json", "5 processes", "ui.perfetto.dev"]);
    assert!(!said.contains("could not be recorded"), "{said}");
    let (slices, events) = slices(&run_dir.join("trace.json"));

    let stages: BTreeSet<&str> = slices.iter().map(|s| s.stage.as_str()).collect();
    assert_eq!(stages, BTreeSet::from(STAGES));
    let processes: BTreeSet<&str> =
        slices.iter().filter_map(|s| s.process.split_whitespace().next()).collect();
    assert_eq!(processes, BTreeSet::from(["server-0", "server-1", "server-2", "worker-0", "worker-1"]));
    let steps: BTreeSet<u64> = slices.iter().map(|s| s.of().0).collect();
    assert_eq!(steps, (1..=5).collect(), "as many as were asked for");

    let mut tracks: BTreeMap<u64, Vec<&Slice>> = BTreeMap::new();
    slices.iter().for_each(|s| tracks.entry(s.track).or_default().push(s));
    for track in tracks.values_mut() {
        track.sort_by(|a, b| (a.begin, a.end).partial_cmp(&(b.begin, b.end)).expect("numbers"));
        for w in track.windows(2) {
            assert!(w[0].end <= w[1].begin + SLACK, "two at a time on one track: {w:?}");
        }
    }

    let pushes: Vec<&Slice> = slices.iter().filter(|s| s.stage == "push").collect();
    let buckets: BTreeSet<u64> = pushes.iter().map(|s| s.of().1).collect();
    assert!(buckets.len() > 1, "parameters and buffers: {buckets:?}");
    assert_eq!(pushes.len(), 5 * 2 * buckets.len());
    for push in &pushes {
        let (step, bucket, worker) = push.of();
        let all = |stage: &str, worker: Option<u64>| {
            let found = slices.iter().filter(|s| s.stage == stage && s.of() == (step, bucket, worker));
            found.cloned().collect::<Vec<_>>()
        };
        let one = |stage: &str, worker: Option<u64>| {
            let mut found = all(stage, worker);
            assert_eq!(found.len(), 1, "{stage} of {push:?}: {found:?}");
            found.remove(0)
        };
        let written = [all("copy", worker), all("encode", worker)].concat();
        let [written] = written.as_slice() else { panic!("it is copied or encoded, once: {written:?}") };
        let (ready, queue) = (one("ready", worker), one("queue", worker));
        // One update of both workers' pushes.
        let replicate = one("replicate", None);
        let applies = all("apply", None);
        let on: BTreeSet<&str> = applies.iter().map(|a| a.process.as_str()).collect();
        assert_eq!(on.len(), applies.len(), "once on each replica: {applies:?}");
        let apply = applies.iter().find(|a| a.process == replicate.process).expect("the leader's");
        assert_eq!(queue.process, replicate.process);
        let order = [
            ("the model reports it", ready.end),
            ("it is written", written.begin),
            ("it is there", written.end),
            ("it is handed over", push.begin),
            ("it has arrived", queue.begin),
            ("the round is closed", queue.end),
            ("the leader begins to apply it", apply.begin),
            ("it is applied", apply.end),
            ("the coordinator knows", replicate.end),
            ("the ack is there", push.end),
        ];
        for w in order.windows(2) {
            assert!(w[0].1 <= w[1].1 + SLACK, "{} at {}, {} at {}; {push:?}", w[0].0, w[0].1, w[1].0, w[1].1);
        }
        assert!(replicate.begin <= apply.begin + SLACK, "{replicate:?} {apply:?}");
        let (publish, pull, decode) = (one("publish", worker), one("pull", worker), one("decode", worker));
        let back = [apply.end, publish.begin, publish.end, pull.end, decode.begin];
        assert!(back.windows(2).all(|w| w[0] <= w[1] + SLACK), "{back:?} {push:?}");
        assert!(queue.args["bytes"] == push.args["bytes"] && written.args["bytes"] == push.args["bytes"]);
    }
    for ph in ["s", "t", "f"] {
        assert_eq!(events.iter().filter(|e| e["ph"] == ph).count(), pushes.len(), "arrows: {ph}");
    }

    // The files of the processes can be merged again, as those of several hosts are.
    let again = scratch.path().join("again.json");
    let folder = run_dir.join("trace");
    let args = ["trace", folder.to_str().expect("utf-8"), "--to", again.to_str().expect("utf-8")];
    let out = run(&args);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert_eq!(fs::read(&again).expect("again"), fs::read(run_dir.join("trace.json")).expect("trace"));
}

#[test]
fn without_tracing_no_span_is_recorded_but_sums_are_served() {
    let scratch = tempfile::tempdir().expect("scratch");
    let run_dir = scratch.path().join("run");
    let l = Launcher::training(&digits("asp", 1, 100_000), 2);
    let server = wait("the address of /metrics", || {
        let log = fs::read_to_string(l.run_dir.join("server-0.log")).unwrap_or_default();
        let line = log.lines().find(|l| l.contains("serving /metrics")).ok_or("no line")?;
        let line: Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
        line["fields"]["at"].as_str().map(str::to_string).ok_or(line.to_string())
    });
    let page = wait("sums of the stages", || {
        let page = get(&server, &l.run_dir);
        let counted = |stage: &str| {
            let line = format!("paraft_stage_spans_total{{stage=\"{stage}\"}} ");
            page.lines().find_map(|l| l.strip_prefix(&line)?.parse::<u64>().ok()).unwrap_or(0) > 0
        };
        match ["queue", "replicate", "apply", "publish"].iter().all(|s| counted(s)) {
            true => Ok(page.clone()),
            false => Err(page),
        }
    });
    for stage in STAGES {
        contains(&page, &[&format!("paraft_stage_seconds_total{{stage=\"{stage}\"}} ")]);
    }
    assert!(!l.run_dir.join("trace").exists());
    let _ = kill(Pid::from_raw(l.child.id() as i32), Signal::SIGINT);
    let kept = l.keep();
    let dir = l.run_dir.clone();
    l.output();
    assert!(!dir.join("trace").exists() && !dir.join("trace.json").exists());
    drop(kept);
    let out = run(&["trace", run_dir.parent().and_then(Path::to_str).expect("utf-8")]);
    assert_eq!(out.status.code(), Some(65), "{}", text(&out.stderr));
    contains(&text(&out.stderr), &["holds no trace", "--trace"]);
    let out = run(&["train", "job.toml", "--trace-steps", "3"]);
    assert_eq!(out.status.code(), Some(2), "steps of what? {}", text(&out.stderr));
}

/// As Prometheus gets it, with a certificate of the run's.
fn get(address: &str, run_dir: &Path) -> String {
    use paraft_tls::{Access, access::As, access::Expected, blocking::Wire};
    use std::io::{Read, Write};
    let mut page = String::new();
    let Ok(socket) = std::net::TcpStream::connect(address) else { return page };
    let access = Access::of(Some(&run_dir.join("certs")), false, As::Admin).expect("certificates");
    let mut stream = Wire::dial(socket, &access, &Expected::SERVER).expect("TLS");
    let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    let _ = stream.read_to_string(&mut page);
    page
}

/// An OTLP receiver over HTTP that replies with this status.
fn takes_otlp(status: &'static str) -> (String, std::thread::JoinHandle<Vec<(String, Value)>>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let takes = move || {
        let (socket, _) = listener.accept().expect("somebody comes");
        let mut socket = std::io::BufReader::new(socket);
        let mut taken = Vec::new();
        loop {
            let (mut head, mut line) = (Vec::new(), String::new());
            while socket.read_line(&mut line).is_ok_and(|n| n > 2) {
                head.push(std::mem::take(&mut line).trim().to_lowercase());
            }
            let Some(length) = head.iter().find_map(|h| h.strip_prefix("content-length: ")) else {
                return taken;
            };
            let mut body = vec![0; length.parse().expect("a length")];
            socket.read_exact(&mut body).expect("a body");
            taken.push((head.join("\n"), serde_json::from_slice(&body).expect("JSON")));
            write!(socket.get_mut(), "HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\n{{}}").expect("answered");
        }
    };
    (url, std::thread::spawn(takes))
}

#[test]
fn a_trace_exports_spans_of_every_process_to_otlp() {
    let scratch = tempfile::tempdir().expect("scratch");
    let run_dir = scratch.path().join("run");
    let dir = run_dir.to_str().expect("utf-8");
    let path = a_job(scratch.path(), "asp");
    let out = run(&["train", path.to_str().expect("utf-8"), "--run-dir", dir, "--trace", "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let (slices, _) = slices(&run_dir.join("trace.json"));
    let (url, takes) = takes_otlp("200 OK");
    let mut sends = paraft();
    sends.args(["trace", dir, "--otlp", &url]).env("OTEL_EXPORTER_OTLP_HEADERS", "api-key=abc");
    let out = sends.output().expect("paraft starts");
    assert!(out.status.success(), "{}", text(&out.stderr));
    let taken = takes.join().expect("it was taken");
    for (head, _) in &taken {
        contains(head, &["post /v1/traces http/1.1", "content-type: application/json", "api-key: abc"]);
    }
    let spans = |r: &Value| r["scopeSpans"][0]["spans"].as_array().expect("spans").clone();
    let resources = || taken.iter().map(|(_, body)| &body["resourceSpans"][0]);
    let all: Vec<Value> = resources().flat_map(spans).collect();
    let steps = all.iter().filter(|s| s["name"] == "step").count();
    assert_eq!(all.len() - steps, slices.len(), "each of them");
    assert_eq!(steps, 2 * 8, "of two workers");
    contains(&text(&out.stdout), &[&format!("{} spans to {url}", all.len())]);
    let name = |r: &Value| {
        let attributes = r["resource"]["attributes"].as_array().expect("attributes").clone();
        let of = attributes.into_iter().find(|a| a["key"] == "service.instance.id");
        of.and_then(|a| Some(a["value"]["stringValue"].as_str()?.to_string())).expect("a name")
    };
    let names: BTreeSet<String> = resources().map(name).collect();
    let expected = ["server-0", "server-1", "server-2", "worker-0", "worker-1"];
    assert_eq!(names, expected.map(String::from).into());
    // What a leader did for a push lies in it.
    let ids: BTreeMap<&str, &Value> = all.iter().filter_map(|s| Some((s["spanId"].as_str()?, s))).collect();
    let queued: Vec<&Value> = all.iter().filter(|s| s["name"] == "queue").collect();
    assert!(!queued.is_empty());
    for q in queued {
        let push = ids[q["parentSpanId"].as_str().expect("a parent")];
        assert_eq!((&push["name"], &push["traceId"]), (&"push".into(), &q["traceId"]));
    }

    let (url, takes) = takes_otlp("401 Unauthorized");
    for (to, code, words) in [
        (&*url, 78, "OTEL_EXPORTER_OTLP_HEADERS"),
        ("http://127.0.0.1:1", 69, "127.0.0.1:1"),
        ("localhost:4318", 2, "http://HOST:4318"),
    ] {
        let out = run(&["trace", dir, "--otlp", to]);
        assert_eq!(out.status.code(), Some(code), "{}", text(&out.stderr));
        contains(&text(&out.stderr), &[words]);
    }
    drop(takes);
}
