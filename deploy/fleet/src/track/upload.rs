//! A run that goes to MLflow while it trains, by a thread of its own.
//!
//! ```text
//!  points ─▶ queue, bounded ─▶ a request, tried again with pauses ─▶ MLflow
//!                   └─ the run's end: tried for 10 s more, then what is left is counted
//! ```
//!
//! Training never waits for it.

use super::{
    mlflow::{About, Client, METRICS, Metric, Status, Wrong},
    sweep::Sweep,
};
use parking_lot::{Condvar, Mutex};
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

/// So many numbers wait at most, a few megabytes: more than the longest run has lines for.
const MOST: usize = 100_000;
/// What is left at the run's end is tried for so long.
pub(super) const AT_END: Duration = Duration::from_secs(10);
/// The first pause before a request is tried again, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// The pause while the run's end waits.
const PAUSE_AT_END: Duration = Duration::from_millis(500);

/// What has not been sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsent {
    /// How many numbers.
    pub metrics: u64,
    /// Why not.
    pub why: String,
}

/// A run on its way to MLflow.
#[derive(Debug)]
pub struct Upload {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// The queue has something, the run has ended, or the thread has.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Metric>,
    /// How many have left the queue, whatever became of them.
    gone: u64,
    /// That nobody will send any more.
    lost: u64,
    /// How the run has ended, when, and until when that is tried.
    end: Option<(Status, f64, Instant)>,
    /// To be said to the user.
    notes: Vec<String>,
    /// Why the last request came to nothing.
    why: String,
    over: Option<Result<(), Unsent>>,
}

impl Upload {
    /// Begins to send; returns at once. Of a sweep's trial, below the sweep's own run.
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

    /// Gives it numbers to send. Where too many wait the oldest go.
    pub fn push(&self, metrics: impl IntoIterator<Item = Metric>) {
        let mut state = self.shared.state.lock();
        if state.over.is_some() {
            state.lost += metrics.into_iter().count() as u64;
            return;
        }
        state.queue.extend(metrics);
        let over = state.queue.len().saturating_sub(MOST);
        state.leave(over);
        state.lost += over as u64;
        self.shared.changed.notify_all();
    }

    /// What there is to be said to the user, once.
    pub fn notes(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.state.lock().notes)
    }

    /// The run has ended: what is left is sent, if it can be within [`AT_END`].
    pub fn end(&self, status: Status, wall: f64) {
        let mut state = self.shared.state.lock();
        state.end.get_or_insert((status, wall, Instant::now() + AT_END));
        self.shared.changed.notify_all();
    }

    /// After [`Self::end`]: waits for what it came to, no longer than that takes.
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
    /// The first of the queue go.
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
    /// Its id, as soon as it has one.
    run: Option<String>,
    said: bool,
}

impl Sender {
    fn work(&mut self) {
        let mut pause = PAUSE.0;
        loop {
            match self.next() {
                Ok(true) => return self.over(Ok(())),
                Ok(false) => pause = PAUSE.0,
                Err(wrong) => {
                    let mut state = self.shared.state.lock();
                    state.why = wrong.why().to_string();
                    let never = matches!(wrong, Wrong::Refused(_)) && self.run.is_none();
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
                    let wait = if ending { PAUSE_AT_END } else { pause };
                    // The end of the run cuts the pause short; more numbers do not.
                    let until = Instant::now() + wait;
                    while state.end.is_some() == ending
                        && !self.shared.changed.wait_until(&mut state, until).timed_out()
                    {
                    }
                    pause = (pause * 2).min(PAUSE.1);
                }
            }
        }
    }

    /// Sends what is next, when there is something; whether that was the end.
    fn next(&mut self) -> Result<bool, Wrong> {
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
            return self.client.update(run, status, Some(wall), most).map(|()| true);
        }
        let refused = match self.client.metrics(run, &metrics, most) {
            Ok(_) => None,
            // These will be refused again; others may not be.
            Err(Wrong::Refused(why)) => Some(why),
            Err(later) => return Err(later),
        };
        let mut state = self.shared.state.lock();
        // Some may have made room for others meanwhile.
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

    fn begin(&self) -> Result<String, Wrong> {
        let mut about = self.about.clone();
        if let Some(sweep) = &self.of {
            about.tags.push((super::PARENT.into(), sweep.run(self.most())?));
        }
        let run = self.client.begin(&about, self.most())?.id;
        match self.client.params(&run, &about.params, self.most()) {
            Err(Wrong::Refused(why)) => self.shared.state.lock().notes.push(format!("warning: {why}")),
            other => other?,
        }
        Ok(run)
    }

    /// What a request may take: what is left of the end's time.
    fn most(&self) -> Duration {
        let end = self.shared.state.lock().end;
        let left = end.map_or(AT_END, |(_, _, until)| until.saturating_duration_since(Instant::now()));
        left.max(Duration::from_millis(1))
    }

    fn over(&self, how: Result<(), Unsent>) {
        let mut state = self.shared.state.lock();
        state.queue = VecDeque::new();
        // Numbers that were refused are not there, however the rest went.
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
