//! A workload whose final weights show how often each push was applied.
//!
//! The model is a vector of zeros, the optimizer SGD with rate 1. A push is 1 at its own place and 0
//! elsewhere. Each weight therefore ends as minus the number of updates with its push: 0 is a lost
//! push, -2 a duplicate one. All intermediate numbers are small and exact in `f32`.
//!
//! A step has one entry, or one in every bucket ([`Ledger::in_every_bucket`]). In a long ledger up to
//! [`MAX_PER_PLACE`] entries share a place: entry n (from 0) pushes 4^n, so the place has one base-4
//! digit per entry. An entry that was applied once, never or twice reads as 1, 0 or 2 in its digit.

use crate::{
    rows::LedgerRows,
    tally::{Fate, Tally},
};
use paraft_client::{Client, ClientError, ClientOptions, Pulled, Transport};
use paraft_common::{
    BucketId, Durability, LeaderWindow, Mode, Step, WorkerId,
    config::ServerJob,
    optim::{LrScale, Momentum, OptimizerConfig, ScheduleConfig},
};
use std::time::Duration;

/// A fleet from the view of its workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At {
    /// The servers' addresses, by id.
    pub addresses: Vec<String>,
    /// Raft groups.
    pub shards: u32,
    /// Replicas of each.
    pub replicas: u32,
    /// The transport between workers and servers.
    pub transport: Transport,
}

/// Base-4 digits that an `f32` holds exactly.
pub const MAX_PER_PLACE: u32 = 12;
/// From this bucket length on, a place holds only one entry.
const SHORT: usize = 4096;

/// A ledger with one page for each worker and one entry for each step.
#[derive(Clone, Copy, Debug)]
pub struct Ledger {
    /// The job's name.
    pub name: &'static str,
    /// Workers that start the job.
    pub workers: u32,
    /// Pages: workers that ever take part.
    pub pages: u32,
    /// Steps of each.
    pub steps: u64,
    /// The consistency mode.
    pub mode: Mode,
    /// Values in a bucket.
    pub bucket_len: usize,
    /// Entries per place; 1: plain unit vectors.
    pub per_place: u32,
    /// Copies of the pages: 1, or one in each bucket, which then has their length.
    pub copies: usize,
    /// Values after the pages that stay 0: bulk for the network.
    pub extra: usize,
    /// A worker with a broken connection is removed after this time.
    pub grace_ms: u64,
    /// The promise of an acknowledgement.
    pub durability: Durability,
    /// The bound of the level `leader`.
    pub leader_window: LeaderWindow,
    /// The optimizer keeps a slot (a momentum of 0, which has no effect), so an image is twice its
    /// weights.
    pub slot: bool,
    /// A table beside the vector.
    pub rows: Option<LedgerRows>,
    /// The rate grows with the number of pushes in an update, so each push counts in full in BSP too,
    /// which averages pushes.
    pub whole: bool,
}

impl Ledger {
    /// `workers` workers of `steps` steps, in buckets of 16.
    pub fn new(mode: Mode, workers: u32, steps: u64) -> Self {
        Self {
            name: "ledger",
            workers,
            pages: workers,
            steps,
            mode,
            bucket_len: 16,
            per_place: 1,
            copies: 1,
            extra: 0,
            grace_ms: 500,
            durability: Durability::default(),
            leader_window: LeaderWindow::default(),
            slot: false,
            rows: None,
            whole: false,
        }
    }

    /// As [`Self::new`], with an entry in each of `buckets` buckets for every step. The rate is
    /// independent of the buckets in a push.
    pub fn in_every_bucket(mode: Mode, workers: u32, steps: u64, buckets: usize) -> Self {
        let entries = workers as usize * steps as usize;
        let per_place = (entries.div_ceil(SHORT) as u32).clamp(1, MAX_PER_PLACE);
        let bucket_len = entries.div_ceil(per_place as usize).max(1);
        Self { bucket_len, per_place, copies: buckets, whole: true, ..Self::new(mode, workers, steps) }
    }

    /// Values of one copy of the pages.
    fn span(&self) -> usize {
        (self.pages as usize * self.steps as usize).div_ceil(self.per_place as usize).max(1)
    }

    /// Pushes of a step: one for each copy of the pages, and one for each partition.
    pub fn pushes(&self) -> usize {
        self.copies + self.rows.map_or(0, |rows| rows.partitions as usize)
    }

    /// Values of the model.
    pub fn len(&self) -> usize {
        self.span() * self.copies + self.extra
    }

    /// Always false: there is at least one place.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The entry of a step in a copy of the pages: its place in the flat vector, and its digit.
    fn entry(&self, worker: u32, step: Step, copy: usize) -> (usize, u32) {
        let entry = u64::from(worker) * self.steps + step.0 - 1;
        let place = copy * self.span() + (entry / u64::from(self.per_place)) as usize;
        (place, (entry % u64::from(self.per_place)) as u32)
    }

    /// The place of a step in the first copy.
    pub fn place(&self, worker: u32, step: Step) -> usize {
        self.entry(worker, step, 0).0
    }

    /// Writes the push of a worker's step to `gradient`, over that of the previous step.
    pub fn write(&self, worker: u32, step: Step, gradient: &mut [f32]) {
        for copy in 0..self.copies {
            if step.0 > 1 {
                gradient[self.entry(worker, Step(step.0 - 1), copy).0] = 0.0;
            }
            let (place, digit) = self.entry(worker, step, copy);
            gradient[place] = (1u32 << (2 * digit)) as f32;
        }
    }

    /// A copy without the entry of this step. A worker that has pushed the step must never pull such
    /// weights.
    pub fn missing(&self, worker: u32, step: Step, weights: &[f32]) -> Option<usize> {
        (0..self.copies).find(|copy| {
            let (place, digit) = self.entry(worker, step, *copy);
            // (Weights that are no such sum cast to any number; the final read detects them.)
            (-weights[place] as u32 >> (2 * digit)) & 3 == 0
        })
    }

    /// Reads the final weights. `fate` returns the known fate of a worker's step in a copy.
    pub fn read(&self, weights: &[f32], fate: impl Fn(u32, Step, usize) -> Fate) -> Tally {
        let mut tally = Tally::default();
        let full = (1u64 << (2 * self.per_place)) as f32;
        let mut used = vec![0u32; weights.len()];
        for copy in 0..self.copies {
            for worker in 0..self.pages {
                for step in (1..=self.steps).map(Step) {
                    let (place, digit) = self.entry(worker, step, copy);
                    used[place] += 1;
                    let sum = -weights[place];
                    if !(sum >= 0.0 && sum < full && sum.fract() == 0.0) {
                        continue; // counted below
                    }
                    let times = (sum as u32 >> (2 * digit)) & 3;
                    let who = || format!("worker {worker}, {step}, copy {copy}: {times} times");
                    tally.enter(fate(worker, step, copy), times, who);
                }
            }
        }
        for (place, sum) in weights.iter().map(|w| -w).enumerate() {
            let possible = if used[place] == 0 { 1.0 } else { full };
            if !(sum >= 0.0 && sum < possible && sum.fract() == 0.0) {
                tally.damaged += 1;
                tally.note(|| format!("place {place} reads {}", -sum));
            }
        }
        tally
    }

    /// The servers' job.
    pub fn job(&self) -> ServerJob {
        ServerJob {
            fingerprint: "a vector of zeros".into(),
            workers: self.workers,
            grace_ms: self.grace_ms,
            durability: self.durability,
            leader_window: self.leader_window,
            optimizer: match self.slot {
                false => OptimizerConfig::sgd(1.0),
                true => OptimizerConfig::Momentum(Momentum { lr: 1.0, momentum: 0.0, ..Momentum::default() }),
            },
            schedule: ScheduleConfig {
                scale: if self.whole { LrScale::Linear } else { LrScale::default() },
                ..ScheduleConfig::default()
            },
            tables: self.rows.iter().map(LedgerRows::table).collect(),
            ..ServerJob::new(self.name, self.mode, self.len(), self.bucket_len)
        }
    }

    /// Joins the job.
    pub fn join(&self, fleet: &At, worker: u32) -> Result<Page, ClientError> {
        let options = ClientOptions {
            servers: fleet.addresses.clone(),
            shards: fleet.shards,
            replicas: fleet.replicas,
            worker: WorkerId(worker),
            job: self.job(),
            device: String::new(),
            transport: fleet.transport,
            timeout: Duration::from_secs(30),
            handover: paraft_client::HANDOVER,
            stages: None,
        };
        let (client, done) = Client::join(options, &vec![0.0; self.len()])?;
        Ok(Page { ledger: *self, worker, client, done, weights: vec![0.0; self.len()], rounds: 0 })
    }
}

/// One worker and its page.
pub struct Page {
    ledger: Ledger,
    worker: u32,
    /// Its session.
    pub client: Client,
    /// Its last finished step.
    pub done: Step,
    /// The weights of the last pull.
    pub weights: Vec<f32>,
    /// Steps that were pushed.
    rounds: u64,
}

impl Page {
    /// The first pull, which waits until all workers have joined.
    pub fn begin(&mut self) -> Result<Pulled, ClientError> {
        let pulled = self.client.pull(self.done, &mut self.weights)?;
        self.done = pulled.done;
        Ok(pulled)
    }

    /// Pushes the next step's entry without waiting.
    pub fn push(&mut self) {
        let step = self.done.next();
        let mut gradient = vec![0.0; self.ledger.len()];
        self.ledger.write(self.worker, step, &mut gradient);
        self.push_gradient(&gradient);
    }

    /// Pushes any gradient for the next step, last bucket first as a backward pass does.
    pub fn push_gradient(&mut self, gradient: &[f32]) {
        let step = self.done.next();
        let buckets = self.client.layout().buckets().to_vec();
        for i in self.client.layout().dense().rev() {
            self.client.push(BucketId(i), step, &gradient[buckets[i as usize].range()]);
        }
        if let Some(rows) = self.ledger.rows {
            // After the loss of a session its steps are not its rounds.
            self.rounds += 1;
            rows.push(&mut self.client, self.worker, (step, Step(self.rounds)));
        }
        self.done = step;
    }

    /// Pulls, which waits until the consistency rule admits this worker.
    pub fn pull(&mut self) -> Result<Pulled, ClientError> {
        let pulled = self.client.pull(self.done, &mut self.weights)?;
        self.done = pulled.done;
        Ok(pulled)
    }

    /// One step: push and pull.
    pub fn step(&mut self) -> Result<Pulled, ClientError> {
        self.push();
        self.pull()
    }

    /// Runs all remaining steps, finishes and returns the final weights.
    pub fn run(mut self) -> Result<Vec<f32>, ClientError> {
        self.begin()?; // once more changes nothing
        while self.done.0 < self.ledger.steps {
            self.step()?;
        }
        self.finish()
    }

    /// Finishes and returns the final weights.
    pub fn finish(self) -> Result<Vec<f32>, ClientError> {
        self.finish_with_rows().map(|(weights, _)| weights)
    }

    /// Finishes; returns the final weights, and worker 0 the rows of the table, too.
    pub fn finish_with_rows(mut self) -> Result<(Vec<f32>, Vec<f32>), ClientError> {
        self.client.finish();
        self.client.pull_final(self.done, &mut self.weights)?;
        let rows = match self.ledger.rows.filter(|_| self.worker == 0) {
            Some(rows) => rows.read(&mut self.client, self.done, &mut self.weights)?,
            None => Vec::new(),
        };
        Ok((self.weights, rows))
    }
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
