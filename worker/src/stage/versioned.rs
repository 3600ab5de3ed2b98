//! A rank's weights, with the version of each bucket.

use crate::worker::WorkerError;
use paraft_host::Pages;
use std::ops::{Deref, DerefMut};

/// Weights, with the version of each bucket.
pub(super) struct Versioned {
    pub values: Pages,
    pub versions: Vec<u64>,
    /// How often new weights have landed in this process; 0: never.
    pub edition: u64,
}

impl Versioned {
    pub fn new(len: usize) -> Result<Self, WorkerError> {
        Ok(Self { values: pages(len)?, versions: Vec::new(), edition: 0 })
    }
}

/// Room for this many values, which take memory when they are written.
pub(super) fn pages(len: usize) -> Result<Pages, WorkerError> {
    Pages::new(len).map_err(|e| WorkerError::Job(format!("no address space for {len} values: {e}")))
}

impl Deref for Versioned {
    type Target = Pages;

    fn deref(&self) -> &Pages {
        &self.values
    }
}

impl DerefMut for Versioned {
    fn deref_mut(&mut self) -> &mut Pages {
        &mut self.values
    }
}
