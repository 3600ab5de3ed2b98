//! The sleep state of a replica.

use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Instant,
};
use tokio::sync::Notify;

/// The sleep state of a replica.
#[derive(Debug, Default)]
pub(super) struct Sleep {
    pub asleep: AtomicBool,
    /// When it fell asleep last.
    pub since: Mutex<Option<Instant>>,
    /// It has slept since the last check.
    pub slept: AtomicBool,
    /// Counts requests to the replica: it does not fall asleep if one arrived meanwhile.
    pub activity: AtomicU64,
    /// Notified when it wakes.
    pub woken: Notify,
    /// Requests a compaction of the log.
    pub compact: Arc<Notify>,
}
