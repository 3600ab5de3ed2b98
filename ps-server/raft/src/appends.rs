//! Pipelined appends to a follower: several are in flight at once, so that the throughput does not depend on the
//! link's latency.
//!
//! There is one stream per follower of a group, over a lane for bulk, else over HTTP/2; answers come in the order
//! of the requests. The requests in flight are bounded in messages and bytes, and a follower reads all of them
//! without flow control, so no group's appends wait behind another's on a shared connection. If the follower
//! refuses a request, or the stream ends, everything behind it is void: openraft asks the follower for the end of
//! its log, and sends from there.

use super::{
    lane,
    network::{Answers, CallError, Connection, ERROR_DELAY, unreachable},
    types::{LogId, Types},
    wire,
};
use futures::{Stream, StreamExt, future::ready, stream};
use openraft::raft::{AppendEntriesRequest, AppendEntriesResponse, StreamAppendResult};
use paraft_common::Payload;
use paraft_lanes::LaneError;
use paraft_proto::{Incoming, PeerCall, PeerReply, PeerRequest, WithBulk, services};
use paraft_tls::Wire;
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

/// Messages in flight. Each takes what has been proposed meanwhile, up to 1 MiB: small entries still share
/// messages.
const MAX_MESSAGES: usize = 16;
/// Payload bytes in flight: 40 ms at 400 MB/s. A follower may hold as much per group in memory before its log takes
/// it.
const MAX_BYTES: usize = 16 << 20;

/// A follower that owes an answer for this long counts as unreachable. A megabyte on a slow link takes longer than
/// a heartbeat's timeout.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// An idle stream of appends ends after this long: an idle server keeps none open.
const IDLE_TIMEOUT: Duration = Duration::from_secs(2);
/// A stream that starts with this many payload bytes uses a lane. For less, a connection of its own would cost more
/// than it saves: streams start and end with every leader and every change of members.
const LANE_BYTES: usize = 16 << 10;
/// Interval of the checks for both.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The requests in flight to a follower.
struct InFlight<S> {
    /// The source of requests; `None`: no more.
    requests: Option<S>,
    sent: VecDeque<SentRequest>,
    bytes: usize,
    /// Payload bytes of the largest request so far.
    largest: usize,
    /// When the last answer came, or the first of these requests was sent.
    progress: Instant,
    waker: Option<Waker>,
}

struct SentRequest {
    prev: Option<LogId>,
    last: Option<LogId>,
    bytes: usize,
}

/// The requests as messages; polled by the connection that sends them.
pub(super) struct RequestStream<S> {
    under_way: Arc<Mutex<InFlight<S>>>,
    /// The message without header and payloads.
    head: PeerRequest,
}

/// The consumer of the answers. Dropping it ends the requests.
pub(super) struct AnswerReader<S> {
    under_way: Arc<Mutex<InFlight<S>>>,
}

/// Splits requests into the messages to send, with this head, and the consumer of their answers.
pub(super) fn pipeline<S>(requests: S, head: PeerRequest) -> (RequestStream<S>, AnswerReader<S>) {
    let under_way = Arc::new(Mutex::new(InFlight {
        requests: Some(requests),
        sent: VecDeque::new(),
        bytes: 0,
        largest: 0,
        progress: Instant::now(),
        waker: None,
    }));
    (RequestStream { under_way: under_way.clone(), head }, AnswerReader { under_way })
}

impl<S> Stream for RequestStream<S>
where
    S: Stream<Item = AppendEntriesRequest<Types>> + Unpin,
{
    type Item = WithBulk<PeerRequest>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let mut u = this.under_way.lock();
        u.waker = Some(cx.waker().clone());
        let full = u.sent.len() >= MAX_MESSAGES || u.bytes >= MAX_BYTES;
        let Some(requests) = &mut u.requests else { return Poll::Ready(None) };
        if full {
            return Poll::Pending;
        }
        let Some(request) = std::task::ready!(requests.poll_next_unpin(cx)) else {
            u.requests = None;
            return Poll::Ready(None);
        };
        let bulk = wire::payloads(&request.entries);
        let header = match wire::encode(&request) {
            Ok(header) => header,
            Err(e) => {
                tracing::error!(error = %e, "an append cannot be sent");
                u.requests = None;
                return Poll::Ready(None);
            }
        };
        let bytes = bulk.iter().map(Payload::len).sum();
        let prev = request.prev_log_id;
        let last = request.entries.last().map(|e| e.log_id).or(prev);
        if u.sent.is_empty() {
            u.progress = Instant::now();
        }
        u.sent.push_back(SentRequest { prev, last, bytes });
        u.bytes += bytes;
        u.largest = u.largest.max(bytes);
        Poll::Ready(Some(WithBulk { message: PeerRequest { header, ..this.head.clone() }, bulk }))
    }
}

impl<S> AnswerReader<S> {
    /// Interprets the answer to the oldest request; `None`: there is no request that it could answer.
    pub fn answer(&self, answer: AppendEntriesResponse<Types>) -> Option<StreamAppendResult<Types>> {
        let mut u = self.under_way.lock();
        let sent = u.sent.pop_front()?;
        u.bytes -= sent.bytes;
        u.progress = Instant::now();
        let waker = u.waker.take();
        drop(u);
        if let Some(waker) = waker {
            waker.wake();
        }
        // An append without a previous entry cannot conflict: the answer is not to this request.
        if answer.is_conflict() && sent.prev.is_none() {
            return None;
        }
        Some(answer.into_stream_result(sent.prev, sent.last))
    }

    /// Whether every request has its answer.
    pub fn is_complete(&self) -> bool {
        self.under_way.lock().sent.is_empty()
    }

    /// Whether its requests are large enough for a lane.
    fn has_bulk(&self) -> bool {
        self.under_way.lock().largest >= LANE_BYTES
    }

    /// Returns a check for the end: no more requests come, and every one has its answer.
    fn is_over(&self) -> impl Fn() -> bool + Send + use<S>
    where
        S: Send + 'static,
    {
        let under_way = self.under_way.clone();
        move || {
            let u = under_way.lock();
            u.requests.is_none() && u.sent.is_empty()
        }
    }

    /// Whether a request is in flight, and the time since the last progress.
    pub fn since(&self) -> (bool, Duration) {
        let u = self.under_way.lock();
        (!u.sent.is_empty(), u.progress.elapsed())
    }

    /// Ends the requests; those in flight are answered. It takes effect at once: openraft's next call must not find
    /// a stream that still takes its requests.
    pub fn close(&self) {
        let mut u = self.under_way.lock();
        let (requests, waker) = (u.requests.take(), u.waker.take());
        drop(u);
        drop(requests);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<S> Drop for AnswerReader<S> {
    fn drop(&mut self) {
        self.close();
    }
}

impl Connection {
    /// Opens a stream of appends: over a lane if the first has bulk, else over HTTP/2; such a stream ends when bulk
    /// comes.
    pub(super) async fn appends(
        &mut self,
        first: AppendEntriesRequest<Types>,
        behind: impl Stream<Item = AppendEntriesRequest<Types>> + Send + Unpin + 'static,
    ) -> Result<Answers<'static>, CallError> {
        let address = self.address();
        let bulk: usize = wire::payloads(&first.entries).iter().map(Payload::len).sum();
        let tries = bulk >= LANE_BYTES && self.peers.speaks_lanes(&address);
        let lane = if tries { self.lane(&address).await? } else { None };
        let requests = stream::once(ready(first)).chain(behind);
        let (outgoing, answered) = pipeline(requests, self.head(PeerCall::Append));
        let replies = match lane {
            Some(socket) => lane::carry(socket, outgoing, answered.is_over()),
            None => self.over_http(&address, outgoing, tries).await?,
        };
        let moves = !tries && self.peers.speaks_lanes(&address);
        let answers = stream::unfold(Some((replies, answered)), move |open| async move {
            let (mut replies, answered) = open?;
            if moves && answered.has_bulk() {
                answered.close();
            }
            match next_answer(&mut replies, &answered).await {
                Ok(None) => None,
                // A refusal is the last answer: everything sent after it is void.
                Ok(Some(refusal @ Err(_))) => Some((Ok(refusal), None)),
                Ok(Some(answer)) => Some((Ok(answer), Some((replies, answered)))),
                Err(e) => {
                    tokio::time::sleep(ERROR_DELAY).await;
                    Some((Err(unreachable(e)), None))
                }
            }
        });
        Ok(answers.boxed())
    }

    /// A lane to the follower; `None`: the follower supports none.
    async fn lane(&mut self, address: &str) -> Result<Option<Wire>, CallError> {
        match lane::dial(address, self.peers.access()).await {
            Ok(socket) => {
                self.silent = false;
                Ok(Some(socket))
            }
            Err(LaneError::NoLanes) => Ok(None),
            // A middlebox may drop an unknown protocol.
            Err(LaneError::Silent(_)) if std::mem::replace(&mut self.silent, true) => Ok(None),
            Err(e) => {
                tokio::time::sleep(ERROR_DELAY).await;
                Err(CallError::Setup(e.to_string()))
            }
        }
    }

    /// As a lane, over HTTP/2; `tried`: a lane failed, so a middlebox may pass HTTP only.
    async fn over_http(
        &mut self,
        address: &str,
        requests: impl Stream<Item = WithBulk<PeerRequest>> + Send + Unpin + 'static,
        tried: bool,
    ) -> Result<Incoming<PeerReply>, CallError> {
        let channel = self.peers.channel(address, true).map_err(CallError::Setup)?;
        match tokio::time::timeout(ANSWER_TIMEOUT, services::peer_appends(&channel, requests)).await {
            Ok(Ok(replies)) => {
                if tried {
                    self.peers.speaks_http_alone(address);
                }
                Ok(replies)
            }
            Ok(Err(status)) => {
                tokio::time::sleep(ERROR_DELAY).await;
                Err(CallError::Status(status))
            }
            Err(_) => Err(CallError::Timeout(ANSWER_TIMEOUT)),
        }
    }
}

/// The next answer of a follower; `None`: the stream has ended, with everything answered.
async fn next_answer<S>(
    replies: &mut Incoming<PeerReply>,
    answered: &AnswerReader<S>,
) -> Result<Option<StreamAppendResult<Types>>, CallError> {
    let reply = loop {
        if let Ok(reply) = tokio::time::timeout(CHECK_INTERVAL, replies.message()).await {
            break reply.map_err(CallError::Status)?;
        }
        match answered.since() {
            (true, since) if since > ANSWER_TIMEOUT => return Err(CallError::Timeout(ANSWER_TIMEOUT)),
            (false, since) if since > IDLE_TIMEOUT => answered.close(),
            _ => {}
        }
    };
    let unasked = || CallError::Setup("an answer to nothing".into());
    match reply {
        Some(reply) => {
            let answer = wire::decode(&reply.message.header)?;
            answered.answer(answer).ok_or_else(unasked).map(Some)
        }
        None if answered.is_complete() => Ok(None),
        None => Err(CallError::Setup("the stream ended before its answers".into())),
    }
}

#[cfg(test)]
#[path = "appends_tests.rs"]
mod tests;
