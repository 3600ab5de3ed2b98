//! One reader that reads for many.
//!
//! ```text
//!  next(7) ─┐
//!  next(9) ─┼─▶ the task ──▶ Reader::next ──▶ one version for all who wait for it or an earlier one
//!  next(7) ─┘
//! ```

use super::{ReadError, Reader, Want, WholeVersion};
use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
};

/// How often the task looks whether anybody waits still.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Requests that wait for the task.
const MAX_WAITING: usize = 64;

/// How a version is held for those who asked for it.
pub trait Held: Send + Sync + Sized + 'static {
    /// Holds a version.
    ///
    /// # Errors
    /// There is no memory for it.
    fn of(version: WholeVersion) -> io::Result<Self>;

    /// The version.
    fn version(&self) -> &WholeVersion;
}

impl Held for WholeVersion {
    fn of(version: WholeVersion) -> io::Result<Self> {
        Ok(version)
    }

    fn version(&self) -> &WholeVersion {
        self
    }
}

/// A version, and a time when it was the newest, if that is known.
pub type Fetched<H> = Result<(Arc<H>, Option<Instant>), ReadError>;

/// How far a job is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct News {
    /// Its newest version.
    pub reached: u64,
    /// All its workers have finished: there will be no later version.
    pub over: bool,
}

/// A reader that reads for many. It ends when this is dropped.
#[derive(Debug)]
pub struct Fetcher<H> {
    asks: mpsc::Sender<Asked<H>>,
    news: watch::Receiver<News>,
    task: JoinHandle<()>,
}

impl<H> Drop for Fetcher<H> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Somebody wants a version.
#[derive(Debug)]
struct Asked<H> {
    step: u64,
    /// One that was the newest at this time, or later.
    since: Option<Instant>,
    answer: oneshot::Sender<Fetched<H>>,
}

impl<H> Asked<H> {
    /// A version serves this request if it was the newest at a time.
    fn accepts(&self, step: u64, at: Option<Instant>) -> bool {
        self.step <= step && self.since.is_none_or(|since| at.is_some_and(|at| at >= since))
    }
}

impl<H: Held> Fetcher<H> {
    /// Reads by this reader. After each `timeout` without a version it asks how far the job is; if no server answers, all who
    /// wait get an error.
    pub fn begin(reader: Reader, timeout: Duration) -> Self {
        let (asks, asked) = mpsc::channel(MAX_WAITING);
        let (tell, news) = watch::channel(News::default());
        let task = tokio::spawn(Task { reader, timeout, tell, waiting: Vec::new(), last: None }.run(asked));
        Self { asks, news, task }
    }

    /// The newest version, of this step or a later one, and never from before this call unless `since` accepts an older one: a
    /// time at which it was the newest.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub async fn next(&self, step: u64, since: Option<Instant>) -> Fetched<H> {
        let (answer, answered) = oneshot::channel();
        let ended = || ReadError::Refused("the reader that reads for all has ended".into());
        self.asks.send(Asked { step, since, answer }).await.map_err(|_| ended())?;
        answered.await.unwrap_or_else(|_| Err(ended()))
    }

    /// How far the job was when that was heard last.
    pub fn news(&self) -> News {
        *self.news.borrow()
    }
}

struct Task<H> {
    reader: Reader,
    timeout: Duration,
    tell: watch::Sender<News>,
    waiting: Vec<Asked<H>>,
    /// The last version, and the time when it was the newest, if that is known.
    last: Option<(Arc<H>, Option<Instant>)>,
}

/// What is asked of the servers: for all who wait, what the most modest of them accepts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Goal {
    From(u64),
    /// The newest, as a majority confirms.
    Newest,
}

impl<H: Held> Task<H> {
    /// Reads versions for all who have asked by then, never from before they asked, unless they accept an older one.
    async fn run(mut self, mut asked: mpsc::Receiver<Asked<H>>) {
        loop {
            while let Ok(one) = asked.try_recv() {
                self.waiting.push(one);
            }
            self.waiting.retain(|one| !one.answer.is_closed());
            if let Some((held, Some(at))) = self.last.clone() {
                let accepts =
                    |one: &Asked<H>| one.since.is_some() && one.accepts(held.version().step, Some(at));
                self.answer(&held, Some(at), accepts);
            }
            let Some(step) = self.waiting.iter().map(|one| one.step).min() else {
                match asked.recv().await {
                    Some(one) => self.waiting.push(one),
                    None => return,
                }
                continue;
            };
            let newest = self.waiting.iter().any(|one| one.since.is_some());
            let goal = if newest { Goal::Newest } else { Goal::From(step) };
            let began = Instant::now();
            let Some((came, later)) = self.read(goal, &mut asked).await else { return };
            match came {
                None => {}
                Some(Ok(version)) => match hold::<H>(version).await {
                    Ok(held) => {
                        let version = held.version();
                        self.reader.has_now(version);
                        let (reached, over) = (version.reached, version.is_last);
                        self.tell.send_modify(|news| {
                            *news = News { reached: news.reached.max(reached), over: news.over || over };
                        });
                        // That it was the newest is known only if the leader was asked.
                        let (step, at) = (version.step, (goal == Goal::Newest).then_some(began));
                        self.answer(&held, at, |one| one.accepts(step, at));
                        self.last = Some((held, at));
                    }
                    Err(error) => self.fail(&error),
                },
                // It has not come yet, or the servers have gone.
                Some(Err(ReadError::Timeout(_))) => match self.reader.news().await {
                    Ok(news) => drop(self.tell.send_replace(news)),
                    Err(why) => self.fail(&ReadError::Timeout(why)),
                },
                Some(Err(error)) => self.fail(&error),
            }
            self.waiting.extend(later);
        }
    }

    /// Reads, until all who wait have gone, or one comes that need not wait for what the others wait for. `None`: nobody will ask any
    /// more.
    async fn read(
        &mut self,
        goal: Goal,
        asked: &mut mpsc::Receiver<Asked<H>>,
    ) -> Option<(Option<Result<WholeVersion, ReadError>>, Vec<Asked<H>>)> {
        let Self { reader, waiting, timeout, .. } = self;
        let timeout = *timeout;
        let reads = async {
            match goal {
                Goal::From(step) => reader.next(Want::AtLeast(step), timeout).await,
                Goal::Newest => reader.next_confirmed(timeout).await,
            }
        };
        let (mut reads, mut later) = (std::pin::pin!(reads), Vec::new());
        loop {
            tokio::select! {
                came = &mut reads => return Some((Some(came), later)),
                one = asked.recv() => {
                    let one = one?;
                    // The version that is waited for may be far off, and this one there.
                    let sooner = matches!(goal, Goal::From(step) if one.step < step || one.since.is_some());
                    later.push(one);
                    if sooner {
                        return Some((None, later));
                    }
                }
                () = tokio::time::sleep(LOOK_INTERVAL) => {
                    if waiting.iter().all(|one| one.answer.is_closed()) {
                        return Some((None, later));
                    }
                }
            }
        }
    }

    fn answer(&mut self, held: &Arc<H>, at: Option<Instant>, accepts: impl Fn(&Asked<H>) -> bool) {
        for one in self.waiting.extract_if(.., |one| accepts(one)) {
            let _ = one.answer.send(Ok((held.clone(), at)));
        }
    }

    fn fail(&mut self, error: &ReadError) {
        for one in self.waiting.drain(..) {
            let _ = one.answer.send(Err(error.clone()));
        }
    }
}

async fn hold<H: Held>(version: WholeVersion) -> Result<Arc<H>, ReadError> {
    let held = tokio::task::spawn_blocking(move || H::of(version)).await;
    let held = held.unwrap_or_else(|e| Err(io::Error::other(e)));
    held.map(Arc::new).map_err(|e| ReadError::Refused(format!("no memory for a version: {e}")))
}
