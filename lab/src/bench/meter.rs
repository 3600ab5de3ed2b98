//! Time and CPU time of operations that several processes work on, or that another one times itself.

use crate::statistics::median;
use paraft_fleet::{failure::Failure, launch};
use paraft_host::cpu_seconds_of;
use paraft_worker::exit;
use std::{
    process::{Command, Stdio},
    sync::atomic::AtomicI32,
    time::{Duration, Instant},
};

/// Reads the CPU clocks of this process and of others.
pub struct Meter(Vec<u32>);

impl Meter {
    /// Of this process and these.
    pub fn new(others: impl IntoIterator<Item = u32>) -> Self {
        Self(std::iter::once(std::process::id()).chain(others).collect())
    }

    /// CPU seconds of all of them so far; NaN where one cannot be read, which no median counts.
    pub fn cpu(&self) -> f64 {
        self.0.iter().map(|pid| cpu_seconds_of(*pid).unwrap_or(f64::NAN)).sum()
    }

    /// Runs `op`; returns the time and the CPU time that it took.
    pub fn time<T>(&self, op: impl FnOnce() -> Result<T, Failure>) -> Result<OpTime, Failure> {
        let (cpu, began) = (self.cpu(), Instant::now());
        op()?;
        let seconds = began.elapsed().as_secs_f64();
        Ok(OpTime { seconds, cpu: self.cpu() - cpu })
    }
}

/// What an operation took.
#[derive(Clone, Copy, Debug)]
pub struct OpTime {
    pub seconds: f64,
    /// CPU seconds of all processes.
    pub cpu: f64,
}

/// Operations one after the other, for this time and at least three: the median of their times, and the mean of their
/// CPU times. `op` may do more than it says it took, up to three times as much before fewer operations have to do.
pub fn median_of(
    time: Duration,
    interrupted: &AtomicI32,
    mut op: impl FnMut() -> Result<OpTime, Failure>,
) -> Result<OpTime, Failure> {
    const MIN_OPERATIONS: usize = 3;
    let (mut seconds, mut cpu, mut sum, began) = (Vec::new(), 0.0, 0.0, Instant::now());
    while seconds.len() < MIN_OPERATIONS || sum < time.as_secs_f64() && began.elapsed() < 4 * time {
        launch::check_interrupted(interrupted)?;
        let took = op()?;
        seconds.push(took.seconds);
        sum += took.seconds;
        cpu += took.cpu;
    }
    let middle = median(&seconds).map_or(f64::NAN, |m| m.0);
    Ok(OpTime { seconds: middle, cpu: cpu / seconds.len() as f64 })
}

/// The median of so many seconds, in milliseconds.
pub fn milliseconds(seconds: &[f64]) -> f64 {
    median(seconds).map_or(f64::NAN, |(s, _)| s * 1e3)
}

/// Likewise, of those that a command prints last, as a JSON list.
pub fn printed(mut command: Command) -> Result<f64, Failure> {
    let name = command.get_program().to_string_lossy().into_owned();
    let failed = |what: String| Failure::new(exit::FAILED, format!("{name}: {what}"));
    let output = command.stdin(Stdio::null()).output().map_err(|e| failed(e.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_string()));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().next_back().unwrap_or_default();
    let seconds: Vec<f64> =
        serde_json::from_str(last).map_err(|e| failed(format!("it printed {last:?}: {e}")))?;
    Ok(milliseconds(&seconds))
}
