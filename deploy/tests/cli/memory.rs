//! Servers whose memory is taken from them on purpose: by a cgroup, and by `ulimit -v`.

use crate::common::*;

/// A cgroup of its own with so much memory; `None` where this machine lets nobody make one.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(bytes: u64) -> Option<Self> {
        let name = format!("paraft-test-{}-{bytes}", std::process::id());
        for (root, limit) in
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
        {
            let path = Path::new(root).join(&name);
            if fs::create_dir(&path).is_ok() {
                let group = Self(path);
                if fs::write(group.0.join(limit), bytes.to_string()).is_ok() {
                    return Some(group);
                }
            }
        }
        None
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Its processes may still be on their way out.
        let began = Instant::now();
        while fs::remove_dir(&self.0).is_err() && began.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A server of the fleet's job, started by a shell that does this first.
fn serve_after(fleet: &mut Fleet, id: usize, first: &str) {
    let paraft = env!("CARGO_BIN_EXE_paraft");
    let job = fleet.job.clone().expect("a job");
    let (job, data) = (job.display(), fleet.data(id));
    let log = fleet.folder.join(format!("s{id}.log"));
    let line = format!(
        "{first} && exec {paraft} server {job} --id {id} --data {} --log-file {}",
        data.display(),
        log.display()
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", &line]).stdin(Stdio::null()).stderr(Stdio::null()).env_remove("PARAFT_SERVERS");
    fleet.servers[id] = Some(Held(shell.spawn().expect("a shell")));
}

/// 0.6 million values with Adam's slots on each of three shards: 7 MiB of state, 46 MiB with a log and copies.
fn body() -> String {
    "name = \"m\"\n[model]\nkind = \"mlp\"\nhidden = [24000]\n[data]\nkind = \"digits\"\n[train]\nmode = \"bsp\"\nbatch = 16\n\
     epochs = 1\nmax_steps = 3\n[optimizer]\nkind = \"adam\"\nlr = 0.001\n[cluster]\nservers = 3\nreplicas = 3\nshards = 3\n\
     election_ms = 200\ndurability = \"quorum-disk\"\n"
        .into()
}

fn replies(fleet: &Fleet) -> Vec<Value> {
    let out = fleet.ask(&["status", "--json"]);
    text(&out.stdout).lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
}

fn shards_of(fleet: &Fleet, id: u64) -> Vec<Value> {
    let reply = replies(fleet).into_iter().find(|r| r["server"] == id && r["shards"].is_array());
    reply.and_then(|r| r["shards"].as_array().cloned()).unwrap_or_default()
}

#[test]
fn a_server_with_room_for_two_of_its_three_replicas_keeps_those_and_says_what_the_third_lacks() {
    // With what the process itself takes, and a reserve of 4 MiB.
    let Some(cgroup) = Cgroup::new(190 << 20) else {
        eprintln!(
            "skipped: no cgroup with a memory limit can be made here (it takes root, and a writable /sys/fs/cgroup)"
        );
        return;
    };
    let scratch = tempfile::tempdir().expect("scratch");
    let mut fleet = Fleet::start(scratch.path(), Some(&body()));
    fleet.all("serving");
    let workers: Vec<_> = (0..2)
        .map(|rank| {
            let run = scratch.path().join(format!("run{rank}"));
            fs::create_dir(&run).expect("a folder");
            fleet.worker(rank, &run).stderr(Stdio::piped()).spawn().expect("worker")
        })
        .collect();
    for w in workers {
        let out = w.wait_with_output().expect("worker");
        assert!(out.status.success(), "{}", text(&out.stderr));
    }
    let memory = &shards_of(&fleet, 0)[0]["memory"];
    assert!(
        memory["need"].as_u64() > memory["state"].as_u64() && memory["state"].as_u64() > Some(6 << 20),
        "{memory}"
    );
    // The last server comes back with less than it needs.
    fleet.kill(2);
    let first = format!("echo $$ > {}/cgroup.procs", cgroup.0.display());
    serve_after(&mut fleet, 2, &first);
    let log = scratch.path().join("s2.log");
    let needs = |line: &&str| line.contains("needs") && line.contains("free of 190.0 MiB (cgroup");
    wait("one replica to say what it lacks, and two to follow", || {
        let said = fs::read_to_string(&log).unwrap_or_default();
        let short = said.lines().find(needs).map(str::to_string);
        let shards = shards_of(&fleet, 2);
        let follow = shards
            .iter()
            .filter(|s| s["role"] == "follower" && s["memory"]["state"].as_u64() > Some(6 << 20));
        match (short, follow.count()) {
            (Some(_), 2) => Ok(()),
            (short, n) => Err(format!("{short:?}, {n} follow: {shards:?}")),
        }
    });
    // Nobody was killed for memory, its neighbours least of all.
    std::thread::sleep(Duration::from_secs(2));
    for server in fleet.servers.iter_mut().flatten() {
        assert!(matches!(server.0.try_wait(), Ok(None)), "a server has ended");
    }
    assert_eq!(replies(&fleet).iter().filter(|r| r["shards"].is_array()).count(), 3, "all answer");
    // With the memory that it had, all of them come back.
    fleet.kill(2);
    drop(cgroup);
    fleet.serve(2);
    fleet.all("serving");
}

#[test]
fn a_server_whose_address_space_is_limited_says_so_or_counts_with_it() {
    let scratch = tempfile::tempdir().expect("scratch");
    let address = free_addresses(1).remove(0);
    let paraft = env!("CARGO_BIN_EXE_paraft");
    let data = scratch.path().join("d");
    let start = |kilobytes: u64| {
        let line = format!(
            "ulimit -v {kilobytes} && exec {paraft} server --servers {address} --id 0 --shards 1 --replicas 1 --data {}",
            data.display()
        );
        let mut shell = Command::new("sh");
        shell.args(["-c", &line]).stdin(Stdio::null()).stderr(Stdio::piped()).env_remove("PARAFT_SERVERS");
        shell.spawn().expect("a shell")
    };
    let out = start(700_000).wait_with_output().expect("it ends");
    assert_eq!(out.status.code(), Some(78), "{}", text(&out.stderr));
    contains(&text(&out.stderr), &["ulimit -v", "MiB", "help"]);
    let _server = Held(start(4 << 20));
    let memory = wait("the server to answer", || {
        let out = run(&["status", "--json", "--servers", &address]);
        let all = text(&out.stdout);
        let first = all.lines().find_map(|l| serde_json::from_str::<Value>(l).ok());
        let memory = first.map(|r| r["memory"].clone()).filter(Value::is_object);
        memory.ok_or_else(|| all + &text(&out.stderr))
    });
    assert_eq!(
        (memory["what"].as_str(), memory["limit"].as_u64()),
        (Some("ulimit -v"), Some(4 << 30)),
        "{memory}"
    );
}

#[test]
fn a_job_file_that_no_person_wrote_is_refused_at_once() {
    let scratch = tempfile::tempdir().expect("scratch");
    let base = digits("bsp", 1, 1);
    let cases = [
        (base.replace("\"t\"", &format!("\"{}\"", "x".repeat(100_000_000))), "that is no job file"),
        (base.replace("[32]", &format!("[{}]", "2,".repeat(1_000_000))), "that is no job file"),
        (base.replace("[32]", &format!("[{}]", "2,".repeat(300_000))), "300000 layers"),
        (base.replace("\"t\"", "\"a\\u001b[2Jb\""), "control characters"),
        (base.clone() + "grace_ms = 100000000000\n", "more than a day"),
    ];
    for (body, word) in cases {
        let path = job(scratch.path(), &body);
        let began = Instant::now();
        let out = paraft().arg("train").arg(path).arg("--run-dir").arg(scratch.path().join("run")).output();
        let (took, out) = (began.elapsed(), out.expect("paraft starts"));
        let err = text(&out.stderr);
        assert_eq!(out.status.code(), Some(78), "{err}");
        assert!(err.contains(word) && err.len() < 2000, "`{word}` is not in: {err}");
        assert!(!err.contains('\u{1b}'), "{err}");
        assert!(took < Duration::from_secs(5), "{word}: {took:?}");
    }
}
