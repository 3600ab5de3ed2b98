//! What a fleet knows of its jobs and checkpoints, from any server, while servers die.

use crate::common::*;
use std::io::Read;

const EPOCHS: u64 = 60;
/// Steps of a worker: 44 in each epoch of the 1,437 embedded images.
const STEPS: u64 = 44 * EPOCHS;

/// What a command prints; it must succeed.
fn printed(args: &[&str]) -> String {
    let out = paraft().args(args).output().expect("paraft starts");
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// What the control group knows, asked at one server: the last line of its status.
fn known(address: &str) -> Result<Value, String> {
    let out = paraft().args(["status", "--fleet", address, "--json"]).output().expect("paraft starts");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let last = text.lines().next_back().unwrap_or_default();
    let line: Value = serde_json::from_str(last).map_err(|e| format!("{e}: {text}"))?;
    if line.get("jobs").is_some() { Ok(line) } else { Err(text) }
}

/// Its only job.
fn job_at(address: &str) -> Result<Value, String> {
    let line = known(address)?;
    match line["jobs"].as_array().map(Vec::as_slice) {
        Some([job]) => Ok(job.clone()),
        _ => Err(line.to_string()),
    }
}

fn worker(fleet: &Fleet, rank: u32, run_dir: &Path) -> Child {
    fleet.worker(rank, run_dir).stderr(Stdio::piped()).spawn().expect("worker")
}

/// The server that leads the control group.
fn leader(fleet: &Fleet) -> usize {
    wait("a leader of the control group", || {
        let lines: Vec<_> = fleet.addresses.iter().filter_map(|a| known(a).ok()).collect();
        let named = |l: &Value| fleet.addresses.iter().position(|a| l["leader"] == a.as_str());
        lines.iter().find_map(named).ok_or_else(|| format!("{lines:?}"))
    })
}
fn names(job: &Value) -> BTreeSet<String> {
    let all = job["checkpoints"].as_array().expect("a list").iter();
    all.map(|c| c["path"].as_str().expect("a path").to_string()).collect()
}

#[test]
fn any_server_lists_jobs_after_the_control_leader_is_killed() {
    let scratch = tempfile::tempdir().expect("scratch");
    let run_dir = scratch.path().join("run");
    fs::create_dir(&run_dir).expect("run folder");
    let body = format!(
        "name = \"t\"
[model]
kind = \"mlp\"
hidden = [32]
[data]
kind = \"digits\"
[train]
mode = \"bsp\"
\
         batch = 16
epochs = {EPOCHS}
[checkpoint]
every_steps = 100
keep = 2
[cluster]
servers = 3
\
         replicas = 3
election_ms = 200
"
    );
    let mut fleet = Fleet::start(scratch.path(), Some(&body));
    let workers: Vec<_> = (0..2).map(|rank| Held(worker(&fleet, rank, &run_dir))).collect();
    let job = wait("a checkpoint to be listed", || match job_at(&fleet.addresses[0])? {
        job if job["latest"].is_object() => Ok(job),
        job => Err(job.to_string()),
    });
    for (key, value) in [("job", "t"), ("mode", "bsp"), ("durability", "quorum-memory")] {
        assert_eq!(job[key], value, "{job}");
    }
    assert_eq!(job["workers"], 2, "{job}");

    let killed = leader(&fleet);
    fleet.kill(killed);
    for mut w in workers {
        let status = w.0.wait().expect("worker");
        let mut said = String::new();
        w.0.stderr.take().expect("piped").read_to_string(&mut said).expect("what it said");
        assert!(status.success(), "{status}: {said}");
    }
    // No worker is left. Each of the others tells the same, asked by itself.
    let others: Vec<String> =
        (0..3).filter(|id| *id != killed).map(|id| fleet.addresses[id].clone()).collect();
    let folder = run_dir.join("checkpoints");
    let on_disk: BTreeSet<String> = fs::read_dir(&folder)
        .expect("checkpoints")
        .flatten()
        .filter(|e| e.path().is_dir())
        .map(|e| e.path().display().to_string())
        .collect();
    let pointed = |name: &str| {
        let text = fs::read_to_string(folder.join(name)).expect("a pointer");
        folder.join(text.lines().next().unwrap_or_default()).display().to_string()
    };
    for address in &others {
        let job = wait("the job to have finished", || match job_at(address)? {
            job if job["state"] == "finished" => Ok(job),
            job => Err(job.to_string()),
        });
        assert_eq!(names(&job), on_disk, "what checkpoint.keep removed is not listed");
        assert_eq!(job["latest"]["step"], STEPS, "{job}");
        assert_eq!(job["latest"]["path"], pointed("latest").as_str(), "{job}");
        assert_eq!(job["best"]["path"], pointed("best").as_str(), "{job}");
        assert!(job["best"]["loss"].as_f64().is_some_and(|l| l > 0.0 && l < 1.0), "{job}");
        assert!(job["latest"]["worker"].is_u64() && job["latest"]["bytes"].as_u64() > Some(1000), "{job}");
        assert_eq!(job["latest"]["versions"], serde_json::json!([STEPS, STEPS]), "{job}");
        let text = printed(&["status", "--fleet", address]);
        let shown = format!("latest: step {STEPS}");
        let both = format!("latest, best: step {STEPS}");
        assert!(text.contains("job t  finished  begun in bsp  2 workers"), "{text}");
        assert!(text.contains(&shown) || text.contains(&both), "{text}");
        let list = printed(&["checkpoint", "list", "--fleet", address]);
        assert!(on_disk.iter().all(|path| list.contains(path)), "{list}");
        let list: Value =
            serde_json::from_str(&printed(&["checkpoint", "list", "--fleet", address, "--json"]))
                .expect("json");
        assert_eq!(list["jobs"][0], job);
    }

    // Without a majority no leader is elected, and the last server still reports the agreed state.
    let second = leader(&fleet);
    fleet.kill(second);
    let last = (0..3).find(|id| *id != killed && *id != second).expect("one of three");
    let last = fleet.addresses[last].as_str();
    let job = wait("the last server to lead nothing", || match known(last)? {
        line if line["leader"].is_null() => Ok(line["jobs"][0].clone()),
        line => Err(line.to_string()),
    });
    assert_eq!((&job["state"], names(&job)), (&"finished".into(), on_disk.clone()));

    // The whole fleet dies and restarts: the weights were in memory, the agreed state is on disk.
    (0..3).for_each(|id| fleet.kill(id));
    (0..3).for_each(|id| fleet.serve(id));
    let leader = leader(&fleet);
    let job = job_at(&fleet.addresses[leader]).expect("its job");
    assert_eq!((&job["state"], names(&job)), (&"finished".into(), on_disk));
}

#[test]
fn a_worker_of_a_finished_job_says_what_to_do() {
    let scratch = tempfile::tempdir().expect("scratch");
    let run_dir = scratch.path().join("run");
    fs::create_dir(&run_dir).expect("run folder");
    // A lease that no test waits for: a member that did not finish would be seen below.
    let fleet = Fleet::start(scratch.path(), Some(&(digits("bsp", 3, 2) + "grace_ms = 600000\n")));
    let workers: Vec<_> = (0..2).map(|rank| Held(worker(&fleet, rank, &run_dir))).collect();
    for mut w in workers {
        assert!(w.0.wait().expect("worker").success());
    }
    let again = worker(&fleet, 1, &run_dir).wait_with_output().expect("worker");
    let said = text(&again.stderr);
    assert_eq!(again.status.code(), Some(78), "{said}");
    contains(&said, &["88 steps already", "other servers", "other data folders"]);
    let out = fleet.ask(&["status", "--json"]);
    let lines: Vec<Value> = text(&out.stdout).lines().filter_map(|l| serde_json::from_str(l).ok()).collect();
    let shards = lines.iter().flat_map(|l| l["shards"].as_array().into_iter().flatten());
    let led: Vec<_> = shards.filter(|s| s["role"] == "leader" && s["buckets"] != 0).collect();
    assert!(!led.is_empty(), "{lines:?}");
    for shard in led {
        let members = shard["members"].as_array().expect("members");
        assert!(members.len() == 2 && members.iter().all(|m| m["finished"] == true), "{shard}");
        assert_eq!(shard["workers_lost"], 0, "{shard}");
    }
    wait("the job to be finished", || match job_at(&fleet.addresses[0])? {
        job if job["state"] == "finished" => Ok(()),
        job => Err(job.to_string()),
    });
}
