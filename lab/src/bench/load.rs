//! Shared by the benchmarks of servers: a fleet with one shard, and clients that push.

use super::scratch;
use paraft_client::{Acked, Client, ClientError, ClientOptions, Transport};
use paraft_common::{
    BucketId, BucketSpec, Durability, Mode, Step, TensorSpec, WorkerId, codec::F32_BYTES, config::ServerJob,
};
use paraft_fleet::{
    failure::Failure,
    faults::link::Link,
    fleet::{Extras, Fleet},
};
use paraft_worker::{Job, WorkerError, exit};
use std::{
    path::Path,
    sync::{
        atomic::{AtomicI32, Ordering::Relaxed},
        mpsc::Receiver,
    },
    time::{Duration, Instant},
};

/// The transport between client and server on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Via {
    Tcp,
    Unix,
}

impl Via {
    /// The name in the benchmark's cases.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
        }
    }

    fn transport(self) -> Transport {
        match self {
            Self::Tcp => Transport::Tcp,
            // Both are on this host, and the fleet's servers have sockets.
            Self::Unix => Transport::Auto,
        }
    }
}

/// A fleet in asynchronous mode, with as many servers as replicas.
pub struct BenchFleet {
    pub job: Job,
    pub server_job: ServerJob,
    pub fleet: Fleet,
}

/// The shape of a fleet.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    pub values: usize,
    pub workers: u32,
    /// The workers push one after the other, so no worker may wait for another.
    pub in_turn: bool,
    pub replicas: u32,
    pub durability: Durability,
    pub grace_ms: u64,
    pub set: &'a [String],
    /// The simulated link between servers.
    pub between: Option<Link>,
    /// The simulated link between workers and servers, over TCP.
    pub link: Option<Link>,
}

impl Default for Shape<'_> {
    fn default() -> Self {
        let durability = Durability::default();
        Self {
            values: 1,
            workers: 1,
            in_turn: false,
            replicas: 3,
            durability,
            grace_ms: 1000,
            set: &[],
            between: None,
            link: None,
        }
    }
}

impl Shape<'_> {
    /// For pushes that are timed one by one: a lease long enough for a busy machine.
    pub fn timed(durability: Durability) -> Self {
        Self { durability, grace_ms: 10_000, ..Self::default() }
    }
}

impl BenchFleet {
    /// Starts the servers; their files are in `dir`.
    pub fn start(shape: Shape, dir: &Path) -> Result<Self, Failure> {
        std::fs::create_dir_all(dir).map_err(|e| scratch::write(dir, e))?;
        // Rate 1e-9: the optimizer does its work and the weights stay finite.
        let text = format!(
            "name = \"bench\"\n[train]\nworkers = {}\nmode = \"asp\"\n[optimizer]\nkind = \"sgd\"\nlr = 1e-9\n\
             [cluster]\nservers = {r}\nreplicas = {r}\nshards = 1\ndurability = \"{}\"\ngrace_ms = {}\n",
            shape.workers,
            shape.durability,
            shape.grace_ms,
            r = shape.replicas,
        );
        let mut set = shape.set.to_vec();
        set.extend(shape.link.map(|_| "cluster.transport=tcp".into()));
        let job = Job::parse(&text, Path::new("bench"), &set)?;
        let mode = job.train.mode;
        if mode != Mode::Asp.into() && shape.in_turn && shape.workers > 1 {
            let what = format!("in {mode} each worker waits for the other, and they are measured in turn");
            return Err(Failure::new(exit::USAGE, what).help("give one --via, or leave train.mode as it is"));
        }
        let file = dir.join("job.toml");
        std::fs::write(&file, job.to_toml()).map_err(|e| scratch::write(&file, e))?;
        let extras = Extras { between: shape.between, link: shape.link, ..Extras::default() };
        let fleet = Fleet::servers(&job, dir, extras)?;
        let server_job = job.server_job(&[TensorSpec::param("values", &[shape.values])]);
        Ok(Self { job, server_job, fleet })
    }

    /// The process ids of its servers.
    pub fn servers(&self) -> Vec<u32> {
        self.fleet.servers.iter().map(|s| s.id()).collect()
    }

    /// The options of one of its workers, over TCP.
    pub fn slot(&self, worker: u32) -> WorkerSlot {
        self.slot_via(worker, Via::Tcp)
    }

    /// The options of one of its workers, over this transport.
    pub fn slot_via(&self, worker: u32, via: Via) -> WorkerSlot {
        let options = ClientOptions {
            servers: self.fleet.addresses.clone(),
            shards: self.job.shards(),
            replicas: self.job.cluster.replicas,
            worker: WorkerId(worker),
            job: self.server_job.clone(),
            device: String::new(),
            transport: via.transport(),
            timeout: Duration::from_millis(self.job.cluster.timeout_ms),
            handover: paraft_client::HANDOVER,
            stages: None,
        };
        WorkerSlot(options)
    }
}

/// The options of a worker that joins on its own thread.
pub struct WorkerSlot(ClientOptions);

impl WorkerSlot {
    /// Joins, waits until all workers have, and returns the current step.
    pub fn join(self, weights: &mut [f32]) -> Result<(Client, Step), ClientError> {
        let (mut client, step) = Client::join(self.0, weights)?;
        client.pull(step, weights)?;
        Ok((client, step))
    }

    /// Joins; the first pull waits until all workers have.
    pub fn pusher(self) -> Result<Pusher, Failure> {
        let weights = vec![0.0; self.0.job.params_len];
        let (client, step) = Client::join(self.0, &weights).map_err(failed)?;
        let (acks, buckets) = (client.acks(), client.layout().buckets().to_vec());
        let gradient = vec![1e-3; weights.len()];
        Ok(Pusher { client, step, acks, open: 0, buckets, gradient, weights })
    }
}

/// A worker that computes nothing: it pushes and pulls the whole model.
pub struct Pusher {
    client: Client,
    step: Step,
    acks: Receiver<Acked>,
    /// Unacknowledged pushes.
    open: usize,
    buckets: Vec<BucketSpec>,
    gradient: Vec<f32>,
    weights: Vec<f32>,
}

/// The result of [`Pusher::stream`].
pub struct Streamed {
    pub pushes: u64,
    /// Payload bytes.
    pub bytes: u64,
    /// Time until the last acknowledgement.
    pub took: Duration,
}

/// An acknowledgement that takes longer is an error.
const ACK_TIMEOUT: Duration = Duration::from_secs(30);

impl Pusher {
    /// Pushes every bucket, the last first as a backward pass does, and waits for all acknowledgements.
    pub fn push(&mut self) -> Result<(), Failure> {
        self.begin();
        self.wait_for_acks()
    }

    /// Pulls the model.
    pub fn pull(&mut self) -> Result<(), Failure> {
        self.client.pull(self.step, &mut self.weights).map(drop).map_err(failed)
    }

    /// Pulls the model after a push that changed all of it. Fewer bytes are an error, since the time
    /// would mean nothing.
    pub fn pull_whole(&mut self) -> Result<(), Failure> {
        let before = self.client.counters().bytes_pulled;
        self.pull()?;
        let came = self.client.counters().bytes_pulled - before;
        let whole = (self.weights.len() * F32_BYTES) as u64;
        match came == whole {
            true => Ok(()),
            false => {
                let what = format!("a pull after a push of the whole model brought {came} of {whole} bytes");
                Err(Failure::new(exit::FAILED, what))
            }
        }
    }

    /// The exchange of a training step: pushes and pulls the model, without a wait for the
    /// acknowledgements in between.
    pub fn round(&mut self) -> Result<(), Failure> {
        self.begin();
        self.pull()?;
        self.open = self.open.saturating_sub(self.acks.try_iter().count());
        Ok(())
    }

    /// Waits until every push is acknowledged.
    pub fn wait_for_acks(&mut self) -> Result<(), Failure> {
        self.wait_until_unacked(0)
    }

    /// Pushes one bucket after the other until the time is over or the user interrupts; then waits for
    /// the last acknowledgement. One push per bucket is in flight: a server accepts the next push of a
    /// bucket only after the previous update.
    pub fn stream(&mut self, time: Duration, interrupted: &AtomicI32) -> Result<Streamed, Failure> {
        let (mut pushes, mut bytes, began) = (0, 0, Instant::now());
        while began.elapsed() < time && interrupted.load(Relaxed) == 0 {
            self.step = self.step.next();
            for i in (0..self.buckets.len()).rev() {
                self.wait_until_unacked(self.buckets.len() - 1)?; // acknowledgements arrive in the order of the pushes
                self.push_bucket(i);
                pushes += 1;
                bytes += (self.buckets[i].len * F32_BYTES) as u64;
            }
        }
        self.wait_for_acks()?;
        Ok(Streamed { pushes, bytes, took: began.elapsed() })
    }

    /// Pushes one bucket at a time; returns the seconds from each push to its acknowledgement. The last
    /// step of this pusher may leave out some buckets.
    pub fn one_by_one(mut self, time: Duration, interrupted: &AtomicI32) -> Result<Vec<f64>, Failure> {
        let (mut seconds, began) = (Vec::new(), Instant::now());
        let continues = || began.elapsed() < time && interrupted.load(Relaxed) == 0;
        while continues() {
            self.step = self.step.next();
            // If each acknowledgement waits for a disk flush, a step takes a minute.
            for i in (0..self.buckets.len()).rev().take_while(|_| continues()) {
                let pushed = Instant::now();
                self.push_bucket(i);
                self.wait_for_acks()?;
                seconds.push(pushed.elapsed().as_secs_f64());
            }
        }
        Ok(seconds)
    }

    fn begin(&mut self) {
        self.step = self.step.next();
        (0..self.buckets.len()).rev().for_each(|i| self.push_bucket(i));
    }

    fn push_bucket(&mut self, i: usize) {
        let range = self.buckets[i].range();
        self.client.push(BucketId(i as u32), self.step, &self.gradient[range]);
        self.open += 1;
    }

    /// Waits until at most `most` pushes are unacknowledged.
    fn wait_until_unacked(&mut self, most: usize) -> Result<(), Failure> {
        while self.open > most {
            if self.acks.recv_timeout(ACK_TIMEOUT).is_err() {
                // The client has failed or its servers are gone; a pull returns the error.
                self.pull()?;
                let what = match self.client.counters().rejoins {
                    0 => {
                        format!("no acknowledgement of a push within {ACK_TIMEOUT:?}, but pulls are answered")
                    }
                    _ => "a worker of the benchmark lost its lease, and pushes with it".into(),
                };
                return Err(
                    Failure::new(exit::FAILED, what).help("end what keeps this machine busy, and try again")
                );
            }
            self.open -= 1;
        }
        Ok(())
    }
}

/// The failure of a benchmark's worker.
fn failed(e: ClientError) -> Failure {
    WorkerError::from(e).into()
}

/// The result of a benchmark's worker thread, which may have failed or panicked.
pub fn ended<T>(result: std::thread::Result<Result<T, ClientError>>) -> Result<T, Failure> {
    let ended = result.map_err(|_| Failure::new(exit::FAILED, "a worker of the benchmark panicked"))?;
    Ok(ended.map_err(WorkerError::from)?)
}

/// Bytes so far on this host's loopback interface.
pub fn loopback_bytes() -> Option<u64> {
    let devices = std::fs::read_to_string("/proc/net/dev").ok()?;
    let lo = devices.lines().find_map(|l| l.trim().strip_prefix("lo:"))?;
    lo.split_whitespace().next()?.parse().ok()
}
