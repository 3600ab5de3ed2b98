//! Simulated time: an event queue, and the rule that the next event happens after all effects of the
//! previous one.
//!
//! Everything runs on one thread. While any task can run, time stands still. When none can, the runtime
//! calls back (`on_thread_park`) and the earliest event happens. Events of the same moment happen in
//! the order of their requests. So a run depends only on its arguments.
//!
//! There are two clocks: this one in nanoseconds, and tokio's, which is paused and counts whole
//! milliseconds. The servers' own deadlines (leases, deltas) use tokio's clock, with the same scale and
//! resolution as in a real server. Tokio's clock never runs ahead of this one.
//!
//! Other modules define how long each event takes.

use crate::error::SimError;
use parking_lot::Mutex;
use std::{
    cmp::Ordering,
    collections::BinaryHeap,
    future::Future,
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

/// Nanoseconds since the start of the run.
pub(crate) type Moment = u64;

/// A moment that never comes.
pub(crate) const NEVER: Moment = Moment::MAX;

const MILLISECOND: u64 = 1_000_000;

/// If only deadlines of servers expire for this simulated time and no event is queued, the run is
/// stuck.
const SILENCE: Duration = Duration::from_secs(3600);

/// An event.
pub(crate) trait SimEvent: Send {
    /// Executes the event; or returns it with a later moment, before it has any effect.
    fn happens(self: Box<Self>) -> Option<(Moment, Box<dyn SimEvent>)>;
}

impl<F: FnOnce() + Send> SimEvent for F {
    fn happens(self: Box<Self>) -> Option<(Moment, Box<dyn SimEvent>)> {
        self();
        None
    }
}

/// A queued event.
struct QueuedEvent {
    at: Moment,
    /// Its number in the order of requests.
    number: u64,
    happens: Box<dyn SimEvent>,
}

impl PartialEq for QueuedEvent {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for QueuedEvent {}

impl PartialOrd for QueuedEvent {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for QueuedEvent {
    /// `BinaryHeap` pops the largest element, which here is the earliest event.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

#[derive(Default)]
struct Queue {
    now: Moment,
    number: u64,
    due: BinaryHeap<QueuedEvent>,
    /// The moment to which tokio's clock advances now: a request for an earlier event wakes the driver.
    passing_to: Option<Moment>,
    happened: u64,
}

struct Inner {
    queue: Mutex<Queue>,
    /// Notified when no task can run, or when an event is queued before the target of the current
    /// advance.
    bell: Notify,
    stuck: Notify,
    began: OnceLock<Instant>,
}

/// Simulated time. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Clock(Arc<Inner>);

impl Clock {
    /// Runs the future of `main` to its end, in simulated time from zero. Tasks that it has spawned end
    /// with it.
    pub fn run<F, T>(main: impl FnOnce(Clock) -> F) -> Result<T, SimError>
    where
        F: Future<Output = Result<T, SimError>>,
    {
        let inner = Inner {
            queue: Mutex::default(),
            bell: Notify::new(),
            stuck: Notify::new(),
            began: OnceLock::new(),
        };
        let clock = Clock(Arc::new(inner));
        let idle = clock.clone();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .on_thread_park(move || idle.on_all_tasks_blocked())
            .build()
            .map_err(|e| SimError::Runtime(e.to_string()))?;
        let result = runtime.block_on(async {
            clock.0.began.get_or_init(Instant::now);
            tokio::spawn(clock.clone().drive());
            tokio::select! {
                biased;
                result = main(clock.clone()) => result,
                () = clock.0.stuck.notified() => Err(SimError::Stuck(clock.seconds())),
            }
        });
        drop(runtime);
        // Queued events hold the world, and the world holds this clock: break the cycle.
        clock.0.queue.lock().due.clear();
        result
    }

    /// The current moment.
    pub fn now(&self) -> Moment {
        self.0.queue.lock().now.max(self.paused())
    }

    /// The current moment in seconds.
    pub fn seconds(&self) -> f64 {
        seconds(self.now())
    }

    /// The number of events so far.
    pub fn happened(&self) -> u64 {
        self.0.queue.lock().happened
    }

    /// Queues an event for a moment, or for now if the moment is past.
    pub fn at(&self, at: Moment, happens: impl SimEvent + 'static) {
        self.put(at, Box::new(happens));
    }

    fn put(&self, at: Moment, happens: Box<dyn SimEvent>) {
        let paused = self.paused();
        let mut queue = self.0.queue.lock();
        queue.number += 1;
        let due = QueuedEvent { at: at.max(queue.now).max(paused), number: queue.number, happens };
        if queue.passing_to.is_some_and(|to| due.at < to) {
            self.0.bell.notify_one();
        }
        queue.due.push(due);
    }

    /// Waits until a moment.
    pub fn until(&self, at: Moment) -> impl Future<Output = ()> + Send + use<> {
        let (tell, told) = oneshot::channel();
        self.at(at, move || _ = tell.send(()));
        async move { told.await.unwrap_or(()) }
    }

    /// Waits for this many nanoseconds.
    pub fn sleep(&self, nanos: u64) -> impl Future<Output = ()> + Send + use<> {
        self.until(self.now().saturating_add(nanos))
    }

    /// Tokio's clock, in nanoseconds since the run began.
    fn paused(&self) -> Moment {
        self.0.began.get().map_or(0, |began| began.elapsed().as_nanos() as u64)
    }

    /// Called when the runtime is about to wait for a timer.
    fn on_all_tasks_blocked(&self) {
        if self.0.queue.lock().passing_to.is_none() {
            self.0.bell.notify_one();
        }
    }

    async fn drive(self) {
        let began = *self.0.began.get_or_init(Instant::now);
        // The last event may have made tasks runnable.
        let mut caused = true;
        loop {
            if std::mem::replace(&mut caused, true) {
                self.0.bell.notified().await;
            }
            let next = self.0.queue.lock().due.peek().map(|d| d.at);
            let to = next.unwrap_or_else(|| self.now().saturating_add(SILENCE.as_nanos() as u64));
            if to / MILLISECOND > self.paused() / MILLISECOND {
                // Deadlines of servers come first, and may queue an earlier event.
                self.0.queue.lock().passing_to = Some(to);
                let passed = tokio::select! {
                    biased;
                    () = self.0.bell.notified() => false,
                    () = tokio::time::sleep_until(began + Duration::from_millis(to / MILLISECOND)) => true,
                };
                let mut queue = self.0.queue.lock();
                queue.passing_to = None;
                if passed && next.is_none() && queue.due.is_empty() {
                    self.0.stuck.notify_one();
                    return;
                }
                continue;
            }
            let due = {
                let mut queue = self.0.queue.lock();
                let due = queue.due.pop();
                if let Some(due) = &due {
                    queue.now = due.at;
                    queue.happened += 1;
                }
                due
            };
            if let Some((at, again)) = due.and_then(|due| due.happens.happens()) {
                self.put(at, again);
                caused = false;
            }
        }
    }
}

/// Nanoseconds to seconds.
pub(crate) fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

/// Seconds to nanoseconds; an invalid time is zero.
pub(crate) fn nanos(seconds: f64) -> u64 {
    (seconds * 1e9).round().max(0.0) as u64
}

#[cfg(test)]
#[path = "clock_tests.rs"]
mod tests;
