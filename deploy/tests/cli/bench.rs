//! `paraft bench`: every figure is one of this run, and says what it is compared with.

use crate::common::*;

/// Runs one and gives its figures; checks what all have in common.
fn figures(args: &[&str]) -> Vec<Value> {
    let out = run(&[&["bench"], args, &["--json"]].concat());
    assert!(out.status.success(), "{args:?}: {}", text(&out.stderr));
    let lines: Vec<Value> =
        text(&out.stdout).lines().map(|l| serde_json::from_str(l).expect("json")).collect();
    for key in ["bench", "case", "value", "unit", "reference", "ratio", "spread"] {
        assert!(lines.iter().all(|l| l.get(key).is_some()), "{key}: {lines:?}");
    }
    lines
}

/// A figure; panics when there is none.
fn find<'a>(figures: &'a [Value], bench: &str, case: &str, reference: &str) -> &'a Value {
    let found =
        figures.iter().find(|f| f["bench"] == bench && f["case"] == case && f["reference"] == reference);
    found.unwrap_or_else(|| panic!("no {bench} of {case} against {reference}: {figures:?}"))
}

/// The value of a figure; panics when there is none or it is not above 0. With one repeat no figure is too noisy.
fn value(figures: &[Value], bench: &str, case: &str, reference: &str) -> f64 {
    let figure = find(figures, bench, case, reference);
    if reference != "-" {
        assert!(figure["ratio"].as_f64().is_some_and(|r| r > 0.0), "{figure}");
    }
    figure["value"].as_f64().filter(|v| *v > 0.0).unwrap_or_else(|| panic!("{figure}"))
}

#[test]
fn wire_compares_each_way_with_raw_sockets() {
    let figures = figures(&["wire", "--sizes", "64K,1M", "--millis", "1", "--repeats", "1"]);
    for size in ["64 KiB", "1 MiB"] {
        for what in ["wire push", "wire pull", "wire round", "wire push cpu", "wire pull cpu"] {
            value(&figures, what, &format!("tcp, {size}"), "raw tcp");
            value(&figures, what, &format!("tcp, {size}"), "raw tls");
            value(&figures, what, &format!("unix, {size}"), "raw tcp");
            value(&figures, what, &format!("unix, {size}"), "raw unix");
            for way in ["raw tcp", "raw tls", "raw unix"] {
                value(&figures, what, &format!("{way}, {size}"), "-");
            }
        }
    }
    assert!(figures.iter().all(|f| f["reference"] != "raw tls" || f["case"] != "unix, 1 MiB"), "{figures:?}");
    for bad in ["3", "2G", "1T", "M", ""] {
        assert_eq!(run(&["bench", "wire", "--sizes", bad]).status.code(), Some(2), "{bad}");
    }
}

/// A ratio to sealed bytes would flatter a fleet that sends plain ones.
#[test]
fn wire_without_tls_is_not_compared_with_raw_tls() {
    let few = ["--insecure", "wire", "--sizes", "64K", "--via", "tcp", "--millis", "1", "--repeats", "1"];
    let figures = figures(&few);
    value(&figures, "wire push", "tcp, 64 KiB", "raw tcp");
    assert!(figures.iter().all(|f| !f.to_string().contains("raw tls")), "{figures:?}");
}

#[test]
fn kernels_measures_a_step_with_each_set_that_is_asked_for() {
    let few =
        ["kernels", "--models", "mlp,transformer", "--levels", "portable", "--millis", "1", "--repeats", "1"];
    let figures = figures(&few);
    assert_eq!(figures.len(), 2);
    for case in ["mlp, batch 64, portable", "transformer, batch 8, portable"] {
        value(&figures, "kernels step", case, "-");
    }
    assert_eq!(run(&["bench", "kernels", "--levels", "avx"]).status.code(), Some(2));
}

#[test]
fn apply_counts_the_bytes_that_an_optimizer_must_touch() {
    let args = ["apply", "--sizes", "4M", "--threads", "1,2", "--millis", "1", "--repeats", "1"];
    let figures = figures(&args);
    for threads in ["1 thread", "2 threads"] {
        let memcpy = format!("memcpy, 4 MiB, {threads}"); // once beside each optimizer, so it may be too noisy
        assert!(
            figures.iter().any(|f| f["bench"] == "apply bandwidth" && f["case"] == memcpy),
            "{figures:?}"
        );
        for (optimizer, touched) in [
            ("sgd", 3),
            ("momentum", 5),
            ("nesterov", 5),
            ("adagrad", 5),
            ("rmsprop", 5),
            ("adam", 7),
            ("adamw", 7),
        ] {
            let case = format!("{optimizer}, 4 MiB, {threads}");
            value(&figures, "apply gradient", &case, &format!("memory's limit ({touched} bytes touched)"));
        }
    }
}

#[test]
fn shard_compares_replicas_with_one_and_with_raw_transfers() {
    let few =
        ["shard", "--millis", "50", "--repeats", "1", "--durability", "quorum-memory,quorum-disk,leader"];
    let figures = figures(&few);
    for what in ["goodput", "small pushes", "ack p50", "ack p99", "wire"] {
        for case in ["quorum-memory, replicas 1", "quorum-memory, replicas 3", "leader, replicas 3"] {
            value(&figures, &format!("shard {what}"), case, "replicas 1");
        }
    }
    value(&figures, "shard goodput", "quorum-memory, replicas 1", "raw tcp");
    value(&figures, "shard goodput", "quorum-memory, replicas 3", "3 raw tcp at once");
    value(&figures, "shard goodput", "quorum-memory, replicas 3", "3 raw tls at once");
    value(&figures, "shard goodput", "quorum-disk, replicas 1", "bare file");
    value(&figures, "shard goodput", "quorum-disk, replicas 3", "3 bare files at once");
    // Of three servers: where they differ too much it has no value.
    find(&figures, "shard goodput", "3 raw tcp in turn", "-");
    // Every byte goes to a server once, and once to each of the two others unless an image of the weights is smaller.
    assert!(value(&figures, "shard wire", "quorum-memory, replicas 1", "replicas 1") >= 1.0);
}

/// It took at least what cannot be less.
fn takes_more_than_the_least(figure: &Value) {
    assert!(figure["ratio"].as_f64().is_some_and(|r| r > 1.0), "{figure}");
}

/// Three steps are more than 32 MiB: the log is cut by a snapshot, and the server restarts from it.
#[test]
fn large_measures_a_model_and_its_restart_from_disk() {
    let figures = figures(&["large", "--params", "3e6", "--steps", "60"]);
    let case = "2.9986e6 parameters";
    for what in ["load", "step", "snapshot", "failover, until it leads", "failover, until weights come"] {
        value(&figures, &format!("large {what}"), case, "-");
    }
    for what in ["server peak", "server peak after its restart", "disk, most"] {
        takes_more_than_the_least(find(&figures, &format!("large {what}"), case, "12 bytes a parameter"));
    }
    takes_more_than_the_least(find(&figures, "large worker peak", case, "8 bytes a parameter"));
    value(&figures, "large log in memory, most", case, "the longest log");
}

#[test]
fn ctrl_c_ends_a_benchmark_and_its_processes() {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut child = paraft()
        .args(["bench", "wire", "--sizes", "1M", "--millis", "60000", "--repeats", "1000"])
        .env("TMPDIR", scratch.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map(Held)
        .expect("paraft starts");
    wait("the far side to run", || {
        let all = processes(scratch.path());
        if all.iter().any(|(_, l)| l.contains("raw-peer")) { Ok(()) } else { Err(format!("{all:?}")) }
    });
    std::thread::sleep(Duration::from_millis(500)); // into a measure, which would take a minute
    kill(Pid::from_raw(child.0.id() as i32), Signal::SIGINT).expect("signal");
    let began = Instant::now();
    let status =
        wait("it to end", || child.0.try_wait().expect("status").ok_or_else(|| "it runs".to_string()));
    assert_eq!(status.code(), Some(130));
    assert!(began.elapsed() < Duration::from_secs(30), "it went on for {:?}", began.elapsed());
    wait_for_the_end(scratch.path());
}

#[test]
fn what_a_benchmark_cannot_measure_is_said_before_it_begins() {
    for (args, words) in [
        (&["train", "--peers", "/nowhere"][..], &["/nowhere/train_ddp.py is no file", "--peers names"][..]),
        (&["shard", "--replicas", "0"], &["an odd number from 1"]),
        (&["wire", "--sizes", "64K", "--set", "train.mode=bsp"], &["waits for the other", "one --via"]),
        (&["wire", "--sizes", "3"], &["such as 64K or 4M"]),
    ] {
        let output = paraft().arg("bench").args(args).output().expect("paraft runs");
        assert!(!output.status.success() && output.stdout.is_empty(), "{args:?}");
        contains(&text(&output.stderr), words);
    }
}
