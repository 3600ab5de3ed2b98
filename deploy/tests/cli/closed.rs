//! Closed to strangers: what people do with certificates, and where keys never are.

use crate::common::*;

/// Three servers for no job, which speak TLS. Who asks has another temporary folder, so that no Unix socket leads past it.
struct Closed {
    addresses: Vec<String>,
    folder: PathBuf,
    _servers: Vec<Process>,
}

impl Closed {
    fn start(folder: &Path) -> Self {
        let addresses = free_addresses(3);
        for tmp in ["a", "b"] {
            fs::create_dir(folder.join(tmp)).expect("a folder");
        }
        let mut fleet = Self { addresses, folder: folder.into(), _servers: Vec::new() };
        fleet.done(None, &["certs", "new", "certs"]);
        for id in 0..3 {
            let mut c = paraft();
            c.env("TMPDIR", folder.join("a")).env("PARAFT_CERTS", folder.join("certs"));
            c.args(["server", "--shards", "0", "--replicas", "3", "--election-ms", "200"]);
            c.args(["--servers", &fleet.addresses.join(","), "--id", &id.to_string(), "--data"]);
            c.arg(folder.join(format!("s{id}")));
            fleet._servers.push(Process::start(format!("server-{id}"), c, folder).expect("server"));
        }
        wait("the fleet to stand", || {
            match fleet.say(Some("certs"), &["status", "--fleet", fleet.any(), "--wait", "whole"]) {
                (Some(0), _) => Ok(()),
                (_, said) => Err(said),
            }
        });
        fleet
    }

    fn any(&self) -> &str {
        &self.addresses[1]
    }

    fn command(&self, certs: Option<&str>) -> Command {
        let mut c = paraft();
        c.env("TMPDIR", self.folder.join("b")).current_dir(&self.folder);
        certs.iter().for_each(|certs| _ = c.args(["--certs", certs]));
        c
    }

    fn say(&self, certs: Option<&str>, args: &[&str]) -> (Option<i32>, String) {
        let out = self.command(certs).args(args).output().expect("paraft starts");
        (out.status.code(), text(&out.stdout) + &text(&out.stderr))
    }

    fn done(&self, certs: Option<&str>, args: &[&str]) -> String {
        let (code, said) = self.say(certs, args);
        assert_eq!(code, Some(0), "{args:?}: {said}");
        said
    }

    /// It is not done, and that is said in these words.
    fn fails(&self, certs: Option<&str>, args: &[&str], words: &[&str]) {
        let (code, said) = self.say(certs, args);
        assert!(code.is_some_and(|c| c != 0), "{args:?} as {certs:?}: {said}");
        contains(&said, words);
    }

    fn issue(&self, name: &str, roles: &[&str]) {
        self.done(None, &[&["certs", "issue", "certs", "--out", name], roles].concat());
    }
}

#[test]
fn a_certificate_covers_its_own_jobs_and_acts_are_audited() {
    let scratch = tempfile::tempdir().expect("scratch");
    let file = job(scratch.path(), &digits("bsp", 3, 1));
    let file = file.to_str().expect("utf-8");
    let fleet = Closed::start(scratch.path());
    let any = fleet.any().to_string();
    fleet.issue("alice", &["submit:alice-*", "--name", "Alice"]);
    fleet.issue("bob", &["submit:bob"]);
    fleet.issue("looks", &["reader:alice-1"]);
    fleet.done(Some("alice"), &["train", file, "--fleet", &any, "--set", "name=alice-1"]);
    contains(&fleet.done(Some("looks"), &["jobs", "--fleet", &any]), &["alice-1"]);
    contains(&fleet.done(Some("bob"), &["jobs", "--fleet", &any]), &["no jobs"]);
    for (who, args, words) in [
        ("alice", &["train", file, "--fleet", &any, "--set", "name=bob"][..], "not for that"),
        ("bob", &["delete", "alice-1", "--fleet", &any], "not for that"),
        ("bob", &["mode", "asp", "--fleet", &any], ""),
        ("bob", &["drain", "1", "--fleet", &any], "not for that"),
        ("looks", &["delete", "alice-1", "--fleet", &any], "not for that"),
        ("certs/worker", &["drain", "1", "--fleet", &any], "not for that"),
    ] {
        fleet.fails(Some(who), args, &[words]);
    }
    // As the servers' user on their host, where a Unix socket would need no certificate.
    let mut delete = fleet.command(Some("looks"));
    let out =
        delete.env("TMPDIR", scratch.path().join("a")).args(["delete", "alice-1", "--fleet", &any]).output();
    let out = out.expect("paraft starts");
    assert!(!out.status.success());
    contains(&text(&out.stderr), &["not for that"]);
    // By hand, as a worker of a job that is another's.
    let worker = ["worker", file, "--rank", "0", "--fleet", &any, "--set", "name=alice-1"];
    fleet.fails(Some("bob"), &worker, &["not for that"]);
    fleet.fails(None, &["jobs", "--fleet", &any], &["--certs"]);
    fleet.fails(Some("certs"), &["--insecure", "jobs", "--fleet", &any], &["cannot be used with"]);
    fleet.fails(None, &["--insecure", "jobs", "--fleet", &any], &[&any]);
    let lanes = [&["--insecure"], &worker[..]].concat();
    fleet.fails(None, &lanes, &["TLS only"]);
    fleet.done(None, &["certs", "new", "theirs"]);
    fleet.fails(Some("theirs"), &["jobs", "--fleet", &any], &["certificate"]);
    fleet.done(Some("alice"), &["delete", "alice-1", "--fleet", &any]);
    let audit: String = (0..3)
        .map(|id| fs::read_to_string(scratch.path().join(format!("s{id}/audit.jsonl"))).unwrap_or_default())
        .collect();
    let acts: Vec<Value> = audit.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let of = |act: &str| acts.iter().find(|a| a["act"] == act && a["done"] == true);
    for act in ["submit of job `alice-1`", "delete of job `alice-1`"] {
        let act = of(act).unwrap_or_else(|| panic!("{act}: {audit}"));
        assert!(act["who"].as_str().is_some_and(|w| w.contains("Alice")), "{act}");
    }
    let his = |a: &&Value| a.to_string().contains("bob");
    assert!(acts.iter().filter(his).all(|a| a["done"] == false), "nothing of his was done: {audit}");
    assert!(acts.iter().any(|a| his(&a)), "and that is written down: {audit}");
}

#[test]
fn an_authority_is_replaced_during_a_job() {
    let scratch = tempfile::tempdir().expect("scratch");
    let file = job(scratch.path(), &digits("asp", 3, 100_000));
    let file = file.to_str().expect("utf-8");
    let fleet = Closed::start(scratch.path());
    let any = fleet.any().to_string();
    fleet.done(Some("certs"), &["submit", file, "--fleet", &any]);
    let samples = || {
        let said = fleet.done(Some("certs"), &["status", "--fleet", &any, "--json"]);
        let all = said.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
        let shards = all.flat_map(|v| v["shards"].as_array().cloned().unwrap_or_default());
        shards.filter_map(|s| s["pushes"].as_u64()).max().unwrap_or(0)
    };
    let goes_on = |what: &str| {
        let before = samples();
        wait(what, || match samples() {
            now if now > before + 50 => Ok(()),
            now => Err(format!("{now} pushes, after {before}")),
        });
    };
    goes_on("it to train");
    let looks = || std::thread::sleep(Duration::from_millis(1500));
    let renew = |step: &[&str]| {
        fleet.done(None, &[&["certs", "renew", "certs"], step].concat());
        looks();
        goes_on("it to go on");
    };
    renew(&["--authority"]);
    // A process that knows both authorities, and gets no other certificate.
    fs::create_dir(scratch.path().join("old")).expect("a folder");
    for name in ["ca.crt", "tls.crt", "tls.key"] {
        let from = scratch.path().join("certs/admin").join(name);
        fs::copy(from, scratch.path().join("old").join(name)).expect("copied");
    }
    renew(&[]);
    fleet.done(Some("old"), &["jobs", "--fleet", &any]);
    renew(&["--drop-old"]);
    fleet.fails(Some("old"), &["jobs", "--fleet", &any], &["certificate"]);
    fleet.done(Some("certs"), &["stop", "t", "--fleet", &any]);
    let log = scratch.path().join("runs/t-1/report.html");
    wait("its launcher to end", || {
        if log.exists() {
            Ok(())
        } else {
            Err(text(&fs::read(scratch.path().join("runs/t-1/launcher.log")).unwrap_or_default()))
        }
    });
}

#[test]
fn no_key_is_where_others_may_read_it() {
    let scratch = tempfile::tempdir().expect("scratch");
    let file = job(scratch.path(), &digits("asp", 3, 100_000));
    let run = scratch.path().join("run");
    let mut trains = paraft();
    trains.arg("train").arg(&file).arg("--run-dir").arg(&run).stdout(Stdio::null()).stderr(Stdio::null());
    let trains = Held(trains.spawn().expect("paraft starts"));
    wait("it to train", || match fs::read_to_string(run.join("metrics.jsonl")) {
        Ok(text) if text.contains("\"step\"") => Ok(()),
        other => Err(format!("{other:?}")),
    });
    let certs = run.join("certs");
    let mut keys = Vec::new();
    for of in ["peer", "worker", "admin"] {
        let path = certs.join(of).join("tls.key");
        let mode =
            std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&path).expect("a key").permissions());
        assert_eq!(mode & 0o777, 0o600);
        let key = fs::read_to_string(path).expect("a key");
        keys.push(key.lines().nth(1).expect("a line").to_string());
    }
    let secret = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        text.contains("PRIVATE KEY") || keys.iter().any(|k| text.contains(k))
    };
    assert!(secret(&fs::read(certs.join("peer/tls.key")).expect("a key")), "it would be seen");
    let mut looked = 0;
    for process in fs::read_dir("/proc").expect("/proc").flatten() {
        let of = |name: &str| fs::read(process.path().join(name)).unwrap_or_default();
        let (line, environment) = (of("cmdline"), of("environ"));
        if !text(&line).contains(run.to_str().expect("utf-8")) {
            continue;
        }
        looked += 1;
        assert!(!secret(&line) && !secret(&environment), "{}", text(&line));
    }
    assert!(looked >= 6, "{looked} processes");
    kill(Pid::from_raw(trains.0.id() as i32), Signal::SIGTERM).expect("it runs");
    wait("it to end", || {
        if run.join("report.html").exists() || processes(&run).is_empty() { Ok(()) } else { Err("it runs") }
            .map_err(String::from)
    });
    let mut files = vec![run.clone()];
    while let Some(at) = files.pop() {
        match fs::read_dir(&at) {
            _ if at == certs => {}
            Ok(inside) => files.extend(inside.flatten().map(|e| e.path())),
            Err(_) => assert!(!fs::read(&at).is_ok_and(|bytes| secret(&bytes)), "{}", at.display()),
        }
    }
}

#[test]
fn wrong_certificates_are_told_with_a_remedy() {
    let scratch = tempfile::tempdir().expect("scratch");
    let say = |args: &[&str]| {
        let out = paraft().args(args).current_dir(scratch.path()).output().expect("paraft starts");
        (out.status.code(), text(&out.stdout) + &text(&out.stderr))
    };
    let fails = |args: &[&str], code: i32, words: &[&str]| {
        let (got, said) = say(args);
        assert_eq!(got, Some(code), "{args:?}: {said}");
        contains(&said, words);
    };
    fails(
        &["server", "--servers", "127.0.0.1:1", "--id", "0"],
        2,
        &["--certs", "paraft certs new", "--insecure"],
    );
    fails(&["certs", "issue", "none", "admin"], 78, &["none", "paraft certs new"]);
    assert_eq!(say(&["certs", "new", "certs"]).0, Some(0));
    fails(&["certs", "new", "certs"], 2, &["is there already", "renew"]);
    fails(&["certs", "issue", "certs", "admin"], 2, &["has a certificate already", "--out"]);
    fails(&["certs", "issue", "certs", "root"], 2, &["no role", "worker:JOBS"]);
    fails(&["certs", "issue", "certs", "reader:x", "--out", "certs"], 2, &["authority's own folder"]);
    fails(&["certs", "issue", "certs", "reader:x", "--for", "forever"], 2, &["has an end"]);
    fails(&["certs", "show", "nowhere"], 74, &["nowhere"]);
    fails(&["--certs", "nowhere", "jobs", "--fleet", "127.0.0.1:1"], 78, &["nowhere"]);
    let key = scratch.path().join("certs/admin/tls.key");
    fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o644)).expect("set");
    fails(&["--certs", "certs", "jobs", "--fleet", "127.0.0.1:1"], 78, &["others may read", "chmod 600"]);
    let (code, said) = say(&["certs", "show", "certs"]);
    assert_eq!(code, Some(0), "{said}");
    contains(&said, &["certs/peer: peer", "worker:*", "ends in 89 days"]);
}
