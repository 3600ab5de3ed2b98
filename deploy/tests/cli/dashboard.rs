//! The live page, queried as by a browser.

use crate::{common::*, engines::Tools};
use serde_json::json;
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
};

/// A job that trains on its own fleet, and the address of its page.
struct Page {
    launcher: Child,
    folder: tempfile::TempDir,
    address: String,
    token: String,
}

impl Drop for Page {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.launcher.id() as i32), Signal::SIGTERM);
        let _ = self.launcher.wait();
    }
}

impl Page {
    fn of(body: &str) -> Self {
        Self::printed_by("train", body, &[])
    }

    fn printed_by(command: &str, body: &str, more: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("scratch");
        let mut trains = paraft();
        trains.arg(command).arg(job(folder.path(), body)).arg("--run-dir").arg(folder.path().join("run"));
        trains.args(more);
        Self::of_command(trains, folder)
    }

    fn of_command(mut command: Command, folder: tempfile::TempDir) -> Self {
        let said = folder.path().join("said");
        command.stdout(Stdio::null()).stderr(fs::File::create(&said).expect("a file"));
        let launcher = command.spawn().expect("paraft starts");
        let (address, token) = wait("the page's address", || {
            let said = fs::read_to_string(&said).unwrap_or_default();
            let link = said
                .split_whitespace()
                .find_map(|w| w.strip_prefix("http://"))
                .ok_or_else(|| said.clone())?;
            let (address, token) = link.split_once("/#token=").ok_or_else(|| said.clone())?;
            Ok((address.to_string(), token.to_string()))
        });
        Self { launcher, folder, address, token }
    }

    fn asks(&self, address: &str, request: &str, more: &[&str], body: &str) -> BufReader<TcpStream> {
        let mut socket = TcpStream::connect(address).expect("it listens");
        socket.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        let more: String = more.iter().map(|h| format!("{h}\r\n")).collect();
        let length = body.len();
        write!(socket, "{request} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {length}\r\n{more}\r\n{body}")
            .expect("asked");
        BufReader::new(socket)
    }

    fn shows(&self) -> String {
        format!("Authorization: Bearer {}", self.token)
    }

    /// The status and the body of a reply.
    fn answer(&self, request: &str, more: &[&str], body: &str) -> (u16, String) {
        let mut text = String::new();
        self.asks(&self.address, request, more, body).read_to_string(&mut text).expect("an answer");
        let status = text.split_whitespace().nth(1).and_then(|s| s.parse().ok()).expect("a status");
        (status, text)
    }

    fn acts(&self, act: &Value) -> (u16, String) {
        self.answer("POST /act", &[&self.shows()], &act.to_string())
    }

    /// The events of the page at an address from now on.
    fn told(&self, address: &str) -> impl Iterator<Item = Value> + use<> {
        let lines = self.asks(address, "GET /behind/a/proxy/live", &[&self.shows()], "").lines();
        lines.map_while(Result::ok).filter_map(|l| serde_json::from_str(l.strip_prefix("data: ")?).ok())
    }

    /// The first event that satisfies `so`.
    fn hears<T>(&self, address: &str, what: &str, so: impl Fn(&Value) -> Option<T>) -> T {
        let began = Instant::now();
        let mut last = Value::Null;
        for said in self.told(address) {
            match so(&said) {
                Some(t) => return t,
                None => assert!(began.elapsed() < DEADLINE, "gave up waiting for {what}: {said}"),
            }
            last = said;
        }
        let said = fs::read_to_string(self.folder.path().join("said")).unwrap_or_default();
        panic!("the page said no more, waiting for {what}: {last}; the launcher: {said}")
    }
}

fn trains(said: &Value) -> Option<Value> {
    let job = said["facts"]["jobs"].as_array()?.iter().find(|j| j["name"] == "t")?;
    let steps = job["members"].as_array()?.iter().filter_map(|m| m["clock"].as_u64()).max()?;
    (steps > 20).then(|| job.clone())
}

#[test]
fn a_run_page_shows_it_and_accepts_commands_with_the_token() {
    let page = Page::of(&digits("bsp", 3, 100_000));
    let job = page.hears(&page.address, "it to train", trains);
    assert_eq!((&job["mode"], job["workers"].as_u64()), (&json!("bsp"), Some(2)), "{job}");
    let point = page.hears(&page.address, "a point", |said| {
        let points = said["news"]["points"].as_object()?.values().next()?.clone();
        (points["samples"].as_f64()? > 0.0 && points["loss"].is_f64()).then_some(points)
    });
    assert!(point["step"].as_u64() > Some(20), "{point}");
    page.hears(&page.address, "an evaluation", |said| {
        let known =
            || said["curves"].as_object()?.values().next()?["evaluations"].as_array()?.first().cloned();
        known().or_else(|| said["news"]["evaluations"].as_object()?.values().next().cloned())
    });
    page.hears(&page.address, "somebody to wait", |said| {
        let jobs = said["facts"]["jobs"].as_array()?;
        jobs.iter().find_map(|j| j["waits"].as_array()?.first().cloned())
    });
    // The page itself contains no data.
    let (status, html) = page.answer("GET /under/some/prefix/", &[], "");
    assert!(status == 200 && html.contains("uPlot") && !html.contains(&page.token), "{status}");
    // An action has the effect and the errors of its command.
    let (status, said) = page.acts(&json!({"act": "mode", "job": "t", "mode": "asp"}));
    assert_eq!(status, 200, "{said}");
    contains(&said, &["t continues in asp (switch 1)"]);
    page.hears(&page.address, "the other mode", |said| trains(said).filter(|j| j["mode"] == "asp"));
    for (act, words) in [
        (json!({"act": "mode", "job": "u", "mode": "asp"}), "no job `u`"),
        (json!({"act": "mode", "job": "t", "mode": "sometimes"}), "sometimes"),
        (json!({"act": "drain", "server": 9}), "9"),
        (json!({"act": "explode"}), "no action"),
        (json!([]), "no action"),
    ] {
        let (status, said) = page.acts(&act);
        assert!(status >= 400, "{act}: {said}");
        contains(&said, &[words]);
    }
    let (status, said) = page.acts(&json!({"act": "stop", "job": "t"}));
    assert_eq!(status, 200, "{said}");
    page.hears(&page.address, "what was done there", |said| {
        let events = said["events"].as_array()?;
        let acted = |e: &&Value| {
            e["kind"] == "action" && e["what"].as_str().is_some_and(|w| w.contains("asked from"))
        };
        (events.iter().filter(acted).count() >= 2).then_some(())
    });
}

#[test]
fn a_client_without_the_token_neither_reads_nor_acts() {
    let page = Page::of(&digits("asp", 1, 100_000));
    let wrong = format!("Authorization: Bearer {}", "0".repeat(page.token.len()));
    let short = format!("Authorization: Bearer {}", &page.token[1..]);
    let (shows, stop) = (page.shows(), json!({"act": "stop", "job": "t"}).to_string());
    for (request, more, why) in [
        ("GET /live", &[][..], "no token"),
        ("GET /live", &[&*wrong], "wrong token"),
        ("GET /live", &[&*short], "wrong token"),
        ("GET /live?token=x", &[], "no token"),
        ("POST /act", &[], "no token"),
        ("POST /act", &[&*wrong], "wrong token"),
        ("POST /act", &[&*shows, "Origin: http://elsewhere.example"], "another site"),
        ("POST /act", &[&*shows, "Origin: null"], "another site"),
    ] {
        let (status, said) = page.answer(request, more, &stop);
        assert_eq!(status, 403, "{request} {more:?}: {said}");
        contains(&said, &["refused", why]);
        assert!(!said.contains("Access-Control"), "no other site may read it: {said}");
    }
    let log = fs::read_to_string(page.folder.path().join("run/server-0.log")).expect("a log");
    contains(&log, &["no token", "wrong token", "another site"]);
    let job = page.hears(&page.address, "it to train", trains);
    assert_eq!(job["state"], "running", "{job}");
}

#[test]
fn every_servers_page_shows_a_death_and_its_election() {
    let page = Page::of(&digits("asp", 3, 100_000));
    page.hears(&page.address, "it to train", trains);
    let pages: Vec<(u64, String)> = page.hears(&page.address, "everybody's pages", |said| {
        let servers = said["facts"]["servers"].as_array()?;
        let all: Vec<_> = servers
            .iter()
            .filter_map(|s| Some((s["id"].as_u64()?, s["page"].as_str()?.to_string())))
            .collect();
        (all.len() == 3 && all.iter().all(|(_, p)| !p.is_empty())).then_some(all)
    });
    assert!(pages.iter().any(|(_, at)| *at == page.address), "{pages:?}");
    // A server that leads a shard of the job and does not serve this page.
    let leads = page.hears(&page.address, "leaders", |said| {
        let shards = said["facts"]["shards"].as_array()?;
        shards.iter().find_map(|s| s["leader"].as_u64().filter(|l| *l != 0))
    });
    let told = page.told(&page.address);
    let victim = pid_of(
        page.folder.path(),
        &format!("--log-file {}", page.folder.path().join(format!("run/server-{leads}.log")).display()),
    );
    kill(victim, Signal::SIGKILL).expect("killed");
    let (mut dead, mut elected) = (false, false);
    for said in told {
        for event in said["news"]["events"].as_array().into_iter().flatten() {
            let what = event["what"].as_str().unwrap_or_default();
            dead |= what.starts_with(&format!("s{leads} is silent"));
            elected |= event["kind"] == "election" && what.contains("leads shard");
        }
        if dead && elected {
            break;
        }
    }
    assert!(dead && elected, "s{leads} died; said so: {dead}, elected: {elected}");
    let (_, other) = pages.iter().find(|(id, _)| *id != leads && *id != 0).expect("a third");
    page.hears(other, "the third server's page", trains);
}

#[test]
fn a_simulated_fleet_has_a_page_too_where_nothing_can_be_done() {
    let more =
        ["--dashboard", "127.0.0.1:0", "--workers", "40", "--server-mttf-s", "3", "--server-restart-s", "1"];
    let page = Page::printed_by("simulate", &digits("ssp:2", 3, 100_000), &more);
    let job = page.hears(&page.address, "it to train", trains);
    assert_eq!((job["workers"].as_u64(), &job["state"]), (Some(40), &json!("running")), "{job}");
    let point = page
        .hears(&page.address, "a point", |said| said["news"]["points"].as_object()?.values().next().cloned());
    assert!(point["samples"].as_f64() > Some(0.0) && point["loss"].is_f64(), "{point}");
    page.hears(&page.address, "a server to fail", |said| {
        let events = said["news"]["events"].as_array().or(said["events"].as_array())?;
        events
            .iter()
            .find(|e| e["kind"] == "server" && e["what"].as_str().is_some_and(|w| w.contains("silent")))
            .cloned()
    });
    page.hears(&page.address, "the facts", |said| said["facts"]["simulated"].as_bool().filter(|s| *s));
    let (status, said) = page.acts(&json!({"act": "stop", "job": "t"}));
    assert!(status == 409 && said.contains("simulated"), "{status}: {said}");
    let (status, _) = page.answer("GET /live", &["Authorization: Bearer wrong"], "");
    assert_eq!(status, 403);
}

#[test]
fn a_run_page_scales_workers_and_sets_and_clears_faults() {
    let body = digits("asp", 3, 100_000).replace("[train]\n", "[train]\nsampler = \"leased\"\n");
    // On a loaded machine an election takes longer.
    let body = body + "timeout_ms = 300000\n";
    let page = Page::printed_by("train", &body, &["--faults"]);
    let job = page.hears(&page.address, "it to train", trains);
    assert_eq!(job["most"], 2, "{job}");
    let id = job["id"].as_u64().expect("a number");
    let members = |n: usize| {
        page.hears(&page.address, &format!("{n} workers"), |said| {
            let members = trains(said)?["members"].as_array()?.len();
            (members == n).then_some(())
        });
    };
    let workers = |n: u64| page.acts(&json!({"act": "workers", "job": id, "workers": n}));
    assert_eq!(workers(1).0, 200);
    members(1);
    assert_eq!(workers(2).0, 200);
    members(2);
    for (n, words) in [(0, "one at least"), (3, "the job has 2")] {
        let (status, said) = workers(n);
        assert!(status == 409 && said.contains(words), "{status}: {said}");
    }
    let (status, said) = page.acts(&json!({"act": "workers", "job": id + 7, "workers": 1}));
    assert!(status == 409 && said.contains("no job"), "{status}: {said}");

    // Behind fault point proxies, servers look remote.
    let (status, said) = page.acts(&json!({"act": "mode", "job": "t", "mode": "ssp:4"}));
    assert!(status == 200 && said.contains("t continues in ssp:4"), "{status}: {said}");

    // The faults file contains the fault.
    let file = page.folder.path().join("run/faults.json");
    let put = |fault: &str, undo: bool| {
        page.acts(&json!({"act": "fault", "server": 1, "fault": fault, "undo": undo}))
    };
    let on = |wanted: Value| {
        page.hears(&page.address, "the faults", |said| (said["facts"]["faults"] == wanted).then_some(()));
    };
    on(json!([]));
    let (status, said) = put("partition", false);
    assert!(status == 200 && said.contains("partition is put on s1"), "{status}: {said}");
    on(json!([[1, "partition"]]));
    assert!(fs::read_to_string(&file).expect("the file").contains("\"isolated\":[1]"));
    page.hears(&page.address, "it to be seen", |said| {
        let servers = said["facts"]["servers"].as_array()?;
        servers.iter().any(|s| s["id"] == 1 && s["state"] != "up").then_some(())
    });
    assert_eq!(put("partition", true).0, 200);
    on(json!([]));
    page.hears(&page.address, "it to be back", |said| {
        let servers = said["facts"]["servers"].as_array()?;
        servers.iter().any(|s| s["id"] == 1 && s["state"] == "up").then_some(())
    });
    for (act, status) in [
        (json!({"act": "fault", "server": 9, "fault": "partition"}), 409),
        (json!({"act": "fault", "server": 1, "fault": "plague"}), 400),
    ] {
        let (is, said) = page.acts(&act);
        assert_eq!(is, status, "{said}");
    }

    // The runs beside this one, and no other file.
    let runs = |query: &str| page.answer(&format!("GET /runs{query}"), &[&page.shows()], "");
    let earlier = page.folder.path().join("earlier");
    fs::create_dir(&earlier).expect("made");
    fs::copy(page.folder.path().join("run/metrics.jsonl"), earlier.join("metrics.jsonl")).expect("copied");
    let (status, said) = runs("");
    assert!(status == 200 && said.contains("\"name\":\"earlier\""), "{status}: {said}");
    assert!(!said.contains("\"run\""), "it is drawn as it trains: {said}");
    let (status, said) = runs("?name=earlier");
    assert!(
        status == 200 && said.contains("\"points\":[{\"at\":") && said.contains("\"evaluations\":[{"),
        "{said}"
    );
    for name in ["..", "..%2frun", "../run", "none"] {
        assert_eq!(runs(&format!("?name={name}")).0, 404, "{name}");
    }
    assert_eq!(page.answer("GET /runs", &[], "").0, 403, "without the token");
}

#[test]
fn connections_without_the_token_lock_no_client_out() {
    let page = Page::of(&digits("asp", 1, 100_000));
    page.hears(&page.address, "it to train", trains);
    let holds: Vec<TcpStream> = (0..600)
        .filter_map(|_| {
            let mut socket = TcpStream::connect(&page.address).ok()?;
            write!(socket, "GET /live HTTP/1.1\r\n").ok()?;
            Some(socket)
        })
        .collect();
    let (status, _) = page.answer("GET /runs", &[&page.shows()], "");
    assert_eq!(status, 200, "beside {} connections", holds.len());
    // A connection that has shown the token is not the one that closes.
    let mut told = page.told(&page.address);
    assert!(told.next().is_some());
    let more: Vec<_> = (0..300).filter_map(|_| TcpStream::connect(&page.address).ok()).collect();
    assert!(told.nth(3).is_some(), "it goes on beside {} more", more.len());
}

#[test]
fn a_fleet_without_fault_points_has_none_on_its_page() {
    let page = Page::of(&digits("asp", 1, 100_000));
    page.hears(&page.address, "it to train", trains);
    let none = page.hears(&page.address, "the facts", |said| Some(said["facts"]["faults"].clone()));
    assert_eq!(none, Value::Null);
    let (status, said) = page.acts(&json!({"act": "fault", "server": 0, "fault": "slow-disk"}));
    assert!(status == 409 && said.contains("--faults"), "{status}: {said}");
}

#[test]
fn a_standalone_page_serves_a_fleet_and_scales_an_engine() {
    let scratch = tempfile::tempdir().expect("scratch");
    let run = scratch.path().join("run");
    let mut train = paraft();
    train.arg("train").arg(job(scratch.path(), &digits("bsp", 3, 100_000)));
    train.arg("--no-dashboard").arg("--run-dir").arg(&run).stdout(Stdio::null()).stderr(Stdio::null());
    let mut train = train.spawn().expect("paraft starts");
    let servers = wait("the servers", || fs::read_to_string(run.join("servers")).map_err(|e| e.to_string()));
    // As if an engine had started them.
    let systemctl = Tools::new("systemctl", "");
    let parts: Vec<_> = (0..2).map(|n| json!(["worker", format!("paraft-t-worker@{n}.service")])).collect();
    let servers: Vec<_> = servers.trim().split(',').collect();
    let handle = json!({"engine": "systemd", "parts": parts, "args": ["--user"], "servers": servers});
    fs::write(run.join("engine.json"), handle.to_string()).expect("written");

    let mut command = paraft();
    command.arg("dashboard").arg("--fleet").arg(&run).env("PATH", systemctl.first_in_path());
    let page = Page::of_command(command, tempfile::tempdir().expect("scratch"));
    let job = page.hears(&page.address, "it to train", trains);
    assert_eq!(job["most"], 2, "{job}");
    let workers = |n: u64| page.acts(&json!({"act": "workers", "job": job["id"], "workers": n}));
    let (status, said) = workers(1);
    assert!(status == 200 && said.contains("t is to have 1 worker"), "{status}: {said}");
    let told = "--user start paraft-t-worker@0.service\n--user stop paraft-t-worker@1.service\n";
    assert_eq!(systemctl.told(), told);
    for n in [0, 3] {
        let (status, said) = workers(n);
        assert!(status == 409 && said.contains("the job has 2, and one at least"), "{status}: {said}");
    }
    assert_eq!(systemctl.told(), "");
    let (status, said) = page.acts(&json!({"act": "mode", "job": "t", "mode": "asp"}));
    assert!(status == 200 && said.contains("t continues in asp"), "{status}: {said}");
    let status = paraft().args(["status", "--fleet"]).arg(&run).output().expect("paraft starts");
    contains(&text(&status.stdout), &["asp"]);
    // The server logs refusals and actions.
    let wrong = "Authorization: Bearer 0123456789abcdef0123456789abcdef";
    assert_eq!(page.answer("POST /act", &[wrong], "{}").0, 403);
    wait("it to be said", || {
        let said = fs::read_to_string(page.folder.path().join("said")).unwrap_or_default();
        let all = ["it showed a wrong token", "t continues in asp", "t is to have 1 worker"];
        if all.iter().all(|words| said.contains(words)) { Ok(()) } else { Err(said) }
    });
    // The fleet ends, and no process is left to report it.
    let _ = kill(Pid::from_raw(train.id() as i32), Signal::SIGTERM);
    let _ = train.wait();
    page.hears(&page.address, "nobody to be there", |said| {
        let facts = &said["facts"];
        let silent = facts["servers"].as_array()?.iter().filter(|s| s["state"] == "silent").count();
        let stale = facts["jobs"].as_array()?.iter().any(|j| j["name"] == "t" && j["stale"] == true);
        let led = facts["shards"].as_array()?.iter().any(|s| !s["leader"].is_null());
        (silent == 3 && stale && !led && facts["leader"].is_null()).then_some(())
    });
}

#[test]
fn an_open_page_hears_how_the_run_has_ended() {
    let page = Page::of(&digits("bsp", 3, 100_000));
    let job = page.hears(&page.address, "it to train", trains);
    let (status, said) = page.answer(&format!("GET /record?job={}", job["id"]), &[&page.shows()], "");
    assert_eq!(status, 200, "{said}");
    contains(&said, &["\"points\":[{\"at\":", "\"end\":null"]);
    assert_eq!(page.answer("GET /record?job=99", &[&page.shows()], "").0, 204, "no such job");
    assert_eq!(page.answer("GET /record?job=0", &[], "").0, 403, "without the token");
    let told = page.told(&page.address);
    let (status, said) = page.acts(&json!({"act": "stop", "job": "t"}));
    assert_eq!(status, 200, "{said}");
    let last = told.last().expect("a last message");
    let (record, end) = (&last["record"], &last["record"]["end"]);
    assert_eq!((&record["run"]["name"], &end["state"]), (&json!("t"), &json!("stopped")), "{last}");
    assert_eq!(last["job"], job["id"]);
    assert!(end["summary"]["final_loss"].is_f64(), "{last}");
    let report = end["report"].as_str().expect("the report is written before the servers end");
    assert!(Path::new(report).is_file(), "{report}");
}

#[test]
fn an_ended_run_has_a_page_from_its_record() {
    let scratch = tempfile::tempdir().expect("scratch");
    let dir = scratch.path().join("runs/t-1");
    let file = job(scratch.path(), &digits("bsp", 1, 1));
    let (file, at) = (file.to_str().expect("utf-8"), dir.to_str().expect("utf-8"));
    let out = run(&["train", file, "--run-dir", at, "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let mut command = paraft();
    command.args(["dashboard", "--fleet", at]);
    let page = Page::of_command(command, scratch);
    let job = page.hears(&page.address, "the job", |said| said["facts"]["jobs"].as_array()?.first().cloned());
    assert_eq!((&job["name"], &job["state"]), (&json!("t"), &json!("finished")), "{job}");
    let (status, said) = page.answer("GET /record?job=0", &[&page.shows()], "");
    assert_eq!(status, 200, "{said}");
    contains(&said, &["\"state\":\"finished\"", "report.html", "\"points\":[{\"at\":"]);
    let (status, said) = page.answer("GET /runs", &[&page.shows()], "");
    assert!(status == 200 && !said.contains("\"t-1\""), "its own run is not among the others: {said}");
}
