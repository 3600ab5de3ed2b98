//! Whether a rank of a finished group hangs.

use std::time::{Duration, Instant};

/// A rank of a finished group hangs if it is idle for this long. It may still evaluate, or save a large
/// model.
const HANG_TIMEOUT: Duration = Duration::from_secs(15);
/// CPU seconds up to which a process counts as idle.
const IDLE_CPU_SECONDS: f64 = 0.3;

/// How long a process has been idle.
pub(super) struct IdleTime {
    /// Its CPU time at that moment.
    pub(super) cpu_seconds: f64,
    pub(super) since: Instant,
}

impl IdleTime {
    /// Records the CPU time so far; returns whether the process hangs.
    pub(super) fn hangs(&mut self, cpu_seconds: f64, now: Instant) -> bool {
        if cpu_seconds - self.cpu_seconds > IDLE_CPU_SECONDS {
            *self = Self { cpu_seconds, since: now };
        }
        now.duration_since(self.since) > HANG_TIMEOUT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_active_process_does_not_hang() {
        let began = Instant::now();
        let at = |seconds: f64| began + Duration::from_secs_f64(seconds);
        let new = || IdleTime { cpu_seconds: 7.0, since: began };
        let mut saves = new();
        assert!((1..60).all(|n| !saves.hangs(7.0 + 0.1 * f64::from(n), at(f64::from(n)))));
        let mut stopped = new();
        assert!(!stopped.hangs(7.0, at(15.0)) && stopped.hangs(7.0, at(15.1)));
        // The check is only whether other workers are present.
        let mut waits = new();
        assert!((1..60).any(|n| waits.hangs(7.0 + 0.001 * f64::from(n), at(f64::from(n)))));
    }
}
