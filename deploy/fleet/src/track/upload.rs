//! Uploads a run to MLflow during training, on its own thread.
//!
//! ```text
//!  points ─▶ queue, bounded ─▶ a request, retried with pauses ─▶ MLflow
//!                   └─ the run's end: retries for 10 s more, then counts what is unsent
//! ```
//!
//! Training never waits for it.

use super::{
    mlflow::{About, Client, METRICS, Metric, RequestError, Status},
    run::PARENT,
    sweep::{END_TIMEOUT, Sweep},
};
use parking_lot::{Condvar, Mutex};
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

/// The maximal number of queued values, a few megabytes: more than the longest run has lines.
const MAX_QUEUED: usize = 100_000;
/// The first and the longest pause before a retry.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// The pause between retries at the run's end.
const RETRY_DELAY_AT_END: Duration = Duration::from_millis(500);

/// The unsent rest of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsent {
    /// The number of unsent values.
    pub metrics: u64,
    /// The reason.
    pub why: String,
}

/// The upload of a run.
#[derive(Debug)]
pub struct Upload {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when the queue grows, the run ends, or the thread ends.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Metric>,
    /// Unsent tags, which follow the values.
    tags: VecDeque<(String, String)>,
    /// Values that have left the queue, sent or lost.
    gone: u64,
    /// Values that will not be sent.
    lost: u64,
    /// The run's final status, its time, and the deadline of the upload.
    end: Option<(Status, f64, Instant)>,
    /// Messages for the user.
    notes: Vec<String>,
    /// Why the last request failed.
    why: String,
    over: Option<Result<(), Unsent>>,
}

impl Upload {
    /// Starts the upload; returns at once. A sweep's trial is nested in the sweep's own run.
    pub fn start(client: Client, about: About, of: Option<Arc<Sweep>>) -> Self {
        let shared = Arc::new(Shared::default());
        let mut sender = Sender { shared: shared.clone(), client, about, of, run: None, said: false };
        let spawned = std::thread::Builder::new().name("mlflow".into()).spawn(move || sender.work());
        if let Err(e) = spawned {
            let unsent = Unsent { metrics: 0, why: format!("no thread: {e}") };
            shared.state.lock().over = Some(Err(unsent));
        }
        Self { shared }
    }

    /// Queues values. If the queue is full, the oldest values are dropped.
    pub fn push(&self, metrics: impl IntoIterator<Item = Metric>) {
        let mut state = self.shared.state.lock();
        if state.over.is_some() {
            state.lost += metrics.into_iter().count() as u64;
            return;
        }
        state.queue.extend(metrics);
        let over = state.queue.len().saturating_sub(MAX_QUEUED);
        state.leave(over);
        state.lost += over as u64;
        self.shared.changed.notify_all();
    }

    /// Takes the messages for the user.
    pub fn notes(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.state.lock().notes)
    }

    /// Sets tags of the run, as key and value. They are sent after the values, when the run has ended.
    pub fn tag(&self, tags: Vec<(String, String)>) {
        self.shared.state.lock().tags.extend(tags);
    }

    /// Ends the run: the rest is sent if that succeeds within [`END_TIMEOUT`].
    pub fn end(&self, status: Status, wall: f64) {
        let mut state = self.shared.state.lock();
        state.end.get_or_insert((status, wall, Instant::now() + END_TIMEOUT));
        self.shared.changed.notify_all();
    }

    /// Waits for the result after [`Self::end`], at most for that time.
    pub fn wait(&self) -> Result<(), Unsent> {
        let mut state = self.shared.state.lock();
        let until = state.end.map_or_else(Instant::now, |(_, _, until)| until);
        while state.over.is_none() {
            if self.shared.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        match &state.over {
            Some(Ok(())) => Ok(()),
            Some(Err(unsent)) => Err(unsent.clone()),
            None => Err(Unsent { metrics: state.unsent(), why: state.why.clone() }),
        }
    }
}

impl State {
    /// Removes the first `n` values of the queue.
    fn leave(&mut self, n: usize) {
        self.gone += self.queue.drain(..n).count() as u64;
    }

    fn unsent(&self) -> u64 {
        self.lost + self.queue.len() as u64
    }
}

struct Sender {
    shared: Arc<Shared>,
    client: Client,
    about: About,
    of: Option<Arc<Sweep>>,
    /// The MLflow id, once it exists.
    run: Option<String>,
    said: bool,
}

impl Sender {
    fn work(&mut self) {
        let mut pause = RETRY_DELAYS.0;
        loop {
            match self.next() {
                Ok(true) => return self.over(Ok(())),
                Ok(false) => pause = RETRY_DELAYS.0,
                Err(wrong) => {
                    let mut state = self.shared.state.lock();
                    state.why = wrong.why().to_string();
                    let never = matches!(wrong, RequestError::Refused(_)) && self.run.is_none();
                    let late = state.end.is_some_and(|(_, _, until)| Instant::now() >= until);
                    if !self.said && !never {
                        self.said = true;
                        if self.of.as_ref().is_none_or(|s| s.says()) {
                            let why = wrong.why();
                            state
                                .notes
                                .push(format!("warning: {why}; it is tried again until the run's end"));
                        }
                    }
                    if never || late {
                        let unsent = Unsent { metrics: state.unsent(), why: state.why.clone() };
                        drop(state);
                        return self.over(Err(unsent));
                    }
                    let ending = state.end.is_some();
                    let wait = if ending { RETRY_DELAY_AT_END } else { pause };
                    // The end of the run cuts the pause short; new values do not.
                    let until = Instant::now() + wait;
                    while state.end.is_some() == ending
                        && !self.shared.changed.wait_until(&mut state, until).timed_out()
                    {
                    }
                    pause = (pause * 2).min(RETRY_DELAYS.1);
                }
            }
        }
    }

    /// Sends the next request, if any; returns whether that was the end.
    fn next(&mut self) -> Result<bool, RequestError> {
        let Some(run) = &self.run else {
            self.run = Some(self.begin()?);
            return Ok(false);
        };
        let (metrics, gone, end) = {
            let mut state = self.shared.state.lock();
            while state.queue.is_empty() && state.end.is_none() {
                self.shared.changed.wait(&mut state);
            }
            (state.queue.iter().take(METRICS).cloned().collect::<Vec<_>>(), state.gone, state.end)
        };
        let most = self.most();
        if metrics.is_empty() {
            let Some((status, wall, _)) = end else { return Ok(false) };
            let tag = self.shared.state.lock().tags.front().cloned();
            if let Some((key, value)) = tag {
                match self.client.tag(run, &key, &value, most) {
                    Err(RequestError::Later(why)) => return Err(RequestError::Later(why)),
                    // What is refused once is refused again.
                    Err(RequestError::Refused(_)) | Ok(()) => {}
                }
                self.shared.state.lock().tags.pop_front();
                return Ok(false);
            }
            return self.client.update(run, status, Some(wall), most).map(|()| true);
        }
        let refused = match self.client.metrics(run, &metrics, most) {
            Ok(_) => None,
            // The server would refuse these values again; other values may pass.
            Err(RequestError::Refused(why)) => Some(why),
            Err(later) => return Err(later),
        };
        let mut state = self.shared.state.lock();
        // New values may have displaced some in the meantime.
        let here = metrics.len().saturating_sub((state.gone - gone) as usize);
        state.leave(here);
        if let Some(why) = refused {
            if state.lost == 0 {
                state.notes.push(format!("warning: {why}"));
            }
            state.lost += here as u64;
            state.why = why;
        }
        Ok(false)
    }

    fn begin(&self) -> Result<String, RequestError> {
        let mut about = self.about.clone();
        if let Some(sweep) = &self.of {
            about.tags.push((PARENT.into(), sweep.run(self.most())?));
        }
        let run = self.client.begin(&about, self.most())?.id;
        match self.client.params(&run, &about.params, self.most()) {
            Err(RequestError::Refused(why)) => self.shared.state.lock().notes.push(format!("warning: {why}")),
            other => other?,
        }
        Ok(run)
    }

    /// The timeout of a request: at the end, the remaining time.
    fn most(&self) -> Duration {
        let end = self.shared.state.lock().end;
        let left = end.map_or(END_TIMEOUT, |(_, _, until)| until.saturating_duration_since(Instant::now()));
        left.max(Duration::from_millis(1))
    }

    fn over(&self, how: Result<(), Unsent>) {
        let mut state = self.shared.state.lock();
        state.queue = VecDeque::new();
        // Refused values are missing, whatever the other requests achieved.
        let how = match how {
            Ok(()) if state.lost > 0 => Err(Unsent { metrics: state.lost, why: state.why.clone() }),
            other => other,
        };
        if let Err(unsent) = &how {
            state.lost = unsent.metrics;
        }
        state.over = Some(how);
        self.shared.changed.notify_all();
        if let Some(sweep) = &self.of {
            sweep.ended(state.over.as_ref().is_some_and(Result::is_err));
        }
    }
}
