//! The least time between two checkpoints.

use std::time::{Duration, Instant};

/// When the last checkpoint began, or the training.
#[derive(Debug)]
pub(super) struct Spacing {
    least: Duration,
    last: Option<Instant>,
}

impl Spacing {
    pub(super) fn new(least: Duration) -> Self {
        Self { least, last: None }
    }

    /// The training continues. Only the first call counts.
    pub(super) fn trains(&mut self, now: Instant) {
        self.last.get_or_insert(now);
    }

    /// A checkpoint begins.
    pub(super) fn begins(&mut self, now: Instant) {
        self.last = Some(now);
    }

    /// Whether there is a least time at all.
    pub(super) fn limits(&self) -> bool {
        !self.least.is_zero()
    }

    /// Whether a checkpoint may begin now.
    pub(super) fn allows(&self, now: Instant) -> bool {
        let passed = |last: Instant| now.saturating_duration_since(last) >= self.least;
        !self.limits() || self.last.is_some_and(passed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_are_a_minute_apart_unless_there_is_no_limit() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut spacing = Spacing::new(Duration::from_secs(60));
        assert!(!spacing.allows(at(100)), "nothing is trained yet");
        spacing.trains(at(100));
        spacing.trains(at(150));
        // The ends of epochs, and whether each has a checkpoint.
        for (end, allowed) in
            [(101, false), (159, false), (160, true), (161, false), (219, false), (223, true)]
        {
            assert_eq!(spacing.allows(at(end)), allowed, "{end}");
            if allowed {
                spacing.begins(at(end));
            }
        }
        let none = Spacing::new(Duration::ZERO);
        assert!(none.allows(start) && !none.limits());
    }
}
