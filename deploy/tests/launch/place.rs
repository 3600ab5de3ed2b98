//! What a script knows of its place, and where what it says goes.

use crate::{Place, common::*, python, run_out};
use std::os::unix::fs::PermissionsExt;

/// Writes down how it was started.
const TELLS: &str = r#"
import json, os, sys
lifeline = int(os.environ["PARAFT_LIFELINE_FD"])
told = dict(os.environ)
told["argv"] = sys.argv[1:]
told["lifeline is a pipe"] = os.readlink("/proc/self/fd/%d" % lifeline).startswith("pipe:")
told["stdin"] = sys.stdin.read()
path = os.path.join(os.environ["PARAFT_RUN_DIR"], "told-%s.json" % os.environ["RANK"])
with open(path, "a") as out:
    out.write(json.dumps(told) + "\n")
# Each in one write: the two are passed on side by side.
print("said by " + os.environ["RANK"])
print("complained by " + os.environ["RANK"], file=sys.stderr)
"#;

fn told(place: &Place, rank: u32) -> Vec<Value> {
    let all = place.read(&format!("told-{rank}.json"));
    all.lines().map(|l| serde_json::from_str(l).expect("a line")).collect()
}

#[test]
fn a_script_knows_its_place_and_its_arguments_are_its_own() {
    if !python() {
        return;
    }
    let place = Place::new();
    place.script("train.py", TELLS);
    let own = ["--workers", "9", "--json", "-x", "--", "a b", "\"quoted\\\""];
    let mut command = place.launch(&["--workers", "3", "--mode", "ssp:4", "train.py"]);
    // Of an outer run.
    command.args(own).envs([
        ("PARAFT_RESUME", "x"),
        ("PARAFT_SLOW", "3"),
        ("RANK", "7"),
        ("MASTER_PORT", "1"),
    ]);
    let (code, out, err) = run_out(command);
    assert_eq!(code, Some(0), "{err}");
    // The servers never heard of a job.
    assert_eq!(err.matches("no worker came to the servers").count(), 1, "{err}");
    assert!(out.contains("said by 0") && err.contains("complained by 0"), "{out}{err}");
    assert!(!out.contains("said by 1") && !err.contains("complained by 1"), "{out}{err}");
    let run_dir = place.run_dir().canonicalize().expect("it is there");
    for line in [
        format!("run     {}", place.run_dir().display()),
        format!("report  {}", place.run_dir().join("report.html").display()),
    ] {
        assert!(out.contains(&line), "`{line}` is not in {out}");
    }
    assert!(!out.contains("final loss"), "nothing was trained, and there is no table: {out}");
    assert!(fs::read_to_string(run_dir.join("report.html")).expect("report").contains("train.py"));
    let mut ports = BTreeSet::new();
    for rank in 0..3 {
        let name = format!("worker-{rank}.out");
        contains(&place.read(&name), &[&format!("said by {rank}"), &format!("complained by {rank}")]);
        let all = told(&place, rank);
        let t = &all[0];
        let is = |key: &str, value: &str| assert_eq!(t[key], value, "{key} of {rank}");
        let rank = rank.to_string();
        for key in ["PARAFT_RANK", "RANK", "LOCAL_RANK", "ROLE_RANK"] {
            is(key, &rank);
        }
        for key in ["PARAFT_WORKERS", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"] {
            is(key, "3");
        }
        for (key, value) in [
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("TORCHELASTIC_RUN_ID", "train"),
            ("PYTHONUNBUFFERED", "1"),
            ("stdin", ""),
        ] {
            is(key, value);
        }
        let file = |name: &str| run_dir.join(name).display().to_string();
        is("PARAFT_RUN_DIR", &run_dir.display().to_string());
        is("PARAFT_JOB", &file("job.toml"));
        is("PARAFT_SERVERS", &place.read("servers"));
        assert_eq!(t["argv"], serde_json::json!(own));
        assert_eq!(t["lifeline is a pipe"], true);
        assert!(t["OMP_NUM_THREADS"].as_str().is_some_and(|n| n.parse::<u32>().is_ok_and(|n| n > 0)), "{t}");
        assert!(t.get("PARAFT_RESUME").is_none() && t.get("PARAFT_SLOW").is_none(), "{t}");
        ports.insert(t["MASTER_PORT"].as_str().expect("a port").to_string());
    }
    assert!(ports.len() == 1 && !ports.contains("1"), "the same for all: {ports:?}");
    let job = place.read("job.toml");
    contains(&job, &["mode = \"ssp:4\"", "workers = 3", "servers = 1", "replicas = 1", "name = \"train\""]);
}

#[test]
fn a_module_runs_on_the_named_python_with_set_threads() {
    if !python() {
        return;
    }
    let place = Place::new();
    fs::create_dir(place.scratch.path().join("pkg")).expect("folder");
    place.script("pkg/train.py", TELLS);
    let python = place.script("python-of-mine", "#!/bin/sh\necho mine \"$@\"\nexec python3 \"$@\"\n");
    let flags = [
        "--workers",
        "1",
        "--name",
        "m.1",
        "--python",
        python.to_str().expect("text"),
        "-m",
        "pkg.train",
        "--workers",
        "5",
        "--",
        "-m",
    ];
    let mut command = place.launch(&flags);
    command.env("OMP_NUM_THREADS", "11");
    let (code, out, err) = run_out(command);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("mine -m pkg.train --workers 5 -- -m"), "{out}");
    let all = told(&place, 0);
    assert_eq!(all[0]["argv"], serde_json::json!(["--workers", "5", "--", "-m"]));
    assert_eq!(all[0]["OMP_NUM_THREADS"], "11");
    assert_eq!(all[0]["TORCHELASTIC_RUN_ID"], "m.1");
    assert!(place.read("metrics.jsonl").contains("\"model\":\"pkg.train\""));
}

#[test]
fn the_python_beside_the_program_goes_before_that_of_the_path() {
    if !python() {
        return;
    }
    let place = Place::new();
    let program = Path::new(env!("CARGO_BIN_EXE_paraft"));
    let bin = tempfile::tempdir_in(program.parent().expect("a folder")).expect("an environment");
    // A link and no copy: a test beside this one that starts a process may hold what is being written.
    fs::hard_link(program, bin.path().join("paraft")).expect("on one file system");
    place.script("train.py", "print('trains')\n");
    let own = bin.path().join("python3");
    fs::write(&own, "#!/bin/sh\necho own \"$1\"\nexec python3 \"$@\"\n").expect("script");
    fs::set_permissions(&own, fs::Permissions::from_mode(0o755)).expect("executable");
    let launch = |python: Option<&str>| {
        let mut command = Command::new(bin.path().join("paraft"));
        command.current_dir(place.scratch.path());
        command.args(["launch", "--servers", "1", "--workers", "1"]);
        command.args(python.iter().flat_map(|p| ["--python", p])).arg("train.py");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let (code, out, err) = run_out(command);
        assert_eq!(code, Some(0), "{err}");
        out
    };
    let out = launch(None);
    assert!(out.contains("own /") && out.contains("trains"), "{out}");
    let out = launch(Some("python3"));
    assert!(!out.contains("own") && out.contains("trains"), "{out}");
}

#[test]
fn a_script_lies_beside_its_job_file_and_is_quiet_with_json() {
    if !python() {
        return;
    }
    let place = Place::new();
    fs::create_dir(place.scratch.path().join("jobs")).expect("folder");
    place.script("jobs/train.py", TELLS);
    let job = place.scratch.path().join("jobs/t.toml");
    fs::write(
        &job,
        "[cluster]\nservers = 1\nreplicas = 1\nscript = [\"python3\", \"train.py\", \"--lr\", \"1\"]\n",
    )
    .expect("job file");
    let mut command = paraft();
    command.current_dir("/").args(["train", "--json", "--run-dir"]).arg(place.run_dir()).arg(&job);
    let out = command.output().expect("paraft starts");
    assert!(out.status.success(), "{}", text(&out.stderr));
    let summary: Value = serde_json::from_str(text(&out.stdout).trim()).expect("one object and nothing else");
    assert_eq!(summary["samples"], 0);
    assert!(!text(&out.stderr).contains("complained by"), "{}", text(&out.stderr));
    contains(&place.read("worker-0.out"), &["said by 0", "complained by 0"]);
    assert_eq!(told(&place, 1)[0]["argv"], serde_json::json!(["--lr", "1"]));
}

/// Kills itself the first time, and then waits for the other: once all that run are done, none starts again.
const DIES_ONCE: &str = r#"
import os, signal, time
here = os.path.join(os.environ["PARAFT_RUN_DIR"], "died-" + os.environ["RANK"])
if not os.path.exists(here):
    open(here, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
other = os.path.join(os.environ["PARAFT_RUN_DIR"], "told-%d.json" % (1 - int(os.environ["RANK"])))
while not os.path.exists(other) or open(other).read().count("\n") < 2:
    time.sleep(0.05)
"#;

#[test]
fn a_killed_script_restarts_with_the_same_variables() {
    if !python() {
        return;
    }
    let place = Place::new();
    place.script("train.py", &format!("{TELLS}{DIES_ONCE}"));
    let set = ["--set", "cluster.max_restarts=1", "train.py"];
    let (code, _, err) = run_out(place.launch(&set));
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(err.matches("was ended by SIGKILL; started again").count(), 2, "{err}");
    for rank in 0..2 {
        let all: Vec<Value> = told(&place, rank)
            .into_iter()
            .map(|mut t| {
                t.as_object_mut().expect("an object").remove("PARAFT_LIFELINE_FD");
                t
            })
            .collect();
        assert_eq!(all.len(), 2);
        assert_eq!(all[0], all[1]);
    }
}

/// The terminal's input and its Ctrl-C are the script's.
const ASKS: &str = r#"
import sys
try:
    print("ready", flush=True)
    print("got", input("who? "), flush=True)
    sys.stdin.readline()
except KeyboardInterrupt:
    print("interrupted, and here", flush=True)
print("then", sys.stdin.readline().strip(), flush=True)
"#;

/// Runs a command on a terminal of its own: answers what is asked, then presses Ctrl-C.
const TERMINAL: &str = r#"
import os, pty, signal, sys, time
signal.alarm(90)
pid, master = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], sys.argv[1:])
said = b""
def until(words):
    global said
    while words not in said:
        some = os.read(master, 4096)
        if not some: sys.exit("it ended: " + said.decode())
        said += some
until(b"who? "); os.write(master, b"me\n")
until(b"got me"); time.sleep(0.3); os.write(master, b"\x03")
until(b"and here"); os.write(master, b"bye\n")
until(b"then bye")
try:
    while os.read(master, 4096): pass
except OSError:
    pass
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"#;

#[test]
fn one_script_on_a_terminal_reads_from_it_and_has_its_ctrl_c() {
    if !python() {
        return;
    }
    let place = Place::new();
    place.script("train.py", ASKS);
    let mut command = Command::new("python3");
    command.args([
        "-c",
        TERMINAL,
        env!("CARGO_BIN_EXE_paraft"),
        "launch",
        "--servers",
        "1",
        "--workers",
        "1",
    ]);
    command.current_dir(place.scratch.path()).arg("--run-dir").arg(place.run_dir()).arg("train.py");
    let out = command.output().expect("python3");
    assert_eq!(out.status.code(), Some(0), "{}{}", text(&out.stdout), text(&out.stderr));
    contains(&place.read("worker-0.out"), &["got me", "interrupted, and here", "then bye"]);
    place.is_empty();
}
