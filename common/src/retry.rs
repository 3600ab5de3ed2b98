//! How long to wait before the next try. Pure: the random number is an argument.

use std::time::Duration;

/// Exponential back-off with full jitter under one deadline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryPolicy {
    /// Longest first wait.
    pub base: Duration,
    /// Longest wait of all.
    pub max: Duration,
    /// No try starts later than this after the first.
    pub deadline: Duration,
}

impl RetryPolicy {
    /// The wait before try number `attempt` (from 1), or `None` when the deadline has passed. `random` is
    /// uniform in 0..1. It is at most a quarter of `elapsed`, so a server that returns soon is
    /// found soon.
    pub fn delay(&self, attempt: u32, elapsed: Duration, random: f64) -> Option<Duration> {
        if elapsed >= self.deadline {
            return None;
        }
        let cap = self.base.saturating_mul(1 << attempt.saturating_sub(1).min(20)).min(self.max);
        let cap = cap.min(self.base.max(elapsed / 4));
        // Never below a quarter of the cap: a zero wait against a refused port is a hot loop.
        Some(cap.mul_f64(0.25 + 0.75 * random.clamp(0.0, 1.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_cap_and_end_at_the_deadline() {
        let ms = Duration::from_millis;
        let p = RetryPolicy { base: ms(10), max: ms(100), deadline: ms(1000) };
        assert_eq!(p.delay(1, ms(0), 1.0), Some(ms(10)));
        assert_eq!(p.delay(3, ms(200), 1.0), Some(ms(40)));
        assert_eq!(p.delay(9, ms(120), 1.0), Some(ms(30)), "many tries in a short time");
        assert_eq!(p.delay(99, ms(999), 0.0), Some(ms(25)));
        assert_eq!(p.delay(1, ms(1000), 0.5), None);
    }
}
