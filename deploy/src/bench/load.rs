//! What the benchmarks of servers have in common: a fleet with one shard, and clients that push.

use crate::{failure::Failure, fleet::Fleet};
use paraft_client::{Client, ClientError, ClientOptions, Transport};
use paraft_common::{Durability, LogForm, Step, TensorSpec, WorkerId, config::ServerJob};
use paraft_worker::{Job, WorkerError, exit};
use std::{path::Path, time::Duration};

/// A fleet of as many servers as its one shard has replicas, in asynchronous mode.
pub struct Bed {
    pub job: Job,
    pub server_job: ServerJob,
    pub fleet: Fleet,
}

/// What a bed is like.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    pub values: usize,
    pub workers: u32,
    pub replicas: u32,
    pub durability: Durability,
    pub log: LogForm,
    pub optimizer: &'a str,
    pub set: &'a [String],
}

impl Default for Shape<'_> {
    fn default() -> Self {
        let (durability, log) = (Durability::default(), LogForm::default());
        Self { values: 1, workers: 1, replicas: 3, durability, log, optimizer: "sgd", set: &[] }
    }
}

impl Bed {
    /// Starts the servers; their files are in `dir`.
    pub fn start(shape: Shape, dir: &Path) -> Result<Self, Failure> {
        std::fs::create_dir_all(dir).map_err(|e| Failure::write(dir, e))?;
        // Rate 1e-9: the optimizer's work is done and the weights stay finite.
        let text = format!(
            "name = \"bench\"\n[train]\nworkers = {}\nmode = \"asp\"\n[optimizer]\nkind = {:?}\nlr = 1e-9\n\
             [cluster]\nservers = {r}\nreplicas = {r}\nshards = 1\ndurability = \"{}\"\nlog = \"{}\"\n",
            shape.workers,
            shape.optimizer,
            shape.durability,
            shape.log,
            r = shape.replicas,
        );
        let job = Job::parse(&text, Path::new("bench"), shape.set)?;
        let file = dir.join("job.toml");
        std::fs::write(&file, job.to_toml()).map_err(|e| Failure::write(&file, e))?;
        let fleet = Fleet::servers(&job, dir, false)?;
        let server_job = job.server_job(&[TensorSpec::param("values", &[shape.values])]);
        Ok(Self { job, server_job, fleet })
    }

    /// How one of its workers joins.
    pub fn seat(&self, worker: u32) -> Seat {
        Seat(ClientOptions {
            servers: self.fleet.addresses.clone(),
            shards: self.job.shards(),
            replicas: self.job.cluster.replicas,
            worker: WorkerId(worker),
            job: self.server_job.clone(),
            transport: Transport::Tcp,
            patience: Duration::from_millis(self.job.cluster.patience_ms),
        })
    }
}

/// A worker's place, to be taken on a thread of its own.
pub struct Seat(ClientOptions);

impl Seat {
    /// Joins, waits until all have, and gives the step that it is at.
    pub fn join(self, weights: &mut [f32]) -> Result<(Client, Step), ClientError> {
        let (mut client, step) = Client::join(self.0, weights)?;
        client.pull(step, weights)?;
        Ok((client, step))
    }
}

/// A benchmark's worker ended with an error, or its thread panicked.
pub fn ended<T>(result: std::thread::Result<Result<T, ClientError>>) -> Result<T, Failure> {
    let ended = result.map_err(|_| Failure::new(exit::FAILED, "a worker of the benchmark panicked"))?;
    Ok(ended.map_err(WorkerError::from)?)
}

/// Bytes that this host's loopback interface has carried.
pub fn loopback_bytes() -> Option<u64> {
    let devices = std::fs::read_to_string("/proc/net/dev").ok()?;
    let lo = devices.lines().find_map(|l| l.trim().strip_prefix("lo:"))?;
    lo.split_whitespace().next()?.parse().ok()
}
