//! Simulated time: a queue of what is to happen, and the rule that the next thing happens when all that the one before
//! has caused is done.
//!
//! Everything runs on one thread. While any task can go on, time stands still. When none can, the runtime says so
//! (`on_thread_park`) and the earliest of the queue happens. What happens at the same moment happens in the order in which
//! it was asked for. So a run depends on nothing but its arguments.
//!
//! Two clocks are kept together: this one, in nanoseconds, and tokio's, which is paused and counts whole milliseconds.
//! The servers' own deadlines (leases, deltas) are on tokio's, at their true scale and with the grain that they have in a
//! server. It never runs ahead of this one.
//!
//! Not here: what takes how long. It is asked for by whoever knows.

use crate::SimError;
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

/// A moment: nanoseconds since the run began.
pub(crate) type Moment = u64;

/// A moment that never comes.
pub(crate) const NEVER: Moment = Moment::MAX;

const MILLISECOND: u64 = 1_000_000;

/// Only deadlines of servers for so long, in simulated time, and nothing asked for: nobody will ever go on.
const SILENCE: Duration = Duration::from_secs(3600);

/// What happens at a moment.
pub(crate) trait Happens: Send {
    /// It happens; or, where a moment is given, it has caused nothing yet and happens then.
    fn happens(self: Box<Self>) -> Option<(Moment, Box<dyn Happens>)>;
}

impl<F: FnOnce() + Send> Happens for F {
    fn happens(self: Box<Self>) -> Option<(Moment, Box<dyn Happens>)> {
        self();
        None
    }
}

/// What is to happen, and when.
struct Due {
    at: Moment,
    /// In which order it was asked for.
    number: u64,
    happens: Box<dyn Happens>,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    /// The heap gives the largest first: that is the earliest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

#[derive(Default)]
struct Queue {
    now: Moment,
    number: u64,
    due: BinaryHeap<Due>,
    /// Time passes up to this moment: whoever asks for something earlier wakes the driver.
    passing_to: Option<Moment>,
    happened: u64,
}

struct Inner {
    queue: Mutex<Queue>,
    /// Nothing can go on, or something was asked for that comes before what time passes to.
    bell: Notify,
    stuck: Notify,
    began: OnceLock<Instant>,
}

/// Simulated time. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Clock(Arc<Inner>);

impl Clock {
    /// Runs what `main` makes until it is done, in simulated time from zero. What it has spawned ends with it.
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
            .on_thread_park(move || idle.nothing_can_go_on())
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
        // What is left in the queue holds the world that holds this clock.
        clock.0.queue.lock().due.clear();
        result
    }

    /// Now.
    pub fn now(&self) -> Moment {
        self.0.queue.lock().now.max(self.paused())
    }

    /// Now, in seconds.
    pub fn seconds(&self) -> f64 {
        seconds(self.now())
    }

    /// How many things have happened so far.
    pub fn happened(&self) -> u64 {
        self.0.queue.lock().happened
    }

    /// Has something happen at a moment, or now if that is over.
    pub fn at(&self, at: Moment, happens: impl Happens + 'static) {
        self.put(at, Box::new(happens));
    }

    fn put(&self, at: Moment, happens: Box<dyn Happens>) {
        let paused = self.paused();
        let mut queue = self.0.queue.lock();
        queue.number += 1;
        let due = Due { at: at.max(queue.now).max(paused), number: queue.number, happens };
        if queue.passing_to.is_some_and(|to| due.at < to) {
            self.0.bell.notify_one();
        }
        queue.due.push(due);
    }

    /// Returns at a moment.
    pub fn until(&self, at: Moment) -> impl Future<Output = ()> + Send + use<> {
        let (tell, told) = oneshot::channel();
        self.at(at, move || _ = tell.send(()));
        async move { told.await.unwrap_or(()) }
    }

    /// Returns after so many nanoseconds.
    pub fn sleep(&self, nanos: u64) -> impl Future<Output = ()> + Send + use<> {
        self.until(self.now().saturating_add(nanos))
    }

    /// Tokio's clock, in nanoseconds since the run began.
    fn paused(&self) -> Moment {
        self.0.began.get().map_or(0, |began| began.elapsed().as_nanos() as u64)
    }

    /// The runtime is about to wait for a timer.
    fn nothing_can_go_on(&self) {
        if self.0.queue.lock().passing_to.is_none() {
            self.0.bell.notify_one();
        }
    }

    async fn drive(self) {
        let began = *self.0.began.get_or_init(Instant::now);
        // What has happened may have caused something.
        let mut caused = true;
        loop {
            if std::mem::replace(&mut caused, true) {
                self.0.bell.notified().await;
            }
            let next = self.0.queue.lock().due.peek().map(|d| d.at);
            let to = next.unwrap_or_else(|| self.now().saturating_add(SILENCE.as_nanos() as u64));
            if to / MILLISECOND > self.paused() / MILLISECOND {
                // Deadlines of servers come first. They may ask for something earlier.
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

/// Nanoseconds as seconds.
pub(crate) fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

/// Seconds as nanoseconds; what is no time is none.
pub(crate) fn nanos(seconds: f64) -> u64 {
    (seconds * 1e9).round().max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_and_server_deadlines_happen_in_time_order() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let told = seen.clone();
        let ended = Clock::run(|clock| async move {
            let note = move |what: &'static str, at: Moment| told.lock().push((what, at));
            let (n, c) = (note.clone(), clock.clone());
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(7)).await;
                n("deadline", c.now());
                // Earlier than what time passes to: it must not be passed over.
                let (n, d) = (n.clone(), c.clone());
                c.at(c.now() + 200_000, move || n("asked for by it", d.now()));
            });
            for (what, at) in [("late", 50_000_000), ("early", 1_500), ("same", 1_500), ("close", 6_900_000)]
            {
                let (n, c) = (note.clone(), clock.clone());
                clock.at(at, move || n(what, c.now()));
            }
            clock.sleep(60_000_000).await;
            Ok(clock.happened())
        });
        assert_eq!(ended.expect("an end"), 6);
        let want = [
            ("early", 1_500),
            ("same", 1_500),
            ("close", 6_900_000),
            ("deadline", 7_000_000),
            ("asked for by it", 7_200_000),
            ("late", 50_000_000),
        ];
        assert_eq!(*seen.lock(), want);
    }

    #[test]
    fn a_run_in_which_nobody_will_ever_go_on_ends() {
        let ended = Clock::run(|_| std::future::pending::<Result<(), SimError>>());
        assert!(matches!(ended, Err(SimError::Stuck(_))));
    }
}
