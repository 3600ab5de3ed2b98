//! Whether a replica sleeps.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64},
};
use tokio::sync::Notify;

/// Whether a replica sleeps.
#[derive(Debug, Default)]
pub(super) struct Sleep {
    pub asleep: AtomicBool,
    /// It has slept since somebody looked.
    pub slept: AtomicBool,
    /// Counts what the replica was asked for: it does not fall asleep over what came meanwhile.
    pub activity: AtomicU64,
    /// It sleeps no more.
    pub woken: Notify,
    /// Has the log compacted.
    pub compact: Arc<Notify>,
}
