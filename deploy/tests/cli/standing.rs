//! A fleet that was started without a job: jobs are trained on it, submitted, followed, stopped and
//! deleted.

use crate::common::*;
use serde_json::json;

/// Three servers, on free ports.
pub struct Standing {
    pub addresses: Vec<String>,
    folder: PathBuf,
    pub servers: Vec<Option<Process>>,
}

impl Standing {
    pub fn start(folder: &Path) -> Self {
        let addresses = free_addresses(3);
        let out =
            paraft().args(["certs", "new", "certs"]).current_dir(folder).output().expect("paraft starts");
        assert!(out.status.success(), "{}", text(&out.stderr));
        let mut fleet = Self { addresses, folder: folder.into(), servers: vec![None, None, None] };
        (0..3).for_each(|id| fleet.serve(id));
        wait("the fleet to stand", || {
            match fleet.say(&["status", "--fleet", fleet.any(), "--wait", "whole"]) {
                (Some(0), _) => Ok(()),
                (_, said) => Err(said),
            }
        });
        fleet
    }

    pub fn serve(&mut self, id: usize) {
        let mut c = paraft();
        c.arg("--certs").arg(self.folder.join("certs"));
        c.args(["server", "--shards", "0", "--replicas", "3", "--election-ms", "200"]);
        // More than the jobs of these tests need.
        c.args(["--job-memory", "512MiB"]);
        c.args(["--servers", &self.addresses.join(","), "--id", &id.to_string()])
            .arg("--data")
            .arg(self.data(id));
        self.servers[id] = Some(Process::start(format!("server-{id}"), c, &self.folder).expect("server"));
    }

    /// Starts the `n`th additional server, which joins.
    pub fn joining(&self, n: usize) -> Process {
        let mut c = paraft();
        c.arg("--certs").arg(self.folder.join("certs"));
        c.args([
            "server",
            "--election-ms",
            "200",
            "--join",
            "--fleet",
            self.any(),
            "--listen",
            &free_addresses(1)[0],
        ]);
        c.arg("--data").arg(self.folder.join(format!("more-{n}")));
        Process::start(format!("more-{n}"), c, &self.folder).expect("server")
    }

    fn data(&self, id: usize) -> PathBuf {
        self.folder.join(format!("s{id}"))
    }

    /// One address is enough.
    pub fn any(&self) -> &str {
        &self.addresses[2]
    }

    /// Runs a command in the fleet's folder; returns its exit code and output.
    pub fn say(&self, args: &[&str]) -> (Option<i32>, String) {
        let out = self.command(args).output().expect("paraft starts");
        (out.status.code(), text(&out.stdout) + &text(&out.stderr))
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut c = paraft();
        c.env("PARAFT_CERTS", self.folder.join("certs")).args(args).current_dir(&self.folder);
        c
    }

    pub fn done(&self, args: &[&str]) -> String {
        let (code, said) = self.say(args);
        assert_eq!(code, Some(0), "{args:?}: {said}");
        said
    }

    /// The jobs by name: state, and whether servers hold their data.
    fn jobs(&self) -> BTreeMap<String, (String, bool)> {
        let said: Value =
            serde_json::from_str(&self.done(&["jobs", "--fleet", self.any(), "--json"])).expect("an object");
        let jobs = said["jobs"].as_array().expect("a list");
        let word = |j: &Value, key: &str| j[key].as_str().expect("a word").to_string();
        jobs.iter().map(|j| (word(j, "job"), (word(j, "state"), j["bytes"] != 0))).collect()
    }
}

fn weights(run: &Path) -> Vec<u8> {
    fs::read(run.join("model.safetensors")).expect("weights")
}

#[test]
fn a_job_on_a_shared_fleet_learns_the_same_bits() {
    let scratch = tempfile::tempdir().expect("scratch");
    let file = job(scratch.path(), &digits("bsp", 3, 2));
    let file = file.to_str().expect("utf-8");
    let fleet = Standing::start(scratch.path());
    fleet.done(&["train", file, "--run-dir", "own"]);
    // Another job that pushes all the time.
    fleet.done(&[
        "submit",
        file,
        "--fleet",
        fleet.any(),
        "--set",
        "train.epochs=100000",
        "--set",
        "train.mode=asp",
    ]);
    fleet.done(&["train", file, "--fleet", fleet.any(), "--run-dir", "theirs"]);
    let [own, theirs] = ["own", "theirs"].map(|run| weights(&scratch.path().join(run)));
    assert!(own == theirs, "other bits");
    // Its name was taken. What has become of it is reported in a moment.
    let states = [("t", "running"), ("t-2", "finished")];
    wait("both to be known", || match fleet.jobs() {
        jobs if states.iter().all(|(name, state)| jobs[*name] == (state.to_string(), true)) => Ok(()),
        jobs => Err(format!("{jobs:?}")),
    });
    fleet.done(&["delete", "t", "--fleet", fleet.any()]);
}

#[test]
fn a_job_is_followed_stopped_and_deleted_by_its_name() {
    let scratch = tempfile::tempdir().expect("scratch");
    let body = digits("asp", 3, 100_000) + "durability = \"quorum-disk\"\n";
    let file = job(scratch.path(), &body);
    let file = file.to_str().expect("utf-8");
    let mut fleet = Standing::start(scratch.path());
    contains(&fleet.done(&["jobs", "--fleet", fleet.any()]), &["no jobs", "paraft submit"]);
    for n in ["t", "t-2"] {
        let said = fleet.done(&["submit", file, "--fleet", fleet.any(), "--keep", "forever"]);
        contains(&said, &[&format!("job {n} is submitted"), "runs/t-"]);
    }
    wait("both to train", || match fleet.jobs() {
        jobs if jobs.values().all(|j| j.0 == "running") => Ok(()),
        jobs => Err(format!("{jobs:?}")),
    });
    let (code, said) = fleet.say(&["stop", "t"]);
    assert_eq!(code, Some(2), "{said}");
    contains(&said, &["which fleet?", "runs/t-1", "runs/t-2", "are going on"]);
    contains(&fleet.done(&["logs", "t-2", "--fleet", fleet.any()]), &["worker-0.log", "connected"]);
    assert!(fleet.data(0).join("shard-1-0").is_dir(), "job 1's first shard, on its disk");
    // A new leader may not be visible yet, and one worker may join later than the other.
    let said = wait("all of its leaders to be seen", || {
        match fleet.say(&["status", "t-2", "--fleet", fleet.any()]) {
            (Some(0), said) if ["w0(", "w1("].iter().all(|w| said.contains(w)) => Ok(said),
            (_, said) => Err(said),
        }
    });
    contains(&said, &["job t-2", "running", "1.0", "1.1", "runs/t-2"]);
    assert!(!said.contains("job t "), "of the other job nothing: {said}");
    let one: Value = serde_json::from_str(&fleet.done(&["status", "t-2", "--fleet", fleet.any(), "--json"]))
        .expect("an object");
    assert_eq!((&one["job"], &one["leaderless"]), (&json!("t-2"), &json!([])));
    assert!(
        one["leaders"].as_array().is_some_and(|l| !l.is_empty() && l.iter().all(|s| s["job"] == 1)),
        "{one}"
    );
    let (code, said) = fleet.say(&["status", "t-3", "--fleet", fleet.any()]);
    assert_eq!(code, Some(78), "{said}");
    contains(&said, &["no job `t-3`", "paraft jobs"]);
    // A server dies and restarts with its data of both jobs.
    fleet.servers[0] = None;
    fleet.serve(0);
    contains(&fleet.done(&["stop", "t", "--fleet", fleet.any()]), &["t is stopped"]);
    let run = scratch.path().join("runs/t-1");
    wait("its launcher to end", || match run.join("report.html").exists() {
        true => Ok(()),
        false => Err(fs::read_to_string(run.join("launcher.log")).unwrap_or_default()),
    });
    assert!(!weights(&run).is_empty());
    let said = fleet.done(&["stop", "t"]);
    contains(&said, &["runs/t-2, the only run in runs/ that is going on", "already"]);
    contains(&fleet.done(&["delete", "t-2", "--fleet", fleet.any()]), &["deleted", "running"]);
    wait("its files to go", || {
        let left: Vec<_> = (0..3).map(|id| fleet.data(id).join("shard-1-0")).filter(|d| d.exists()).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    });
    assert_eq!(fleet.jobs(), BTreeMap::from([("t".to_string(), ("stopped".to_string(), true))]));
    let (code, said) = fleet.say(&["logs", "t-2", "--fleet", fleet.any()]);
    assert_eq!(code, Some(78), "{said}");
    contains(&said, &["no job `t-2`"]);
    let (code, said) = fleet.say(&["delete", "unknown", "--fleet", fleet.any()]);
    assert_eq!(code, Some(78), "{said}");
    contains(&said, &["no job `unknown`", "`t`"]);
    // Its launcher logs why it has ended.
    let log = scratch.path().join("runs/t-2/launcher.log");
    wait("the other launcher to end", || match fs::read_to_string(&log).unwrap_or_default() {
        said if said.contains("no job `t-2`") => Ok(()),
        said => Err(said),
    });
}

#[test]
fn what_cannot_be_submitted_is_said_at_once() {
    let scratch = tempfile::tempdir().expect("scratch");
    let file = job(scratch.path(), &digits("bsp", 5, 1));
    let file = file.to_str().expect("utf-8");
    let fleet = Standing::start(scratch.path());
    let cases = [
        (vec!["submit", file, "--fleet", fleet.any()], 78, vec!["5 replicas", "this fleet has 3"]),
        (vec!["submit", file, "--fleet", "127.0.0.1:1"], 69, vec!["127.0.0.1:1"]),
        (vec!["submit", file], 2, vec!["--fleet", "--on"]),
        (vec!["submit", file, "--fleet", fleet.any(), "--keep", "1w"], 2, vec!["1w", "12h"]),
        (vec!["train", file, "--fleet", fleet.any(), "--faults"], 2, vec!["--faults"]),
        (vec!["train", file, "--set", "train.init=job:t"], 78, vec!["job:t", "--fleet FLEET"]),
        (vec!["train", file, "--set", "train.init=job:"], 78, vec!["train.init", "job:NAME"]),
        (vec!["simulate", file, "--set", "train.init=job:t"], 78, vec!["train.init"]),
    ];
    for (args, code, words) in cases {
        let (ended, said) = fleet.say(&args);
        assert_eq!(ended, Some(code), "{args:?}: {said}");
        contains(&said, &words);
    }
    assert_eq!(fleet.jobs(), BTreeMap::new(), "nothing is left of those");
    let large =
        ["--set", "model.hidden=[16384, 2048]", "--set", "cluster.servers=3", "--set", "cluster.replicas=3"];
    let (ended, said) = fleet.say(&[&["train", file, "--fleet", fleet.any()], &large[..]].concat());
    assert_eq!(ended, Some(78), "{said}");
    contains(&said, &["where a job may have 512.0 MiB (--job-memory)"]);
    // Files of an earlier run stay.
    let small = ["--set", "cluster.servers=3", "--set", "cluster.replicas=3", "--set", "train.max_steps=1"];
    fleet.done(&[&["train", file, "--fleet", fleet.any(), "--run-dir", "once"], &small[..]].concat());
    let job_file = scratch.path().join("once/job.toml");
    let before = std::fs::read_to_string(&job_file).expect("the job that was trained");
    let resume = ["submit", file, "--fleet", fleet.any(), "--run-dir", "once", "--resume"];
    let (ended, said) = fleet.say(&[&resume[..], &small[..]].concat());
    assert!(ended != Some(0), "{said}");
    assert_eq!(std::fs::read_to_string(&job_file).ok(), Some(before), "{said}");
}

#[test]
fn a_comparison_leaves_no_jobs_on_a_shared_fleet() {
    let scratch = tempfile::tempdir().expect("scratch");
    let file = job(scratch.path(), &digits("bsp", 3, 1));
    let file = file.to_str().expect("utf-8");
    let fleet = Standing::start(scratch.path());
    // Whose name the runs cannot have.
    fleet.done(&["train", file, "--fleet", fleet.any(), "--run-dir", "first"]);
    let compare = ["compare", file, "--modes", "bsp,asp", "--fleet", fleet.any(), "--run-dir", "both"];
    contains(&fleet.done(&compare), &["bsp", "asp", "report"]);
    let [first, bsp] = ["first", "both/bsp"].map(|run| weights(&scratch.path().join(run)));
    assert!(first == bsp, "other bits");
    assert_eq!(fleet.jobs(), BTreeMap::from([("t".to_string(), ("finished".to_string(), true))]));
    // What is there is known again.
    contains(&fleet.done(&compare), &["2 of 2 runs are complete already"]);
    let (code, said) = fleet.say(&["compare", file, "--fleet", fleet.any(), "--delay-ms", "3"]);
    assert_eq!(code, Some(2), "{said}");
}
