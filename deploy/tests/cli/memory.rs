//! Servers whose memory is limited by `ulimit -v`, and job files that no person wrote.

use crate::common::*;

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
