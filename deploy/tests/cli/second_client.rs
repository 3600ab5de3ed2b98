//! A client in Python that was written from docs/protocol.md and the .proto files alone keeps a ledger while leaders are killed.
//! Skipped, with the reason, where no Python has grpcio; `.ci/run` installs it and says so by PARAFT_GRPC_PYTHON.

use crate::common::*;
use std::{
    io::{BufRead, BufReader},
    sync::mpsc,
};

fn python() -> Option<String> {
    let python = std::env::var("PARAFT_GRPC_PYTHON").unwrap_or_else(|_| "python3".into());
    let has = Command::new(&python).args(["-c", "import grpc, grpc_tools"]).stderr(Stdio::null()).status();
    if has.is_ok_and(|s| s.success()) {
        return Some(python);
    }
    assert!(std::env::var("PARAFT_GRPC_PYTHON").is_err(), "{python} has no grpcio");
    eprintln!(
        "SKIPPED: {python} has no grpcio and grpcio-tools; set PARAFT_GRPC_PYTHON to a Python that has"
    );
    None
}

/// The client, and what it says line by line.
struct Ledger {
    child: Held,
    lines: mpsc::Receiver<Value>,
}

impl Ledger {
    fn start(python: &str, fleet: &Fleet, args: &[&str]) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/second-client/ledger.py");
        let mut child = Command::new(python)
            .arg(script)
            // It is given one server and finds the others.
            .args(["--servers", &fleet.addresses[0], "--until-eof", "--steps", "3000"])
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python");
        let out = BufReader::new(child.stdout.take().expect("its output"));
        let (tell, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let value = serde_json::from_str(&line).unwrap_or(Value::String(line));
                if tell.send(value).is_err() {
                    return;
                }
            }
        });
        Self { child: Held(child), lines }
    }

    fn next(&self) -> Value {
        self.lines.recv_timeout(DEADLINE).expect("the client says something")
    }

    /// Waits until more pushes than so many are acknowledged; gives how many.
    fn beyond(&self, count: u64) -> u64 {
        let began = Instant::now();
        loop {
            let said = self.next();
            assert_eq!(said["event"], "training", "{said}");
            let acknowledged = said["acknowledged"].as_u64().expect("a number");
            if acknowledged > count {
                return acknowledged;
            }
            assert!(began.elapsed() < DEADLINE, "nothing more is acknowledged: {said}");
        }
    }

    /// Lets it finish; gives its verdict and its exit code.
    fn end(mut self) -> (Value, Option<i32>) {
        drop(self.child.0.stdin.take());
        self.verdict()
    }

    /// Likewise, once it has done all its steps.
    fn verdict(mut self) -> (Value, Option<i32>) {
        let verdict = loop {
            let said = self.next();
            if said["event"] != "training" {
                break said;
            }
        };
        (verdict, self.child.0.wait().expect("it ends").code())
    }
}

fn fleet(folder: &Path) -> Fleet {
    let job = "name = \"t\"\n[model]\nkind = \"logistic-regression\"\n[data]\nkind = \"digits\"\n[cluster]\nelection_ms = 200\ndurability = \"quorum-disk\"\n";
    let fleet = Fleet::start(folder, Some(job));
    fleet.all("serving");
    fleet
}

/// The server that leads a shard.
fn leader(fleet: &Fleet, shard: usize) -> usize {
    wait("a leader", || {
        let out = fleet.ask(&["status", "--json"]);
        let last: Value =
            text(&out.stdout).lines().last().and_then(|l| serde_json::from_str(l).ok()).unwrap_or_default();
        let placed = last["placement"].as_array().and_then(|p| p.iter().find(|s| s["shard"] == shard));
        placed.and_then(|s| s["leader"].as_u64()).map(|l| l as usize).ok_or_else(|| last.to_string())
    })
}

fn while_leaders_are_killed(mode: &str) {
    let Some(python) = python() else { return };
    let scratch = tempfile::tempdir().expect("scratch");
    let mut fleet = fleet(scratch.path());
    let ledger = Ledger::start(&python, &fleet, &["--mode", mode, "--durability", "quorum-disk"]);
    let mut acknowledged = ledger.beyond(50);
    for round in 0..4 {
        let server = leader(&fleet, round % 3);
        fleet.kill(server);
        acknowledged = ledger.beyond(acknowledged);
        fleet.serve(server);
        fleet.all("serving");
        acknowledged = ledger.beyond(acknowledged);
    }
    let (verdict, code) = ledger.end();
    for bad in ["lost", "doubled", "stale_reads", "unknown"] {
        assert_eq!(verdict[bad], 0, "{verdict}");
    }
    assert_eq!((verdict["same_for_all"].clone(), code), (Value::Bool(true), Some(0)), "{verdict}");
    assert!(verdict["acknowledged"].as_u64() >= Some(acknowledged), "{verdict}");
    assert!(verdict["breaks"].as_u64() >= Some(4), "its leaders were killed: {verdict}");
    println!("{mode}: {verdict}");
}

#[test]
fn a_client_written_from_the_docs_is_exact_in_asp() {
    while_leaders_are_killed("asp");
}

#[test]
fn a_client_written_from_the_docs_is_exact_in_bsp() {
    while_leaders_are_killed("bsp");
}

/// A ledger that cannot fail shows nothing.
#[test]
fn its_ledger_tells_of_a_doubled_and_of_a_lost_push() {
    let Some(python) = python() else { return };
    for (broken, shows) in [("resend-as-new-step", "doubled"), ("count-unsent-as-acknowledged", "lost")] {
        let scratch = tempfile::tempdir().expect("scratch");
        let fleet = fleet(scratch.path());
        let args = ["--break", broken, "--durability", "quorum-disk", "--steps", "30"];
        let (verdict, code) = Ledger::start(&python, &fleet, &args).verdict();
        assert_eq!(code, Some(1), "{verdict}");
        assert!(verdict[shows].as_u64() > Some(0), "{broken}: {verdict}");
    }
}
