//! `paraft relay`: readers of its versions get what the servers' readers get, and are told when it is cut off.

use crate::common::*;
use std::{io::BufRead, thread};

/// A job of which few values change from step to step, in bf16.
fn body(epochs: u64) -> String {
    digits("bsp", 3, epochs)
        .replace("mode = \"bsp\"\n", "mode = \"bsp\"\nworkers = 1\n")
        .replace("[cluster]", "[optimizer]\nkind = \"sgd\"\nlr = 1e-5\n[cluster]")
}

fn worker(fleet: &Fleet, folder: &Path) -> Held {
    Held(fleet.worker(0, &folder.join("w")).stderr(Stdio::null()).spawn().expect("a worker"))
}

/// A relay that reads from these addresses, and its own.
fn relay(from: &str, listen: &str) -> (Held, String) {
    let mut c = paraft();
    c.env("PARAFT_INSECURE", "1").args([
        "relay",
        "t",
        "--timeout",
        "60",
        "--fleet",
        from,
        "--listen",
        listen,
    ]);
    let mut child = c.stderr(Stdio::piped()).spawn().expect("paraft starts");
    let mut said = std::io::BufReader::new(child.stderr.take().expect("it is piped"));
    let held = Held(child);
    let mut line = String::new();
    while !line.contains("is relayed on ") {
        line.clear();
        assert!(said.read_line(&mut line).expect("utf-8") > 0, "the relay has ended");
    }
    let address = line.rsplit(' ').next().expect("an address").trim().to_string();
    thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
    (held, address)
}

fn pull(from: &str, to: &Path, more: &[&str]) -> Command {
    let mut c = paraft();
    c.env("PARAFT_INSECURE", "1").args(["pull", "t", "--json", "--fleet", from, "--to"]).arg(to).args(more);
    c.stdout(Stdio::piped()).stderr(Stdio::piped());
    c
}

/// What a pull says, a line a version.
fn lines(pull: Child) -> Vec<Value> {
    let out = pull.wait_with_output().expect("it ends");
    assert!(out.status.success(), "{}", text(&out.stderr));
    text(&out.stdout).lines().map(|l| serde_json::from_str(l).expect("JSON")).collect()
}

fn digests(lines: &[Value]) -> BTreeMap<u64, String> {
    let digest = |l: &Value| (l["version"].as_u64().expect("a step"), l["digest"].to_string());
    lines.iter().map(digest).collect()
}

#[test]
fn readers_of_a_relays_relay_get_the_servers_versions() {
    let scratch = tempfile::tempdir().expect("scratch");
    let fleet = Fleet::start(scratch.path(), Some(&body(30)));
    let _worker = worker(&fleet, scratch.path());
    let (_first, near) = relay(&fleet.list(), "127.0.0.1:0");
    let (_second, far) = relay(&near, "127.0.0.1:0");
    let follow = |from: &str, name: &str, dtype: &str| {
        let flags = ["--follow", "--every", "3", "--timeout", "120", "--dtype", dtype];
        pull(from, &scratch.path().join(name), &flags).spawn().expect("paraft starts")
    };
    let started = [("direct", "f32"), ("a", "f32"), ("b", "f32"), ("c", "bf16")].map(|(name, dtype)| {
        let from = if name == "direct" { fleet.list() } else { far.clone() };
        follow(&from, name, dtype)
    });
    let [direct, a, b, c] = started.map(lines);
    let (of_servers, mut shared) = (digests(&direct), 0);
    for relayed in [&a, &b] {
        let of_relay = digests(relayed);
        assert_eq!(of_relay.last_key_value(), of_servers.last_key_value(), "the last version");
        for (step, digest) in &of_relay {
            shared += usize::from(of_servers.get(step).is_some_and(|known| known == digest));
            assert!(of_servers.get(step).is_none_or(|known| known == digest), "{step} has two contents");
        }
    }
    assert!(shared > 2, "{of_servers:?} {shared}");
    let bytes: Vec<_> = c.iter().map(|l| l["bytes"].as_u64().expect("bytes")).collect();
    assert!(bytes.len() > 3 && bytes[1..].iter().any(|b| 5 * b < bytes[0]), "no difference in {bytes:?}");
}

#[test]
fn relay_that_is_gone_or_cut_off_is_told_from_a_slow_job() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut fleet = Fleet::start(scratch.path(), Some(&body(4000)));
    let _worker = worker(&fleet, scratch.path());
    let (first, at) = relay(&fleet.list(), "127.0.0.1:0");
    let to = scratch.path().join("w.safetensors");
    let one = |from: &str| lines(pull(from, &to, &["--timeout", "60"]).spawn().expect("paraft starts"));
    let before = one(&at)[0]["version"].as_u64().expect("a step");
    let refused = |from: &str, words: &[&str]| {
        let out = pull(from, &to, &["--timeout", "12"]).output().expect("paraft starts");
        assert_eq!(out.status.code(), Some(69), "{}", text(&out.stderr));
        contains(&text(&out.stderr), words);
    };
    // Its readers have other addresses, or none.
    drop(first);
    assert!(one(&format!("{at},{}", fleet.list()))[0]["version"].as_u64() >= Some(before));
    refused(&at, &["no server answers"]);
    let (_again, _) = relay(&fleet.list(), &at);
    assert!(one(&at)[0]["version"].as_u64() >= Some(before), "another relay at its address");
    (0..3).for_each(|id| fleet.kill(id));
    refused(&at, &["the relay cannot read from 127.0.0.1", "no server answers"]);
}
