//! Servers with a memory limit by a cgroup or `ulimit -v`, and invalid job files.

use crate::common::*;

/// The limit of a server's memory: its own cgroup or, without permission for one, its address space.
struct Bound {
    bytes: u64,
    /// The file of the limit.
    cgroup: Option<PathBuf>,
}

const ENOUGH: u64 = 1 << 30;

impl Bound {
    fn new() -> Self {
        let name = format!("paraft-test-{}", std::process::id());
        for (root, limit) in
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
        {
            let path = Path::new(root).join(&name);
            if fs::create_dir(&path).is_ok() {
                let made = Self { bytes: 190 << 20, cgroup: Some(path.join(limit)) };
                if made.set(made.bytes).is_ok() {
                    return made;
                }
            }
        }
        Self { bytes: (2 << 30) + (128 << 20), cgroup: None }
    }

    fn set(&self, bytes: u64) -> std::io::Result<()> {
        self.cgroup.as_ref().map_or(Ok(()), |limit| fs::write(limit, bytes.to_string()))
    }

    /// Starts the last server with memory for some of its three replicas. Its own need depends on the
    /// build and its allocator, so it is found by trial.
    fn with_too_little(fleet: &mut Fleet) -> Self {
        let mut bound = Self::new();
        for _ in 0..60 {
            fleet.kill(2);
            bound.set(bound.bytes).expect("nobody is in it");
            serve_after(fleet, 2, &bound.first());
            let (whole, waiting) =
                wait("every replica to have come up or to wait", || match whole_and_waiting(fleet, 2) {
                    (whole, waiting) if whole.len() + waiting.len() == 3 => Ok((whole, waiting)),
                    other => Err(format!("{} bytes: {other:?}", bound.bytes)),
                });
            match (whole.len(), waiting.len()) {
                (_, 0) => bound.bytes -= 24 << 20,
                (0, _) => bound.bytes += 24 << 20,
                _ => return bound,
            }
        }
        panic!("no bound is enough for some replicas and too little for others: {} bytes", bound.bytes)
    }

    /// The shell commands before the server.
    fn first(&self) -> String {
        match self.cgroup.as_ref().and_then(|limit| limit.parent()) {
            Some(path) => format!("echo $$ > {}/cgroup.procs", path.display()),
            None => format!("ulimit -S -v {}", self.bytes / 1024),
        }
    }

    /// Raises the limit, also for a running server.
    fn raise(&self, server: &Process) {
        self.set(ENOUGH).expect("raised");
        if self.cgroup.is_none() {
            use rustix::process::{Pid, Resource, Rlimit, prlimit};
            let pid = Pid::from_raw(server.id() as i32);
            prlimit(pid, Resource::As, Rlimit { current: None, maximum: None }).expect("raised");
        }
    }

    fn name(&self) -> &'static str {
        if self.cgroup.is_some() { "(cgroup " } else { "(ulimit -v)" }
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let Some(path) = self.cgroup.as_ref().and_then(|limit| limit.parent()) else { return };
        // After a failure its server still runs.
        let inside = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
        for process in inside.lines().filter_map(|pid| pid.parse().ok()) {
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
        let began = Instant::now();
        while fs::remove_dir(path).is_err() && began.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Starts a server of the fleet's job from a shell that first runs `first`.
fn serve_after(fleet: &mut Fleet, id: usize, first: &str) {
    let paraft = env!("CARGO_BIN_EXE_paraft");
    let job = fleet.job.clone().expect("a job");
    let (job, data) = (job.display(), fleet.data(id));
    let line = format!("{first} && exec {paraft} server {job} --id {id} --data {}", data.display());
    let mut shell = Command::new("sh");
    shell.args(["-c", &line]).env_remove("PARAFT_SERVERS").env("PARAFT_INSECURE", "1");
    let server = Process::start(format!("server-{id}"), shell, &fleet.folder).expect("a shell");
    fleet.servers[id] = Some(server);
}

/// 0.6 million values with Adam's slots on three shards: 7 MiB of state each, and some 50 with a log and copies.
fn body() -> String {
    "name = \"m\"\n[model]\nkind = \"mlp\"\nhidden = [24000]\n[data]\nkind = \"digits\"\n[train]\nmode = \"bsp\"\nbatch = 16\n\
     epochs = 100000\n[optimizer]\nkind = \"adam\"\nlr = 0.001\n[cluster]\nservers = 3\nreplicas = 3\nshards = 3\n\
     election_ms = 200\ndurability = \"quorum-disk\"\n"
        .into()
}

fn replies(fleet: &Fleet, more: &[&str]) -> Vec<Value> {
    let out = fleet.ask(&[&["status", "--json"], more].concat());
    let all = text(&out.stdout);
    let lines = all.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    lines.filter(|r| r["shards"].is_array()).collect()
}

/// For a server: the shards whose replicas have their full state, and the reasons of the waiting ones.
fn whole_and_waiting(fleet: &Fleet, id: u64) -> (Vec<u64>, Vec<(u64, String)>) {
    let Some(reply) = replies(fleet, &[]).into_iter().find(|r| r["server"] == id) else {
        return Default::default();
    };
    let list = |key: &str| reply[key].as_array().cloned().unwrap_or_default();
    let shard = |s: &Value| s["shard"].as_u64().expect("a number");
    let is_whole = |s: &Value| {
        ["follower", "leader"].iter().any(|r| s["role"] == *r)
            && s["memory"]["state"].as_u64() > Some(5 << 20)
    };
    let whole = list("shards").iter().filter(|s| is_whole(s)).map(shard).collect();
    let waits = |s: &Value| (shard(s), s["why"].as_str().unwrap_or_default().to_string());
    (whole, list("stopped").iter().map(waits).collect())
}

/// Only one shard on one server is affected. The process is not killed repeatedly: it asks for memory
/// before it reads the log.
#[test]
fn a_server_with_little_memory_keeps_what_fits_and_says_so() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut fleet = Fleet::start(scratch.path(), Some(&body()));
    fleet.all("serving");
    let workers: Vec<_> = (0..2)
        .map(|rank| {
            let run = scratch.path().join(format!("run{rank}"));
            fs::create_dir(&run).expect("a folder");
            fleet.worker(rank, &run).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("worker")
        })
        .collect();
    // A finished job would need less memory, so this one's workers die.
    wait("it to train", || match pushes_of(&fleet, 0) {
        pushes if pushes.iter().all(|p| *p > Some(10)) => Ok(()),
        pushes => Err(format!("{pushes:?}")),
    });
    workers.into_iter().for_each(|w| drop(Held(w)));
    wait("their leases to end", || match replies(&fleet, &[]) {
        all if all.iter().all(has_no_members) => Ok(()),
        all => Err(format!("{all:?}")),
    });
    let pushes: Vec<_> = pushes_of(&fleet, 0);
    let kept =
        |fleet: &Fleet, id: usize| (0..3).all(|s| fleet.data(id).join(format!("shard-{s}/need")).exists());
    wait(
        "what replicas need to be written down",
        || if kept(&fleet, 2) { Ok(()) } else { Err(String::new()) },
    );
    // The last server restarts with less memory than it needs.
    let bound = Bound::with_too_little(&mut fleet);
    let settled = |fleet: &Fleet| {
        let (whole, waiting) = whole_and_waiting(fleet, 2);
        let said = waiting.iter().all(|(_, why)| why.contains("needs") && why.contains(bound.name()));
        match (1..=2).contains(&whole.len()) && whole.len() + waiting.len() == 3 && said {
            true => Ok(whole),
            false => Err(format!("{whole:?} are whole, {waiting:?} wait")),
        }
    };
    let first = wait("some to follow, and the others to say what they lack", || settled(&fleet));
    // The kernel has killed no process for memory, and waiting replicas do not alternate with the
    // others.
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(4) {
        for server in fleet.servers.iter_mut().flatten() {
            assert_eq!(server.ended(), None, "a server has ended");
        }
        assert_eq!(settled(&fleet), Ok(first.clone()));
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(first, (0..first.len() as u64).collect::<Vec<_>>(), "in the order of the shards");
    assert_eq!(replies(&fleet, &[]).len(), 3, "all answer");
    // With more memory the waiting replicas start by themselves, with all acknowledged pushes.
    bound.raise(fleet.servers[2].as_ref().expect("it runs"));
    wait("all three replicas", || match whole_and_waiting(&fleet, 2) {
        (whole, waiting) if whole.len() == 3 && waiting.is_empty() => Ok(()),
        other => Err(format!("{other:?}")),
    });
    fleet.all("serving");
    assert_eq!(pushes_of(&fleet, 0), pushes);
    wait("the server to have all that the others have", || {
        let (one, other) = (pushes_of(&fleet, 2), digests_of(&fleet));
        if one == pushes && other { Ok(()) } else { Err(format!("{one:?} of {pushes:?}")) }
    });
}

/// Whether no shard of this server has a member.
fn has_no_members(reply: &Value) -> bool {
    let members = |s: &Value| s["members"].as_array().is_some_and(|m| m.is_empty());
    reply["shards"].as_array().is_some_and(|shards| shards.iter().all(members))
}

fn pushes_of(fleet: &Fleet, id: u64) -> Vec<Option<u64>> {
    let reply = replies(fleet, &[]).into_iter().find(|r| r["server"] == id);
    let shards = reply.and_then(|r| r["shards"].as_array().cloned()).unwrap_or_default();
    shards.iter().map(|s| s["pushes"].as_u64()).collect()
}

/// Whether the replicas of each shard are the same bits, at the same index.
fn digests_of(fleet: &Fleet) -> bool {
    let all = replies(fleet, &["--digest"]);
    let of = |shard: usize| -> BTreeSet<String> {
        all.iter()
            .map(|r| format!("{}@{}", r["shards"][shard]["digest"], r["shards"][shard]["applied_index"]))
            .collect()
    };
    all.len() == 3 && (0..3).all(|shard| of(shard).len() == 1)
}

#[test]
fn a_server_with_limited_address_space_says_so() {
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
        shell
            .args(["-c", &line])
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .env_remove("PARAFT_SERVERS")
            .env("PARAFT_INSECURE", "1");
        shell.spawn().expect("a shell")
    };
    let out = start(700_000).wait_with_output().expect("it ends");
    assert_eq!(out.status.code(), Some(78), "{}", text(&out.stderr));
    contains(&text(&out.stderr), &["ulimit -v", "MiB", "help"]);
    let _server = Held(start(4 << 20));
    let memory = wait("the server to answer", || {
        let out = run(&["status", "--json", "--fleet", &address]);
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
        (base.replace("\"t\"", "\"a\\u001b[2Jb\""), "cannot be a job's name"),
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
