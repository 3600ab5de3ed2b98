//! Waits for a condition, instead of a sleep and a hope.

use std::{
    fmt::Debug,
    thread,
    time::{Duration, Instant},
};

/// Long enough for a loaded machine with two cores; reached only if a test fails.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Polls `state` until `done` holds, and returns that state.
///
/// # Panics
/// After [`DEADLINE`], with `what` and the last state.
pub fn until<T: Debug>(what: &str, mut state: impl FnMut() -> T, done: impl Fn(&T) -> bool) -> T {
    let began = Instant::now();
    loop {
        let now = state();
        if done(&now) {
            return now;
        }
        assert!(began.elapsed() < DEADLINE, "waited {DEADLINE:?} for: {what}; last seen: {now:#?}");
        thread::sleep(Duration::from_millis(5));
    }
}
