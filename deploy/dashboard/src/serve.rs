//! The HTTP server of the page. It works under any path, so a proxy may add a prefix: all links are
//! relative.

use crate::{act::Act, facts, facts::Facts, history::History, local::LocalControl, runs};
use axum::{
    Router,
    body::Bytes,
    extract::{ConnectInfo, DefaultBodyLimit, State, connect_info::Connected},
    http::{HeaderMap, Method, StatusCode, Uri, header},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
    serve::{IncomingStream, Listener},
};
use futures::{Stream, StreamExt, stream};
use parking_lot::Mutex;
use serde_json::json;
use std::{
    collections::VecDeque,
    convert::Infallible,
    fs::File,
    io::{self, Read},
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Notify, OwnedSemaphorePermit, Semaphore, broadcast, oneshot, watch},
    time::Sleep,
};

/// The environment variable with the token. All servers of a fleet share it, so a page that loses one
/// server continues with another.
pub const TOKEN: &str = "PARAFT_DASHBOARD_TOKEN";

/// The poll interval while a page is open, and while no page is open.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// A browser must read some of its data within this time.
const TAKE_TIMEOUT: Duration = Duration::from_secs(10);
const IDLE_POLL_INTERVAL: Duration = Duration::from_secs(5);
/// The interval of keep-alive messages.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(1);
/// After this many unanswered polls, the fleet counts as gone.
const MAX_MISSED_POLLS: u32 = 2;
/// Updates that a page may lag; beyond that it receives the full state again.
const MAX_LAG: usize = 16;
/// The maximal number of pages, and of connections.
const MAX_PAGES: usize = 64;
const MAX_CONNECTIONS: usize = 256;
/// Connections that may be open without the token: a new one closes the oldest.
const MAX_STRANGERS: usize = 128;
/// Characters of a generated token.
const TOKEN_LENGTH: usize = 32;
/// Maximal bytes of a request's body.
const MAX_BODY_BYTES: usize = 4096;
/// At most this many refusals are logged in this time.
const REFUSAL_LOG_LIMIT: (u32, Duration) = (10, Duration::from_secs(10));

/// A client with this token may view and control the fleet.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// A token with this text.
    ///
    /// # Errors
    ///
    /// The text is easy to guess, or is not valid in a URL.
    pub fn new(text: &str) -> Result<Self, String> {
        match text.len() >= 16 && text.chars().all(|c| c.is_ascii_alphanumeric()) {
            true => Ok(Self(text.into())),
            false => Err(format!("{TOKEN}: write at least 16 letters and digits")),
        }
    }

    /// The token from the environment, if there is one.
    pub fn given() -> Option<Result<Self, String>> {
        std::env::var(TOKEN).ok().filter(|t| !t.is_empty()).map(|given| Self::new(&given))
    }

    /// A random token.
    ///
    /// # Errors
    ///
    /// The system has no random numbers.
    pub fn draw() -> io::Result<Self> {
        let mut bytes = [0u8; TOKEN_LENGTH / 2];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self(bytes.iter().map(|b| format!("{b:02x}")).collect()))
    }

    /// The link to the page at host:port. Browsers do not send the part after `#`, so no server or
    /// proxy sees the token.
    pub fn link(&self, address: &str) -> String {
        format!("http://{address}/#token={}", self.0)
    }

    /// The token as it is in the link.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Compares in constant time.
    fn is(&self, shown: &str) -> bool {
        let differ = self.0.bytes().zip(shown.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
        self.0.len() == shown.len() && differ == 0
    }
}

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

struct Shared {
    sweep: Option<watch::Receiver<serde_json::Value>>,
    here: LocalControl,
    /// One record is read at a time, because a training on this host needs the cores.
    reads: Arc<Semaphore>,
    token: Token,
    history: Mutex<History>,
    /// The number of logged refusals since this time.
    logged: Mutex<(u32, Instant)>,
    /// The updates of each poll.
    news: broadcast::Sender<Arc<str>>,
    /// The given servers; empty for a channel of snapshots.
    listed: Vec<String>,
    /// Notified when a page opens.
    wakes: Notify,
}

/// Serves the page until `shutdown` resolves.
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
    let app = Router::new().fallback(answer).layer(DefaultBodyLimit::max(MAX_BODY_BYTES)).with_state(shared);
    let app = app.into_make_service_with_connect_info::<From>();
    let listener = BoundedListener {
        listener,
        room: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        strangers: VecDeque::new(),
    };
    let served = axum::serve(listener, app).with_graceful_shutdown(shutdown).await;
    looks.abort();
    served
}

/// The client of a connection.
#[derive(Clone, Debug)]
struct From {
    address: SocketAddr,
    /// The client has sent the token.
    is_known: Arc<AtomicBool>,
}

impl Connected<IncomingStream<'_, BoundedListener>> for From {
    fn connect_info(stream: IncomingStream<'_, BoundedListener>) -> Self {
        Self { address: *stream.remote_addr(), is_known: stream.io().is_known.clone() }
    }
}

/// A listener with a bounded number of connections; further clients wait. The bound protects the file
/// descriptors of the training.
struct BoundedListener {
    listener: TcpListener,
    room: Arc<Semaphore>,
    /// Connections without the token, the oldest first, each with a sender that closes it when dropped.
    strangers: VecDeque<(Arc<AtomicBool>, oneshot::Sender<Infallible>)>,
}

impl Listener for BoundedListener {
    type Io = BoundedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (BoundedStream, SocketAddr) {
        let (stream, from) = Listener::accept(&mut self.listener).await;
        self.strangers.retain(|(is_known, closes)| !is_known.load(Relaxed) && !closes.is_closed());
        self.strangers.drain(..self.strangers.len().saturating_sub(MAX_STRANGERS - 1));
        let room = self.room.clone().acquire_owned().await.ok();
        let (is_known, (closes, closed)) = (Arc::new(AtomicBool::new(false)), oneshot::channel());
        self.strangers.push_back((is_known.clone(), closes));
        (BoundedStream { stream, is_known, closed, stalls: None, _room: room }, from)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection, with its permit.
struct BoundedStream {
    stream: TcpStream,
    is_known: Arc<AtomicBool>,
    closed: oneshot::Receiver<Infallible>,
    /// While the browser reads nothing: the deadline for its next read.
    stalls: Option<Pin<Box<Sleep>>>,
    _room: Option<OwnedSemaphorePermit>,
}

impl AsyncRead for BoundedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // A client that has sent the token stays; its close signal is no longer polled.
        if !self.is_known.load(Relaxed) && Pin::new(&mut self.closed).poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for BoundedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        if written.is_ready() {
            self.stalls = None;
            return written;
        }
        // A hung browser must not occupy a connection slot.
        let stalls = self.stalls.get_or_insert_with(|| Box::pin(tokio::time::sleep(TAKE_TIMEOUT)));
        stalls.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
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

async fn answer(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(from): ConnectInfo<From>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let from = &from;
    let what = uri.path().rsplit('/').next().unwrap_or_default();
    match (method, what) {
        (Method::GET, "" | "index.html") => page(),
        (Method::GET, "live") => match shared.refuses(&headers, from, "look") {
            None => live(&shared).into_response(),
            Some(refused) => refused,
        },
        (Method::GET, "sweep") => match shared.refuses(&headers, from, "look") {
            None => match &shared.sweep {
                Some(sweep) => sweep.borrow().to_string().into_response(),
                None => (StatusCode::NO_CONTENT, "").into_response(),
            },
            Some(refused) => refused,
        },
        (Method::GET, "log") => match shared.refuses(&headers, from, "look") {
            None => log(&shared, uri.query().unwrap_or_default()).await,
            Some(refused) => refused,
        },
        (Method::GET, "runs") => match shared.refuses(&headers, from, "look") {
            None => recorded(&shared, uri.query().unwrap_or_default()).await,
            Some(refused) => refused,
        },
        (Method::POST, "act") => match shared.refuses(&headers, from, "act") {
            None => act(&shared, from.address, &body).await,
            Some(refused) => refused,
        },
        (Method::GET, "favicon.ico") => StatusCode::NO_CONTENT.into_response(),
        _ => (StatusCode::NOT_FOUND, "there is nothing here").into_response(),
    }
}

fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src *; \
             frame-ancestors 'none'; form-action 'none'; base-uri 'none'",
        ),
    ];
    (
        headers,
        paraft_record::live_page(
            include_str!("../page/live.html"),
            include_str!("../page/live.css"),
            include_str!("../page/live.js"),
        ),
    )
        .into_response()
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
        said.into_iter().for_each(|said| _ = self.news.send(said.into()));
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
    fn all(&self) -> (Arc<str>, broadcast::Receiver<Arc<str>>) {
        let history = self.history.lock();
        let (curves, events) = (&history.curves, &history.events);
        let all = json!({ "facts": history.last(), "curves": curves, "events": events }).to_string();
        (all.into(), self.news.subscribe())
    }
}

fn live(shared: &Arc<Shared>) -> Response {
    if shared.news.receiver_count() >= MAX_PAGES {
        let why = format!("{MAX_PAGES} pages look at this server: close one, or look at another server");
        return (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    }
    // A page that receives nothing for some seconds knows that this server hangs.
    Sse::new(told(shared.clone())).keep_alive(KeepAlive::new().interval(KEEP_ALIVE_INTERVAL)).into_response()
}

fn told(shared: Arc<Shared>) -> impl Stream<Item = Result<Event, Infallible>> {
    let (all, news) = shared.all();
    shared.wakes.notify_one();
    let first = stream::iter([Ok(Event::default().event("all").data(all))]);
    let rest = stream::unfold((shared, news), |(shared, mut news)| async move {
        match news.recv().await {
            Ok(said) => Some((Ok(Event::default().event("news").data(said)), (shared, news))),
            Err(broadcast::error::RecvError::Lagged(_)) => {
                let (all, news) = shared.all();
                Some((Ok(Event::default().event("all").data(all)), (shared, news)))
            }
            Err(broadcast::error::RecvError::Closed) => None,
        }
    });
    first.chain(rest)
}

/// The last log lines of a worker (`job=NUMBER&worker=NUMBER`), from the leader of shard 0.
async fn log(shared: &Shared, query: &str) -> Response {
    let number = |name: &str| {
        query.split('&').find_map(|p| p.strip_prefix(name)?.strip_prefix('=')?.parse::<u32>().ok())
    };
    let (Some(job), Some(worker)) = (number("job"), number("worker")) else {
        return (StatusCode::BAD_REQUEST, "say job=NUMBER&worker=NUMBER").into_response();
    };
    let leads = {
        let history = shared.history.lock();
        let facts = history.last();
        let leader = facts.shards.iter().find(|s| (s.job, s.shard) == (job, 0)).and_then(|s| s.leader);
        facts.servers.iter().find(|s| Some(s.id) == leader).map(|s| s.address.clone())
    };
    match leads {
        None => (StatusCode::NOT_FOUND, format!("shard 0 of job {job} has no leader")).into_response(),
        Some(address) => match facts::logged(&address, job, worker).await {
            Ok(lines) => json!(lines).to_string().into_response(),
            Err(why) => (StatusCode::CONFLICT, why).into_response(),
        },
    }
}

/// Decodes a URL-encoded text.
fn decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

/// The runs with records on this host; with `name=NAME` the curves of one run.
async fn recorded(shared: &Shared, query: &str) -> Response {
    let Some(folder) = shared.here.runs.clone() else { return StatusCode::NO_CONTENT.into_response() };
    let Ok(one) = shared.reads.clone().acquire_owned().await else {
        return StatusCode::NO_CONTENT.into_response();
    };
    let name = query.strip_prefix("name=").map(decoded);
    let own = shared.here.run.clone();
    let read = move || {
        // The read runs to its end even if the page has closed.
        let _one = one;
        match name {
            None => Ok(json!(runs::list(&folder, own.as_deref()))),
            Some(name) => runs::curves(&folder, &name).map(|curves| json!(curves)),
        }
    };
    match tokio::task::spawn_blocking(read).await {
        Ok(Ok(said)) => said.to_string().into_response(),
        Ok(Err(why)) => (StatusCode::NOT_FOUND, why).into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, e.to_string()).into_response(),
    }
}

async fn act(shared: &Shared, from: SocketAddr, body: &[u8]) -> Response {
    let act: Act = match serde_json::from_slice(body) {
        Ok(act) => act,
        Err(e) => return (StatusCode::BAD_REQUEST, format!("that is no action: {e}")).into_response(),
    };
    let facts = shared.now().await;
    if facts.simulated {
        return (StatusCode::CONFLICT, "this fleet is simulated: nothing can be done to it").into_response();
    }
    let done = act.carry_out(&facts, &shared.here).await;
    let what = match &done {
        Ok(done) => done.clone(),
        Err(why) => format!("not done: {why}"),
    };
    tracing::info!(%from, ?act, "on the dashboard: {what}");
    shared.history.lock().acted(format!("{what} (asked from {})", from.ip()));
    match done {
        Ok(done) => done.into_response(),
        Err(why) => (StatusCode::CONFLICT, why).into_response(),
    }
}
