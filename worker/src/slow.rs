//! A worker that is made slower on purpose, so that a comparison has a straggler on a machine whose cores are all alike.
//!
//! It sleeps before a step, so many times as long as its step before took to compute: between the pull and the gradient, as a
//! slower core would spend the time, so that its gradients are as late as a straggler's. The first step is not slowed. While
//! it sleeps it uses no core, which a slower core would: on a host whose cores are shared the others get more than they would
//! have.

use std::time::{Duration, Instant};

/// See the module.
#[derive(Debug)]
pub(crate) struct Slow {
    factor: f64,
    last: Duration,
}

impl Slow {
    /// A step takes `factor` times as long, from 1.
    pub fn new(factor: f64) -> Self {
        Self { factor, last: Duration::ZERO }
    }

    /// How long the next step is held up.
    fn pause(&self) -> Duration {
        self.last.mul_f64((self.factor - 1.0).max(0.0))
    }

    /// Makes a step.
    pub fn step<T>(&mut self, step: impl FnOnce() -> T) -> T {
        let pause = self.pause();
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
        let began = Instant::now();
        let made = step();
        self.last = began.elapsed();
        made
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_held_up_in_proportion_to_the_one_before() {
        let mut slow = Slow::new(5.0);
        assert_eq!(slow.pause(), Duration::ZERO, "nothing is known of the first");
        slow.step(|| std::thread::sleep(Duration::from_millis(2)));
        assert!(slow.pause() >= Duration::from_millis(8) && slow.pause() == slow.last * 4);
        let mut same = Slow::new(1.0);
        same.step(|| std::thread::sleep(Duration::from_millis(1)));
        assert_eq!(same.pause(), Duration::ZERO);
    }
}
