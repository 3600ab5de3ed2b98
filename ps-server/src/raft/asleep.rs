//! Whether a replica sleeps.

use std::sync::atomic::{AtomicBool, AtomicU64};

/// Whether a replica sleeps.
#[derive(Debug, Default)]
pub(super) struct Sleep {
    pub asleep: AtomicBool,
    /// It has slept since somebody looked.
    pub slept: AtomicBool,
    /// Counts what the replica was asked for: it does not fall asleep over what came meanwhile.
    pub activity: AtomicU64,
}
