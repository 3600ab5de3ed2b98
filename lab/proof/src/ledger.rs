//! Gradients made so that the final weights tell how often each push was applied.
//!
//! The model is a vector of zeros, the optimizer SGD with rate 1. A push is 1 at one place of its own and 0
//! everywhere else, so each weight ends as minus the number of times that its push was applied: 0 is a lost
//! push, -2 a doubled one. All numbers on the way are small and exact in `f32`.

use paraft_client::{Client, ClientError, ClientOptions, Pulled, Transport};
use paraft_common::{
    BucketId, Durability, LeaderWindow, Mode, Step, WorkerId,
    config::ServerJob,
    optim::{LrScale, Momentum, OptimizerConfig, ScheduleConfig},
};
use std::time::Duration;

/// A fleet as its workers see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At {
    /// Where the servers listen, by id.
    pub addresses: Vec<String>,
    /// Raft groups.
    pub shards: u32,
    /// Replicas of each.
    pub replicas: u32,
}

/// A ledger with one page for each worker and one place for each step.
#[derive(Clone, Copy, Debug)]
pub struct Ledger {
    /// Workers that start the job.
    pub workers: u32,
    /// Pages: workers that ever take part.
    pub pages: u32,
    /// Steps of each.
    pub steps: u64,
    /// How consistent.
    pub mode: Mode,
    /// Values in a bucket.
    pub bucket_len: usize,
    /// Values beyond the pages, which stay 0: bulk for the network.
    pub extra: usize,
    /// A worker whose connection breaks is taken out after this long.
    pub grace_ms: u64,
    /// What an acknowledgement promises.
    pub durability: Durability,
    /// Bound of the level `leader`.
    pub leader_window: LeaderWindow,
    /// The optimizer keeps a slot (a momentum of 0, which changes nothing): an image is twice its weights.
    pub slot: bool,
    /// The rate grows with the number of pushes in an update: in BSP too, where pushes are averaged, each counts
    /// as a whole.
    pub whole: bool,
}

impl Ledger {
    /// `workers` workers of `steps` steps, in buckets of 16.
    pub fn new(mode: Mode, workers: u32, steps: u64) -> Self {
        Self {
            workers,
            pages: workers,
            steps,
            mode,
            bucket_len: 16,
            extra: 0,
            grace_ms: 500,
            durability: Durability::default(),
            leader_window: LeaderWindow::default(),
            slot: false,
            whole: false,
        }
    }

    /// Values of the model.
    pub fn len(&self) -> usize {
        self.pages as usize * self.steps as usize + self.extra
    }

    /// Never: there is a step at least.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The place of a push.
    pub fn place(&self, worker: u32, step: Step) -> usize {
        worker as usize * self.steps as usize + step.0 as usize - 1
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
            ..ServerJob::new("ledger", self.mode, self.len(), self.bucket_len)
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
            transport: Transport::Tcp,
            timeout: Duration::from_secs(30),
            handover: paraft_client::HANDOVER,
        };
        let (client, done) = Client::join(options, &vec![0.0; self.len()])?;
        Ok(Page { ledger: *self, worker, client, done, weights: vec![0.0; self.len()] })
    }
}

/// One worker and its page.
pub struct Page {
    ledger: Ledger,
    worker: u32,
    /// Its session.
    pub client: Client,
    /// The last step that it has done.
    pub done: Step,
    /// As last pulled.
    pub weights: Vec<f32>,
}

impl Page {
    /// Pulls once everyone is there.
    pub fn begin(&mut self) -> Result<Pulled, ClientError> {
        let pulled = self.client.pull(self.done, &mut self.weights)?;
        self.done = pulled.done;
        Ok(pulled)
    }

    /// Pushes the next step's entry; does not wait.
    pub fn push(&mut self) {
        let step = self.done.next();
        let mut gradient = vec![0.0; self.ledger.len()];
        gradient[self.ledger.place(self.worker, step)] = 1.0;
        self.push_gradient(&gradient);
    }

    /// Pushes any gradient for the next step, last bucket first as a backward pass does.
    pub fn push_gradient(&mut self, gradient: &[f32]) {
        let step = self.done.next();
        let buckets = self.client.layout().buckets().to_vec();
        for (i, b) in buckets.iter().enumerate().rev() {
            self.client.push(BucketId(i as u32), step, &gradient[b.range()]);
        }
        self.done = step;
    }

    /// Waits until the rule lets this worker go on.
    pub fn pull(&mut self) -> Result<Pulled, ClientError> {
        let pulled = self.client.pull(self.done, &mut self.weights)?;
        self.done = pulled.done;
        Ok(pulled)
    }

    /// Push and pull.
    pub fn step(&mut self) -> Result<Pulled, ClientError> {
        self.push();
        self.pull()
    }

    /// Every step that is left, the end, and the final weights.
    pub fn run(mut self) -> Result<Vec<f32>, ClientError> {
        self.begin()?; // once more changes nothing
        while self.done.0 < self.ledger.steps {
            self.step()?;
        }
        self.finish()
    }

    /// The end, and the final weights.
    pub fn finish(mut self) -> Result<Vec<f32>, ClientError> {
        self.client.finish();
        self.client.pull_final(self.done, &mut self.weights)?;
        Ok(self.weights)
    }
}
