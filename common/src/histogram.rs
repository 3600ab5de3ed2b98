//! A histogram of small whole numbers, exact below [`DelayHistogram::EXACT`].

use serde::{Deserialize, Serialize};

/// Counts how often each delay (in versions) was seen. Delays of [`Self::EXACT`] and above share the last
/// count, so its size is bounded whatever a straggler does.
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
            *a = a.saturating_add(*b); // counts come from files and peers too
        }
    }

    /// Builds one from counts by delay; counts beyond the last exact place are added to it.
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

    /// `counts()[d]` is how often delay `d` was seen.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Number of delays recorded.
    pub fn total(&self) -> u64 {
        self.counts.iter().fold(0, |sum, c| sum.saturating_add(*c))
    }

    /// The largest delay seen (capped at [`Self::EXACT`]), or `None` when nothing was recorded.
    pub fn max(&self) -> Option<u64> {
        self.counts.iter().rposition(|&c| c > 0).map(|i| i as u64)
    }

    /// The mean delay, or `None` when nothing was recorded.
    pub fn mean(&self) -> Option<f64> {
        let total = self.total();
        let sum: f64 = self.counts.iter().enumerate().map(|(i, &c)| i as f64 * c as f64).sum();
        (total > 0).then(|| sum / total as f64)
    }

    /// The smallest delay `d` such that at least the share `q` (0 to 1) of all delays is at most `d`; `None`
    /// when nothing was recorded.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_that_no_run_can_have_do_not_overflow() {
        let mut h = DelayHistogram::from_counts(&[vec![u64::MAX; 2], vec![1; 2000]].concat());
        h.merge(&h.clone());
        h.record(0);
        assert_eq!((h.total(), h.quantile(0.99), h.max()), (u64::MAX, Some(0), Some(1024)));
    }

    #[test]
    fn quantiles_follow_their_definition() {
        let mut h = DelayHistogram::default();
        assert_eq!(h.quantile(0.5), None);
        for d in [0, 0, 0, 1, 1, 2, 5, 5, 5, 9] {
            h.record(d);
        }
        assert_eq!((h.quantile(0.0), h.quantile(0.3), h.quantile(0.5)), (Some(0), Some(0), Some(1)));
        assert_eq!((h.quantile(0.99), h.max(), h.total()), (Some(9), Some(9), 10));
        h.record(u64::MAX);
        assert_eq!(h.max(), Some(DelayHistogram::EXACT as u64));
        assert_eq!(DelayHistogram::from_counts(h.counts()), h);
    }
}
