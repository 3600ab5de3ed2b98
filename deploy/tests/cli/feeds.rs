//! `paraft feed`: engines get whole versions of a job, whatever one of them does.

use crate::{
    common::*,
    stub_engine::{Fault, Stub},
};
use std::io::{BufRead, BufReader};

const PAUSE: &str = "/pause_generation";
const FLUSH: &str = "/flush_cache";
const LOAD: &str = "/update_weights_from_disk";
const INFO: &str = "/model_info";
const RESUME: &str = "/continue_generation";
const ROUND: [&str; 5] = [PAUSE, FLUSH, LOAD, INFO, RESUME];

fn body(epochs: u64) -> String {
    digits("bsp", 3, epochs).replace("mode = \"bsp\"\n", "mode = \"bsp\"\nworkers = 1\n")
}

/// A fleet on which the job has been trained.
fn trained(folder: &Path) -> Fleet {
    let fleet = Fleet::start(folder, Some(&body(2)));
    let out = fleet.worker(0, &folder.join("w")).stderr(Stdio::piped()).output().expect("a worker");
    assert!(out.status.success(), "{}", text(&out.stderr));
    fleet
}

fn feed(fleet: &Fleet, kind: &str, stubs: &[Stub], folder: &Path) -> Command {
    let base = folder.join("base");
    fs::create_dir_all(&base).expect("a folder");
    fs::write(base.join("config.json"), "{}").expect("a file");
    let mut c = paraft();
    c.env("PARAFT_INSECURE", "1").args(["feed", kind]).args(stubs.iter().map(|stub| &stub.url));
    c.args(["--job", "t", "--json", "--engine-timeout", "6", "--timeout", "120", "--fleet", &fleet.list()]);
    c.arg("--to").arg(folder.join("engines")).arg("--base").arg(base);
    c.stdout(Stdio::piped()).stderr(Stdio::piped());
    c
}

/// A feed that has ended: its exit code, its lines, and what it said beside.
fn ended(mut feed: Command) -> (Option<i32>, Vec<Value>, String) {
    let out = feed.output().expect("paraft starts");
    let lines = text(&out.stdout).lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    (out.status.code(), lines, text(&out.stderr))
}

fn states(line: &Value) -> Vec<&str> {
    line["engines"].as_array().expect("engines").iter().filter_map(|e| e["state"].as_str()).collect()
}

/// Each engine serves the version of the last line, and no feed has done to it what must not be done.
fn all_serve(stubs: &[Stub], lines: &[Value], said: &str) {
    let last = lines.last().expect("a line");
    assert_eq!(last["ok"], true, "{last} {said}");
    for stub in stubs {
        let seen = stub.seen();
        let state = (seen.label.as_str(), seen.paused, seen.half);
        assert_eq!(state, (last["version"].to_string().as_str(), false, false), "{:?} {said}", seen.calls);
        assert!(seen.wrong.is_empty(), "{:?}", seen.wrong);
    }
}

#[test]
fn sglang_engine_that_fails_is_named_and_healed() {
    let scratch = tempfile::tempdir().expect("scratch");
    let fleet = trained(scratch.path());
    let refused = r#"{"success": false, "message": "no such tensor"}"#;
    // It is asked whether it answers before it is paused again.
    let again = |first: &[&'static str]| [first, &[INFO], &ROUND].concat();
    for (i, (faults, state, calls)) in [
        (vec![], "current", ROUND.to_vec()),
        (vec![(LOAD, Fault::Hangs)], "half_loaded", again(&[PAUSE, FLUSH, LOAD])),
        (vec![(LOAD, Fault::Says(200, refused))], "half_loaded", again(&[PAUSE, FLUSH, LOAD])),
        (vec![(LOAD, Fault::Says(200, "<html>"))], "half_loaded", again(&[PAUSE, FLUSH, LOAD])),
        (vec![(LOAD, Fault::Garbage)], "half_loaded", again(&[PAUSE, FLUSH, LOAD])),
        (vec![(LOAD, Fault::Dies(0))], "half_loaded", again(&[PAUSE, FLUSH, LOAD])),
        (vec![(LOAD, Fault::Lies)], "half_loaded", again(&[PAUSE, FLUSH, LOAD, INFO])),
        (vec![(INFO, Fault::Garbage)], "half_loaded", again(&[PAUSE, FLUSH, LOAD, INFO])),
        (
            vec![(FLUSH, Fault::Says(400, "busy")), (FLUSH, Fault::Says(400, "busy"))],
            "current",
            vec![PAUSE, FLUSH, FLUSH, FLUSH, LOAD, INFO, RESUME],
        ),
        (vec![(PAUSE, Fault::Says(500, "no"))], "behind", again(&[PAUSE, RESUME])),
        (vec![(PAUSE, Fault::Garbage), (RESUME, Fault::Dies(2))], "paused", again(&[PAUSE, RESUME])),
    ]
    .into_iter()
    .enumerate()
    {
        let stubs: Vec<_> = [&[], &[], &faults[..], &[]].map(Stub::start).into();
        let folder = scratch.path().join(format!("f{i}"));
        let (code, lines, said) = ended(feed(&fleet, "sglang", &stubs, &folder));
        assert_eq!(code, Some(0), "{faults:?}: {said}");
        assert_eq!(states(&lines[0]), ["current", "current", state, "current"], "{faults:?}");
        assert_eq!(lines[0]["ok"], state == "current");
        assert_eq!(lines.len(), if state == "current" { 1 } else { 2 }, "{lines:?}");
        assert_eq!(stubs[2].seen().calls, calls, "{faults:?}");
        if state != "current" {
            contains(&said, &[&stubs[2].url, "warning"]);
        }
        for healthy in [0, 1, 3] {
            assert_eq!(stubs[healthy].seen().calls, ROUND, "a failure touched another engine: {faults:?}");
        }
        all_serve(&stubs, &lines, &said);
    }
}

#[test]
fn engine_that_never_loads_stays_paused_and_is_named() {
    let scratch = tempfile::tempdir().expect("scratch");
    let fleet = trained(scratch.path());
    let never = [(LOAD, Fault::Says(200, r#"{"success": false}"#)); 9];
    let stubs = [Stub::start(&[]), Stub::start(&never)];
    let (code, lines, said) = ended(feed(&fleet, "sglang", &stubs, scratch.path()));
    assert_eq!(code, Some(69), "{said}");
    assert!(lines.iter().all(|line| states(line) == ["current", "half_loaded"]), "{lines:?}");
    assert!(lines.iter().all(|line| line["engines"][1]["version"].is_null() && line["ok"] == false));
    contains(&said, &["error: job `t` has ended", &stubs[1].url, "may be half loaded and stays paused"]);
    let seen = stubs[1].seen();
    assert_eq!((seen.label.as_str(), seen.paused), ("default", true), "{:?}", seen.calls);
    assert!(!seen.calls.iter().any(|call| call == RESUME), "{:?}", seen.calls);
    all_serve(&stubs[..1], &[serde_json::json!({ "ok": true, "version": lines[0]["version"] })], &said);
}

#[test]
fn old_servers_and_an_engine_twice_on_the_command_line() {
    let scratch = tempfile::tempdir().expect("scratch");
    let fleet = trained(scratch.path());
    let stub = Stub::start(&[]);
    stub.seen().old = true;
    let (code, lines, said) = ended(feed(&fleet, "sglang", std::slice::from_ref(&stub), scratch.path()));
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(stub.seen().calls[3..], [INFO, "/get_weight_version", RESUME]);
    all_serve(std::slice::from_ref(&stub), &lines, &said);
    let (code, _, said) = ended(feed(&fleet, "sglang", &[stub.clone(), stub], scratch.path()));
    assert_eq!(code, Some(2), "{said}");
}

#[test]
fn vllm_engine_that_fails_is_told_the_job_again() {
    let scratch = tempfile::tempdir().expect("scratch");
    let fleet = trained(scratch.path());
    let init = "/init_weight_transfer_engine";
    let pause = "/pause?mode=wait&clear_cache=true";
    let rest =
        ["/start_weight_update", "/update_weights", "/finish_weight_update", "/weight_info", "/resume"];
    let round = [&[init, pause], &rest[..]].concat();
    for (i, (fault, calls)) in [
        (None, vec![]),
        (Some(("/start_weight_update", Fault::Dies(1))), round[..3].to_vec()),
        (Some(("/update_weights", Fault::Dies(0))), round[..4].to_vec()),
        (Some(("/update_weights", Fault::Says(500, "a tensor is missing"))), round[..4].to_vec()),
        (Some(("/finish_weight_update", Fault::Hangs)), round[..5].to_vec()),
    ]
    .into_iter()
    .enumerate()
    {
        let stubs = [Stub::start(&[]), Stub::start(&Vec::from_iter(fault))];
        let folder = scratch.path().join(format!("f{i}"));
        let (code, lines, said) = ended(feed(&fleet, "vllm", &stubs, &folder));
        assert_eq!(code, Some(0), "{fault:?}: {said}");
        let state = if fault.is_some() { "half_loaded" } else { "current" };
        assert_eq!(states(&lines[0]), ["current", state], "{fault:?}");
        assert_eq!(stubs[0].seen().calls, round);
        let seen = stubs[1].seen().calls.clone();
        assert!(seen.starts_with(&calls.iter().map(ToString::to_string).collect::<Vec<_>>()), "{seen:?}");
        // An update that nobody finished is ended by an order to load that fails.
        let unfinished = matches!(fault, Some((_, Fault::Hangs)));
        let last = if unfinished {
            [&round[..3], &[round[3], round[2]], &round[3..]].concat()
        } else {
            round.clone()
        };
        assert_eq!(seen[seen.len() - last.len()..], last, "{fault:?}");
        all_serve(&stubs, &lines, &said);
    }
}

#[test]
fn feed_that_waits_for_a_job_ends_at_once_when_told() {
    let scratch = tempfile::tempdir().expect("scratch");
    let fleet = Fleet::start(scratch.path(), Some(&body(2)));
    let mut feed = running(feed(&fleet, "vllm", &[Stub::start(&[])], scratch.path()));
    let id = feed.child.0.id();
    // SIGINT is bit 1 of the signals that it handles.
    let handles = |status: &str| {
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?;
        Some(u64::from_str_radix(mask.trim(), 16).ok()? & 0b10 != 0)
    };
    wait("its handler", || match fs::read_to_string(format!("/proc/{id}/status")) {
        Ok(status) if handles(&status) == Some(true) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    kill(Pid::from_raw(id as i32), Signal::SIGINT).expect("a signal");
    assert_eq!(feed.child.0.wait().expect("an end").code(), Some(130));
}

/// Lines of a running feed.
struct Running {
    child: Held,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

fn running(mut feed: Command) -> Running {
    let mut child = Held(feed.spawn().expect("paraft starts"));
    let lines = BufReader::new(child.0.stdout.take().expect("its output")).lines();
    Running { child, lines }
}

#[test]
fn engines_follow_a_job_that_trains_to_its_last_version() {
    let scratch = tempfile::tempdir().expect("scratch");
    let fleet = Fleet::start(scratch.path(), Some(&body(20)));
    let stubs = [Stub::start(&[]), Stub::start(&[(LOAD, Fault::Says(200, r#"{"success": false}"#))])];
    let mut command = feed(&fleet, "sglang", &stubs, scratch.path());
    command.args(["--every", "150"]);
    // The feed is there before the job.
    let mut feed = running(command);
    let _worker =
        Held(fleet.worker(0, &scratch.path().join("w")).stderr(Stdio::null()).spawn().expect("a worker"));
    let lines: Vec<Value> =
        feed.lines.by_ref().map(|line| serde_json::from_str(&line.expect("a line")).expect("JSON")).collect();
    assert_eq!(feed.child.0.wait().expect("an end").code(), Some(0));
    assert_eq!(states(&lines[0]), ["current", "half_loaded"]);
    let versions: Vec<u64> = lines.iter().filter_map(|line| line["version"].as_u64()).collect();
    assert!(versions.len() > 2 && versions.is_sorted(), "{versions:?}");
    assert_eq!(versions.last(), Some(&(20 * (TRAINED / 16))), "{versions:?}");
    all_serve(&stubs, &lines, "");
    let folders: Vec<_> = fs::read_dir(scratch.path().join("engines")).expect("a folder").flatten().collect();
    let versions = folders.iter().filter(|f| f.file_name().to_string_lossy().starts_with('v')).count();
    assert_eq!(versions, 2, "{folders:?}");
}

#[test]
fn engine_that_is_gone_holds_no_other_engine_up() {
    let scratch = tempfile::tempdir().expect("scratch");
    let fleet = Fleet::start(scratch.path(), Some(&body(20)));
    let mut stubs = [Stub::start(&[]), Stub::start(&[])];
    stubs[1].url = format!("http://{}", free_addresses(1)[0]);
    let mut command = feed(&fleet, "sglang", &stubs, scratch.path());
    command.args(["--every", "150"]);
    let feed = std::thread::spawn(move || ended(command));
    let _worker =
        Held(fleet.worker(0, &scratch.path().join("w")).stderr(Stdio::null()).spawn().expect("a worker"));
    let (code, lines, said) = feed.join().expect("a feed");
    assert_eq!(code, Some(69), "{said}");
    contains(&said, &[&format!("help: {} may be paused", stubs[1].url)]);
    assert!(
        lines.iter().all(|line| states(line) == ["current", "paused"] && line["ok"] == false),
        "{lines:?}"
    );
    let versions: BTreeSet<u64> = lines.iter().filter_map(|line| line["version"].as_u64()).collect();
    assert!(versions.len() > 2 && versions.last() == Some(&(20 * (TRAINED / 16))), "{versions:?}");
    let loads = stubs[0].seen().calls.iter().filter(|call| *call == LOAD).count();
    assert_eq!(loads, versions.len(), "one load a version");
    assert_eq!(stubs[0].seen().label, (20 * (TRAINED / 16)).to_string());
}

#[test]
fn feed_killed_during_a_load_does_not_resume_half() {
    let scratch = tempfile::tempdir().expect("scratch");
    let fleet = trained(scratch.path());
    // Hangs as the first feed is killed; the second one is refused before it loads.
    let stubs = [Stub::start(&[(LOAD, Fault::Hangs), (PAUSE, Fault::Says(500, "no"))])];
    let first = running(feed(&fleet, "sglang", &stubs, scratch.path()));
    wait("the load", || match stubs[0].seen().calls.len() {
        3 => Ok(()),
        n => Err(format!("{n} calls")),
    });
    drop(first);
    let (code, lines, said) = ended(feed(&fleet, "sglang", &stubs, scratch.path()));
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(states(&lines[0]), ["half_loaded"]);
    assert_eq!(stubs[0].seen().calls, [&[PAUSE, FLUSH, LOAD, PAUSE, INFO], &ROUND[..]].concat());
    all_serve(&stubs, &lines, &said);
}

#[test]
fn feed_that_is_told_to_end_resumes_engines_first() {
    let scratch = tempfile::tempdir().expect("scratch");
    let fleet = trained(scratch.path());
    let stubs = [Stub::start(&[]), Stub::start(&[(FLUSH, Fault::Hangs)])];
    let mut feed = running(feed(&fleet, "sglang", &stubs, scratch.path()));
    wait("the flush", || match stubs[1].seen().calls.len() {
        2 => Ok(()),
        n => Err(format!("{n} calls")),
    });
    kill(Pid::from_raw(feed.child.0.id() as i32), Signal::SIGTERM).expect("a signal");
    let lines: Vec<_> = feed.lines.by_ref().map_while(Result::ok).collect();
    assert_eq!(feed.child.0.wait().expect("an end").code(), Some(143));
    assert_eq!(lines.len(), 1, "{lines:?}");
    for stub in &stubs {
        let seen = stub.seen();
        assert!(!seen.paused && seen.wrong.is_empty(), "{:?} {:?}", seen.calls, seen.wrong);
    }
}
