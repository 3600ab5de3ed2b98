//! The time of day. For people to read and for what is compared with other hosts' files: nothing that has to be right is
//! decided by it, since hosts' clocks are set, and jump.

use std::{
    sync::atomic::{AtomicI64, Ordering::Relaxed},
    time::{SystemTime, UNIX_EPOCH},
};

static SHIFT_SECONDS: AtomicI64 = AtomicI64::new(0);

/// Milliseconds of unix time; 0 before 1970.
pub fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as i64);
    u64::try_from(now.saturating_add(SHIFT_SECONDS.load(Relaxed).saturating_mul(1000))).unwrap_or(0)
}

/// From now on this process's clock is so many seconds ahead of its host's, or behind: a fault on purpose.
pub fn shift(seconds: i64) {
    SHIFT_SECONDS.store(seconds, Relaxed);
}
