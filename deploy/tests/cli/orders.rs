//! Orders while the leader of the control group is killed: exit code 0 only of what is done, and 78 never, since none of them is wrong.
//!
//! Each is tried a few times. `PARAFT_ORDERS=100` tries each so often, and prints how they ended.

use crate::{common::*, standing::Standing};
use paraft_client::Order;
use paraft_fleet::{ask, orders};
use paraft_proto::{DescribeReply, FleetShape, SubmitRequest};
use std::{
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

/// The leader is killed up to so many milliseconds after the command was started: it looks for the leader, gives the order, and has
/// its answer within that.
const MOMENTS: u64 = 250;

fn tries() -> usize {
    std::env::var("PARAFT_ORDERS").ok().and_then(|n| n.parse().ok()).unwrap_or(1)
}

/// How the tries of one command have ended.
#[derive(Debug, Default)]
struct Ends {
    done: usize,
    unheard: usize,
}

struct Trial {
    fleet: Standing,
    ends: BTreeMap<&'static str, Ends>,
}

impl Trial {
    fn seen(&self) -> DescribeReply {
        wait("a leader of the control group", || match ask::agreeing(&self.fleet.addresses) {
            Ok(fleet) => Ok(fleet),
            Err(none) => Err(none.why),
        })
    }

    /// Runs a command, kills the control group's leader meanwhile, and starts it again. Whether the command says that it is done.
    fn give(&mut self, what: &'static str, args: &[&str]) -> (bool, String) {
        let leader = self.seen().leader;
        let leader = self.fleet.addresses.iter().position(|a| *a == leader).expect("one of the three");
        let command = self.fleet.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let command = command.expect("paraft starts");
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        thread::sleep(Duration::from_micros(u64::from(now.subsec_micros()) * 7919 % (MOMENTS * 1000)));
        self.fleet.servers[leader] = None;
        self.fleet.serve(leader);
        let out = command.wait_with_output().expect("it ends");
        let said = text(&out.stdout) + &text(&out.stderr);
        let code = out.status.code();
        assert!(matches!(code, Some(0 | 69)), "{args:?}: {code:?}: {said}");
        let ends = self.ends.entry(what).or_default();
        match code {
            Some(0) => ends.done += 1,
            _ => ends.unheard += 1,
        }
        (code == Some(0), said)
    }

    /// A job that waits for its first worker.
    fn submitted(&self, name: &str) {
        let shape = FleetShape { shards: 1, replicas: 3, durability: "quorum-memory".into() };
        let (name, shape, run) = (name.to_string(), Some(shape), String::new());
        let request = SubmitRequest { name, token: 0, shape, keep_ms: None, run };
        orders::given(&self.fleet.addresses, &Order::Submit(request)).expect("submitted");
    }

    fn state_of(&self, job: &str) -> Option<String> {
        self.seen().jobs.into_iter().rfind(|j| j.name == job).map(|j| j.state)
    }

    /// Of a server that was killed a moment ago it is said that it is silent.
    fn draining(&self, server: u64) -> bool {
        wait("the server to be heard", || {
            let state = self.seen().servers.into_iter().find(|s| s.server == server).map(|s| s.state);
            match state.as_deref() {
                Some("draining") => Ok(true),
                Some("up") => Ok(false),
                other => Err(format!("{other:?}")),
            }
        })
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        println!("{:?}", self.ends);
    }
}

fn trial(scratch: &Path) -> Trial {
    Trial { fleet: Standing::start(scratch), ends: BTreeMap::new() }
}

#[test]
fn jobs_end_once_while_leaders_die() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut t = trial(scratch.path());
    let any = t.fleet.addresses.join(",");
    for n in 0..tries() {
        let name = format!("t{n}");
        t.submitted(&name);
        if let (true, said) = t.give("stop", &["stop", &name, "--fleet", &any]) {
            assert_eq!(t.state_of(&name).as_deref(), Some("stopped"), "{said}");
        }
        if let (true, said) = t.give("delete", &["delete", &name, "--fleet", &any]) {
            contains(&said, &[&format!("{name} is deleted")]);
            assert_eq!(t.state_of(&name), None, "{said}");
        }
    }
}

#[test]
fn jobs_are_submitted_once_while_leaders_die() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut t = trial(scratch.path());
    let file = job(scratch.path(), &digits("asp", 3, 100_000));
    let file = file.to_str().expect("utf-8").to_string();
    let any = t.fleet.addresses.join(",");
    for n in 0..tries() {
        let name = format!("name=t{n}");
        let submit = ["submit", &file, "--fleet", &any, "--set", &name, "--set", "train.workers=1"];
        let (done, said) = t.give("submit", &submit);
        let of_it = |j: &&paraft_proto::JobInfo| j.name.starts_with(&name["name=".len()..]);
        let jobs = t.seen().jobs;
        let jobs: Vec<_> = jobs.iter().filter(of_it).collect();
        assert!(jobs.len() == 1 || !done && jobs.is_empty(), "{said}: {jobs:?}");
        for job in jobs {
            t.fleet.done(&["delete", &job.name, "--fleet", &any]);
        }
    }
}

#[test]
fn servers_drain_once_while_leaders_die() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut t = trial(scratch.path());
    let any = t.fleet.addresses.join(",");
    for n in 0..tries() {
        let server = n as u64 % 3;
        let id = server.to_string();
        if let (true, said) = t.give("drain", &["drain", &id, "--fleet", &any]) {
            assert!(t.draining(server), "{said}");
        }
        if let (true, said) = t.give("undo", &["drain", &id, "--undo", "--fleet", &any]) {
            assert!(!t.draining(server), "{said}");
        }
        t.fleet.done(&["drain", &id, "--undo", "--fleet", &any]);
    }
}

#[test]
fn servers_are_forgotten_once_while_leaders_die() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut t = trial(scratch.path());
    let any = t.fleet.addresses.join(",");
    for n in 0..tries() {
        let joined = t.fleet.joining(n);
        let id = wait("a fourth server to be heard", || {
            let fleet = t.seen();
            let known =
                |s: &&paraft_proto::ServerInfo| !t.fleet.addresses.contains(&s.address) && s.state == "up";
            fleet.servers.iter().find(known).map(|s| s.server).ok_or(format!("{:?}", fleet.servers))
        });
        drop(joined);
        // It has ended a moment ago, which the control group does not know yet.
        let args = ["forget", &id.to_string(), "--fleet", &any];
        if let (true, said) = t.give("forget", &args) {
            assert!(t.seen().servers.iter().all(|s| s.server != id), "{said}");
        }
        let _ = t.fleet.say(&args);
    }
}

#[test]
fn modes_and_checkpoints_are_exact_while_leaders_die() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut t = trial(scratch.path());
    let body = digits("asp", 3, 100_000) + "[checkpoint]\nevery_steps = 1000000\n";
    let file = job(scratch.path(), &body);
    let any = t.fleet.addresses.join(",");
    t.fleet.done(&["submit", file.to_str().expect("utf-8"), "--fleet", &any, "--run-dir", "run"]);
    wait("it to train", || match t.state_of("t").as_deref() {
        Some("running") => Ok(()),
        other => Err(format!("{other:?}")),
    });
    // Its weights are in memory only: a second server may not end before the first has them again.
    let whole = ["status", "--wait", "whole", "--timeout", "60", "--fleet", &any];
    for n in 0..tries() {
        let mode = ["bsp", "ssp:3", "asp"][n % 3];
        t.fleet.done(&whole);
        if let (true, said) = t.give("mode", &["mode", "t", mode, "--fleet", &any]) {
            contains(&said, &[&format!("-> {mode} "), "switched"]);
            let in_force = wait("its leader to be seen", || {
                let (code, said) = t.fleet.say(&["status", "t", "--fleet", &any, "--json"]);
                let one: Value =
                    serde_json::from_str(said.lines().next().unwrap_or_default()).unwrap_or_default();
                let leaders = one["leaders"].as_array().filter(|l| !l.is_empty() && code == Some(0));
                let modes =
                    leaders.map(|l| l.iter().filter(|s| s["version"] != 0).all(|s| s["mode"] == mode));
                modes.ok_or(said)
            });
            assert!(in_force, "{said}");
        }
        t.fleet.done(&whole);
        if let (true, said) = t.give("save", &["checkpoint", "save", "t", "--fleet", &any]) {
            let path = said.lines().next().and_then(|l| l.split_once("  ")).expect("step N  PATH").1;
            assert!(Path::new(path).join("checkpoint.json").exists(), "{said}");
        }
    }
    t.fleet.done(&["delete", "t", "--fleet", &any]);
}
