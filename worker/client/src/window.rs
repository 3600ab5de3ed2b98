//! What a client may have pushed without an ack: beyond it, `push` waits. So a server that is slower than its workers
//! makes them wait, and the memory for what is on its way does not grow with the model.

use std::{
    sync::{Condvar, Mutex, MutexGuard},
    time::{Duration, Instant},
};

/// Bytes of payload on their way, over all shards.
#[derive(Debug)]
pub(crate) struct Window {
    limit: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    bytes: usize,
    /// A link has ended: nobody may wait for its acks.
    over: bool,
}

impl Window {
    /// Lets through `limit` bytes, or one larger push.
    pub fn new(limit: usize) -> Self {
        Self { limit, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Waits until there is room for a push of `len` bytes, and takes it. Gives the time that it waited.
    pub fn enter(&self, len: usize) -> Duration {
        let mut state = self.lock();
        let full = |s: &mut State| !s.over && s.bytes > 0 && s.bytes.saturating_add(len) > self.limit;
        let mut waited = Duration::ZERO;
        if full(&mut state) {
            let began = Instant::now();
            state = self.changed.wait_while(state, full).unwrap_or_else(|e| e.into_inner());
            waited = began.elapsed();
        }
        state.bytes = state.bytes.saturating_add(len);
        waited
    }

    /// Pushes of `len` bytes together were acknowledged, or never will be.
    pub fn leave(&self, len: usize) {
        let mut state = self.lock();
        state.bytes = state.bytes.saturating_sub(len);
        self.changed.notify_all();
    }

    /// Nobody waits any more.
    pub fn give_up(&self) {
        self.lock().over = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::{Arc, mpsc},
        thread,
    };

    #[test]
    fn a_push_waits_until_there_is_room_and_no_longer() {
        let window = Arc::new(Window::new(100));
        assert_eq!(window.enter(1000), Duration::ZERO, "one push always goes out");
        window.leave(1000);
        assert_eq!(window.enter(60), Duration::ZERO);
        let (tell, told) = mpsc::channel();
        let waits = thread::spawn({
            let window = window.clone();
            move || {
                window.enter(60);
                let _ = tell.send(());
            }
        });
        assert!(told.recv_timeout(Duration::from_millis(50)).is_err(), "120 bytes are more than 100");
        window.leave(30);
        told.recv().expect("90 bytes are not");
        waits.join().expect("no panic");
    }

    #[test]
    fn nobody_waits_for_acks_of_a_link_that_has_ended() {
        let window = Arc::new(Window::new(10));
        window.enter(10);
        let waits = thread::spawn({
            let window = window.clone();
            move || window.enter(10)
        });
        window.give_up();
        waits.join().expect("it goes on");
        window.enter(10);
    }
}
