//! What a run keeps: checkpoints, logs that can be replayed.

use crate::common::*;

/// A job with everything that has a memory, long enough to be killed in the middle.
fn with_checkpoints(epochs: u64) -> String {
    digits("bsp", 3, epochs)
        + "[optimizer]\nkind = \"adam\"\nlr = 0.002\n[schedule]\nkind = \"cosine\"\nsteps = 4000\nwarmup = 40\n"
        + "[clip]\nnorm = 0.5\n[checkpoint]\nevery_steps = 100\nevery_epochs = 1\n"
}

#[test]
fn a_job_resumes_bit_for_bit_after_its_fleet_is_killed() {
    let body = with_checkpoints(30);
    let l = Launcher::training(&body, 2);
    let checkpoints = l.run_dir.join("checkpoints");
    wait("a third checkpoint", || {
        let latest = fs::read_to_string(checkpoints.join("latest")).unwrap_or_default();
        let step = latest.trim().strip_prefix("step-").and_then(|s| s.parse::<u64>().ok()).unwrap_or(0);
        if step >= 100 { Ok(()) } else { Err(latest) }
    });
    for (pid, _) in processes(&l.run_dir) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL); // one may have followed its launcher already
    }
    let Launcher { mut child, run_dir, scratch } = l;
    child.wait().expect("the launcher is gone");
    let (job, dir) = (scratch.path().join("job.toml"), run_dir.to_str().expect("utf-8"));
    let job = job.to_str().expect("utf-8");
    let model = |dir: &Path| dir.join("model.safetensors");
    assert!(!model(&run_dir).exists(), "it was killed before its end");
    let out = run(&["train", job, "--run-dir", dir, "--resume", "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("resuming from step "), "{}", text(&out.stderr));
    assert!(run_dir.join("metrics.1.jsonl").exists(), "the record so far is kept");
    let quiet = scratch.path().join("quiet");
    let out = run(&["train", job, "--run-dir", quiet.to_str().expect("utf-8"), "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let (a, b) = (fs::read(model(&run_dir)).expect("weights"), fs::read(model(&quiet)).expect("weights"));
    assert!(a == b, "the run that was killed ends with the weights of the one that was not");
    // The last three, and the best one where that is older.
    let folders = fs::read_dir(&checkpoints).expect("checkpoints").flatten().filter(|e| e.path().is_dir());
    let mut kept: Vec<_> = folders.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    kept.sort();
    let best = fs::read_to_string(checkpoints.join("best")).expect("best");
    let others = kept.iter().rev().skip(3).filter(|k| !best.starts_with(k.as_str())).count();
    assert!(kept.len() >= 3 && others == 0, "{kept:?}, best {best}");
    // The new fleet did not begin with what the old one left; and it left nothing itself, having ended in order.
    assert!(run_dir.join("server-0.1").exists() && !run_dir.join("server-0").exists());
}

#[test]
fn checkpoints_are_shown_compared_exported_and_refused() {
    let scratch = tempfile::tempdir().expect("scratch");
    let at = |name: &str| scratch.path().join(name).to_str().expect("utf-8").to_string();
    let path = job(scratch.path(), &with_checkpoints(3));
    let path = path.to_str().expect("utf-8");
    let none = run(&["train", path, "--run-dir", &at("none"), "--resume"]);
    assert_eq!(none.status.code(), Some(65), "{}", text(&none.stderr));
    assert!(text(&none.stderr).contains("no such checkpoint"), "{}", text(&none.stderr));
    let out = run(&["train", path, "--run-dir", &at("run"), "--json", "--set", "checkpoint.every_steps=88"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let folder = |step: u64| at(&format!("run/checkpoints/step-{step:010}"));

    let out = run(&["checkpoint", "inspect", &at("run"), "--json"]);
    let shown: Value = serde_json::from_str(text(&out.stdout).trim()).expect("one object");
    assert_eq!((&shown["step"], &shown["versions"]), (&132.into(), &"132".into()), "{shown}");
    assert_eq!(shown["tensors"].as_array().expect("tensors").len(), 4 + 8, "{shown}");
    assert!(shown.get("best_loss").is_none(), "no rule of early stopping has one: {shown}");
    let rule = ["--set", "eval.early_stop.patience=9", "--set", "checkpoint.every_steps=50"];
    let stops = at("stops");
    assert!(run(&[&["train", path, "--run-dir", &stops, "--json"][..], &rule].concat()).status.success());
    let out = run(&["checkpoint", "inspect", &stops, "--json"]);
    let with_rule: Value = serde_json::from_str(text(&out.stdout).trim()).expect("one object");
    assert!(with_rule["best_loss"].as_f64().is_some_and(|l| l > 0.0), "{with_rule}");
    let table = text(&run(&["checkpoint", "inspect", &folder(132)]).stdout);
    assert!(table.contains("exp_avg_sq.0.weight") && table.contains("32x64"), "{table}");

    let to = at("out.safetensors");
    assert!(run(&["checkpoint", "export", &at("run"), "--to", &to]).status.success());
    let same = run(&["checkpoint", "diff", &to, &at("run/model.safetensors")]);
    assert_eq!(same.status.code(), Some(0), "{}", text(&same.stdout));
    assert!(run(&["checkpoint", "export", &at("run"), "--to", &to, "--dtype", "f16"]).status.success());
    let other = run(&["checkpoint", "diff", &to, &at("run/model.safetensors"), "--json"]);
    assert_eq!(other.status.code(), Some(1));
    assert!(text(&other.stdout).contains("\"equal\":false"), "{}", text(&other.stdout));

    // Into a checkpoint nothing is written; what cannot be written is named as it was given.
    let model = format!("{}/model.safetensors", folder(132));
    let before = fs::read(&model).expect("the checkpoint's weights");
    for (to, code, words) in [
        (&model, 2, "lies in a checkpoint"),
        (&at("nowhere/x.safetensors"), 74, "nowhere/x.safetensors cannot be written"),
    ] {
        let out = run(&["checkpoint", "export", &at("run"), "--to", to, "--dtype", "bf16"]);
        let err = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{err}");
        contains(&err, &[to, words, "help: choose a file"]);
        assert!(!err.contains(".part"), "{err}");
    }
    assert!(before == fs::read(&model).expect("the checkpoint's weights"), "it is as it was");

    // A model file begins a job; one of another shape does not, and no process starts.
    let init = format!("train.init={to}");
    let begun = run(&["train", path, "--run-dir", &at("begun"), "--json", "--set", &init]);
    assert!(begun.status.success(), "{}", text(&begun.stderr));
    let wrong =
        run(&["train", path, "--run-dir", &at("wrong"), "--set", &init, "--set", "model.hidden=[16]"]);
    let err = text(&wrong.stderr);
    assert_eq!(wrong.status.code(), Some(65), "{err}");
    assert!(err.contains("`0.weight` is [32, 64], the model's is [16, 64]"), "{err}");
    assert!(!scratch.path().join("wrong/server-0.log").exists(), "no process may start");

    // The latest is cut off: it is named, and the one before it is offered.
    let piece = scratch.path().join("run/checkpoints/step-0000000132/optimizer.safetensors");
    let whole = fs::read(&piece).expect("optimizer state");
    fs::write(&piece, &whole[..whole.len() / 2]).expect("cut");
    let set = ["--set", "train.epochs=4"];
    let cut = run(&[&["train", path, "--run-dir", &at("cut"), "--resume", &at("run")][..], &set].concat());
    let err = text(&cut.stderr);
    assert_eq!(cut.status.code(), Some(65), "{err}");
    for words in ["optimizer.safetensors is cut off", "help: the newest whole one is", "step-0000000088"] {
        assert!(err.contains(words), "`{words}` is not in: {err}");
    }
    let resumed = run(&[
        &["train", path, "--run-dir", &at("on"), "--json", "--resume", &folder(88)][..],
        &set,
    ]
    .concat());
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
}

#[test]
fn the_logs_of_a_run_replay_to_its_weights_bit_for_bit() {
    let scratch = tempfile::tempdir().expect("scratch");
    let body =
        digits("bsp", 3, 3) + "durability = \"quorum-disk\"\n[optimizer]\nkind = \"adam\"\nlr = 0.003\n";
    let path = job(scratch.path(), &body);
    let dir = scratch.path().join("run");
    let at = dir.to_str().expect("utf-8");
    let out = run(&["train", path.to_str().expect("utf-8"), "--run-dir", at, "--json"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let to = scratch.path().join("replayed.safetensors");
    let replay = |args: &[&str]| run(&[&["replay", at], args].concat());
    let out = replay(&["--to", to.to_str().expect("utf-8"), "--json"]);
    assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
    let (a, b) =
        (fs::read(&to).expect("replayed"), fs::read(dir.join("model.safetensors")).expect("trained"));
    assert!(a == b, "the replayed weights are the trained ones");
    let told: serde_json::Value = serde_json::from_slice(&out.stdout).expect("json");
    assert_eq!(told["replicas"].as_array().map(Vec::len), Some(9), "three shards on three servers: {told}");

    // A replay that stops early has other weights, and says where it stopped.
    let out = replay(&["--shard", "0", "--index", "20", "--json"]);
    let told: serde_json::Value = serde_json::from_slice(&out.stdout).expect("json");
    assert_eq!(told["replicas"][0]["index"], 20, "{told}");

    // Another fleet's folders do not mix with them.
    let (own, second) = (dir.join("server-0"), scratch.path().join("second"));
    let other = second.to_str().expect("utf-8");
    let out = run(&["train", path.to_str().expect("utf-8"), "--run-dir", other, "--set", "train.epochs=1"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let mixed = scratch.path().join("mixed.safetensors");
    let out = replay(&[other, "--to", mixed.to_str().expect("utf-8")]);
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(65), "{}{err}", text(&out.stdout));
    let theirs = second.join("server-0");
    let both = [own, theirs].map(|f| format!("{} ", f.display()));
    contains(&err, &[&both[0], &both[1], "of fleet ", "help: replay the folders of each fleet"]);
    assert!(!mixed.exists(), "nothing may be written");

    // A log that was damaged is refused by name.
    let log = dir.join("server-1/log");
    let segment = fs::read_dir(&log).expect("log").flatten().map(|f| f.path());
    let segment = segment.filter(|p| p.extension().is_some_and(|e| e == "log")).min().expect("a segment");
    let mut bytes = fs::read(&segment).expect("segment");
    bytes[20] ^= 1; // of its beginning: whatever it has cannot be told any more
    fs::write(&segment, bytes).expect("damage");
    let out = replay(&[]);
    assert_eq!(out.status.code(), Some(65), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains(segment.to_str().expect("utf-8")), "{}", text(&out.stderr));
}

#[test]
fn a_requested_checkpoint_resumes_with_the_same_bits() {
    let l = Launcher::training(&digits("bsp", 3, 60), 2);
    let (keep, run_dir) = (l.keep(), l.run_dir.clone());
    let dir = run_dir.to_str().expect("utf-8");
    let save = |job: &str| run(&["checkpoint", "save", job, "--fleet", dir]);
    let out = save("t");
    assert!(out.status.success(), "{}", text(&out.stderr));
    let said = text(&out.stdout);
    let path = said.split_whitespace().last().expect("a folder");
    assert!(said.starts_with("step ") && Path::new(path).starts_with(run_dir.join("checkpoints")), "{said}");
    let another = save("another");
    assert_eq!(another.status.code(), Some(78));
    contains(&text(&another.stderr), &["no job `another`", "it has: t"]);
    let (code, _, err) = l.output();
    assert_eq!(code, Some(0), "{err}");
    assert!(run(&["checkpoint", "inspect", path]).status.success(), "it is whole");
    let on = keep.path().join("on");
    let job = keep.path().join("job.toml");
    let words = ["train", job.to_str().expect("utf-8"), "--json", "--resume", path, "--run-dir"];
    let out = run(&[&words[..], &[on.to_str().expect("utf-8")]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let weights = |dir: &Path| fs::read(dir.join("model.safetensors")).expect("weights");
    assert!(weights(&run_dir) == weights(&on), "the bits of a run that was never asked");
}
