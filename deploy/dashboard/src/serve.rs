//! The HTTP server of the page. It works under any path, so a proxy may add a prefix: all links are
//! relative.

use crate::{
    facts,
    facts::Facts,
    history::History,
    local::{LocalControl, is_own},
    record::Recorded,
};
use answers::answer;
use axum::{
    Router,
    extract::DefaultBodyLimit,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use listener::{BoundedListener, From};
use parking_lot::Mutex;
use serde_json::json;
use std::{
    io,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};
use tokio::{
    net::TcpListener,
    sync::{Notify, Semaphore, broadcast, watch},
};

mod answers;
mod listener;
mod token;

pub use token::{TOKEN, Token};

/// The poll interval while a page is open, and while no page is open.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const IDLE_POLL_INTERVAL: Duration = Duration::from_secs(5);
/// After this many unanswered polls, the fleet counts as gone.
const MAX_MISSED_POLLS: u32 = 2;
/// Updates that a page may lag; beyond that it receives the full state again.
const MAX_LAG: usize = 16;
/// Maximal bytes of a request's body.
const MAX_BODY_BYTES: usize = 4096;
/// At most this many refusals are logged in this time.
const REFUSAL_LOG_LIMIT: (u32, Duration) = (10, Duration::from_secs(10));

/// The source of the fleet's state.
#[derive(Debug)]
pub enum Source {
    /// Addresses of servers, host:port; they name the others.
    Servers(Vec<String>),
    /// A channel of snapshots; the page ends with its sender.
    Facts(watch::Receiver<Facts>),
}

/// The options of the page.
#[derive(Debug)]
pub struct Options {
    /// The source of the fleet's state.
    pub source: Source,
    /// The token of the page.
    pub token: Token,
    /// The trials of a sweep on the fleet, as `paraft_record::sweep::data` returns them.
    pub sweep: Option<watch::Receiver<serde_json::Value>>,
    /// What this host controls of the fleet.
    pub here: LocalControl,
}

/// A message to all pages: its kind, and its JSON.
type Message = (&'static str, Arc<str>);

/// The kind of the last message. Its JSON has the record of the fleet's own run, if the run has ended.
const ENDED: &str = "ended";

/// What all pages share.
struct Shared {
    sweep: Option<watch::Receiver<serde_json::Value>>,
    here: LocalControl,
    /// One record is read at a time, because a training on this host needs the cores.
    reads: Arc<Semaphore>,
    token: Token,
    history: Mutex<History>,
    /// The number of logged refusals since this time.
    logged: Mutex<(u32, Instant)>,
    /// The updates of each poll, and the last message.
    news: broadcast::Sender<Message>,
    /// The given servers; empty for a channel of snapshots.
    listed: Vec<String>,
    /// Notified when a page opens.
    wakes: Notify,
}

/// Serves the page until `shutdown` resolves; then tells the open pages how the run has ended.
///
/// # Errors
///
/// The listener fails.
pub async fn serve(
    listener: TcpListener,
    options: Options,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let listed = match &options.source {
        Source::Servers(listed) => listed.clone(),
        Source::Facts(_) => Vec::new(),
    };
    let shared = Arc::new(Shared {
        sweep: options.sweep,
        here: options.here,
        reads: Arc::new(Semaphore::new(1)),
        token: options.token,
        history: Mutex::default(),
        logged: Mutex::new((0, Instant::now())),
        news: broadcast::channel(MAX_LAG).0,
        listed,
        wakes: Notify::new(),
    });
    let looks = match options.source {
        Source::Servers(_) => tokio::spawn(look(shared.clone())),
        Source::Facts(told) => tokio::spawn(hear(told, shared.clone())),
    };
    let ends = shared.clone();
    let shutdown = async move {
        shutdown.await;
        ends.say_end().await;
    };
    let app = Router::new().fallback(answer).layer(DefaultBodyLimit::max(MAX_BODY_BYTES)).with_state(shared);
    let app = app.into_make_service_with_connect_info::<From>();
    let served = axum::serve(BoundedListener::new(listener), app).with_graceful_shutdown(shutdown).await;
    looks.abort();
    served
}

/// Polls the fleet until shutdown.
async fn look(shared: Arc<Shared>) {
    let mut known = shared.listed.clone();
    let mut unheard = 0;
    loop {
        let began = Instant::now();
        match facts::ask(&mut known).await {
            Some(mut facts) => {
                unheard = 0;
                shared.here.add(&mut facts);
                shared.sees(facts);
            }
            None => {
                // The servers that were given may answer again.
                shared.add_listed(&mut known);
                // A fault may be the cause, and the page must be able to clear it.
                let last = shared.history.lock().last().clone();
                let faults = last.faults.clone();
                let mut facts = last.without_replies();
                shared.here.add(&mut facts);
                unheard += 1;
                if facts.faults != faults || unheard == MAX_MISSED_POLLS {
                    shared.sees(facts);
                }
            }
        }
        let doubts = (1..MAX_MISSED_POLLS).contains(&unheard);
        let pause =
            if doubts || shared.news.receiver_count() > 0 { POLL_INTERVAL } else { IDLE_POLL_INTERVAL };
        tokio::time::sleep(POLL_INTERVAL / 5).await;
        tokio::select! {
            () = tokio::time::sleep(pause.saturating_sub(began.elapsed())) => {}
            () = shared.wakes.notified() => {}
        }
    }
}

/// Forwards each snapshot to the pages.
async fn hear(mut told: watch::Receiver<Facts>, shared: Arc<Shared>) {
    while told.changed().await.is_ok() {
        let facts = told.borrow_and_update().clone();
        shared.sees(facts);
    }
}

impl Shared {
    /// Records the new state of the fleet and sends the changes to all pages.
    fn sees(&self, facts: Facts) {
        let said = {
            let mut history = self.history.lock();
            let news = history.see(facts);
            // A page that subscribes after this point receives the full state, under the same lock.
            let looks = self.news.receiver_count() > 0;
            looks.then(|| json!({ "facts": history.last(), "news": news }).to_string())
        };
        said.into_iter().for_each(|said| _ = self.news.send(("news", said.into())));
    }

    /// Ends all streams, with the record of the fleet's own run if that has ended.
    async fn say_end(&self) {
        if self.news.receiver_count() == 0 {
            return;
        }
        let own = self.history.lock().last().jobs.iter().find(|j| is_own(j)).map(|j| j.id);
        let record = match (own, self.here.run.clone()) {
            (Some(_), Some(run)) => tokio::task::spawn_blocking(move || Recorded::read(&run)).await.ok(),
            _ => None,
        };
        let ended = record.and_then(Result::ok).filter(Recorded::has_end);
        let said = json!({ "job": own, "record": ended }).to_string();
        _ = self.news.send((ENDED, said.into()));
    }

    /// The refusal for a client without the token, or for a request from another site's page.
    fn refuses(&self, headers: &HeaderMap, from: &From, what: &str) -> Option<Response> {
        let text = |name| headers.get(name).and_then(|v: &header::HeaderValue| v.to_str().ok());
        // Browsers name the page's site in `Origin`; a proxy names the requested host.
        let ours = [text(header::HOST), headers.get("x-forwarded-host").and_then(|v| v.to_str().ok())];
        let is_ours =
            |origin: &str| origin.split_once("://").is_some_and(|(_, host)| ours.contains(&Some(host)));
        let elsewhere = what == "act" && text(header::ORIGIN).is_some_and(|origin| !is_ours(origin));
        let shown = text(header::AUTHORIZATION).and_then(|v| v.strip_prefix("Bearer "));
        let why = match shown {
            _ if elsewhere => "it was asked by a page of another site",
            None => "it showed no token",
            Some(shown) if !self.token.is(shown) => "it showed a wrong token",
            Some(_) => {
                from.is_known.store(true, Relaxed);
                return None;
            }
        };
        let from = from.address;
        let mut logged = self.logged.lock();
        if logged.1.elapsed() >= REFUSAL_LOG_LIMIT.1 {
            *logged = (0, Instant::now());
        }
        logged.0 += 1;
        if logged.0 <= REFUSAL_LOG_LIMIT.0 {
            tracing::warn!(%from, what, "refused on the dashboard: {why}");
        }
        Some((StatusCode::FORBIDDEN, format!("refused: {why}")).into_response())
    }

    /// Adds the given servers to the known ones.
    fn add_listed(&self, known: &mut Vec<String>) {
        let more: Vec<_> = self.listed.iter().filter(|a| !known.contains(a)).cloned().collect();
        known.extend(more);
    }

    /// The current state of the fleet: without open pages, the last poll may be seconds old.
    async fn now(&self) -> Facts {
        let last = self.history.lock().last().clone();
        let is_new =
            paraft_host::clock::unix_ms().saturating_sub(last.at) < 2 * POLL_INTERVAL.as_millis() as u64;
        if self.listed.is_empty() || is_new {
            return last;
        }
        let mut known = last.servers.iter().map(|s| s.address.clone()).collect();
        self.add_listed(&mut known);
        // The first query retries servers that answer slowly.
        let until = Instant::now() + IDLE_POLL_INTERVAL;
        loop {
            let now = facts::ask(&mut known).await;
            let knows_nothing = last.servers.is_empty() && Instant::now() < until;
            match now {
                Some(mut now) if !now.servers.is_empty() || last.servers.is_empty() && !knows_nothing => {
                    self.here.add(&mut now);
                    return now;
                }
                // Without a leader of the control group, the last snapshot is the best known.
                Some(_) | None if !knows_nothing => return last,
                Some(_) | None => tokio::time::sleep(POLL_INTERVAL / 5).await,
            }
        }
    }

    /// The full state, and a subscription to later changes.
    fn all(&self) -> (Arc<str>, broadcast::Receiver<Message>) {
        let history = self.history.lock();
        let (curves, events) = (history.shown_curves(), &history.events);
        let all = json!({ "facts": history.last(), "curves": curves, "events": events }).to_string();
        (all.into(), self.news.subscribe())
    }
}
