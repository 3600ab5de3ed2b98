//! Tests of `fingerprint`.

use super::*;
use std::path::Path;

/// Keys that affect the weights, or that make other workers wait; each differs from its default.
const JOB: &str = r#"
seed = 12
[model]
kind = "mlp"
hidden = [128, 64]
[data]
kind = "csv"
path = "a.csv"
[train]
workers = 31
mode = "asp"
batch = 128
epochs = 12
max_steps = 420
shuffle = false
drop_last = false
encoding = "int8"
[algorithm]
kind = "staleness-aware"
[schedule]
kind = "step"
steps = 321
gamma = 0.25
warmup = 17
[clip]
norm = 1.5
[eval]
every_epoch = false
[checkpoint]
every_steps = 170
[cluster]
shards = 5
bucket_bytes = 65536
grace_ms = 2500
durability = "quorum-disk"
[optimizer]
kind = "momentum"
lr = 0.25
momentum = 0.75
weight_decay = 0.125
"#;

fn servers(text: &str) -> Option<paraft_common::config::ServerJob> {
    let tensors = [TensorSpec::param("w", &[300_000])];
    Job::parse(text, Path::new("job.toml"), &[]).ok().map(|j| j.server_job(&tensors))
}

/// A config volume during an update may give a worker the first half of its file.
#[test]
fn truncated_job_file_is_invalid_or_another_job() {
    let whole = servers(JOB).expect("a job");
    let (mut read, mut alike) = (0, Vec::new());
    for end in 0..JOB.trim_end().len() {
        let Some(cut) = servers(&JOB[..end]) else { continue };
        read += 1;
        if cut == whole {
            alike.push(JOB[..end].lines().next_back().unwrap_or_default());
        }
    }
    assert!(read > 60, "only {read} of them can be read, which shows little");
    assert!(alike.is_empty(), "nobody is told that these lines were cut: {alike:?}");
}

#[test]
fn a_job_without_any_one_of_these_keys_is_another_job() {
    let whole = servers(JOB).expect("a job");
    for key in JOB.lines().filter(|l| l.contains(" = ")) {
        let without: String = JOB.lines().filter(|l| *l != key).map(|l| format!("{l}\n")).collect();
        assert_ne!(servers(&without).as_ref(), Some(&whole), "nobody is told that this is missing: {key}");
    }
}

#[test]
fn other_models_have_other_fingerprints_naming_the_tensor() {
    use paraft_common::config::facts_missing;
    let job = Job::parse(JOB, Path::new("job.toml"), &[]).expect("a job");
    let of = |tensors: &[TensorSpec]| job.server_job(tensors).fingerprint;
    let model = |hidden| {
        [TensorSpec::param("fc1.weight", &[hidden, 64]), TensorSpec::param("fc2.weight", &[10, hidden])]
    };
    let (a, b) = (of(&model(32)), of(&model(48)));
    assert_eq!(facts_missing(&a, &b), "tensor 1 fc1.weight 32x64, tensor 2 fc2.weight 10x32");
    let more = of(&[&model(32)[..], &[TensorSpec::buffer("count\n", &[])]].concat());
    assert_eq!(facts_missing(&more, &a), "tensors 3, tensor 3 count\\n  buffer");
    // The same tensors in another order are another vector.
    let [first, second] = model(32);
    assert_eq!(
        facts_missing(&of(&[second, first]), &a),
        "tensor 1 fc2.weight 10x32, tensor 2 fc1.weight 32x64"
    );
    // With many tensors the last ones are only hashed.
    let long = |last| {
        let names = (0..500).map(|i| format!("layers.{i}.weight"));
        let mut all: Vec<_> = names.map(|n| TensorSpec::param(n, &[16, 16])).collect();
        all.push(TensorSpec::param("head", &[last]));
        of(&all)
    };
    assert!(long(1).len() < 3000 && facts_missing(&long(1), &long(2)).starts_with("tensors 501 "));
}

#[test]
fn what_may_differ_from_host_to_host_is_not_in_it() {
    let whole = servers(JOB).expect("a job");
    for (from, to) in [
        ("path = \"a.csv\"", "path = \"/elsewhere/a.csv\""),
        ("epochs = 12\n", "epochs = 12\ndevice = \"cpu\"\n"),
        ("epochs = 12\n", "epochs = 12\nthreads = 3\n"),
        ("grace_ms = 2500", "grace_ms = 2500\ntimeout_ms = 77000"),
        ("every_epoch = false", "every_epoch = false\ntarget_accuracy = 0.5"),
    ] {
        let other = JOB.replace(from, to);
        assert_ne!(other, JOB, "{from}");
        assert_eq!(servers(&other).as_ref(), Some(&whole), "{to}");
    }
}
