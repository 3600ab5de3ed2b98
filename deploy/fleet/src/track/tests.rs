//! Against a small server in this process: one that answers, one that fails, one that hangs, one that is not there.

use super::{upload::Upload, *};
use mlflow::{About, METRICS, Metric};
use paraft_common::ServerId;
use paraft_record::{Eval, Incident, IncidentKind, METRICS_FILE, MetricsWriter, Run, Train};
use parking_lot::Mutex;
use run::PARENT;
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    time::{Duration, Instant, UNIX_EPOCH},
};

/// What the server does with a request.
#[derive(Clone, Copy, PartialEq)]
enum Mood {
    Answers,
    Fails,
    Denies,
    /// Takes what comes, and says nothing.
    Hangs,
    /// Makes what it is asked to make, and closes the connection without an answer; the first time.
    Drops,
}

struct Server {
    url: String,
    mood: Arc<Mutex<Mood>>,
    /// Path and body of each request that it did what it asks.
    seen: Arc<Mutex<Vec<(String, Value)>>>,
    authorization: Arc<Mutex<Option<String>>>,
}

impl Server {
    fn start(mood: Mood) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let server = Self {
            url: format!("http://{}", listener.local_addr().expect("its address")),
            mood: Arc::new(Mutex::new(mood)),
            seen: Arc::default(),
            authorization: Arc::default(),
        };
        let (mood, seen, authorization) =
            (server.mood.clone(), server.seen.clone(), server.authorization.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (mood, seen, authorization) = (mood.clone(), seen.clone(), authorization.clone());
                std::thread::spawn(move || serve(stream, &mood, &seen, &authorization));
            }
        });
        server
    }

    fn client(&self) -> Client {
        Client::new(&self.url)
    }

    fn bodies(&self, path: &str) -> Vec<Value> {
        self.seen.lock().iter().filter(|(p, _)| p == path).map(|(_, b)| b.clone()).collect()
    }

    /// All numbers that have come, as key and step.
    fn metrics(&self) -> Vec<(String, u64)> {
        let all = self.bodies("runs/log-batch");
        let metrics = all.iter().filter_map(|b| b["metrics"].as_array()).flatten();
        metrics
            .map(|m| (m["key"].as_str().unwrap_or_default().into(), m["step"].as_u64().unwrap_or(0)))
            .collect()
    }
}

/// One request a connection.
fn serve(
    mut stream: TcpStream,
    mood: &Mutex<Mood>,
    seen: &Mutex<Vec<(String, Value)>>,
    authorization: &Mutex<Option<String>>,
) {
    let mut reader = BufReader::new(stream.try_clone().expect("a socket"));
    let mut line = String::new();
    reader.read_line(&mut line).expect("a request");
    let target = line.split(' ').nth(1).unwrap_or_default().to_string();
    let path = target.split_once("/mlflow/").map_or("", |(_, p)| p).split('?').next().unwrap_or_default();
    let mut length = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).expect("a header");
        let Some((name, value)) = header.trim().split_once(": ") else { break };
        match name.to_lowercase().as_str() {
            "content-length" => length = value.parse().expect("a length"),
            "authorization" => *authorization.lock() = Some(value.into()),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).expect("a body");
    let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let mood = *mood.lock();
    if mood == Mood::Hangs {
        let _ = reader.read_to_end(&mut Vec::new()); // until the other one has gone
        return;
    }
    let (status, answer) = match (mood, path) {
        (Mood::Fails, _) => (500, "<html>".to_string()),
        (Mood::Denies, _) => (401, "You are not authenticated".to_string()),
        (_, "experiments/get-by-name") if seen.lock().iter().all(|(p, _)| p != "experiments/create") => {
            (404, json!({ "error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such" }).to_string())
        }
        (_, "experiments/get-by-name") => {
            (200, json!({ "experiment": { "experiment_id": "7" } }).to_string())
        }
        (_, "experiments/create") => (200, json!({ "experiment_id": "7" }).to_string()),
        (_, "runs/search") => {
            let wanted = body["filter"].as_str().unwrap_or_default();
            let made = seen.lock().iter().position(|(p, b)| {
                let id = b["tags"].as_array().into_iter().flatten().find(|t| t["key"] == "paraft.id");
                p == "runs/create" && id.is_some_and(|t| wanted.contains(t["value"].as_str().unwrap_or("?")))
            });
            let run = |n: &usize| {
                let id = format!("run-{n}");
                let seen = seen.lock();
                let mut updates = seen.iter().filter(|(p, b)| p == "runs/update" && b["run_id"] == id);
                let status = updates.next_back().map_or(json!("RUNNING"), |(_, b)| b["status"].clone());
                json!({ "info": { "run_id": id, "status": status } })
            };
            let runs: Vec<_> = made.iter().map(run).collect();
            (200, json!({ "runs": runs }).to_string())
        }
        (_, "runs/create") => (
            200,
            json!({ "run": { "info": { "run_id": format!("run-{}", seen.lock().len()) } } }).to_string(),
        ),
        _ => (200, "{}".to_string()),
    };
    let first = seen.lock().iter().all(|(p, _)| p != path);
    if status < 500 && mood != Mood::Denies {
        seen.lock().push((path.to_string(), body));
    }
    if mood == Mood::Drops && first && path.ends_with("create") {
        return;
    }
    let _ = write!(
        stream,
        "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{answer}",
        answer.len()
    );
}

fn some(from: u64, n: u64) -> impl Iterator<Item = Metric> {
    (from..from + n).map(|step| Metric { key: "train/loss".into(), value: 0.5, step, wall: 1.5 })
}

fn about() -> About {
    let params = (0..250).map(|i| (format!("k{i}"), "v".into())).collect();
    About {
        experiment: "digits".into(),
        name: "digits-1".into(),
        id: "abc".into(),
        began: 1.0,
        params,
        ..About::default()
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed().as_secs() < 60, "gave up waiting for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_run_is_created_once_with_parameters_metrics_and_end() {
    let server = Server::start(Mood::Answers);
    let upload = Upload::start(server.client(), about(), None);
    upload.push(some(0, 2500));
    until("numbers while it goes on", || server.metrics().len() == 2500);
    upload.push(some(2500, 1));
    upload.end(Status::Killed, 3.5);
    assert_eq!(upload.wait(), Ok(()));
    assert!(upload.notes().is_empty());
    let steps: Vec<_> = server.metrics().into_iter().map(|(_, s)| s).collect();
    assert!(steps.into_iter().eq(0..2501), "each once, in order");
    let batches = server.bodies("runs/log-batch");
    let sizes = |of: &str| batches.iter().filter_map(|b| b[of].as_array()).map(Vec::len).collect::<Vec<_>>();
    assert_eq!(sizes("params"), [100, 100, 50]);
    assert!(sizes("metrics").into_iter().all(|n| n <= METRICS));
    assert_eq!(server.bodies("experiments/create"), [json!({ "name": "digits" })]);
    let made = server.bodies("runs/create");
    assert_eq!(
        (made.len(), &made[0]["run_name"], &made[0]["start_time"]),
        (1, &json!("digits-1"), &json!(1000))
    );
    let end = server.bodies("runs/update");
    assert_eq!((&end[0]["status"], &end[0]["end_time"]), (&json!("KILLED"), &json!(3500)));
}

#[test]
fn an_mlflow_outage_is_logged_once_and_caught_up_later() {
    let server = Server::start(Mood::Fails);
    let upload = Upload::start(server.client(), about(), None);
    upload.push(some(0, 10));
    let mut notes = Vec::new();
    until("a warning", || {
        notes.extend(upload.notes());
        !notes.is_empty()
    });
    *server.mood.lock() = Mood::Answers;
    until("numbers", || server.metrics().len() == 10);
    upload.end(Status::Finished, 2.0);
    assert_eq!(upload.wait(), Ok(()));
    notes.extend(upload.notes());
    assert!(notes.len() == 1 && notes[0].contains("500") && notes[0].contains(&server.url), "{notes:?}");
}

#[test]
fn a_run_whose_answer_was_lost_is_not_made_twice() {
    let server = Server::start(Mood::Drops);
    let upload = Upload::start(server.client(), about(), None);
    upload.push(some(0, 1));
    until("its number", || !server.metrics().is_empty());
    upload.end(Status::Finished, 2.0);
    assert_eq!(upload.wait(), Ok(()));
    let again = Upload::start(server.client(), about(), None);
    again.end(Status::Finished, 2.0);
    assert_eq!(again.wait(), Ok(()));
    assert_eq!(server.bodies("runs/create").len(), 1);
    assert_eq!(server.bodies("experiments/create").len(), 1);
}

#[test]
fn a_silent_mlflow_delays_the_end_by_ten_seconds_at_most() {
    let nobody = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port");
    let hangs = Server::start(Mood::Hangs);
    let uploads = [Client::new(&format!("http://{nobody}")), hangs.client()].map(|client| {
        let upload = Upload::start(client, about(), None);
        (0..150).for_each(|i| upload.push(some(i * 1000, 1000)));
        upload.end(Status::Finished, 2.0);
        upload
    });
    for upload in &uploads {
        let unsent = upload.wait().expect_err("nobody is there");
        assert_eq!(unsent.metrics, 150_000, "those that were dropped to bound the queue, and those in it");
    }
    // What was asked last is given up too, and nothing is kept.
    until("the threads to end", || uploads.iter().all(|u| format!("{u:?}").contains("queue: []")));
}

#[test]
fn a_refused_client_learns_the_remedy_at_once() {
    let server = Server::start(Mood::Denies);
    let upload = Upload::start(server.client(), about(), None);
    upload.push(some(0, 3));
    upload.end(Status::Finished, 2.0);
    let unsent = upload.wait().expect_err("it is denied");
    assert!(unsent.why.contains("401") && unsent.why.contains("MLFLOW_TRACKING_TOKEN"), "{}", unsent.why);
    assert!(unsent.metrics <= 3);
    assert!(upload.notes().is_empty(), "the end says it");
}

/// A run's folder, with its job.
fn folder(url: &str) -> (tempfile::TempDir, Job, Event) {
    let dir = tempfile::tempdir().expect("scratch");
    let text = format!(
        "name = \"d\"\n[model]\nkind = \"mlp\"\nhidden = [8, 4]\n[data]\nkind = \"digits\"\n[track]\nmlflow = \"{url}\"\n"
    );
    std::fs::write(dir.path().join(JOB_FILE), &text).expect("a file");
    let job = Job::parse(&text, &dir.path().join(JOB_FILE), &[]).expect("a job");
    let run = Event::Run(Run { wall: 1000.25, workers: 1, ..Run::default() });
    MetricsWriter::append(dir.path().join(METRICS_FILE)).and_then(|mut w| w.write(&run)).expect("a record");
    (dir, job, run)
}

fn write(dir: &Path, samples: u64) {
    let wall = 1000.25 + samples as f64;
    let train = Train { wall, samples, seconds: samples as f64, loss: f64::NAN, ..Train::default() };
    let eval = Eval { wall, epoch: samples, loss: 0.5, accuracy: Some(0.75), ..Eval::default() };
    let mut writer = MetricsWriter::append(dir.join(METRICS_FILE)).expect("a record");
    [Event::Train(train), Event::Eval(eval)].iter().for_each(|e| writer.write(e).expect("a line"));
}

#[test]
fn a_followed_record_sent_again_is_the_same_mlflow_run() {
    let server = Server::start(Mood::Answers);
    let (dir, job, run) = folder(&server.url);
    let tracked = Tracked::new(dir.path(), &job, &run, None);
    write(dir.path(), 10);
    until("the first numbers", || !server.metrics().is_empty());
    write(dir.path(), 20);
    drop(tracked);
    let evals = |all: &[(String, u64)]| {
        all.iter().filter(|(k, _)| k == "eval/accuracy").map(|(_, s)| *s).collect::<Vec<_>>()
    };
    let first = server.metrics();
    assert_eq!(evals(&first), [10, 20]);
    assert_eq!(server.bodies("runs/update").last().map(|b| b["status"].clone()), Some(json!("FAILED")));
    let all = server.bodies("runs/log-batch");
    let param = |key: &str| {
        let params = all.iter().filter_map(|b| b["params"].as_array()).flatten();
        params.filter(|p| p["key"] == key).map(|p| p["value"].clone()).next()
    };
    assert_eq!(param("model.hidden"), Some(json!("[8,4]")));
    assert_eq!(param("train.batch"), Some(json!(job.train.batch.to_string())));
    assert_eq!(param("track.mlflow"), None);
    let before = server.metrics().len();
    send(dir.path(), None, None).expect("sent");
    assert_eq!(server.metrics()[before..], first, "the points of its file are those that were followed");
    assert_eq!(server.bodies("runs/create").len(), 1);
}

#[test]
fn failed_and_drained_servers_become_tags_at_the_end() {
    let server = Server::start(Mood::Answers);
    let (dir, job, run) = folder(&server.url);
    let tracked = Tracked::new(dir.path(), &job, &run, None);
    let what = IncidentKind::ServerEnded {
        server: ServerId(0),
        how: "was ended by SIGKILL".into(),
        code: None,
        signal: Some(9),
        restarts: false,
    };
    let mut writer = MetricsWriter::append(dir.path().join(METRICS_FILE)).expect("a record");
    let drained = |undo| IncidentKind::ServerDrained { server: ServerId(1), undo };
    for what in [what, drained(false), drained(true)] {
        writer.write(&Event::Incident(Incident { wall: 1001.0, what })).expect("a line");
    }
    drop(tracked);
    let tags = server.bodies("runs/set-tag");
    let said: Vec<_> = tags.iter().map(|tag| (&tag["key"], &tag["value"])).collect();
    let one = json!("1");
    let wanted = [json!("paraft.servers_lost"), json!("paraft.servers_drained")];
    assert_eq!(said, [(&wanted[0], &one), (&wanted[1], &one)]);
    assert_eq!(server.bodies("runs/update").len(), 1, "the end follows");
}

fn best() -> Best {
    Best { key: "eval/accuracy", value: 0.75, wall: 1020.0, set: vec!["optimizer.lr=0.1".into()] }
}

#[test]
fn trials_nest_in_their_sweep_and_do_not_wait_for_uploads() {
    let server = Server::start(Mood::Answers);
    let (dir, job, run) = folder(&server.url);
    let sweep = Sweep::new(&job, Path::new("/tmp/runs/d-sweep-1"), "what", 1.0).expect("it is tracked");
    let tracked = Tracked::new(dir.path(), &job, &run, Some(sweep.clone()));
    write(dir.path(), 10);
    drop(tracked);
    sweep.end(Status::Finished, Some(&best()));
    let made = server.bodies("runs/create");
    assert_eq!(made.len(), 2);
    assert_eq!(made[0]["run_name"], "d-sweep-1");
    let tags = made[1]["tags"].as_array().cloned().unwrap_or_default();
    let parent = tags.iter().find(|t| t["key"] == "mlflow.parentRunId").map(|t| t["value"].clone());
    let at = server.seen.lock().iter().position(|(p, _)| p == "runs/create");
    assert_eq!(parent, at.map(|n| json!(format!("run-{n}"))));
    let ends = server.bodies("runs/update");
    assert_eq!(
        ends.last().map(|b| (&b["run_id"], &b["status"])),
        Some((&parent.unwrap_or_default(), &json!("FINISHED")))
    );
}

/// Each created run: its name, its parent, its status.
fn runs(server: &Server) -> Vec<(String, Option<String>, String)> {
    let seen = server.seen.lock().clone();
    let made = seen.iter().enumerate().filter(|(_, (path, _))| path == "runs/create");
    let of = |(n, (_, run)): (usize, &(String, Value))| {
        let id = format!("run-{n}");
        let about = |path: &'static str| {
            seen.iter().filter(move |(p, _)| p == path).map(|(_, b)| b).filter(|b| b["run_id"] == id)
        };
        let word = |v: &Value| v.as_str().unwrap_or_default().to_string();
        let tags = || run["tags"].as_array().into_iter().flatten().chain(about("runs/set-tag"));
        let tag = |key: &str| tags().rfind(|t| t["key"] == key).map(|t| word(&t["value"]));
        let name = tag("mlflow.runName").unwrap_or_else(|| word(&run["run_name"]));
        (name, tag(PARENT), about("runs/update").next_back().map_or("RUNNING".into(), |u| word(&u["status"])))
    };
    made.map(of).collect()
}

#[test]
fn a_partly_sent_sweep_is_completed_later_without_duplicates() {
    let server = Server::start(Mood::Answers);
    let (dir, job, _) = folder(&server.url);
    let trials: Vec<_> =
        ["trial-0000", "trial-0001", "trial-0002"].map(|t| dir.path().join(t).join("epochs-1")).into();
    let mut firsts = Vec::new();
    for (n, trial) in trials.iter().enumerate() {
        std::fs::create_dir_all(trial).expect("a folder");
        std::fs::copy(dir.path().join(JOB_FILE), trial.join(JOB_FILE)).expect("a file");
        let run = Event::Run(Run { wall: 1000.0 + n as f64, workers: 1, ..Run::default() });
        MetricsWriter::append(trial.join(METRICS_FILE)).and_then(|mut w| w.write(&run)).expect("a record");
        write(trial, 10);
        firsts.push(run);
    }
    let sweep = || Sweep::new(&job, Path::new("/tmp/runs/d-sweep-1"), "what", 1.0).expect("it is tracked");
    // One trial while it trained, by a sweep that was killed then; another by itself.
    let live = sweep();
    drop(Tracked::new(&trials[0], &job, &firsts[0], Some(live)));
    until("the first trial", || server.bodies("runs/update").len() == 1);
    send(&trials[1], None, None).expect("sent");
    let parent = Some(format!(
        "run-{}",
        server.seen.lock().iter().position(|(p, _)| p == "runs/create").expect("the sweep's")
    ));
    for _twice in 0..2 {
        let sent = sweep().send(&job, &trials, Status::Finished, 1020.0, Some(&best())).expect("sent");
        assert_eq!(Some(sent), parent);
        let trial = |n: usize| (format!("trial-000{n}/epochs-1"), parent.clone(), "FAILED".to_string());
        let whole = ("d-sweep-1".to_string(), None, "FINISHED".to_string());
        assert_eq!(runs(&server), [whole, trial(0), trial(1), trial(2)]);
    }
    let told = |key: &str| {
        let of = server
            .bodies("runs/log-batch")
            .into_iter()
            .filter(|b| Some(b["run_id"].as_str()) == Some(parent.as_deref()));
        of.filter_map(|b| b[key].as_array().cloned()).flatten().collect::<Vec<_>>()
    };
    assert_eq!(told("params")[0], json!({ "key": "best.optimizer.lr", "value": "0.1" }));
    let metrics = told("metrics");
    assert_eq!(
        metrics[0],
        json!({ "key": "eval/accuracy", "value": 0.75, "timestamp": 1_020_000, "step": 0 })
    );
    assert!(metrics.iter().all(|m| *m == metrics[0]), "the same point, which is there once");
}

#[test]
fn an_open_mlflow_run_is_ended_by_the_next_in_its_folder() {
    let server = Server::start(Mood::Answers);
    let (dir, job, run) = folder(&server.url);
    let aside = |n: u32| {
        std::fs::rename(dir.path().join(METRICS_FILE), dir.path().join(format!("metrics.{n}.jsonl")))
            .expect("moved");
        let run = Event::Run(Run { wall: 2000.0 + f64::from(n), workers: 1, ..Run::default() });
        MetricsWriter::append(dir.path().join(METRICS_FILE))
            .and_then(|mut w| w.write(&run))
            .expect("a record");
        run
    };
    // Ended by the user, also where it is sent again; then killed.
    let mut tracked = Tracked::new(dir.path(), &job, &run, None);
    tracked.status = Status::Killed;
    drop(tracked);
    super::send_to(&server.client(), dir.path(), &job, None).expect("sent");
    let second = aside(1);
    let killed = Upload::start(server.client(), super::about(dir.path(), &job, &second), None);
    until("the second", || server.bodies("runs/create").len() == 2);
    let third = aside(2);
    drop(Tracked::new(dir.path(), &job, &third, None));
    let ends = || runs(&server).into_iter().map(|(.., status)| status).collect::<Vec<_>>();
    assert_eq!(ends(), ["KILLED", "FAILED", "FAILED"]);
    let end =
        server.bodies("runs/update").into_iter().find(|u| u["status"] == "FAILED").expect("the second's");
    let wrote =
        std::fs::metadata(dir.path().join("metrics.2.jsonl")).and_then(|m| m.modified()).expect("a time");
    let wrote = wrote.duration_since(UNIX_EPOCH).expect("after 1970").as_millis();
    assert_eq!(end["end_time"].as_u64().map(u128::from), Some(wrote), "when it was heard of last");
    drop(killed);
}
