//! `paraft sweep`: many trials on one fleet, killed and gone on with.

use crate::{common::*, standing::Standing};
use std::io::BufRead;

const SPACE: &str = "metric = \"accuracy\"\n[space]\n\"optimizer.lr\" = [0.003, 0.03, 0.1, 0.3, 1.0]\n\
                     \"train.batch\" = [16, 32, 64, 128]\n\"model.hidden\" = [[8], [16], [32]]\n";

fn sweep(folder: &Path, run_dir: &str, more: &[&str]) -> Command {
    let body = digits("bsp", 3, 2).replace("batch", "workers = 1\nbatch") + "[optimizer]\nkind = \"sgd\"\n";
    let job = job(folder, &body);
    fs::write(folder.join("space.toml"), SPACE).expect("space");
    let mut c = paraft();
    c.current_dir(folder).arg("sweep").arg(job).args([
        "--space",
        "space.toml",
        "--json",
        "--run-dir",
        run_dir,
    ]);
    c.args(more);
    c
}

/// What each trial has come to, by trial and epochs; and the best.
fn results(lines: &str) -> (BTreeMap<(u64, u64), Value>, Option<Value>) {
    let (mut trials, mut best) = (BTreeMap::new(), None);
    for line in lines.lines() {
        let said: Value = serde_json::from_str(line).expect("one object a line");
        match said.get("best") {
            Some(said) => best = Some(said.clone()),
            None => {
                let number = |key: &str| said[key].as_u64().expect("a number");
                let is_new =
                    trials.insert((number("trial"), number("epochs")), said["value"].clone()).is_none();
                assert!(is_new, "told twice: {said}");
            }
        }
    }
    (trials, best)
}

#[test]
fn a_sweep_with_kills_reaches_the_same_result() {
    let scratch = tempfile::tempdir().expect("scratch");
    let halving = ["--search", "halving", "--eta", "4", "--parallel", "2", "--share-cores"];
    let out = sweep(scratch.path(), "undisturbed", &halving).output().expect("paraft starts");
    assert!(out.status.success(), "{}", text(&out.stderr));
    let (undisturbed, best) = results(&text(&out.stdout));
    assert_eq!(undisturbed.keys().filter(|(_, epochs)| *epochs == 1).count(), 60);
    assert_eq!(undisturbed.keys().filter(|(_, epochs)| *epochs == 2).count(), 15);

    let dir = scratch.path().join("killed");
    let worker = || {
        wait("a trial's worker", || {
            let all = processes(&dir.join("trial-"));
            all.iter().find(|(_, l)| l.contains("paraft worker")).map(|w| w.0).ok_or(format!("{all:?}"))
        })
    };
    let mut child = sweep(scratch.path(), "killed", &halving)
        .stdout(Stdio::piped())
        .stderr(fs::File::create(scratch.path().join("said")).expect("file"))
        .spawn()
        .expect("paraft starts");
    let lines = std::io::BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut told = String::new();
    let tried_again = || {
        let said = fs::read_to_string(scratch.path().join("said")).expect("said");
        (said.matches("; try 1 of 3").count(), said)
    };
    for (n, line) in (1..).zip(lines) {
        told += &(line.expect("utf-8") + "\n");
        match n {
            5 | 20 | 35 => _ = kill(Pid::from_raw(worker()), Signal::SIGKILL),
            // One that had just ended its trial is no loss.
            9 | 25 | 40 if tried_again().0 <= n / 15 => _ = kill(Pid::from_raw(worker()), Signal::SIGKILL),
            12 => _ = kill(pid_of(&dir.join("fleet"), "--id 0"), Signal::SIGKILL),
            45 => _ = child.kill(),
            _ => {}
        }
    }
    child.wait().expect("it has ended");
    let (tries, said) = tried_again();
    assert!(tries >= 3, "{said}");
    contains(&said, &["warning: server-0 ", "it is started again"]);
    wait("nobody to be left", || match processes(&dir) {
        none if none.is_empty() => Ok(()),
        some => Err(format!("{some:?}")),
    });
    let (mut killed, none) = results(&told);
    assert!(none.is_none() && killed.len() < 75, "it was killed before its end");
    let out = sweep(scratch.path(), "killed", &halving).output().expect("paraft starts");
    assert!(out.status.success(), "{}", text(&out.stderr));
    contains(&text(&out.stderr), &["trials have ended already"]);
    let (rest, again) = results(&text(&out.stdout));
    // What had ended and was not told any more is in the log alone.
    killed.extend(rest);
    let missing: Vec<_> = undisturbed.keys().filter(|k| !killed.contains_key(k)).collect();
    assert!(missing.len() <= 2, "{missing:?}");
    killed.iter().for_each(|(which, value)| assert_eq!(undisturbed[which], *value, "{which:?}"));
    let set = |best: Option<Value>| best.map(|b| (b["trial"].clone(), b["value"].clone(), b["set"].clone()));
    assert_eq!(set(again), set(best));

    let log = fs::read_to_string(dir.join("sweep.jsonl")).expect("log");
    let ended: Vec<Value> = log.lines().map(|l| serde_json::from_str(l).expect("a line")).collect();
    assert_eq!(ended.iter().filter(|l| l.get("end").is_some()).count(), 75);
    assert!(ended.iter().any(|l| l["end"]["tries"].as_u64().is_some_and(|n| n > 1)), "{log}");
    let report = fs::read_to_string(dir.join("report.html")).expect("report");
    contains(&report, &["60 trials", "optimizer.lr", "sweep.jsonl"]);
    // The job file that it has written is one that trains.
    let best = dir.join("best.toml");
    let out = run(&[
        "train",
        best.to_str().expect("utf-8"),
        "--json",
        "--run-dir",
        dir.join("best").to_str().expect("utf-8"),
    ]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let trained: Value = serde_json::from_str(&text(&out.stdout)).expect("an object");
    let value = undisturbed.iter().filter(|((_, epochs), _)| *epochs == 2).map(|(_, v)| v.as_f64());
    let most = value.flatten().fold(0.0, f64::max);
    assert_eq!(
        trained["final_accuracy"].as_f64(),
        Some(most),
        "from the start it comes to what the best trial came to"
    );
}

/// A sweep of a few trials on an existing fleet, with its output in `said`.
fn sweep_to(scratch: &Path, fleet: &Standing, epochs: u64) -> Command {
    let file = job(scratch, &digits("asp", 3, epochs).replace("batch", "workers = 1\nbatch"));
    fs::write(scratch.join("two.toml"), "metric = \"accuracy\"\n[space]\n\"optimizer.lr\" = [0.05, 0.1]\n")
        .expect("space");
    let mut c = paraft();
    c.env("PARAFT_CERTS", scratch.join("certs")).current_dir(scratch).arg("sweep").arg(file).args([
        "--space",
        "two.toml",
        "--search",
        "grid",
        "--parallel",
        "1",
        "--json",
        "--run-dir",
    ]);
    c.arg(scratch.join("swept"))
        .arg("--fleet")
        .arg(fleet.any())
        .stderr(fs::File::create(scratch.join("said")).expect("file"))
        .stdout(Stdio::piped());
    c
}

/// The jobs that servers still hold, as name and number.
fn held(fleet: &Standing) -> Vec<(String, u64)> {
    let said: Value =
        serde_json::from_str(&fleet.done(&["jobs", "--fleet", fleet.any(), "--json"])).expect("an object");
    let jobs = said["jobs"].as_array().expect("a list").iter().filter(|j| j["released"] == false);
    jobs.map(|j| (j["job"].as_str().unwrap_or_default().into(), j["number"].as_u64().unwrap_or(0))).collect()
}

#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn a_resumed_sweep_deletes_only_its_own_leftover_jobs() {
    let scratch = tempfile::tempdir().expect("scratch");
    let dir = scratch.path();
    let fleet = Standing::start(dir);
    let mut killed = sweep_to(dir, &fleet, 60);
    // It has the name that the trials would have, and waits for no other worker.
    let theirs = dir.join("job.toml");
    fleet.done(&[
        "train",
        theirs.to_str().expect("utf-8"),
        "--fleet",
        fleet.any(),
        "--keep",
        "forever",
        "--set",
        "train.epochs=1",
    ]);
    let mut child = killed.spawn().expect("paraft starts");
    let known = dir.join("swept/trial-0000/epochs-60/on-fleet.json");
    wait("a trial to train", || match held(&fleet) {
        jobs if jobs.iter().any(|j| j.0 == "t-2") => Ok(()),
        jobs => Err(format!("{jobs:?}; {:?}", fs::read_to_string(dir.join("said")))),
    });
    child.kill().expect("it runs");
    child.wait().expect("it has ended");
    wait("nobody to be left", || match processes(&dir.join("swept")) {
        none if none.is_empty() => Ok(()),
        some => Err(format!("{some:?}")),
    });
    assert_eq!(held(&fleet).len(), 2, "nobody was left to delete it");
    // A folder may be wrong about a name, which another's job has by now.
    let mut left: Value = serde_json::from_slice(&fs::read(&known).expect("it knows")).expect("an object");
    (left["name"], left["token"]) = ("t".into(), 7.into());
    let other = dir.join("swept/trial-0001/epochs-60");
    fs::create_dir_all(&other).expect("a folder");
    fs::write(other.join("on-fleet.json"), left.to_string()).expect("a file");
    let out = sweep_to(dir, &fleet, 60).output().expect("paraft starts");
    let said = fs::read_to_string(dir.join("said")).expect("said");
    assert!(out.status.success(), "{said}");
    contains(&said, &["job t-2, which an earlier try had left on the fleet, is deleted there"]);
    let now = held(&fleet);
    assert_eq!(now.iter().map(|j| j.0.as_str()).collect::<Vec<_>>(), ["t"], "{now:?}");
    assert!(!known.exists() && !other.join("on-fleet.json").exists(), "nothing is left to be deleted");
}

#[test]
fn trials_beside_another_job_of_the_machine_say_so() {
    let scratch = tempfile::tempdir().expect("scratch");
    let dir = scratch.path();
    let fleet = Standing::start(dir);
    let mut sweep = sweep_to(dir, &fleet, 1);
    let theirs = dir.join("job.toml");
    let theirs = theirs.to_str().expect("utf-8");
    let long = ["--run-dir", "other", "--set", "train.epochs=100000", "--set", "name=other"];
    fleet.done(&[&["submit", theirs, "--fleet", fleet.any()], &long[..]].concat());
    wait("the other job to train", || match fleet.done(&["jobs", "--fleet", fleet.any()]) {
        said if said.contains("running") => Ok(()),
        said => Err(said),
    });
    let out = sweep.output().expect("paraft starts");
    let said = fs::read_to_string(dir.join("said")).expect("said");
    assert!(out.status.success(), "{said}");
    contains(&said, &["trial 0: job other trains on this machine too", "trial 1: job other"]);
    let report = fs::read_to_string(dir.join("swept/report.html")).expect("a report");
    contains(&report, &["Jobs trained on this machine at the same time (other): the times of 2 trials"]);
    fleet.done(&["stop", "other", "--fleet", fleet.any()]);
    wait("its launcher to end", || match processes(&dir.join("other")) {
        none if none.is_empty() => Ok(()),
        some => Err(format!("{some:?}")),
    });
}

#[test]
fn a_fleet_that_is_not_reached_for_a_while_ends_no_sweep() {
    let scratch = tempfile::tempdir().expect("scratch");
    let dir = scratch.path();
    let fleet = Standing::start(dir);
    let all = |signal| {
        for server in fleet.servers.iter().flatten() {
            kill(server.pid(), signal).expect("it is there");
        }
    };
    all(Signal::SIGSTOP);
    let child = sweep_to(dir, &fleet, 1).spawn().expect("paraft starts");
    let said = || fs::read_to_string(dir.join("said")).unwrap_or_default();
    wait("a try that comes to nothing", || match said() {
        said if said.contains("; try 1 of 3") => Ok(()),
        said => Err(said),
    });
    all(Signal::SIGCONT);
    let out = child.wait_with_output().expect("it has ended");
    assert!(out.status.success(), "{}", said());
    let (trials, best) = results(&text(&out.stdout));
    assert!(trials.len() == 2 && trials.values().all(Value::is_number) && best.is_some(), "{trials:?}");
    assert_eq!(held(&fleet), [], "nor does it leave anything there");
}

#[test]
fn a_sweep_that_cannot_be_is_refused_before_anything_starts() {
    let scratch = tempfile::tempdir().expect("scratch");
    let refused = |space: &str, more: &[&str], words: &[&str]| {
        let mut c = sweep(scratch.path(), "refused", more);
        fs::write(scratch.path().join("space.toml"), space).expect("space");
        let out = c.output().expect("paraft starts");
        let err = text(&out.stderr);
        assert!(matches!(out.status.code(), Some(2 | 78)), "{:?}: {err}", out.status);
        contains(&err, words);
        assert!(!scratch.path().join("refused/fleet").exists(), "nothing may start: {err}");
    };
    refused("metric = \"accurancy\"\n[space]\n", &[], &["space.toml", "accurancy"]);
    refused("metric = \"loss\"\n[space]\n", &[], &["space.toml", "space"]);
    refused("metric = \"loss\"\n[space]\n\"optimizer.rate\" = [0.1]\n", &[], &["optimizer.rate", "trial 0"]);
    refused("metric = \"loss\"\n[space]\n\"train.batch\" = [16, 0]\n", &[], &["train.batch"]);
    refused(
        "metric = \"loss\"\n[space]\n\"optimizer.lr\" = { min = 1.0, max = 0.1 }\n",
        &[],
        &["optimizer.lr", "min"],
    );
    refused(
        "metric = \"loss\"\n[space]\n\"optimizer.lr\" = { min = 0.1, max = 1.0 }\n",
        &["--search", "grid"],
        &["points"],
    );
    refused(SPACE, &["--min-epochs", "2"], &["--min-epochs", "train.epochs"]);
    refused(SPACE, &["--parallel", "200"], &["--share-cores", "cores"]);
}
