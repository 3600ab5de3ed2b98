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
        (vec!["local.kind=diloco", "local.steps=0"], "steps"),
        (vec!["local.kind=diloco", "local.steps=4", "local.fragments=5"], "fragments"),
        (vec!["local.kind=diloco", "local.fragments=2", "round.kind=backup", "round.spare=1"], "round.kind"),
        (vec!["local.kind=diloco", "train.sampler=leased"], "train.sampler"),
        (vec!["local.kind=diloco", "train.group_size=2"], "train.group_size"),
        (vec!["local.kind=easgd", "train.workers=1", "train.exchange=all-reduce"], "train.exchange"),
        (vec!["local.kind=diloco", "algorithm.kind=dc-asgd-c"], "algorithm.kind"),
        (vec!["local.kind=easgd", "algorithm.kind=staleness-aware"], "algorithm.kind"),
        (vec!["local.kind=diloco", "optimizer.kind=delayed-nesterov"], "optimizer.kind"),
        (vec!["local.kind=downpour", "local.alpha=0.1"], "local.alpha"),
        (vec!["local.kind=dilco"], "local.kind"),
    ] {
        let error = parse(&set).expect_err("refused");
        assert!(error.contains(key), "{set:?}: {error}");
    }
    for set in [
        vec!["local.kind=every-step", "train.sampler=leased"],
        vec!["local.kind=diloco", "algorithm.kind=staleness-aware", "train.mode=asp"],
        vec!["local.kind=downpour", "local.n_push=3", "train.mode=asp"],
    ] {
        parse(&set).expect("it goes together");
    }
}

#[test]
fn servers_get_their_part_and_workers_must_agree_on_rest() {
    let tensors = [paraft_common::TensorSpec::param("w", &[8])];
    let servers = |set: &[&str]| parse(set).expect("a job").server_job(&tensors);
    let plain = servers(&["optimizer.lr=0.2", "clip.norm=1.0"]);
    let diloco = servers(&["optimizer.lr=0.2", "clip.norm=1.0", "local.kind=diloco"]);
    assert_eq!((plain.optimizer.kind(), plain.clip.norm), ("sgd", Some(1.0)));
    assert_eq!((diloco.optimizer.kind(), diloco.clip.norm), ("nesterov", None));
    let other = servers(&["optimizer.lr=0.3", "clip.norm=1.0", "local.kind=diloco"]);
    assert_eq!(diloco.optimizer, other.optimizer);
    assert_ne!(diloco.fingerprint, other.fingerprint, "their inner rates differ");
    let text = parse(&["local.kind=diloco", "local.steps=7"]).expect("a job").to_toml();
    let read = Job::parse(&text, Path::new("test.toml"), &[]).expect("what was written");
    assert_eq!(read.local.rule().minibatches(), 7);
}
