//! Who ends a wait before what is waited for has come.

use std::{
    fmt::Debug,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

/// Asked by whoever waits, again and again, whether to give up. A flag that a signal sets is one; an embedding that has signals of
/// its own to look after is another.
pub trait Interrupt: Debug + Send + Sync {
    /// Whether to give up. Called on the thread that waits, also where nothing waits, before each thing that it does: cheap.
    fn is_set(&self) -> bool;
}

impl Interrupt for AtomicBool {
    fn is_set(&self) -> bool {
        self.load(Relaxed)
    }
}
