//! `paraft mode` on a running job.

use crate::common::{Launcher, contains, digits, run, text, wait};

#[test]
fn a_running_job_switches_its_mode_and_records_it() {
    let l = Launcher::training(&digits("bsp", 3, 100_000), 2);
    let dir = l.run_dir.to_str().expect("utf-8");
    let servers = std::fs::read_to_string(l.run_dir.join("servers")).expect("its servers");
    let mut given = servers.trim().split(',');
    let certs = l.run_dir.join("certs");
    let certs = certs.to_str().expect("utf-8");
    let mut seen = 0;
    for (number, mode) in (1..).zip(["asp", "ssp:3", "bsp"]) {
        // Each time another server, which knows the others.
        let out = run(&["mode", "t", mode, "--fleet", given.next().expect("three"), "--certs", certs]);
        assert!(out.status.success(), "{}", text(&out.stderr));
        contains(&text(&out.stdout), &[&format!("-> {mode} (switch {number})"), "switched"]);
        wait("both workers to write it down", || {
            let lines = l.metrics();
            let of =
                lines.iter().filter(|e| e["event"] == "mode" && e["number"] == number && e["mode"] == mode);
            seen = of.count();
            if seen == 2 { Ok(()) } else { Err(format!("{seen} lines of {mode}")) }
        });
        let status = run(&["status", "--fleet", dir, "--json"]);
        contains(&text(&status.stdout), &[&format!("\"mode\":\"{mode}\"")]);
        // The control group learns of a job a moment after its start.
        let mut jobs = String::new();
        wait("the job to be listed with its mode", || {
            jobs = text(&run(&["jobs", "--fleet", dir, "--json"]).stdout);
            let begun = jobs.contains("\"mode\":\"bsp\"");
            let now = jobs.contains(&format!("\"mode_in_force\":\"{mode}\""));
            if begun && now { Ok(()) } else { Err(jobs.clone()) }
        });
    }
    // The rule chooses from here on, until a user switches.
    for (mode, says, json) in [
        ("auto", "-> ssp:1 (switch 4), and a rule", "\"mode_auto\":\"asp\""),
        ("asp", "-> asp (switch", "\"mode_auto\":\"\""),
    ] {
        let out = run(&["mode", "t", mode, "--fleet", dir]);
        contains(&text(&out.stdout), &[says]);
        let status = run(&["status", "--fleet", dir, "--json"]);
        contains(&text(&status.stdout), &[json]);
        assert_eq!(
            mode == "auto",
            text(&run(&["status", "--fleet", dir]).stdout).contains("(auto, up to asp)")
        );
    }
    // A checkpoint says in which mode it was made, not which one the job's file has.
    let saved = run(&["checkpoint", "save", "t", "--fleet", dir]);
    assert!(saved.status.success(), "{}", text(&saved.stderr));
    contains(&text(&run(&["checkpoint", "inspect", dir, "--json"]).stdout), &["\"mode\":\"asp\""]);
    let before = l.metrics().len();
    wait("training to go on", || {
        if l.metrics().len() > before + 5 { Ok(()) } else { Err("no new lines".into()) }
    });
}

#[test]
fn a_switch_that_cannot_be_is_refused_and_changes_nothing() {
    let body = digits("asp", 1, 100_000) + "durability = \"leader\"\n";
    let l = Launcher::training(&body, 2);
    let dir = l.run_dir.to_str().expect("utf-8");
    for (args, code, words) in [
        (["mode", "t", "bsp"], 78, &["weights of one process", "ssp:S"][..]),
        (["mode", "other", "asp"], 78, &["`other`", "`t`"]),
        (["mode", "t", "sync"], 2, &["sync", "ssp:S"]),
    ] {
        let out = run(&[&args[..], &["--fleet", dir][..]].concat());
        let err = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {err}");
        contains(&err, words);
    }
    let out = run(&["mode", "t", "asp", "--fleet", "127.0.0.1:1", "--wait", "1"]);
    assert_eq!(out.status.code(), Some(69), "{}", text(&out.stderr));
    contains(&text(&out.stderr), &["no server answered", "nothing has changed"]);
    assert!(!l.metrics().iter().any(|e| e["event"] == "mode"), "nobody has heard of a switch");
}
