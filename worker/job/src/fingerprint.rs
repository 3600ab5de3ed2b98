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
        match job.checkpoints() {
            // As they are written: with neither, time decides too.
            Some(c) => format!("checkpoint every {:?} steps {:?} epochs", c.every_steps, c.every_epochs),
            None => "no checkpoint".into(),
        },
    ];
    // The servers know how it is split.
    let p = &job.parallel;
    let pipeline = p.is_cut().then(|| {
        format!("pipeline {} with {} micro-batches, {}", p.pipeline, job.micro_batches(), p.schedule.name())
    });
    let within_epochs = job.eval.every_steps.map(|n| format!("evaluated every {n} steps"));
    let tables = job.tables_of_model();
    let tables = (!tables.is_empty()).then(|| format!("[[table]] {:016x}", hash(&format!("{tables:?}"))));
    let sometimes = [within_epochs, pipeline, tables].into_iter().flatten();
    facts.into_iter().chain(sometimes).chain(listed(tensors)).collect::<Vec<_>>().join(", ")
}

/// Maximum bytes of the listed tensors: about fifty. Another model of the same kind differs in its first ones, or
/// in their number.
const LISTED: usize = 2048;

/// The number of tensors, then each one's place, name and shape; if they are too many, a hash of all and the first
/// ones.
fn listed(tensors: &[TensorSpec]) -> Vec<String> {
    let kind = |t: &TensorSpec| match t.kind {
        TensorKind::Param => "",
        TensorKind::Buffer => " buffer",
        TensorKind::Result => " result",
        TensorKind::Rows => " rows",
    };
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
        true => format!("{:?} {:?}", job.local, job.descent()),
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
#[path = "fingerprint_tests.rs"]
mod tests;
