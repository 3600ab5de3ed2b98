//! `paraft pull` into folders that other programs read.

#[path = "../decoder/weight_v.rs"]
mod decoder;

use crate::common::*;
use decoder::{decode, index_of, safetensors};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

/// A job of which few values change from step to step, in bf16.
fn body(epochs: u64) -> String {
    digits("bsp", 3, epochs)
        .replace("mode = \"bsp\"\n", "mode = \"bsp\"\nworkers = 1\n")
        .replace("[cluster]", "[optimizer]\nkind = \"sgd\"\nlr = 1e-5\n[cluster]")
}

fn worker(fleet: &Fleet, folder: &Path) -> Held {
    Held(fleet.worker(0, &folder.join("w")).stderr(Stdio::null()).spawn().expect("a worker"))
}

fn pull(fleet: &Fleet, to: &Path, more: &[&str]) -> Command {
    let mut c = paraft();
    c.env("PARAFT_INSECURE", "1").args(["pull", "t", "--json", "--timeout", "120", "--fleet", &fleet.list()]);
    c.arg("--to").arg(to).args(more).stdout(Stdio::piped()).stderr(Stdio::piped());
    c
}

/// What a pull that succeeds says, a line a version.
fn pulled(mut pull: Command) -> Vec<Value> {
    let out = pull.output().expect("paraft starts");
    assert!(out.status.success(), "{}", text(&out.stderr));
    text(&out.stdout).lines().map(|l| serde_json::from_str(l).expect("JSON")).collect()
}

fn refused(mut pull: Command, code: i32, words: &[&str]) {
    let out = pull.output().expect("paraft starts");
    assert_eq!(out.status.code(), Some(code), "{}", text(&out.stderr));
    contains(&text(&out.stderr), words);
}

/// The numbers of the folders, in order.
fn numbers(root: &Path) -> Vec<u64> {
    let names = fs::read_dir(root).into_iter().flatten().flatten().map(|e| e.file_name());
    let number = |name: String| name.strip_prefix("weight_v").and_then(|n| n.parse().ok());
    let mut numbers: Vec<u64> = names.filter_map(|name| number(name.into_string().ok()?)).collect();
    numbers.sort_unstable();
    numbers
}

#[test]
fn hugging_face_folder_is_whole_whenever_it_is_read() {
    let scratch = tempfile::tempdir().expect("scratch");
    let (folder, base) = (scratch.path().join("hf"), scratch.path().join("base"));
    let fleet = Fleet::start(scratch.path(), Some(&body(6)));
    let _worker = worker(&fleet, scratch.path());
    fs::create_dir_all(&base).expect("a folder");
    pulled(pull(&fleet, &base.join("model.safetensors"), &[]));
    for (name, content) in [("config.json", "{}"), ("tokenizer.model", "t"), ("training_args.bin", "x")] {
        fs::write(base.join(name), content).expect("a file");
    }
    let base = base.to_str().expect("utf-8");
    let done = Arc::new(AtomicBool::new(false));
    let reader = {
        let (done, file) = (done.clone(), folder.join("model.safetensors"));
        std::thread::spawn(move || {
            let mut steps = BTreeSet::new();
            while !done.load(SeqCst) {
                if file.exists() {
                    // It panics at a file that is cut off.
                    let (notes, _) = safetensors(&file);
                    steps.insert(notes["version"].as_str().expect("a version").to_string());
                }
            }
            steps.len()
        })
    };
    let lines =
        pulled(pull(&fleet, &folder, &["--layout", "hf", "--base", base, "--follow", "--dtype", "bf16"]));
    done.store(true, SeqCst);
    assert!(reader.join().expect("a reader") > 1 && lines.len() > 1, "{lines:?}");
    let (notes, _) = safetensors(&folder.join("model.safetensors"));
    let last = lines.last().expect("a line");
    assert_eq!(notes["version"], last["version"].to_string());
    assert_eq!(notes["digest"], last["digest"]);
    assert_eq!(notes["founding"], last["founding"].to_string());
    let mut names: Vec<_> =
        fs::read_dir(&folder).expect("a folder").flatten().map(|e| e.file_name()).collect();
    names.sort();
    assert_eq!(names.remove(0), ".paraft-lock", "{names:?}");
    assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.model"]);

    fs::write(folder.join("old.safetensors"), "").expect("a file");
    refused(pull(&fleet, &folder, &["--layout", "hf"]), 78, &["old.safetensors"]);
    let other = scratch.path().join("other");
    fs::create_dir_all(&other).expect("a folder");
    pulled(pull(&fleet, &other.join("model.safetensors"), &["--only", "*.bias"]));
    let other = other.to_str().expect("utf-8");
    let words = ["2 tensors of job `t` do not fit", "weight` is not in the base"];
    refused(pull(&fleet, &scratch.path().join("hf2"), &["--layout", "hf", "--base", other]), 78, &words);
    refused(pull(&fleet, &folder, &["--base", other]), 2, &["--base"]);
}

#[test]
fn weight_v_folders_give_the_bits_of_a_plain_pull() {
    let scratch = tempfile::tempdir().expect("scratch");
    let (root, plain) = (scratch.path().join("sync"), scratch.path().join("plain.safetensors"));
    let fleet = Fleet::start(scratch.path(), Some(&body(6)));
    let _worker = worker(&fleet, scratch.path());
    let flags = ["--dtype", "bf16"];
    let follow = ["--layout", "weight_v", "--follow", "--every", "20", "--keep", "3"];
    let lines = pulled(pull(&fleet, &root, &[&follow[..], &flags].concat()));
    let fulls: Vec<bool> = lines.iter().filter_map(|line| line["full"].as_bool()).collect();
    assert!(fulls[0] && fulls[1..].contains(&false), "{lines:?}");
    let (all, last) = (numbers(&root), lines.last().expect("a line"));
    assert_eq!(all.last().copied(), last["number"].as_u64());
    pulled(pull(&fleet, &plain, &flags));
    let (notes, tensors) = safetensors(&plain);
    assert_eq!(notes["digest"], last["digest"], "the same version");
    assert_eq!(decode(&root, *all.last().expect("a folder")), tensors);
    // The version is there: the command has nothing to do.
    let again = pulled(pull(&fleet, &root, &[&["--layout", "weight_v"], &flags[..]].concat()));
    assert!(again[0]["file"].is_null(), "{again:?}");
    assert_eq!(numbers(&root), all);
}

#[test]
fn weight_v_after_kills_is_whole_and_continues_with_a_full() {
    let scratch = tempfile::tempdir().expect("scratch");
    let (root, plain) = (scratch.path().join("sync"), scratch.path().join("plain.safetensors"));
    let fleet = Fleet::start(scratch.path(), Some(&body(1000)));
    let worker = worker(&fleet, scratch.path());
    let flags = ["--layout", "weight_v", "--dtype", "bf16"];
    for round in 0..8u64 {
        let before = numbers(&root).last().copied().unwrap_or(0);
        let running =
            Held(pull(&fleet, &root, &[&["--follow"], &flags[..]].concat()).spawn().expect("paraft starts"));
        wait("a folder", || match numbers(&root).last() {
            Some(last) if *last > before + round % 3 => Ok(()),
            other => Err(format!("{other:?}")),
        });
        // Somewhere in the writing of a folder, or between two.
        std::thread::sleep(Duration::from_millis(3 * round));
        drop(running);
        for number in numbers(&root) {
            decode(&root, number);
        }
        let full = index_of(&root.join(format!("weight_v{:06}", before + 1)));
        assert!(full["metadata"]["delta_encoding"].is_null(), "{full}");
    }
    drop(worker);
    // Without its worker the job stands.
    let lines = pulled(pull(&fleet, &root, &flags));
    assert_eq!(lines[0]["number"], *numbers(&root).last().expect("a folder"), "{lines:?}");
    pulled(pull(&fleet, &plain, &["--dtype", "bf16"]));
    let (notes, tensors) = safetensors(&plain);
    assert_eq!(notes["digest"], lines[0]["digest"], "the same version");
    assert_eq!(decode(&root, *numbers(&root).last().expect("a folder")), tensors);
    let left = fs::read_dir(&root).expect("a folder").flatten().map(|e| e.file_name());
    assert_eq!(left.filter(|name| name.to_string_lossy().starts_with(".tmp-")).count(), 0);
}
