//! An artificially slow worker, so that a comparison has stragglers on a machine with equal cores.
//!
//! It sleeps before a step, for a multiple of the previous step's computing time. It sleeps between the pull and
//! the gradient, where a slower core would spend the time, so its gradients are as late as a straggler's. The first
//! step is not slowed. A sleeping worker uses no core, unlike a slower core: on a host with shared cores the other
//! workers get more CPU time than they would have.

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

/// How often a sleeping worker checks whether it should end.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// With a probability, a step takes a multiple of its time. Written `P:Fx`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Straggle {
    /// Probability of a slow step, 0 to 1.
    pub probability: f64,
    /// Multiple of the step's time, 1 or more.
    pub factor: f64,
}

impl FromStr for Straggle {
    type Err = String;

    /// Reads `P:Fx`: with probability P a step takes F times as long.
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "`{text}` is not P:Fx, for example 0.01:10x (one step in a hundred takes ten times as long)"
            )
        };
        let (probability, factor) = text.split_once(':').ok_or_else(bad)?;
        let probability = probability.parse().map_err(|_| bad())?;
        Ok(Self { probability, factor: times(factor).ok_or_else(bad)? })
    }
}

impl fmt::Display for Straggle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}x", self.probability, self.factor)
    }
}

impl Straggle {
    /// Whether the values are in range.
    pub fn is_possible(&self) -> bool {
        (0.0..=1.0).contains(&self.probability) && (1.0..=1000.0).contains(&self.factor)
    }
}

/// Reads a factor: `5x`, or `5`.
pub fn times(text: &str) -> Option<f64> {
    text.strip_suffix('x').unwrap_or(text).parse().ok().filter(|f: &f64| f.is_finite())
}

/// How much slower a worker is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slowness {
    /// Each step takes this multiple of its time, from 1.
    pub factor: f64,
    /// Some steps take even longer. The job's seed and the worker's rank determine which.
    pub straggle: Option<Straggle>,
}

impl Default for Slowness {
    fn default() -> Self {
        Self { factor: 1.0, straggle: None }
    }
}

impl Slowness {
    /// Parses a launcher's values for a script's worker.
    ///
    /// # Errors
    /// The values are out of range.
    pub fn of(factor: f64, straggle: Option<&str>) -> Result<Self, String> {
        if !(1.0..=1000.0).contains(&factor) {
            return Err(format!("a worker is 1 to 1000 times as slow, not {factor}"));
        }
        let straggle = straggle.map(str::parse::<Straggle>).transpose()?;
        match straggle.filter(|s| !s.is_possible()) {
            Some(s) => Err(format!("`{s}`: the share is 0 to 1, the factor 1 to 1000")),
            None => Ok(Self { factor, straggle }),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Slowdown {
    slowness: Slowness,
    draws: ChaCha8Rng,
    last: Duration,
}

impl Slowdown {
    /// For the worker of this rank.
    pub fn new(slowness: Slowness, seed: u64, rank: u32) -> Self {
        let mut draws = ChaCha8Rng::seed_from_u64(seed);
        draws.set_stream(u64::from(rank));
        Self { slowness, draws, last: Duration::ZERO }
    }

    /// The pause before the next step.
    fn pause(&mut self) -> Duration {
        let mut factor = self.slowness.factor;
        if let Some(s) = self.slowness.straggle {
            let drawn = self.draws.next_u64() as f64 / u64::MAX as f64;
            factor *= if drawn < s.probability { s.factor } else { 1.0 };
        }
        self.last.mul_f64((factor - 1.0).max(0.0))
    }

    /// Runs a step.
    pub fn step<T>(&mut self, step: impl FnOnce() -> T) -> T {
        self.hold(|| false);
        let began = Instant::now();
        let made = step();
        self.took(began.elapsed());
        made
    }

    /// Pauses before the next step, unless `ends` returns true.
    pub fn hold(&mut self, ends: impl Fn() -> bool) {
        let mut left = self.pause();
        while !left.is_zero() && !ends() {
            let now = left.min(POLL_INTERVAL);
            thread::sleep(now);
            left -= now;
        }
    }

    /// Records a step's time.
    pub fn took(&mut self, time: Duration) {
        self.last = time;
    }
}

#[cfg(test)]
#[path = "slow_tests.rs"]
mod tests;
