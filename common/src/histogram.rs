//! Histograms: of small integers, exact below [`DelayHistogram::EXACT`], and of positive numbers of any
//! size.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Counts how often each delay (in versions) occurred. Delays from [`Self::EXACT`] on share the last
/// count, so stragglers cannot grow its size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelayHistogram {
    counts: Vec<u64>,
}

impl DelayHistogram {
    /// Delays below this are counted exactly.
    pub const EXACT: usize = 1024;

    /// Counts one delay.
    pub fn record(&mut self, delay: u64) {
        let i = (delay as usize).min(Self::EXACT);
        if self.counts.len() <= i {
            self.counts.resize(i + 1, 0);
        }
        self.counts[i] = self.counts[i].saturating_add(1);
    }

    /// Adds another histogram's counts.
    pub fn merge(&mut self, other: &DelayHistogram) {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        for (a, b) in self.counts.iter_mut().zip(&other.counts) {
            *a = a.saturating_add(*b); // counts also come from files and peers
        }
    }

    /// Creates one from counts by delay; counts beyond the last exact delay are added to it.
    pub fn from_counts(counts: &[u64]) -> Self {
        let mut h = Self::default();
        for (i, &c) in counts.iter().enumerate().filter(|(_, c)| **c > 0) {
            let i = i.min(Self::EXACT);
            if h.counts.len() <= i {
                h.counts.resize(i + 1, 0);
            }
            h.counts[i] = h.counts[i].saturating_add(c);
        }
        h
    }

    /// `counts()[d]` is how often delay `d` occurred.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Number of recorded delays.
    pub fn total(&self) -> u64 {
        self.counts.iter().fold(0, |sum, c| sum.saturating_add(*c))
    }

    /// The largest delay (capped at [`Self::EXACT`]), or `None` without delays.
    pub fn max(&self) -> Option<u64> {
        self.counts.iter().rposition(|&c| c > 0).map(|i| i as u64)
    }

    /// The mean delay, or `None` without delays.
    pub fn mean(&self) -> Option<f64> {
        let total = self.total();
        let sum: f64 = self.counts.iter().enumerate().map(|(i, &c)| i as f64 * c as f64).sum();
        (total > 0).then(|| sum / total as f64)
    }

    /// The smallest delay `d` such that at least the share `q` (0 to 1) of all delays is at most `d`;
    /// `None` without delays.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        let total = self.total();
        let want = ((total as f64) * q.clamp(0.0, 1.0)).ceil().max(1.0) as u64;
        let mut seen = 0u64;
        for (i, &c) in self.counts.iter().enumerate() {
            seen = seen.saturating_add(c);
            if seen >= want && total > 0 {
                return Some(i as u64);
            }
        }
        None
    }
}

/// Counts non-negative numbers by magnitude, with two bins for each power of two. For measurements
/// only, not for replicated state: it computes logarithms.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<(f64, u64)>", into = "Vec<(f64, u64)>")]
pub struct LogHistogram {
    /// Indexed by bin, with the upper bound `2^(bin / 2)`. The lowest bin holds 0 and smaller bounds.
    bins: BTreeMap<i32, u64>,
    /// The sum of all recorded numbers; bins from a file add their upper bounds.
    sum: f64,
}

impl LogHistogram {
    /// The range of bins: from 2^-40 to 2^40.
    const BINS: std::ops::RangeInclusive<i32> = -80..=80;

    /// Counts one number. NaN counts as the largest.
    pub fn record(&mut self, number: f64) {
        let bin = if number.is_nan() { f64::INFINITY } else { number.max(0.0).log2() * 2.0 };
        let bin = (bin.ceil()).clamp(f64::from(*Self::BINS.start()), f64::from(*Self::BINS.end()));
        let count = self.bins.entry(bin as i32).or_default();
        *count = count.saturating_add(1);
        self.sum += if number.is_finite() { number.max(0.0) } else { 0.0 };
    }

    /// Adds another histogram's counts.
    pub fn merge(&mut self, other: &Self) {
        for (bin, n) in &other.bins {
            let count = self.bins.entry(*bin).or_default();
            *count = count.saturating_add(*n);
        }
        self.sum += other.sum;
    }

    /// The non-empty bins in ascending order: upper bound and count. The lowest possible bin has the
    /// bound 0.
    pub fn bins(&self) -> Vec<(f64, u64)> {
        self.bins.iter().map(|(bin, n)| (Self::bound(*bin), *n)).collect()
    }

    fn bound(bin: i32) -> f64 {
        if bin == *Self::BINS.start() { 0.0 } else { 2f64.powf(f64::from(bin) / 2.0) }
    }

    /// Number of recorded numbers.
    pub fn total(&self) -> u64 {
        self.bins.values().fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// Their mean; `None` without numbers.
    pub fn mean(&self) -> Option<f64> {
        let total = self.total();
        (total > 0).then(|| self.sum / total as f64)
    }

    /// Their sum.
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// An upper bound of the quantile `q` (0 to 1), to a factor of 1.42; `None` without numbers.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let want = ((self.total() as f64) * q.clamp(0.0, 1.0)).ceil().max(1.0) as u64;
        let mut seen = 0u64;
        let at = self.bins.iter().find(|(_, n)| {
            seen = seen.saturating_add(**n);
            seen >= want
        });
        at.map(|(bin, _)| Self::bound(*bin))
    }

    /// Creates one from bins and the sum of their numbers.
    pub fn from_bins(bins: impl IntoIterator<Item = (f64, u64)>, sum: f64) -> Self {
        Self {
            sum: if sum.is_finite() { sum } else { 0.0 },
            ..Self::from(bins.into_iter().collect::<Vec<_>>())
        }
    }
}

impl From<Vec<(f64, u64)>> for LogHistogram {
    fn from(bins: Vec<(f64, u64)>) -> Self {
        let mut h = Self::default();
        for (bound, n) in bins {
            let mut one = Self::default();
            // A little below the bound, which rounding may have moved.
            one.record(bound * 0.99);
            let sum = if bound.is_finite() { bound.max(0.0) * n as f64 } else { 0.0 };
            h.merge(&Self { bins: one.bins.into_keys().map(|bin| (bin, n)).collect(), sum });
        }
        h
    }
}

impl From<LogHistogram> for Vec<(f64, u64)> {
    fn from(h: LogHistogram) -> Self {
        h.bins()
    }
}

#[cfg(test)]
#[path = "histogram_tests.rs"]
mod tests;
