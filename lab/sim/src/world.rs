//! What all tasks of a run share.

use crate::{
    clock::Clock,
    cores::Cores,
    learner::Learner,
    network::Network,
    recording::Recording,
    servers::Servers,
    setup::Setup,
    stages::cut::{Cut, values},
    step_lead::StepLead,
};
use bytes::Bytes;
use paraft_common::{Layout, config::ServerJob};
use paraft_worker::{Job, worker::Plan};
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Duration,
};

/// See the module.
pub(crate) struct World {
    pub clock: Clock,
    pub cores: Cores,
    pub network: Arc<Network>,
    pub servers: Arc<Servers>,
    pub setup: Setup,
    pub seed: u64,
    pub shards: u32,
    pub workers: u32,
    /// A worker gives up after so long without a leader.
    pub timeout: Duration,
    /// The job file, and what the servers need of it.
    pub file: Job,
    pub job: ServerJob,
    pub job_text: Arc<str>,
    pub plan: Plan,
    pub layout: Layout,
    /// Where a worker's ranks have stages of the model.
    pub cut: Option<Arc<Cut>>,
    /// The initial weights, by bucket, as the servers get them.
    pub initial: Vec<Bytes>,
    pub learner: Mutex<Learner>,
    pub recording: Recording,
    pub step_lead: Mutex<StepLead>,
    /// A worker has come to the end: none is started again.
    pub over: AtomicBool,
    /// How often a worker has failed.
    pub failures: AtomicU64,
}

impl World {
    /// Ranks of a worker.
    pub fn ranks(&self) -> usize {
        self.cut.as_ref().map_or(1, |cut| cut.ranks())
    }

    /// The first value of a stage.
    pub fn first_of(&self, stage: usize) -> usize {
        self.cut.as_ref().map_or(0, |cut| values(&self.layout, &cut.stages[stage].buckets).start)
    }
}
