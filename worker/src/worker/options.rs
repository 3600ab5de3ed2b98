//! What a worker is given, and what it gives back.

use crate::slow::Slowness;
use paraft_client::Interrupt;
use paraft_models::Evaluation;
use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
};

/// A worker's place in its fleet, and its outputs.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// The process's rank, from 0. The ranks of a group are consecutive.
    pub rank: u32,
    /// All servers, in the servers' own order.
    pub servers: Vec<String>,
    /// The folder of `metrics.jsonl`; `None`: no record.
    pub run_dir: Option<PathBuf>,
    /// Also writes the final weights to this file.
    pub weights: Option<PathBuf>,
    /// Resumes from this checkpoint, or the latest in this folder.
    pub resume: Option<PathBuf>,
    /// The address that serves `/metrics`.
    pub metrics: Option<std::net::SocketAddr>,
    /// The trace's folder, and the number of traced steps (`paraft_trace::DEFAULT_STEPS`).
    pub trace: Option<(PathBuf, u64)>,
    /// Makes this worker a straggler, for comparisons.
    pub slow: Slowness,
    /// Ends the run at the next step, or during a wait, once set.
    pub interrupt: Arc<dyn Interrupt>,
}

impl WorkerOptions {
    /// For this rank and these servers, without outputs or resume.
    pub fn new(rank: u32, servers: Vec<String>) -> Self {
        Self {
            rank,
            servers,
            run_dir: None,
            weights: None,
            resume: None,
            metrics: None,
            trace: None,
            slow: Slowness::default(),
            interrupt: Arc::new(AtomicBool::new(false)),
        }
    }

    /// The folder for files that end with the process.
    pub(super) fn scratch_folder(&self) -> PathBuf {
        self.run_dir.clone().unwrap_or_else(std::env::temp_dir)
    }
}

/// A worker's result.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerReport {
    /// Finished steps.
    pub steps: u64,
    /// Samples trained on.
    pub samples: u64,
    /// Training time in seconds.
    pub seconds: f64,
    /// The final weights, including buffers.
    pub weights: Vec<f32>,
    /// The evaluation of the final weights, if this worker made it.
    pub evaluation: Option<Evaluation>,
}
