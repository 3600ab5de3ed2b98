//! `paraft launch --role`: processes that an engine starts one by one, in any order, kills and starts again, are one fleet.
//!
//! The engine is this test: it starts what has ended, as engines do, by the exit code.

use crate::{Place, common::*};
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

const JOB: &str = "name = \"t\"\nseed = 1\n[model]\nkind = \"mlp\"\nhidden = [32]\n[data]\nkind = \"digits\"\n[train]\nmode = \"bsp\"\nworkers = 2\nbatch = 32\nepochs = EPOCHS\n[optimizer]\nkind = \"sgd\"\nlr = 0.1\n[cluster]\nelection_ms = 200\ntimeout_ms = 20000\n";

/// Processes with roles on one folder.
struct Engine {
    place: Place,
    job: PathBuf,
    running: BTreeMap<String, Child>,
    ended: Vec<(String, Option<i32>)>,
}

impl Engine {
    fn new(epochs: u32) -> Self {
        let place = Place::new();
        fs::create_dir(place.run_dir()).expect("run folder");
        let job = job(place.scratch.path(), &JOB.replace("EPOCHS", &epochs.to_string()));
        Self { place, job, running: BTreeMap::new(), ended: Vec::new() }
    }

    fn start(&mut self, role: &str, index: u32, more: &[&str]) {
        let name = format!("{role}-{index}");
        let out = fs::File::options()
            .create(true)
            .append(true)
            .open(self.place.scratch.path().join(format!("{name}.said")));
        let out = out.expect("a file");
        let mut c = paraft();
        c.args(["launch", "--role", role, "--index", &index.to_string(), "--run-dir"])
            .arg(self.place.run_dir());
        c.args(more).arg(&self.job).stdout(out.try_clone().expect("a file")).stderr(out);
        self.running.insert(name, c.spawn().expect("paraft starts"));
    }

    fn said(&self, name: &str) -> String {
        fs::read_to_string(self.place.scratch.path().join(format!("{name}.said"))).unwrap_or_default()
    }

    fn signal(&self, name: &str, signal: Signal) {
        kill(Pid::from_raw(self.running[name].id() as i32), signal).expect("it runs");
    }

    fn kill(&mut self, name: &str) {
        if let Some(mut child) = self.running.remove(name) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Those that have ended since.
    fn look(&mut self) {
        let mut ended = Vec::new();
        for (name, child) in &mut self.running {
            if let Ok(Some(status)) = child.try_wait() {
                ended.push((name.clone(), status.code()));
            }
        }
        ended.iter().for_each(|(name, _)| _ = self.running.remove(name));
        self.ended.extend(ended);
    }

    fn ends(&mut self, name: &str) -> Option<i32> {
        let scratch = self.place.scratch.path().to_path_buf();
        wait(&format!("{name} to end"), || {
            self.look();
            match self.ended.iter().find(|(n, _)| n == name) {
                Some((_, code)) => Ok(*code),
                None => Err(format!("{:?}; {:?}", self.ended, processes(&scratch))),
            }
        })
    }

    /// What the servers say of their fleet, once so many are up and, if that is asked for, its shards are served.
    fn stands(&mut self, servers: usize, serving: bool) -> paraft_proto::DescribeReply {
        let folder = self.place.run_dir().join("addresses");
        wait("the fleet to stand", || {
            // As engines do with a process that could not join yet.
            self.look();
            while let Some(at) = self.ended.iter().position(|(_, code)| *code == Some(69)) {
                let (name, _) = self.ended.remove(at);
                let number = name.trim_start_matches("server-").parse().expect("a server");
                self.start("server", number, &[]);
            }
            let all = fs::read_dir(&folder)
                .into_iter()
                .flatten()
                .flatten()
                .filter_map(|e| fs::read_to_string(e.path()).ok());
            let all: Vec<String> = all
                .filter_map(|t| {
                    Some(serde_json::from_str::<Value>(&t).ok()?["address"].as_str()?.to_string())
                })
                .collect();
            match paraft_fleet::ask::describe(&all) {
                Some(d)
                    if d.servers.iter().filter(|s| s.state == "up").count() == servers
                        && (!serving || d.shards.iter().all(|s| s.state == "serving")) =>
                {
                    Ok(d)
                }
                other => Err(format!(
                    "{all:?}: {other:?}\n{:?}",
                    (0..3).map(|n| self.said(&format!("server-{n}"))).collect::<Vec<_>>()
                )),
            }
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let names: Vec<_> = self.running.keys().cloned().collect();
        names.iter().for_each(|n| self.kill(n));
    }
}

/// Another number each time, below `below`.
fn random(below: u64) -> u64 {
    RandomState::new().hash_one(0) % below
}

#[test]
fn a_fleet_is_founded_once_whenever_its_servers_are_killed() {
    for round in 0..6 {
        let mut engine = Engine::new(1);
        (0..3).for_each(|n| engine.start("server", n, &[]));
        let mut log = Vec::new();
        for _ in 0..8 {
            std::thread::sleep(Duration::from_millis(random(300)));
            let victim = random(3) as u32;
            let name = format!("server-{victim}");
            engine.kill(&name);
            log.push(victim);
            // Elsewhere for a while: the others may found without it.
            std::thread::sleep(Duration::from_millis(random(2) * random(2_500)));
            // Its host's disk may have gone with it, but never those of two.
            if victim == 2 && random(2) == 0 {
                let _ = fs::remove_dir_all(engine.place.run_dir().join("server-2"));
                log.push(100);
            }
            engine.start("server", victim, &[]);
        }
        // What was in memory may be gone, with a folder that could tell: then its shards wait for a person. The fleet is one.
        let fleet = engine.stands(3, false);
        let number = fs::read_to_string(engine.place.run_dir().join("fleet.number")).expect("it is founded");
        assert_eq!(number, format!("{:016x}", fleet.fleet), "round {round}: {log:?}");
        let told = (0..3).map(|n| engine.said(&format!("server-{n}"))).collect::<String>();
        assert!(!told.contains("the run's is"), "round {round}, {log:?}: {told}");
    }
}

#[test]
fn servers_whose_folders_are_gone_found_no_second_fleet() {
    let mut engine = Engine::new(1);
    (0..3).for_each(|n| engine.start("server", n, &[]));
    let first = engine.stands(3, true).fleet;
    engine.place.says("fleet.number", &format!("{first:016x}"));
    (0..3).for_each(|n| engine.kill(&format!("server-{n}")));
    for n in 0..2 {
        fs::remove_dir_all(engine.place.run_dir().join(format!("server-{n}"))).expect("its folder");
        engine.start("server", n, &["--patience", "2"]);
    }
    for n in 0..2 {
        let name = format!("server-{n}");
        assert_eq!(engine.ends(&name), Some(69), "{}", engine.said(&name));
        assert!(
            engine.said(&name).contains("no server answers that it could join"),
            "{}",
            engine.said(&name)
        );
    }
    // Nor do they with the third, which is one of three.
    (0..3).for_each(|n| engine.start("server", n, &["--patience", "3"]));
    engine.ended.clear();
    assert_eq!(engine.ends("server-0"), Some(69));
    let number = fs::read_to_string(engine.place.run_dir().join("fleet.number")).expect("it is founded");
    assert_eq!(number, format!("{first:016x}"));
}

#[test]
fn a_fleet_trains_through_restarts_and_ends_with_its_job() {
    let mut engine = Engine::new(400);
    (0..3).for_each(|n| engine.start("server", n, &["--until-done"]));
    (0..2).for_each(|n| engine.start("worker", n, &[]));
    engine.place.says("metrics.jsonl", "\"event\":\"train\"");
    // A server elsewhere, a worker elsewhere, by signals as engines give them.
    engine.kill("server-0");
    engine.start("server", 0, &["--until-done"]);
    engine.signal("worker-1", Signal::SIGUSR1);
    assert_eq!(engine.ends("worker-1"), Some(138), "{}", engine.said("worker-1"));
    engine.ended.clear();
    engine.start("worker", 1, &[]);
    engine.stands(3, true);
    engine.signal("server-1", Signal::SIGTERM);
    assert_eq!(engine.ends("server-1"), Some(143), "{}", engine.said("server-1"));
    contains(&engine.said("server-1"), &["s1 leads nothing any more"]);
    engine.ended.clear();
    engine.start("server", 1, &["--until-done"]);
    for name in ["worker-0", "worker-1", "server-0", "server-1", "server-2"] {
        assert_eq!(engine.ends(name), Some(0), "{name}: {}", engine.said(name));
    }
    let evals = Launcher::metrics_in(&engine.place.run_dir());
    let last = evals.iter().rfind(|e| e["event"] == "eval").expect("an evaluation");
    assert!(last["accuracy"].as_f64().is_some_and(|a| a > 0.9), "{last}");
    assert!(engine.place.run_dir().join("model.safetensors").exists());
    // What is started again after the end has nothing to do.
    engine.ended.clear();
    engine.start("worker", 0, &[]);
    engine.start("server", 2, &[]);
    assert_eq!((engine.ends("worker-0"), engine.ends("server-2")), (Some(0), Some(0)));
}

#[test]
fn a_worker_that_fails_ends_its_fleet_and_says_where_it_was() {
    let mut engine = Engine::new(400);
    let script = engine.place.script("fails.sh", "#!/bin/sh\necho \"ValueError: no\" >&2\nexit 3\n");
    let text = fs::read_to_string(&engine.job).expect("job");
    let text = text.split("[model]").next().unwrap_or_default().to_string();
    fs::write(&engine.job, format!("{text}[train]\nworkers = 2\n[cluster]\nscript = [{script:?}]\n"))
        .expect("job");
    (0..3).for_each(|n| engine.start("server", n, &["--until-done"]));
    (0..2).for_each(|n| engine.start("worker", n, &[]));
    assert_eq!((engine.ends("worker-0"), engine.ends("worker-1")), (Some(3), Some(3)));
    for n in 0..3 {
        let name = format!("server-{n}");
        assert_eq!(engine.ends(&name), Some(0), "{}", engine.said(&name));
        contains(&engine.said(&name), &["has failed, with code 3", "ValueError: no"]);
    }
}

#[test]
fn a_process_with_another_job_is_refused() {
    let mut engine = Engine::new(1);
    engine.start("server", 0, &[]);
    engine.place.says("addresses/server-0", "address");
    engine.start("worker", 0, &["--set", "train.batch=7"]);
    assert_eq!(engine.ends("worker-0"), Some(78), "{}", engine.said("worker-0"));
    contains(&engine.said("worker-0"), &["another job"]);
    engine.start("server", 1, &["--advertise", "127.0.0.1", "--set", "train.batch=32"]);
    engine.place.says("addresses/server-1", "127.0.0.1:");
}
