//! Tests of `targets`.

use super::*;
use crate::run_dir::RunDir;

/// A run of this job, which its launcher holds while the result lives.
fn run_of(runs: &Path, name: &str, job: &str) -> RunDir {
    let dir = runs.join(name);
    let held = RunDir::new(Some(&dir), job).expect("a folder");
    fs::write(dir.join(JOB_FILE), format!("name = \"{job}\"\n")).expect("a job file");
    fs::write(dir.join(SERVERS_FILE), "127.0.0.1:1").expect("servers");
    held
}

#[test]
fn a_fleet_is_read_by_the_form_of_its_name() {
    let scratch = tempfile::tempdir().expect("scratch");
    let at = |name: &str| scratch.path().join(name).to_str().expect("utf-8").to_string();
    let named = "[cluster]\nreplicas = 1\naddresses = [\"a:7071\", \"b:7071\"]\n";
    fs::write(at("named.toml"), named).expect("a job file");
    fs::write(at("known.toml"), "name = \"known\"\n").expect("a job file");
    fs::write(at("unknown.toml"), "name = \"unknown\"\n").expect("a job file");
    let runs = scratch.path().join("runs");
    let _others = run_of(&runs, "others", "other");
    let run = run_of(&runs, "anything", "known").to_path_buf();

    let servers = |list: &[&str]| FleetName::Servers(list.iter().map(|a| (*a).to_string()).collect());
    for (text, name) in [
        ("127.0.0.1:7071", servers(&["127.0.0.1:7071"])),
        ("a:7071,b:7072, c:7073", servers(&["a:7071", "b:7072", "c:7073"])),
        ("[::1]:7000", servers(&["[::1]:7000"])),
        (&at("runs/others"), FleetName::Run(runs.join("others"))),
        (&at("named.toml"), servers(&["a:7071", "b:7071"])),
        (&at("known.toml"), FleetName::Run(run)),
    ] {
        assert_eq!(FleetName::read_in(text, &runs).expect("a fleet"), name, "{text}");
    }
    for (text, words) in [
        ("", "no such file or folder, and `` is no address"),
        ("digits", "no such file or folder, and `digits` is no address: write host:port"),
        ("::1:7000", "write IPv6 in brackets"),
        ("a:7071,", "`` is no address"),
        ("a:0", "a port is 1 to 65535"),
        ("runs/none-1", "runs/none-1: there is no such file or folder"),
        (&at("unknown.toml"), "has no run of its job `unknown`"),
    ] {
        let why = FleetName::read_in(text, &runs).expect_err("no fleet");
        assert!(why.message().contains(words), "{text}: {}", why.message());
    }
}

#[test]
fn newest_run_is_asked_and_the_only_running_one_changed() {
    let scratch = tempfile::tempdir().expect("scratch");
    let runs = scratch.path().join("runs");
    for none in [newest(&runs), only_running(&runs)] {
        assert!(none.expect_err("no run").message().contains("which fleet?"));
    }
    let ended = run_of(&runs, "t-1", "t");
    let ended_at = ended.to_path_buf();
    drop(ended);
    assert_eq!(newest(&runs).expect("a run"), FleetName::Run(ended_at));
    assert!(only_running(&runs).expect_err("it has ended").message().contains("No run in "));

    let first = run_of(&runs, "t-2", "t");
    assert_eq!(only_running(&runs).expect("one runs"), FleetName::Run(first.to_path_buf()));
    let _second = run_of(&runs, "t-3", "t");
    let why = only_running(&runs).expect_err("two are going on");
    assert!(["t-2", "t-3"].iter().all(|run| why.message().contains(run)), "{}", why.message());
}

#[test]
fn an_ended_folder_without_a_record_is_told_by_its_job() {
    let scratch = tempfile::tempdir().expect("scratch");
    let run = run_of(scratch.path(), "fleet", "t").to_path_buf();
    fs::write(server_log(&run, 0), "").expect("a server's log");
    let failure = || FleetName::Run(run.clone()).target().err().expect("no record");
    let gone = failure();
    assert!(gone.message().contains("its record metrics.jsonl is gone"), "{}", gone.message());
    // As the servers of a sweep, whatever the folder's name is.
    fs::remove_file(run.join(JOB_FILE)).expect("removed");
    let none = failure();
    assert_eq!(none.code(), exit::UNAVAILABLE);
    assert!(none.message().contains("that run has ended, and its servers with it"), "{}", none.message());
}
