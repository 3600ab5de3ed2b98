//! What a simulated fleet is like: how fast its workers compute, what lies between them and the servers, what fails.

use crate::SimError;
use paraft_worker::slow::{Straggle, times};
use std::collections::BTreeMap;

/// A fleet. Times are in milliseconds where the name does not say otherwise; every time is a mean.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// Seeds all that is drawn but weights and the order of the samples, which have the job's.
    pub seed: u64,
    /// One step's forward and backward pass, alone on a core.
    pub compute_ms: f64,
    /// Deviation of a step's time over its mean; log-normal.
    pub compute_spread: f64,
    /// Deviation of the workers' speeds over their mean: each draws one factor for the whole run; log-normal.
    pub worker_spread: f64,
    /// Workers that are slower than the others, by rank: a step takes so many times as long.
    pub slow: BTreeMap<u32, f64>,
    /// Steps that take longer than others, now and then.
    pub straggle: Option<Straggle>,
    /// What a worker's processor does for a step's messages: to encode, send, receive and decode them.
    pub exchange_ms: f64,
    /// What the leader's processor does for one push: to take it, to replicate it, to apply it, to answer the pull.
    pub push_ms: f64,
    /// What the followers' processors do for one update, all together: in BSP one for a round's pushes of a bucket. Nobody
    /// waits for it.
    pub follow_ms: f64,
    /// One way between two processes.
    pub latency_ms: f64,
    /// Deviation of a message's latency over its mean; log-normal. Messages of a stream keep their order.
    pub jitter: f64,
    /// What a worker's link carries each way, in gigabits a second; 0: no bound.
    pub worker_gbit: f64,
    /// What a server's link carries each way, likewise; replication goes over it too.
    pub server_gbit: f64,
    /// What a majority takes to hold an entry beyond the network: a disk, say.
    pub replicate_ms: f64,
    /// All processes share a host with so many cores; none: each has its own.
    pub cores: Option<u32>,
    /// Mean time to the failure of a worker, in seconds of running; exponential. None fails without.
    pub mttf_s: Option<f64>,
    /// A worker that has failed is started again after so many seconds; without: never.
    pub restart_s: Option<f64>,
    /// Mean time to the failure of a server, in seconds of running; exponential. None fails without.
    pub server_mttf_s: Option<f64>,
    /// A server that has failed is back after so many seconds.
    pub server_restart_s: f64,
}

impl Default for Setup {
    /// A quiet fleet in one rack: 10 ms a step, a tenth of a millisecond one way, 10 gigabits a second.
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

/// Longest time that can be asked for, in milliseconds: a day.
const MAX_MS: f64 = 86_400_000.0;
/// A year.
const MAX_S: f64 = 365.0 * 86_400.0;

impl Setup {
    /// Whether a fleet can be like this, for so many workers.
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

/// Reads `W:Fx`: worker W takes F times as long for a step.
pub fn parse_slow(text: &str) -> Result<(u32, f64), String> {
    let bad = || format!("`{text}` is not W:Fx, for example 1:5x (worker 1 takes five times as long)");
    let (worker, factor) = text.trim_start_matches("worker=").split_once(':').ok_or_else(bad)?;
    Ok((worker.parse().map_err(|_| bad())?, times(factor).ok_or_else(bad)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_fleet_can_be_like_is_refused_by_name() {
        assert!(Setup::default().check(1).is_ok());
        let set = |change: fn(&mut Setup)| {
            let mut setup = Setup::default();
            change(&mut setup);
            setup.check(4).expect_err("refused").to_string()
        };
        for (said, name) in [
            (set(|s| s.compute_ms = -1.0), "compute-ms"),
            (set(|s| s.latency_ms = f64::NAN), "latency-ms"),
            (set(|s| s.jitter = 11.0), "jitter"),
            (set(|s| s.server_gbit = 1e-9), "server-gbit"),
            (set(|s| s.mttf_s = Some(0.0)), "mttf-s"),
            (set(|s| s.cores = Some(0)), "cores"),
            (set(|s| _ = s.slow.insert(4, 2.0)), "worker 4"),
            (set(|s| _ = s.slow.insert(3, f64::INFINITY)), "worker 3"),
            (set(|s| s.straggle = Some(Straggle { probability: 2.0, factor: 2.0 })), "straggle"),
        ] {
            assert!(said.contains(name), "{said}");
        }
        assert_eq!(parse_slow("1:5x"), Ok((1, 5.0)));
        assert_eq!(parse_slow("worker=2:1.5"), Ok((2, 1.5)));
        assert!(["", "1", "1:", "x:5x", "1:NaNx"].into_iter().all(|t| parse_slow(t).is_err()));
        assert_eq!("0.01:10x".parse(), Ok(Straggle { probability: 0.01, factor: 10.0 }));
        assert!("10x".parse::<Straggle>().is_err());
    }
}
