//! Stands in for the crate `base2histogram`: what openraft uses of it, with nothing behind it.
//!
//! openraft records histograms with every message, and Paraft never asks for them. The crate makes tables for widths
//! that nobody uses, 25 MiB in each server, and 2 KiB for each histogram.

use std::{fmt, marker::PhantomData};

/// A histogram that keeps nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram<T = ()>(PhantomData<T>);

impl<T> Histogram<T> {
    /// An empty one, as it stays.
    pub fn new() -> Self {
        Self(PhantomData)
    }

    /// Drops a value.
    pub fn record(&mut self, _: u64) {}

    /// Drops a value that came several times.
    pub fn record_n(&mut self, _: u64, _: u64) {}

    /// Of no samples.
    pub fn percentile_stats(&self) -> PercentileStats {
        PercentileStats::default()
    }
}

impl<T> Default for Histogram<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Percentiles of a histogram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // as in the crate
pub struct PercentileStats {
    pub samples: u64,
    pub p0_1: u64,
    pub p1: u64,
    pub p5: u64,
    pub p10: u64,
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p99_9: u64,
}

impl fmt::Display for PercentileStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[samples: {}]", self.samples)
    }
}

/// A chart of histograms: empty.
#[derive(Clone, Debug, Default)]
pub struct AsciiChart<T = ()>(PhantomData<T>);

impl<T> AsciiChart<T> {
    /// An empty one, as it stays.
    pub fn new() -> Self {
        Self(PhantomData)
    }

    /// Drops a histogram.
    #[must_use]
    pub fn add(self, _: &str, _: Histogram<T>) -> Self {
        self
    }

    /// What it draws.
    pub fn detailed(&self) -> &str {
        ""
    }
}
