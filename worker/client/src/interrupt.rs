//! Ends a wait early.

use std::{
    fmt::Debug,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

/// Every wait polls it. A flag that a signal handler sets is one implementation; an embedding with its own signals
/// is another.
pub trait Interrupt: Debug + Send + Sync {
    /// Whether to give up. Waits and other calls poll it often, on the calling thread, so it must be cheap.
    fn is_set(&self) -> bool;
}

impl Interrupt for AtomicBool {
    fn is_set(&self) -> bool {
        self.load(Relaxed)
    }
}
