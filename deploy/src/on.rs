//! The flags of a job on an engine, and the fleet that they describe.
//!
//! The submission is in `engine`.

use clap::{Args, ValueEnum};
use paraft_engines::{
    Certs, Engine, Fleet, Mount, Part,
    compose::Compose,
    kubernetes::Kubernetes,
    slurm::Slurm,
    ssh::{self, Ssh},
    systemd::Systemd,
};
use paraft_fleet::{certs, failure::Failure};
use paraft_tls::Access;
use paraft_worker::{Job, exit};
use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// What is to run on an engine, and how.
#[derive(Args)]
pub struct OnArgs {
    /// The job file.
    pub job: PathBuf,
    /// The engine.
    #[arg(long)]
    pub on: EngineKind,
    /// The run's folder; on Slurm on a file system that all hosts share. Default: runs/NAME-N, the first N that is free.
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
    /// Overrides a key of the job file; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Begin from a checkpoint, as in `paraft train`.
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "latest")]
    pub resume: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// What the engine is asked for.
#[derive(Args, Clone)]
#[command(next_help_heading = "On an engine")]
pub struct EngineArgs {
    /// Print what would be submitted, and do nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// The image, for engines that run images; it has `paraft` and what the job needs.
    #[arg(long, value_name = "NAME")]
    pub image: Option<String>,
    /// What all processes see besides, and where: WHAT:/PATH. A PersistentVolumeClaim on Kubernetes, a folder
    /// with compose. May be given often.
    #[arg(long, value_name = "WHAT:/PATH")]
    pub mount: Vec<Mount>,
    /// On Kubernetes, a volume of so many bytes that follows each server wherever it is started. Default: what is on a server's disk
    /// goes with its host.
    #[arg(long, value_name = "SIZE")]
    pub server_disk: Option<String>,
    /// Processors of each server.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub server_cpus: u32,
    /// Memory of each server, as the engine writes it.
    #[arg(long, value_name = "SIZE")]
    pub server_memory: Option<String>,
    /// Processors of each worker.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub worker_cpus: u32,
    /// Memory of each worker, as the engine writes it.
    #[arg(long, value_name = "SIZE")]
    pub worker_memory: Option<String>,
    /// GPUs of each worker.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub worker_gpus: u32,
    /// A time limit, as the engine writes it. Shortly before it ends, all processes hand over, and continue in a new one.
    #[arg(long)]
    pub time: Option<String>,
    /// Let several servers share a host: one lost host may then end the job.
    #[arg(long)]
    pub together: bool,
    /// Seconds that a process has to hand over what it holds when its host is taken away.
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    pub grace: u32,
    /// How often the engine starts each of them again.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub restarts: u32,
    /// Handed to the engine unread, for example --arg=--partition=batch; may be given often.
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub arg: Vec<String>,
    /// The hosts for ssh: a file with a host in each line, as `n1` or `n1 slots=8`. The first ones have the servers.
    #[arg(long, value_name = "FILE")]
    pub hosts: Option<PathBuf>,
    /// With --hosts: the servers listen on this port and the ones that follow.
    #[arg(long, value_name = "PORT", default_value_t = 7071)]
    pub port: u16,
    /// The program on the engine's hosts, or in the image. Default: this one's path; in an image `paraft`.
    #[arg(long, value_name = "PATH")]
    pub program: Option<String>,
}

/// An engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineKind {
    /// Slurm, by sbatch, squeue and scancel.
    Slurm,
    /// Kubernetes, by kubectl: servers as a StatefulSet, workers as an Indexed Job.
    Kubernetes,
    /// Kubernetes with JobSet, 0.12 or later: all as one JobSet.
    Jobset,
    /// Kubernetes with Kubeflow Trainer: a ClusterTrainingRuntime and a TrainJob.
    Trainer,
    /// Compose on this machine, by docker compose or podman-compose.
    Compose,
    /// systemd on this machine, by systemctl: root's, or the user's own.
    Systemd,
    /// Hosts that ssh reaches without a question (--hosts).
    Ssh,
}

impl EngineKind {
    /// The implementation.
    pub fn engine(self) -> Box<dyn Engine> {
        match self {
            Self::Slurm => Box::new(Slurm),
            Self::Kubernetes => Box::new(Kubernetes::Sets),
            Self::Jobset => Box::new(Kubernetes::JobSet),
            Self::Trainer => Box::new(Kubernetes::Trainer),
            Self::Compose => Box::new(Compose),
            Self::Systemd => Box::new(Systemd),
            Self::Ssh => Box::new(Ssh),
        }
    }

    /// Whether it is one of the Kubernetes kinds.
    pub fn is_kubernetes(self) -> bool {
        matches!(self, Self::Kubernetes | Self::Jobset | Self::Trainer)
    }

    /// Whether its processes meet in the run's folder, before there are servers to agree with.
    pub fn shares_folder(self) -> bool {
        !self.is_kubernetes() && self != Self::Ssh
    }

    fn runs_images(self) -> bool {
        self.is_kubernetes() || self == Self::Compose
    }
}

/// The description of the job on its engine.
pub fn described(args: &OnArgs, job: &Job, dir: &Path, with_workers: bool) -> Result<Fleet, Failure> {
    let (on, args) = (args.on, &args.engine);
    let own = || match on.runs_images() {
        true => Ok("paraft".into()),
        false => std::env::current_exe().map(|p| p.to_string_lossy().into_owned()),
    };
    // The creator of the folder owns it.
    let owner = fs::metadata(dir).or_else(|_| fs::metadata("/proc/self")).ok().map(|m| (m.uid(), m.gid()));
    let hosts = args.hosts.as_ref().map(|path| {
        let text = fs::read_to_string(path)
            .map_err(|e| Failure::new(exit::USAGE, format!("--hosts {}: {e}", path.display())));
        Ok::<_, Failure>(ssh::hosts_of(&text?)?)
    });
    let whole = |p: String| match p.contains('/') && !on.runs_images() {
        true => std::path::absolute(&p).map(|p| p.to_string_lossy().into_owned()),
        false => Ok(p),
    };
    let program = args.program.clone().map_or_else(own, whole);
    let name: String = job.name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let in_run = |what: &str| dir.join(certs::FOLDER).join(what).to_string_lossy().into_owned();
    let certs = match Access::ours() {
        Access::Insecure => Certs::Insecure,
        _ if on.shares_folder() => Certs::InRun,
        _ if on.is_kubernetes() => {
            // Secrets, whose names are in lower case.
            let name = name.to_ascii_lowercase();
            Certs::Each { server: format!("{name}-peer"), worker: format!("{name}-worker") }
        }
        _ => Certs::Each { server: in_run("peer"), worker: in_run("worker") },
    };
    let count = if with_workers { job.train.workers } else { 0 };
    Ok(Fleet {
        name,
        job: job.to_toml(),
        hosts: hosts.transpose()?.unwrap_or_default(),
        port: args.port,
        owner,
        image: args.image.clone(),
        disk: args.server_disk.clone(),
        mounts: args.mount.clone(),
        program: program.map_err(|e| Failure::new(exit::IO, e).help("name it with --program"))?,
        run_dir: dir.to_path_buf(),
        servers: Part {
            count: job.servers(),
            cpus: args.server_cpus,
            gpus: 0,
            memory: args.server_memory.clone(),
        },
        workers: Part {
            count,
            cpus: args.worker_cpus,
            gpus: args.worker_gpus,
            memory: args.worker_memory.clone(),
        },
        until_done: with_workers,
        grace: args.grace,
        restarts: args.restarts,
        time: args.time.clone(),
        spread: !args.together,
        args: args.arg.clone(),
        certs,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_submitted_is_found_again_by_the_name_of_its_engine() {
        for on in EngineKind::value_variants() {
            let name = on.engine().name();
            assert_eq!(paraft_engines::named(name).map(|e| e.name()), Some(name));
            assert!(on.to_possible_value().is_some_and(|v| v.matches(name, false)), "{name}");
        }
    }
}
