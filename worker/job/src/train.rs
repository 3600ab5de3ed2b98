//! `[train]`: length, steps, consistency, devices.

use crate::{
    DeviceConfig, Job,
    check::{Check, bad},
    is_default,
};
use paraft_common::{
    Encoding, Mode, ModeChoice,
    config::OF_JOB,
    group::MAX_RANKS,
    round::{Backup, RoundConfig},
};
use paraft_models::Precision;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A matrix product cannot use more threads.
const MAX_THREADS: usize = 256;
/// Minibatches per chunk of the leased sampler. With this many, asking for the next chunk costs little, and a dead
/// worker leaves at most these to be trained again.
const CHUNK_BATCHES: usize = 16;

/// `[train]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Workers, 1 to 65536; each a process, or a group of them.
    pub workers: u32,
    /// Ranks of each worker, 1 to 1024: processes that average their gradients and act as one worker.
    #[serde(skip_serializing_if = "is_one")]
    pub group_size: u32,
    /// Which side applies the gradients.
    #[serde(skip_serializing_if = "is_default")]
    pub exchange: Exchange,
    /// `bsp`, `ssp:S`, `asp`, or `auto`.
    pub mode: ModeChoice,
    /// Pushes that a `bsp` round does not wait for (backup workers), from 0, below `workers`.
    #[serde(skip_serializing_if = "is_default")]
    pub backup_workers: u32,
    /// Samples per minibatch of each worker, or of each rank of its group.
    pub batch: usize,
    /// Passes over the training data.
    pub epochs: u64,
    /// Stop each worker after this many steps, before the last epoch's end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_steps: Option<u64>,
    /// Reshuffle the samples each epoch.
    pub shuffle: bool,
    /// Drop the last samples of an epoch that do not fill a whole minibatch on every worker (otherwise the share is
    /// padded from its start, like PyTorch's DistributedSampler, and the last minibatch may be short).
    pub drop_last: bool,
    /// The assignment of samples: a share per worker, or chunks that the servers lease.
    #[serde(skip_serializing_if = "is_default")]
    pub sampler: SamplerKind,
    /// How pushes carry the gradients of trained values.
    #[serde(skip_serializing_if = "is_default")]
    pub encoding: Encoding,
    /// CPU threads of each worker, or of each rank of its group, 1 to 256. They change no bit of the result, and
    /// may differ between workers.
    pub threads: usize,
    /// The workers' device: `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`. It may differ between
    /// workers.
    #[serde(skip_serializing_if = "is_default")]
    pub device: DeviceConfig,
    /// The numbers in which a GPU computes.
    #[serde(skip_serializing_if = "is_default")]
    pub precision: Precision,
    /// A safetensors file with PyTorch's names with the initial weights, in place of the seed's; or `job:NAME`,
    /// another job of the same fleet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init: Option<PathBuf>,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            workers: 2,
            group_size: 1,
            exchange: Exchange::Servers,
            mode: Mode::Bsp.into(),
            backup_workers: 0,
            batch: 64,
            epochs: 1,
            max_steps: None,
            shuffle: true,
            drop_last: true,
            sampler: SamplerKind::Static,
            encoding: Encoding::F32,
            threads: 1,
            device: DeviceConfig::Auto,
            precision: Precision::Tf32,
            init: None,
        }
    }
}

/// Which side applies the gradients, and keeps weights and optimizer state during training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exchange {
    /// The servers: workers push and pull.
    #[default]
    Servers,
    /// Each rank of the job's one group, for itself. The servers keep the membership and the list of checkpoints.
    AllReduce,
}

/// The assignment of samples to workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SamplerKind {
    /// Each worker has a fixed share of every epoch.
    #[default]
    Static,
    /// Workers lease chunks of an epoch from the servers. A chunk that a worker leaves unfinished goes to another.
    Leased,
}

impl TrainConfig {
    /// Samples per chunk of the leased sampler.
    pub fn chunk(&self) -> usize {
        self.batch.saturating_mul(CHUNK_BATCHES)
    }

    pub(crate) fn check(&self, job: &Job) -> Check {
        if self.workers == 0 || self.workers > 65_536 {
            return bad("train.workers", format!("{} workers", self.workers), "use 1 to 65536");
        }
        if self.batch == 0 || self.batch > 1 << 20 {
            return bad("train.batch", format!("a minibatch of {}", self.batch), "use 1 to 1048576 samples");
        }
        if self.epochs == 0 || self.epochs > 1_000_000 {
            return bad("train.epochs", format!("{} epochs", self.epochs), "use 1 to 1000000");
        }
        if self.max_steps == Some(0) {
            return bad("train.max_steps", "no steps", "use 1 or more, or leave it out");
        }
        if self.threads == 0 || self.threads > MAX_THREADS {
            let remedy = "use 1 to 256, best no more than the processors that a worker has for itself";
            return bad("train.threads", format!("{} threads", self.threads), remedy);
        }
        if self.group_size == 0 || job.ranks_of_worker() > MAX_RANKS || job.ranks() > 65_536 {
            let why = format!("{} workers of {} ranks", self.workers, self.group_size);
            return bad("train.group_size", why, "use 1 to 1024, and 65536 ranks in all at most");
        }
        self.check_backup()?;
        self.check_chunks()?;
        if self.init_job().is_some_and(str::is_empty) {
            return bad("train.init", "which job?", "write job:NAME, or a safetensors file");
        }
        match self.exchange {
            Exchange::Servers => Ok(()),
            Exchange::AllReduce => self.check_all_reduce(job),
        }
    }

    /// When a `bsp` round closes.
    pub fn round(&self) -> RoundConfig {
        match self.backup_workers {
            0 => RoundConfig::default(),
            spare => RoundConfig::Backup(Backup { spare }),
        }
    }

    /// Whether each step is a round of all workers.
    pub fn in_rounds_of_all(&self) -> bool {
        self.mode == Mode::Bsp.into() && !self.round().drops_late()
    }

    /// The job of the same fleet that supplies the initial weights.
    pub fn init_job(&self) -> Option<&str> {
        self.init.as_deref()?.to_str()?.strip_prefix(OF_JOB)
    }

    fn check_backup(&self) -> Check {
        if self.backup_workers == 0 {
            return Ok(());
        }
        if self.backup_workers >= self.workers {
            let why = format!("{} of {} workers", self.backup_workers, self.workers);
            return bad("train.backup_workers", why, "use a number below train.workers");
        }
        if self.sampler == SamplerKind::Leased || self.exchange == Exchange::AllReduce {
            let why = "a worker that a round was closed without continues where the others are, which needs train.sampler = \
                       \"static\" and train.exchange = \"servers\"";
            return bad("train.backup_workers", why, "change those, or take it out");
        }
        Ok(())
    }

    fn check_chunks(&self) -> Check {
        let leased = self.sampler == SamplerKind::Leased;
        if leased && self.group_size > 1 {
            let why = "a group's ranks each have their share of an epoch";
            return bad("train.sampler", why, "set train.sampler = \"static\", or train.group_size = 1");
        }
        if leased && self.max_steps.is_some() {
            let why = "with the leased sampler a worker's steps are as many as it gets chunks for";
            return bad("train.max_steps", why, "use train.epochs");
        }
        Ok(())
    }

    fn check_all_reduce(&self, job: &Job) -> Check {
        let why = |what: &str| format!("with train.exchange = \"all-reduce\" {what}");
        if self.workers != 1 {
            let remedy = "set train.workers = 1, and train.group_size to the number of ranks";
            return bad("train.workers", why("all ranks are one group"), remedy);
        }
        if self.mode != Mode::Bsp.into() {
            return bad("train.mode", why("all ranks go in lock-step"), "set train.mode = \"bsp\"");
        }
        if self.init_job().is_some() {
            let nowhere = "the servers have no weights to begin with";
            return bad("train.init", why(nowhere), "give a file: `paraft checkpoint export` makes one");
        }
        if self.encoding != Encoding::F32 {
            let sums = "gradients are summed as f32";
            return bad("train.encoding", why(sums), "set train.encoding = \"f32\", or take it out");
        }
        if job.eval.early_stop.is_some() {
            let nobody = "the servers see no evaluation and stop nobody";
            return bad("eval.early_stop", why(nobody), "take [eval.early_stop] out");
        }
        Ok(())
    }
}

impl Job {
    /// A warning for workers on one host with more threads than processors. One thread per worker is never
    /// reported: the user did not ask for it.
    pub fn oversubscribes(&self, processors: usize) -> Option<String> {
        let (ranks, threads) = (self.ranks() as usize, self.train.threads);
        (threads > 1 && ranks * threads > processors).then(|| {
            format!(
                "train.threads = {threads}: on the CPU {ranks} workers compute on {} threads, and this host has {processors} \
                 processors for them and the servers",
                ranks * threads
            )
        })
    }
}

fn is_one(n: &u32) -> bool {
    *n == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn job(threads: i64) -> Result<Job, String> {
        let text = format!("[train]\nworkers = 3\nthreads = {threads}\n");
        Job::parse(&text, Path::new("job.toml"), &[]).map_err(|e| e.to_string())
    }

    #[test]
    fn zero_or_absurd_threads_are_refused_with_key_and_remedy() {
        for threads in [0, 257, 1_000_000] {
            let said = job(threads).expect_err("refused");
            for part in ["train.threads", &format!("{threads} threads"), "use 1 to 256", "3"] {
                assert!(said.contains(part), "{part}: {said}");
            }
        }
        assert!(job(-1).is_err() && job(256).is_ok());
    }

    #[test]
    fn more_threads_than_processors_warns_but_one_each_never() {
        let oversubscribes = |threads, processors| job(threads).expect("a job").oversubscribes(processors);
        assert_eq!(oversubscribes(1, 2), None, "the default");
        assert_eq!(oversubscribes(2, 6), None);
        let said = oversubscribes(2, 5).expect("six threads on five");
        assert!(said.contains("train.threads = 2: on the CPU 3 workers compute on 6 threads"), "{said}");
    }
}
