//! The parameters of a simulated fleet: compute speed, network and failures.

use crate::error::SimError;
use paraft_worker::slow::{Straggle, times};
use std::collections::BTreeMap;

/// A fleet. Times are means, in milliseconds unless the name says otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// The seed of all draws except weights and sample order, which use the job's.
    pub seed: u64,
    /// One step's forward and backward pass, alone on a core.
    pub compute_ms: f64,
    /// Standard deviation of a step's time over its mean; log-normal.
    pub compute_spread: f64,
    /// Standard deviation of the workers' speeds over their mean: each draws one factor for the whole
    /// run; log-normal.
    pub worker_spread: f64,
    /// Slow workers by rank, with the factor on their step time.
    pub slow: BTreeMap<u32, f64>,
    /// Occasional slow steps.
    pub straggle: Option<Straggle>,
    /// CPU time of a worker for a step's messages: encode, send, receive, decode.
    pub exchange_ms: f64,
    /// CPU time of the leader for one push: receive, replicate, apply, answer the pull.
    pub push_ms: f64,
    /// CPU time of all followers together for one update; in BSP for a round's pushes of a bucket. No
    /// worker waits for it.
    pub follow_ms: f64,
    /// One-way latency between two processes.
    pub latency_ms: f64,
    /// Standard deviation of a message's latency over its mean; log-normal. Messages of a stream keep
    /// their order.
    pub jitter: f64,
    /// A worker's bandwidth in each direction, in gigabits a second; 0: no limit.
    pub worker_gbit: f64,
    /// A server's bandwidth in each direction, in gigabits a second, which replication shares; 0: no
    /// limit.
    pub server_gbit: f64,
    /// The time in which a majority stores an entry, beyond the network: for example a disk.
    pub replicate_ms: f64,
    /// All processes share a host with this many cores; `None`: each has its own.
    pub cores: Option<u32>,
    /// Mean time to the failure of a worker, in seconds of running; exponential. `None`: no failures.
    pub mttf_s: Option<f64>,
    /// A failed worker restarts after this many seconds; `None`: never.
    pub restart_s: Option<f64>,
    /// Mean time to the failure of a server, in seconds of running; exponential. `None`: no failures.
    pub server_mttf_s: Option<f64>,
    /// A failed server is back after this many seconds.
    pub server_restart_s: f64,
}

impl Default for Setup {
    /// A quiet fleet in one rack: 10 ms a step, 0.1 ms one-way latency, 10 gigabits a second.
    fn default() -> Self {
        Self {
            seed: 1,
            compute_ms: 10.0,
            compute_spread: 0.1,
            worker_spread: 0.0,
            slow: BTreeMap::new(),
            straggle: None,
            exchange_ms: 0.0,
            push_ms: 0.0,
            follow_ms: 0.0,
            latency_ms: 0.1,
            jitter: 0.2,
            worker_gbit: 10.0,
            server_gbit: 10.0,
            replicate_ms: 0.0,
            cores: None,
            mttf_s: None,
            restart_s: None,
            server_mttf_s: None,
            server_restart_s: 5.0,
        }
    }
}

/// The longest accepted time in milliseconds: a day.
const MAX_MS: f64 = 86_400_000.0;
/// A year.
const MAX_S: f64 = 365.0 * 86_400.0;

impl Setup {
    /// Checks the parameters, for this many workers.
    pub fn check(&self, workers: u32) -> Result<(), SimError> {
        let bad = |what: String| Err(SimError::Setup(what));
        for (name, value) in [
            ("compute-ms", self.compute_ms),
            ("exchange-ms", self.exchange_ms),
            ("push-ms", self.push_ms),
            ("follow-ms", self.follow_ms),
            ("latency-ms", self.latency_ms),
            ("replicate-ms", self.replicate_ms),
        ] {
            if !(0.0..=MAX_MS).contains(&value) {
                return bad(format!("{name} is {value}; use 0 to {MAX_MS}"));
            }
        }
        for (name, value) in [
            ("compute-spread", self.compute_spread),
            ("worker-spread", self.worker_spread),
            ("jitter", self.jitter),
        ] {
            if !(0.0..=10.0).contains(&value) {
                return bad(format!("{name} is {value}; it is a deviation over a mean: use 0 to 10"));
            }
        }
        for (name, value) in [("worker-gbit", self.worker_gbit), ("server-gbit", self.server_gbit)] {
            if !(0.0..=1e6).contains(&value) || (value > 0.0 && value < 1e-6) {
                return bad(format!("{name} is {value}; use 0 (no bound), or 0.000001 to 1000000"));
            }
        }
        let times = [
            ("mttf-s", self.mttf_s),
            ("restart-s", self.restart_s),
            ("server-mttf-s", self.server_mttf_s),
            ("server-restart-s", Some(self.server_restart_s)),
        ];
        for (name, value) in times.into_iter().filter_map(|(n, v)| Some((n, v?))) {
            if !(0.001..=MAX_S).contains(&value) {
                return bad(format!("{name} is {value}; use 0.001 to {MAX_S} seconds"));
            }
        }
        if self.cores == Some(0) {
            return bad("cores is 0; use 1 or more, or leave it out".into());
        }
        for (worker, factor) in &self.slow {
            if *worker >= workers {
                return bad(format!("slow names worker {worker}; there are {workers}, from 0"));
            }
            if !(0.001..=1000.0).contains(factor) {
                return bad(format!("slow makes worker {worker} {factor} times as slow; use 0.001 to 1000"));
            }
        }
        if let Some(s) = self.straggle
            && !((0.0..=1.0).contains(&s.probability) && (1.0..=1000.0).contains(&s.factor))
        {
            return bad(format!("straggle is {}:{}x; use 0 to 1 and 1x to 1000x", s.probability, s.factor));
        }
        Ok(())
    }
}

/// Parses `W:Fx`: a step of worker W takes F times as long.
pub fn parse_slow(text: &str) -> Result<(u32, f64), String> {
    let bad = || format!("`{text}` is not W:Fx, for example 1:5x (worker 1 takes five times as long)");
    let (worker, factor) = text.trim_start_matches("worker=").split_once(':').ok_or_else(bad)?;
    Ok((worker.parse().map_err(|_| bad())?, times(factor).ok_or_else(bad)?))
}

#[cfg(test)]
#[path = "setup_tests.rs"]
mod tests;
