//! Servers that are stopped, restarted, moved and started wrongly by a person: what they say, and that nothing is lost.

use crate::common::*;

fn code(server: &mut Process) -> Option<i32> {
    wait("the server to end", || server.ended().map(|s| s.code()).ok_or_else(|| "it runs".into()))
}

fn status_waits(fleet: &Fleet, what: &str) -> Output {
    fleet.ask(&["status", "--wait", what, "--timeout", "60"])
}

fn rounds() -> usize {
    std::env::var("PARAFT_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(1)
}

/// The script of docs/operations: every server in turn, told to end, started again, and the next one when the fleet is
/// whole. At a level that keeps the weights in memory only, and at one that has them on disk. `PARAFT_ROUNDS=20` does it so often,
/// in both orders by turns.
#[test]
fn a_rolling_restart_by_a_script_that_waits_loses_nothing() {
    for durability in ["quorum-memory", "quorum-disk"] {
        let scratch = tempfile::tempdir().expect("scratch");
        let body = digits("asp", 3, 100_000)
            .replace("[cluster]", &format!("[cluster]\ndurability = \"{durability}\""));
        let mut fleet = Fleet::start(scratch.path(), Some(&body));
        assert!(status_waits(&fleet, "whole").status.success());
        let runs: Vec<PathBuf> = (0..2).map(|rank| scratch.path().join(format!("run-{rank}"))).collect();
        runs.iter().for_each(|run| fs::create_dir(run).expect("a folder"));
        let workers: Vec<Held> = (0..2)
            .map(|rank| {
                let mut c = fleet.worker(rank, &runs[rank as usize]);
                Held(c.stderr(Stdio::null()).stdout(Stdio::null()).spawn().expect("worker"))
            })
            .collect();
        let lines = || fs::read_to_string(runs[0].join("metrics.jsonl")).unwrap_or_default().lines().count();
        wait("training to begin", || if lines() > 2 { Ok(()) } else { Err(lines().to_string()) });
        for n in 0..3 * rounds() {
            let (round, place) = (n / 3, n % 3);
            let id = if round % 2 == 0 { place } else { 2 - place };
            let mut server = fleet.servers[id].take().expect("it runs");
            server.signal(Signal::SIGTERM);
            assert_eq!(code(&mut server), Some(143));
            fleet.serve(id);
            let waited = status_waits(&fleet, "whole");
            assert!(waited.status.success(), "{durability}, round {round}: {}", text(&waited.stderr));
        }
        // A worker whose shard has lost its state ends and says so; these train on.
        let before = lines();
        wait("training to go on", || if lines() > before + 1 { Ok(()) } else { Err(lines().to_string()) });
        for mut worker in workers {
            assert!(matches!(worker.0.try_wait(), Ok(None)), "{durability}: a worker has ended");
        }
    }
}

#[test]
fn status_does_not_call_a_fleet_that_lost_memory_whole() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut fleet = Fleet::start(scratch.path(), None);
    assert!(status_waits(&fleet, "whole").status.success());
    fleet.kill(1);
    let now = fleet.ask(&["status", "--wait", "whole", "--timeout", "0"]);
    assert_eq!(now.status.code(), Some(69));
    contains(&text(&now.stderr), &["s1", "does not answer"]);
    assert!(status_waits(&fleet, "serving").status.success(), "two of three serve");
    fleet.serve(1);
    assert!(status_waits(&fleet, "whole").status.success());
}

#[test]
fn a_server_with_other_settings_exits_78_and_names_them() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut fleet = Fleet::start(scratch.path(), None);
    assert!(status_waits(&fleet, "whole").status.success());
    fleet.kill(0);
    let addresses = fleet.addresses.clone();
    let [a, b, c] = &addresses[..] else { panic!("three") };
    let list = fleet.list();
    let swapped = format!("{b},{a},{c}");
    let cases: [(&str, &[&str], &[&str]); 4] = [
        (&swapped, &[], &["--servers: in place 0", "(its fleet: 1)"]),
        (&list, &["--shards", "7"], &["--shards 7 (its fleet: 3)"]),
        (&list, &["--durability", "quorum-disk"], &["--durability quorum-disk (its fleet: quorum-memory)"]),
        (&list, &["--replicas", "1"], &["--replicas 1 (its fleet: 3)"]),
    ];
    for (servers, flags, words) in cases {
        let mut command = paraft();
        command
            .env("PARAFT_INSECURE", "1")
            .args(["server", "--id", "0", "--election-ms", "200", "--servers", servers, "--data"])
            .arg(fleet.data(0));
        let out = command.args(flags).output().expect("paraft starts");
        assert_eq!(out.status.code(), Some(78), "{flags:?}: {}", text(&out.stderr));
        contains(&text(&out.stderr), words);
    }
    // With a folder of its own, in which nothing says what its fleet was founded with: the fleet says it. The folder has
    // not learnt the wrong settings.
    let fresh = scratch.path().join("fresh");
    for (flags, words) in [
        (["--shards", "7"], "--shards 7 (its fleet: 3)"),
        (["--durability", "quorum-disk"], "--durability quorum-disk (its fleet: quorum-memory)"),
    ] {
        let mut command = paraft();
        command
            .env("PARAFT_INSECURE", "1")
            .args(["server", "--id", "0", "--election-ms", "200", "--servers", &list, "--data"])
            .arg(&fresh);
        let out = command.args(flags).output().expect("paraft starts");
        assert_eq!(out.status.code(), Some(78), "{flags:?}: {}", text(&out.stderr));
        contains(&text(&out.stderr), &[words, "was founded with other settings"]);
        assert!(!fresh.join("settings").exists(), "{flags:?}");
    }
    // Its identity is gone, and what it held is there.
    fs::rename(fleet.data(0).join("identity"), fleet.data(0).join("elsewhere")).expect("moved");
    let mut command = paraft();
    command
        .env("PARAFT_INSECURE", "1")
        .args(["server", "--id", "0", "--servers", &list, "--data"])
        .arg(fleet.data(0));
    let out = command.output().expect("paraft starts");
    assert_eq!(out.status.code(), Some(78), "{}", text(&out.stderr));
    contains(&text(&out.stderr), &["identity", "is gone"]);
    fs::rename(fleet.data(0).join("elsewhere"), fleet.data(0).join("identity")).expect("moved");
    fleet.serve(0);
    assert!(status_waits(&fleet, "whole").status.success());
    // No server may join at a running server's address, or under its number.
    for (name, place) in [
        ("joins", &["--join", "--fleet", b, "--advertise", a][..]),
        ("is", &["--id", "0", "--servers", &list]),
    ] {
        let log = scratch.path().join(format!("{name}.log"));
        let mut command = paraft();
        command
            .env("PARAFT_INSECURE", "1")
            .args(["server", "--listen", "127.0.0.1:0"])
            .args(place)
            .arg("--log-file")
            .arg(&log);
        let stray = command.arg("--data").arg(scratch.path().join(name)).spawn().expect("it starts");
        let _stray = Held(stray);
        wait("it to say that it is kept out", || {
            let said = fs::read_to_string(&log).unwrap_or_default();
            let kept_out = said.contains("s0 is there already") && said.contains("--advertise");
            kept_out.then_some(()).ok_or(said)
        });
    }
    assert!(status_waits(&fleet, "whole").status.success());
}

#[test]
fn a_server_returns_with_its_data_at_another_address() {
    for level in ["quorum-disk", "quorum-memory"] {
        returns_elsewhere(level);
    }
}

fn returns_elsewhere(level: &str) {
    let scratch = tempfile::tempdir().expect("scratch");
    let body = digits("asp", 3, 1).replace("[cluster]", &format!("[cluster]\ndurability = {level:?}"));
    let mut fleet = Fleet::start(scratch.path(), Some(&body));
    assert!(status_waits(&fleet, "whole").status.success());
    fleet.kill(2);
    fleet.addresses[2] = free_addresses(1).remove(0);
    let new = format!("{body}addresses = {:?}\n", fleet.addresses);
    fleet.job = Some(job(scratch.path(), &new));
    fleet.serve(2);
    let waited = status_waits(&fleet, "whole");
    assert!(waited.status.success(), "{}", text(&waited.stderr));
    let out = fleet.ask(&["status"]);
    contains(&text(&out.stdout), &[&fleet.addresses[2], "whole: every server answers"]);
    // It is counted on there: without another server it is half of the majority.
    fleet.kill(0);
    assert!(status_waits(&fleet, "serving").status.success());
}

#[test]
fn damaged_data_is_quarantined_shown_and_restored() {
    let scratch = tempfile::tempdir().expect("scratch");
    let body = digits("asp", 3, 1).replace("[cluster]", "[cluster]\ndurability = \"quorum-disk\"");
    let mut fleet = Fleet::start(scratch.path(), Some(&body));
    assert!(status_waits(&fleet, "whole").status.success());
    fleet.kill(1);
    fs::write(fleet.data(1).join("shard-0/replica"), b"no fault").expect("damaged");
    fleet.serve(1);
    assert!(status_waits(&fleet, "whole").status.success(), "it is replaced");
    let data = fleet.data(1);
    let list = || {
        let out = paraft().args(["data", "list", "--json"]).arg(&data).output().expect("paraft starts");
        assert!(out.status.success(), "{}", text(&out.stderr));
        let lines: Vec<Value> =
            text(&out.stdout).lines().map(|l| serde_json::from_str(l).expect("json")).collect();
        lines
    };
    let found = list();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((&found[0]["name"], &found[0]["readable"]), (&"shard-0.aside-1".into(), &false.into()));
    let said = text(&fleet.ask(&["status"]).stdout);
    contains(&said, &["quarantined: shard-0.aside-1"]);
    let act = |what: &str| {
        let mut command = paraft();
        command.args(["data", what]).arg(&data).arg("shard-0.aside-1").output().expect("paraft starts")
    };
    let running = act("restore");
    contains(&text(&running.stderr), &["stop it first"]);
    fleet.kill(1);
    contains(&text(&act("restore").stderr), &["replica"]);
    assert!(data.join("shard-0.aside-1").is_dir(), "what cannot be read stays");
    assert!(act("delete").status.success());
    assert!(list().is_empty());
    // What only a person may do, and only knowingly.
    fleet.serve(1);
    assert!(status_waits(&fleet, "whole").status.success());
    let out = fleet.ask(&["forget", "1"]);
    assert_eq!(out.status.code(), Some(78), "{}", text(&out.stderr));
    contains(&text(&out.stderr), &["is there"]);
    let out = fleet.ask(&["data", "abandon", "0"]);
    assert_eq!(out.status.code(), Some(78));
    contains(&text(&out.stderr), &["is given up", "--accept-loss"]);
}
