//! The page over HTTP. It is served under whatever path, so that it works behind a proxy that adds a prefix; all that it asks for is
//! relative.

use crate::{act::Act, facts, facts::Facts, here::Here, history::History, runs};
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

/// The variable with the token: the same for all servers of a fleet, so that a page that has lost one server goes on with another.
pub const TOKEN: &str = "PARAFT_DASHBOARD_TOKEN";

/// Between two looks while somebody looks at the page, and while nobody does.
const SOON: Duration = Duration::from_millis(500);
/// A browser takes something of what it is sent within this time.
const TAKE_TIMEOUT: Duration = Duration::from_secs(10);
const SELDOM: Duration = Duration::from_secs(5);
/// A page that has nothing to hear hears so.
const ALIVE: Duration = Duration::from_secs(1);
/// After so many looks at which nobody answers nobody is there.
const UNHEARD: u32 = 2;
/// Looks that a page may be behind; then it is told everything anew.
const BEHIND: usize = 16;
/// Pages at a time, and connections.
const PAGES: usize = 64;
const CONNECTIONS: usize = 256;
/// Of those so many may not have shown the token yet: the oldest goes for another.
const STRANGERS: usize = 128;
/// Letters and digits of a token that is drawn.
const LENGTH: usize = 32;
/// Bytes of what a page asks for.
const ASKED: usize = 4096;
/// Of those who are refused so many are logged in so long.
const LOGGED: (u32, Duration) = (10, Duration::from_secs(10));

/// Who knows it may look and act.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// This one.
    ///
    /// # Errors
    /// It could be guessed, or stands in no address.
    pub fn new(text: &str) -> Result<Self, String> {
        match text.len() >= 16 && text.chars().all(|c| c.is_ascii_alphanumeric()) {
            true => Ok(Self(text.into())),
            false => Err(format!("{TOKEN}: write at least 16 letters and digits")),
        }
    }

    /// That of the environment, where there is one.
    pub fn given() -> Option<Result<Self, String>> {
        std::env::var(TOKEN).ok().filter(|t| !t.is_empty()).map(|given| Self::new(&given))
    }

    /// One that nobody guesses.
    ///
    /// # Errors
    /// There are no random numbers.
    pub fn draw() -> io::Result<Self> {
        let mut bytes = [0u8; LENGTH / 2];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self(bytes.iter().map(|b| format!("{b:02x}")).collect()))
    }

    /// What to open in a browser, for the page at host:port: no server and no proxy sees what is behind `#`.
    pub fn link(&self, address: &str) -> String {
        format!("http://{address}/#token={}", self.0)
    }

    /// As it stands in the page's address.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Takes as long for a wrong one as for the right one.
    fn is(&self, shown: &str) -> bool {
        let differ = self.0.bytes().zip(shown.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
        self.0.len() == shown.len() && differ == 0
    }
}

/// Who says what the fleet is.
#[derive(Debug)]
pub enum Source {
    /// Servers of it, host:port, which are asked; the others are found.
    Servers(Vec<String>),
    /// Who puts facts together itself; as long as it does.
    Facts(watch::Receiver<Facts>),
}

/// What is served.
#[derive(Debug)]
pub struct Options {
    /// Whose fleet it is of.
    pub source: Source,
    /// See [`Token`].
    pub token: Token,
    /// Of a sweep on it, the trials so far, as `paraft_record::sweep::data` has them.
    pub sweep: Option<watch::Receiver<serde_json::Value>>,
    /// What its own host has of the fleet.
    pub here: Here,
}

struct Shared {
    sweep: Option<watch::Receiver<serde_json::Value>>,
    here: Here,
    /// One record is read at a time, however long: who trains here has the cores.
    reads: Arc<Semaphore>,
    token: Token,
    history: Mutex<History>,
    /// How many were refused since then.
    logged: Mutex<(u32, Instant)>,
    /// What each look has brought.
    news: broadcast::Sender<Arc<str>>,
    /// The servers that were given; none of who puts facts together itself.
    listed: Vec<String>,
    /// Somebody has come who looks.
    wakes: Notify,
}

/// Serves the page until `shutdown` resolves.
///
/// # Errors
/// The socket's.
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
        news: broadcast::channel(BEHIND).0,
        listed,
        wakes: Notify::new(),
    });
    let looks = match options.source {
        Source::Servers(_) => tokio::spawn(look(shared.clone())),
        Source::Facts(told) => tokio::spawn(hear(told, shared.clone())),
    };
    let app = Router::new().fallback(answer).layer(DefaultBodyLimit::max(ASKED)).with_state(shared);
    let app = app.into_make_service_with_connect_info::<From>();
    let listener =
        Bounded { listener, room: Arc::new(Semaphore::new(CONNECTIONS)), strangers: VecDeque::new() };
    let served = axum::serve(listener, app).with_graceful_shutdown(shutdown).await;
    looks.abort();
    served
}

/// Whose connection it is.
#[derive(Clone, Debug)]
struct From {
    address: SocketAddr,
    /// It has shown the token.
    is_known: Arc<AtomicBool>,
}

impl Connected<IncomingStream<'_, Bounded>> for From {
    fn connect_info(stream: IncomingStream<'_, Bounded>) -> Self {
        Self { address: *stream.remote_addr(), is_known: stream.io().is_known.clone() }
    }
}

/// Lets so many connections in; the others wait. They are not those of the training, whose descriptors these would take.
struct Bounded {
    listener: TcpListener,
    room: Arc<Semaphore>,
    /// Who has not shown the token, the oldest first, and what closes its connection when it is dropped.
    strangers: VecDeque<(Arc<AtomicBool>, oneshot::Sender<Infallible>)>,
}

impl Listener for Bounded {
    type Io = Held;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Held, SocketAddr) {
        let (stream, from) = Listener::accept(&mut self.listener).await;
        self.strangers.retain(|(is_known, closes)| !is_known.load(Relaxed) && !closes.is_closed());
        self.strangers.drain(..self.strangers.len().saturating_sub(STRANGERS - 1));
        let room = self.room.clone().acquire_owned().await.ok();
        let (is_known, (closes, closed)) = (Arc::new(AtomicBool::new(false)), oneshot::channel());
        self.strangers.push_back((is_known.clone(), closes));
        (Held { stream, is_known, closed, stalls: None, _room: room }, from)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection, and its place among them.
struct Held {
    stream: TcpStream,
    is_known: Arc<AtomicBool>,
    closed: oneshot::Receiver<Infallible>,
    /// While its browser takes nothing: until when it must take something.
    stalls: Option<Pin<Box<Sleep>>>,
    _room: Option<OwnedSemaphorePermit>,
}

impl AsyncRead for Held {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Whoever is known may stay, and nobody waits for it any more.
        if !self.is_known.load(Relaxed) && Pin::new(&mut self.closed).poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Held {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        if written.is_ready() {
            self.stalls = None;
            return written;
        }
        // A browser that hangs must not keep the place of another one.
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

/// Looks at the fleet again and again.
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
                // Perhaps those answer that were given.
                shared.add_listed(&mut known);
                // A fault may be why, which can be taken back.
                let last = shared.history.lock().last().clone();
                let faults = last.faults.clone();
                let mut facts = last.of_nobody();
                shared.here.add(&mut facts);
                unheard += 1;
                if facts.faults != faults || unheard == UNHEARD {
                    shared.sees(facts);
                }
            }
        }
        let doubts = (1..UNHEARD).contains(&unheard);
        let pause = if doubts || shared.news.receiver_count() > 0 { SOON } else { SELDOM };
        tokio::time::sleep(SOON / 5).await;
        tokio::select! {
            () = tokio::time::sleep(pause.saturating_sub(began.elapsed())) => {}
            () = shared.wakes.notified() => {}
        }
    }
}

/// Takes what it is told, as it comes.
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
    /// The fleet is like this now; who looks is told.
    fn sees(&self, facts: Facts) {
        let said = {
            let mut history = self.history.lock();
            let news = history.see(facts);
            // Who looks from here on is told all, under the same lock.
            let looks = self.news.receiver_count() > 0;
            looks.then(|| json!({ "facts": history.last(), "news": news }).to_string())
        };
        said.into_iter().for_each(|said| _ = self.news.send(said.into()));
    }

    /// What is said to who does not know the token, or asks from a page of another site.
    fn refuses(&self, headers: &HeaderMap, from: &From, what: &str) -> Option<Response> {
        let text = |name| headers.get(name).and_then(|v: &header::HeaderValue| v.to_str().ok());
        // A page of another site: a browser says so. A proxy says by which name it was asked.
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
        if logged.1.elapsed() >= LOGGED.1 {
            *logged = (0, Instant::now());
        }
        logged.0 += 1;
        if logged.0 <= LOGGED.0 {
            tracing::warn!(%from, what, "refused on the dashboard: {why}");
        }
        Some((StatusCode::FORBIDDEN, format!("refused: {why}")).into_response())
    }

    /// To the servers that are known those that were given.
    fn add_listed(&self, known: &mut Vec<String>) {
        let more: Vec<_> = self.listed.iter().filter(|a| !known.contains(a)).cloned().collect();
        known.extend(more);
    }

    /// The fleet as it is now: what was seen last may be of seconds ago, where nobody looks.
    async fn now(&self) -> Facts {
        let last = self.history.lock().last().clone();
        let is_new = paraft_host::clock::unix_ms().saturating_sub(last.at) < 2 * SOON.as_millis() as u64;
        if self.listed.is_empty() || is_new {
            return last;
        }
        let mut known = last.servers.iter().map(|s| s.address.clone()).collect();
        self.add_listed(&mut known);
        // Who knows nothing yet asks servers again that are slow to answer.
        let until = Instant::now() + SELDOM;
        loop {
            let now = facts::ask(&mut known).await;
            let knows_nothing = last.servers.is_empty() && Instant::now() < until;
            match now {
                Some(mut now) if !now.servers.is_empty() || last.servers.is_empty() && !knows_nothing => {
                    self.here.add(&mut now);
                    return now;
                }
                // Without a leader of the control group nobody knows more than was known.
                Some(_) | None if !knows_nothing => return last,
                Some(_) | None => tokio::time::sleep(SOON / 5).await,
            }
        }
    }

    /// All that is known, and what comes from here on.
    fn all(&self) -> (Arc<str>, broadcast::Receiver<Arc<str>>) {
        let history = self.history.lock();
        let (curves, events) = (&history.curves, &history.events);
        let all = json!({ "facts": history.last(), "curves": curves, "events": events }).to_string();
        (all.into(), self.news.subscribe())
    }
}

fn live(shared: &Arc<Shared>) -> Response {
    if shared.news.receiver_count() >= PAGES {
        let why = format!("{PAGES} pages look at this server: close one, or look at another server");
        return (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    }
    // Who hears nothing for some seconds knows that this server hangs.
    Sse::new(told(shared.clone())).keep_alive(KeepAlive::new().interval(ALIVE)).into_response()
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

/// What a worker of a job has logged last, `job=NUMBER&worker=NUMBER`: asked of the leader of shard 0, which it tells.
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

/// What a page has put into its address.
fn decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

/// The runs whose records lie here; with `name=NAME` the curves of one.
async fn recorded(shared: &Shared, query: &str) -> Response {
    let Some(folder) = shared.here.runs.clone() else { return StatusCode::NO_CONTENT.into_response() };
    let Ok(one) = shared.reads.clone().acquire_owned().await else {
        return StatusCode::NO_CONTENT.into_response();
    };
    let name = query.strip_prefix("name=").map(decoded);
    let own = shared.here.run.clone();
    let read = move || {
        // It is read to its end, also for a page that has gone.
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
