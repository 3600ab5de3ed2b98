//! The training clock.

use std::time::{Duration, Instant};

/// Time spent training. It stops during evaluations.
#[derive(Default)]
pub(super) struct Clock {
    running: Option<(Instant, f64)>,
    before: Duration,
    cpu_before: f64,
}

impl Clock {
    pub fn start(&mut self) {
        self.running.get_or_insert_with(|| (Instant::now(), paraft_host::usage().cpu_seconds));
    }

    /// Stops the clock. Returns whether it was running.
    pub fn stop(&mut self) -> bool {
        let Some((since, cpu)) = self.running.take() else { return false };
        self.before += since.elapsed();
        self.cpu_before += paraft_host::usage().cpu_seconds - cpu;
        true
    }

    pub fn seconds(&self) -> f64 {
        (self.before + self.running.map_or(Duration::ZERO, |r| r.0.elapsed())).as_secs_f64()
    }

    /// The process's CPU time over the same periods.
    pub fn cpu_seconds(&self) -> f64 {
        self.cpu_before
    }
}
