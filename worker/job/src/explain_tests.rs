//! Tests of `explain`.

use crate::Job;
use std::path::Path;

const BASE: &str = "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"digits\"\n";

fn said(more: &str, set: &[&str]) -> String {
    let set: Vec<String> = set.iter().map(ToString::to_string).collect();
    let text = format!("{BASE}{more}");
    Job::parse(&text, Path::new("job.toml"), &set).expect_err(more).to_string()
}

#[test]
fn what_is_wrong_is_said_with_the_whole_key_and_what_it_takes() {
    for (more, words) in [
        (
            "[cluster]\nservers = 3\ndurability = \"quorum\"",
            "job.toml:8: cluster.durability: `quorum` is none of `quorum-disk`, `quorum-memory`, `leader`",
        ),
        (
            "[cluster]\nmax_restarts = -1",
            "job.toml:7: cluster.max_restarts: integer `-1`, where a whole number from 0 to 4294967295 is expected",
        ),
        (
            "[optimizer]\nkind = \"sgd\"\nlr = \"x\"",
            "job.toml:8: optimizer.lr: string \"x\", where a number is expected",
        ),
        ("[train]\nshuffle = 3", "job.toml:7: train.shuffle: integer `3`, where true or false is expected"),
        (
            "[schedule]\nkind = \"step\"\nsteps = 3\nmin_factor = 0.5",
            "job.toml:9: schedule.min_factor: unknown key `min_factor`; [schedule] takes `steps`, `gamma`, `warmup`, `scale`",
        ),
        ("[schedule]\nkind = \"cosine\"", "job.toml:6: schedule: missing field `steps`"),
        (
            "[local]\nsteps = 4\n[local.outer]\nkind = \"sgd\"\nlr = true",
            "job.toml:10: local.outer.lr: boolean `true`, where a number is expected",
        ),
        (
            "[train]\nexchange = 1",
            "job.toml:7: train.exchange: integer `1`, where \"servers\" or \"all-reduce\" is expected",
        ),
        ("[optimizer]\nkind = 3", "job.toml:7: optimizer.kind: integer `3`, where a text is expected"),
        ("[train]\nmode = \"x\"", "job.toml:7: train.mode: `x` is no consistency mode"),
        (
            "[eval]\nearly_stop = { patience = -1 }",
            "job.toml:7: eval.early_stop.patience: integer `-1`, where a whole number",
        ),
        // Reports the first of two mistakes.
        ("[cluster]\naddresses = 3\nservers = \"x\"", "cluster.addresses: integer `3`, where a list is"),
    ] {
        let said = said(more, &[]);
        assert!(said.contains(words), "{said}\n{words}");
    }
}

#[test]
fn a_key_in_the_wrong_place_is_told_the_right_one() {
    for (more, set, words) in [
        ("", &["durability=leader"][..], &["--set durability=leader: durability: unknown key"][..]),
        ("", &["durability=leader"], &["help: did you mean `cluster.durability`?"]),
        ("", &["lr=3"], &["did you mean `optimizer.lr`?"]),
        ("", &["min_delta=3"], &["did you mean `eval.early_stop.min_delta`?"]),
        (
            "",
            &["cluster.batch=3"],
            &["cluster.batch: unknown key `batch`; [cluster] takes", "`train.batch`?"],
        ),
        ("", &["model.kinds=mlp"], &["did you mean `model.kind`?"]),
        ("", &["data.foo=1"], &["unknown key `foo`; [data] takes no other keys with this kind"]),
        ("", &["cluster.foo=1"], &["`grace_ms`, `timeout_ms`, `durability`"]),
        ("", &["epoch=3"], &["`train.epochs`?"]),
        ("", &["train.epoch=3"], &["`train.epochs`?"]),
        ("[train]\nepocs = 3", &[], &["job.toml:7: train.epocs: unknown key", "`train.epochs`?"]),
        ("[optimizer]\nkind = \"sgd\"\nweight_deca = 1", &[], &["`optimizer.weight_decay`?"]),
        (
            "",
            &["train.encoding=fp16"],
            &[
                "--set train.encoding=fp16: train.encoding: `fp16` is none of `f32`, `bf16`",
                "did you mean `f16`?",
            ],
        ),
        ("", &["model.kind=mlpp"], &["--set model.kind=mlpp: model.kind: `mlpp` is none of", "`mlp`?"]),
        ("", &["train.encoding=1"], &["train.encoding: integer `1`, where a text is expected"]),
        (
            "",
            &["train.encoding=top-k:2"],
            &["train.encoding: `top-k:2`: the fraction", "above 0 and at most 0.5"],
        ),
        ("", &["train.encoding=powersgd"], &["train.encoding: `powersgd`: the rank", "from 1 to 64"]),
        ("", &["train=3"], &["--set train=3: train: integer `3`, where a table is expected"]),
    ] {
        let said = said(more, set);
        words.iter().for_each(|w| assert!(said.contains(w), "{said}\n{w}"));
    }
}

/// `hidden` is a key of the other model kind, so it must not be proposed.
#[test]
fn a_key_of_another_kind_is_not_proposed_where_it_is_refused() {
    let said = said("", &["model.kind=convnet"]);
    assert!(said.contains("unknown key `hidden`") && !said.contains("did you mean"), "{said}");
}
