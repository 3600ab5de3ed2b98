//! Tests of `local`.

use super::*;
use std::path::Path;

fn parse(set: &[&str]) -> Result<Job, String> {
    let text =
        "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"digits\"\n[optimizer]\nkind = \"sgd\"\n";
    let set: Vec<String> = set.iter().map(ToString::to_string).collect();
    Job::parse(text, Path::new("test.toml"), &set).map_err(|e| e.to_string())
}

#[test]
fn what_does_not_go_with_local_steps_is_refused_by_its_key() {
    for (set, key) in [
        (vec!["local.steps=0"], "steps"),
        (vec!["local.steps=4", "local.fragments=5"], "fragments"),
        (vec!["local.fragments=2", "train.backup_workers=1"], "train.backup_workers"),
        (vec!["local.steps=4", "train.sampler=leased"], "train.sampler"),
        (vec!["local.steps=4", "train.group_size=2"], "train.group_size"),
        (vec!["local.steps=4", "train.workers=1", "train.exchange=all-reduce"], "train.exchange"),
        (vec!["local.steps=4", "algorithm.kind=dc-asgd-c"], "algorithm.kind"),
        (vec!["local.kind=diloco"], "local.kind"),
    ] {
        let error = parse(&set).expect_err("refused");
        assert!(error.contains(key), "{set:?}: {error}");
    }
    for set in [
        vec!["train.sampler=leased"],
        vec!["local.steps=4", "algorithm.kind=staleness-aware", "train.mode=asp"],
    ] {
        parse(&set).expect("it goes together");
    }
}

#[test]
fn servers_get_their_part_and_workers_must_agree_on_rest() {
    let tensors = [paraft_common::TensorSpec::param("w", &[8])];
    let servers = |set: &[&str]| parse(set).expect("a job").server_job(&tensors);
    let plain = servers(&["optimizer.lr=0.2", "clip.norm=1.0"]);
    let diloco = servers(&["optimizer.lr=0.2", "clip.norm=1.0", "local.steps=4"]);
    assert_eq!((plain.optimizer.kind(), plain.clip.norm), ("sgd", Some(1.0)));
    assert_eq!((diloco.optimizer.kind(), diloco.clip.norm), ("nesterov", None));
    let other = servers(&["optimizer.lr=0.3", "clip.norm=1.0", "local.steps=4"]);
    assert_eq!(diloco.optimizer, other.optimizer);
    assert_ne!(diloco.fingerprint, other.fingerprint, "their inner rates differ");
    let text = parse(&["local.steps=7"]).expect("a job").to_toml();
    let read = Job::parse(&text, Path::new("test.toml"), &[]).expect("what was written");
    assert_eq!(read.local.minibatches(), 7);
}
