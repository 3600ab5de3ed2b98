//! What workers must agree on and the servers do not see: model, seed, data, and everything else that affects the
//! weights.
//!
//! It is a list of facts, separated by commas, so that a refusal can name the differing ones: `seed 1, batch 64,
//! ...`. Tensors are listed up to a limit. Long facts are included as a named hash. A truncated job file that still
//! parses has defaults in place of keys; therefore every key that changes the training is included here, or in the
//! servers' job.

use crate::{Exchange, Job, TrainConfig};
use paraft_common::{TensorKind, TensorSpec};
use serde::Serialize;
use toml::Value;

/// For a model with these tensors. The owner of the data adds its digest ([`Job::server_job_on`]).
pub(crate) fn of(job: &Job, tensors: &[TensorSpec]) -> String {
    let exchange = match job.train.exchange {
        Exchange::Servers => "servers",
        Exchange::AllReduce => "all-reduce",
    };
    let one_thread = TrainConfig { threads: 1, ..job.train.clone() };
    let facts = [
        format!("group_size {}", job.train.group_size),
        format!("exchange {exchange}"),
        format!("shards {}", job.shards()),
        format!("seed {}", job.seed),
        format!("batch {}", job.train.batch),
        format!("epochs {}", job.train.epochs),
        format!("every_epoch {}", job.eval.every_epoch),
        // Recomputation changes no result, and may differ with the hosts' memory.
        format!("[model] {}", table(job.model.as_ref(), &["checkpoint_activations"])),
        // Threads change no bit. `init` counts by its content, not its path; it and the encoding are in the
        // servers' job. Hardware may be mixed.
        format!("[train] {}", table(Some(&one_thread), &["init", "encoding", "device", "precision"])),
        format!("[local] {:016x}", hash(&local(job))),
        match &job.checkpoint {
            Some(c) => format!("checkpoint every {:?} steps {:?} epochs", c.every_steps, c.epochs()),
            None => "no checkpoint".into(),
        },
    ];
    // The servers know how it is split.
    let p = &job.parallel;
    let pipeline = p.is_cut().then(|| {
        format!("pipeline {} with {} micro-batches, {}", p.pipeline, job.micro_batches(), p.schedule.name())
    });
    facts.into_iter().chain(pipeline).chain(listed(tensors)).collect::<Vec<_>>().join(", ")
}

/// Maximum bytes of the listed tensors: about fifty. Another model of the same kind differs in its first ones, or
/// in their number.
const LISTED: usize = 2048;

/// The number of tensors, then each one's place, name and shape; if they are too many, a hash of all and the first
/// ones.
fn listed(tensors: &[TensorSpec]) -> Vec<String> {
    let kind = |t: &TensorSpec| if t.kind == TensorKind::Buffer { " buffer" } else { "" };
    let shape = |t: &TensorSpec| t.shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x");
    let fact = |(i, t): (usize, &TensorSpec)| {
        format!("tensor {i} {} {}{}", t.name.escape_debug(), shape(t), kind(t))
    };
    let all: Vec<String> = (1..).zip(tensors).map(fact).collect();
    let mut room = LISTED;
    let fits = |f: &&String| {
        room = room.saturating_sub(f.len() + 2);
        room > 0
    };
    let first: Vec<String> = all.iter().take_while(fits).cloned().collect();
    let hash =
        if first.len() < all.len() { format!(" {:016x}", hash(&all.join(", "))) } else { String::new() };
    [format!("tensors {}{hash}", all.len())].into_iter().chain(first).collect()
}

/// The servers do not see what changes the workers' own weights.
fn local(job: &Job) -> String {
    match job.local.is_local() {
        true => format!("{:?} {:?}", job.local, job.local.rule().on_worker(&job.descent())),
        false => String::new(),
    }
}

/// The values of a job file's table, without these keys.
fn table(table: Option<&impl Serialize>, without: &[&str]) -> String {
    let Some(Ok(Value::Table(mut t))) = table.map(Value::try_from) else { return "none".into() };
    t.retain(|key, _| !without.contains(&key));
    format!("{:016x}", hash(&t.to_string()))
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
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
every = 321
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
            assert_ne!(
                servers(&without).as_ref(),
                Some(&whole),
                "nobody is told that this is missing: {key}"
            );
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
}
