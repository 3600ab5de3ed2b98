//! The logs of a healthy run have nothing above INFO, also while other processes use the processors.

use crate::common::*;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The logs below a folder, and their lines above INFO.
fn alarms(folder: &Path) -> (usize, Vec<String>) {
    let (mut logs, mut found, mut folders) = (0, Vec::new(), vec![folder.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(&folder).expect("a folder").flatten().map(|e| e.path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "log" || e == "stderr") {
                let said = text(&fs::read(&path).unwrap_or_default());
                let is_alarm = |l: &&str| ["WARN", "ERROR", "panicked"].iter().any(|w| l.contains(w));
                found.extend(said.lines().filter(is_alarm).map(|l| format!("{}: {l}", path.display())));
                logs += 1;
            }
        }
    }
    (logs, found)
}

#[test]
fn healthy_runs_on_a_busy_host_log_nothing_above_info() {
    let scratch = tempfile::tempdir().expect("scratch");
    // Who is kept from the processors for longer than a lease is rightly reported.
    let file = job(scratch.path(), &(digits("bsp", 3, 4) + "grace_ms = 60000\n"));
    let space = scratch.path().join("space.toml");
    fs::write(&space, "[space]\n\"optimizer.lr\" = [0.05, 0.1]\n").expect("a space");
    let (trained, swept) = (scratch.path().join("trained"), scratch.path().join("swept"));
    let utf8 = |path: &Path| path.to_str().expect("utf-8").to_string();
    let (file, space) = (utf8(&file), utf8(&space));
    let busy = AtomicBool::new(true);
    let outs = std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while busy.load(Relaxed) {
                    std::hint::spin_loop()
                }
            });
        }
        let outs = [
            run(&["train", &file, "--run-dir", &utf8(&trained)]),
            run(&["sweep", &file, "--space", &space, "--trials", "2", "--run-dir", &utf8(&swept)]),
        ];
        busy.store(false, Relaxed);
        outs
    });
    for (out, dir) in outs.iter().zip([trained, swept]) {
        let err = text(&out.stderr);
        assert!(out.status.success(), "{err}");
        assert!(!err.contains("warning:") && !err.contains("try "), "{err}");
        let (logs, found) = alarms(&dir);
        assert!(logs >= 5 && found.is_empty(), "{logs} logs: {found:#?}");
    }
}
