//! The answers to the page's requests.

use super::{ENDED, Shared, listener::From};
use crate::{act::Act, facts, record::Recorded, runs};
use axum::{
    body::Bytes,
    extract::{ConnectInfo, State},
    http::{HeaderMap, Method, StatusCode, Uri, header},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures::{Stream, StreamExt, stream};
use serde::Serialize;
use serde_json::json;
use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};
use tokio::sync::broadcast;

/// The maximal number of pages.
const MAX_PAGES: usize = 64;
/// The interval of keep-alive messages.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(1);

/// The answer to any request.
pub(super) async fn answer(
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
        (Method::GET, "record") => match shared.refuses(&headers, from, "look") {
            None => record(&shared, uri.query().unwrap_or_default()).await,
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

/// The page's script: one function, so that its names are not those of the charts' scripts.
const SCRIPT: &str = concat!(
    "(() => {\n\"use strict\";\n",
    include_str!("../../page/facts.js"),
    include_str!("../../page/acts.js"),
    include_str!("../../page/charts.js"),
    include_str!("../../page/records.js"),
    include_str!("../../page/fleet.js"),
    include_str!("../../page/job.js"),
    include_str!("../../page/sweep.js"),
    include_str!("../../page/runs.js"),
    include_str!("../../page/view.js"),
    include_str!("../../page/stream.js"),
    "})();\n",
);

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
            include_str!("../../page/live.html"),
            include_str!("../../page/live.css"),
            SCRIPT,
        ),
    )
        .into_response()
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
    let rest = stream::unfold(Some((shared, news)), |open| async move {
        let (shared, mut news) = open?;
        match news.recv().await {
            Ok((kind, said)) => {
                let continues = (kind != ENDED).then_some((shared, news));
                Some((Ok(Event::default().event(kind).data(said)), continues))
            }
            Err(broadcast::error::RecvError::Lagged(_)) => {
                let (all, news) = shared.all();
                Some((Ok(Event::default().event("all").data(all)), Some((shared, news))))
            }
            Err(broadcast::error::RecvError::Closed) => None,
        }
    });
    first.chain(rest)
}

/// The number after `name=` in a query.
fn number(query: &str, name: &str) -> Option<u32> {
    query.split('&').find_map(|p| p.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}

/// The last log lines of a worker (`job=NUMBER&worker=NUMBER`), from the leader of shard 0.
async fn log(shared: &Shared, query: &str) -> Response {
    let (Some(job), Some(worker)) = (number(query, "job"), number(query, "worker")) else {
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

/// The record of a job (`job=NUMBER`), if it is on this host.
async fn record(shared: &Shared, query: &str) -> Response {
    let job = number(query, "job");
    let dir = {
        let history = shared.history.lock();
        let job = history.last().jobs.iter().find(|j| Some(j.id) == job);
        job.and_then(|job| shared.here.launched(job))
    };
    match dir {
        None => StatusCode::NO_CONTENT.into_response(),
        Some(dir) => read(shared, move || text(&Recorded::read(&dir)?)).await,
    }
}

/// The runs with records on this host; with `name=NAME` the curves of one run.
async fn recorded(shared: &Shared, query: &str) -> Response {
    let Some(folder) = shared.here.runs.clone() else { return StatusCode::NO_CONTENT.into_response() };
    let name = query.strip_prefix("name=").map(decoded);
    let own = shared.here.run.clone();
    let look = move || match name {
        None => text(&runs::list(&folder, own.as_deref())),
        Some(name) => text(&runs::one(&folder, &name)?),
    };
    read(shared, look).await
}

/// JSON of what was read.
fn text(read: &impl Serialize) -> Result<String, String> {
    serde_json::to_string(read).map_err(|e| e.to_string())
}

/// The answer of a function that reads files; one at a time.
async fn read(shared: &Shared, look: impl FnOnce() -> Result<String, String> + Send + 'static) -> Response {
    let Ok(one) = shared.reads.clone().acquire_owned().await else {
        return StatusCode::NO_CONTENT.into_response();
    };
    let read = move || {
        // The read runs to its end even if the page has closed.
        let _one = one;
        look()
    };
    match tokio::task::spawn_blocking(read).await {
        Ok(Ok(said)) => said.into_response(),
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

#[cfg(test)]
#[path = "answers_tests.rs"]
mod tests;
