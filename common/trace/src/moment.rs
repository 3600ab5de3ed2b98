//! Times that processes of one host can compare.

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A time on the host's monotonic clock, in nanoseconds. All processes of one host share it, which the standard library's
/// `Instant` does not promise to show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Moment(pub u64);

impl Moment {
    /// Now. Some tens of nanoseconds; no system call.
    pub fn now() -> Self {
        // It fails for clocks that do not exist; Linux has this one.
        let t = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
        Self(t.as_nanos() as u64)
    }

    /// The time since an earlier one; zero if it is later.
    pub fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Unix time of this host's monotonic zero, in nanoseconds: what other hosts' times are compared by.
pub(crate) fn epoch() -> i64 {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as i64);
    wall - Moment::now().0 as i64
}

/// Names this host since it was started; empty where it does not say.
pub(crate) fn boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.map(|id| id.trim().to_string()).unwrap_or_default()
}
