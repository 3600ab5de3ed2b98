//! Answers in flight to clients. A client that reads nothing of an answer must not keep it in this server's
//! memory. Its connection is closed after [`TAKE_TIMEOUT`], and everything that waits there is freed, in
//! whatever buffer it is.
//!
//! An answer waits for its client from the moment at which the transport gets a part of it until the
//! transport asks for the next part (it asks when the client has made room), or has sent the last. An answer
//! that waits for this server, as a worker's stream does between two replies, does not wait for a client.

use super::Visitor;
use bytes::Bytes;
use futures::Stream;
use http_body::{Frame, SizeHint};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    pin::Pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::{Status, body::Body};

/// A client must read a part of its answer within this time. A part has at most 1 MiB, so this is a network
/// of 100 KiB/s.
pub const TAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum interval of checks of all answers.
const STALL_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of one certificate's requests (status, weights to read) whose answers are not read to the
/// end.
pub const MAX_OPEN_ANSWERS: usize = 512;

/// All answers of a server.
pub(super) struct Answers {
    began: Instant,
    last: AtomicU64,
    open: Mutex<HashMap<u64, Weak<Answer>>>,
    /// Remaining requests of each certificate.
    questions: Mutex<HashMap<String, Weak<Semaphore>>>,
    /// Number of closed connections.
    stalled: AtomicU64,
}

/// One answer.
pub struct Answer {
    id: u64,
    visitor: Visitor,
    /// When the transport got a part without asking for the next yet, in milliseconds since the server began,
    /// plus one; 0: it has asked.
    waits: AtomicU64,
    /// Counts among its certificate's requests.
    _question: Option<OwnedSemaphorePermit>,
}

impl Default for Answers {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            last: AtomicU64::new(0),
            open: Mutex::default(),
            questions: Mutex::default(),
            stalled: AtomicU64::new(0),
        }
    }
}

impl Answers {
    /// Number of connections that were closed because their client read nothing.
    pub fn stalled(&self) -> u64 {
        self.stalled.load(Relaxed)
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_millis() as u64 + 1
    }

    /// Closes the connections of answers of which nothing was read for this long. Returns the time until the next may
    /// be due: an answer that does not wait for its client yet is due after the whole timeout.
    pub fn close_stalled(&self, timeout: Duration) -> Duration {
        let (now, timeout) = (self.now(), timeout.as_millis() as u64);
        let mut oldest = now;
        // Not dropped under the lock, since their drop takes it.
        let open: Vec<_> = self.open.lock().values().filter_map(Weak::upgrade).collect();
        for answer in open {
            let since = answer.waits.load(Relaxed);
            if since == 0 {
                continue;
            }
            if now.saturating_sub(since) < timeout {
                oldest = oldest.min(since);
            } else if answer.visitor.close() {
                self.stalled.fetch_add(1, Relaxed);
                let (from, rights) = (answer.visitor.origin(), answer.visitor.rights());
                tracing::warn!(%from, %rights, seconds = timeout / 1000, "closed: the client read nothing of its answer");
            }
        }
        Duration::from_millis((oldest + timeout).saturating_sub(now)).max(STALL_CHECK_INTERVAL)
    }
}

impl Answers {
    async fn question(&self, of: String) -> Option<OwnedSemaphorePermit> {
        self.questions_of(of).acquire_owned().await.ok()
    }

    fn questions_of(&self, of: String) -> Arc<Semaphore> {
        let mut questions = self.questions.lock();
        questions.get(&of).and_then(Weak::upgrade).unwrap_or_else(|| {
            questions.retain(|_, left| left.strong_count() > 0);
            let left = Arc::new(Semaphore::new(MAX_OPEN_ANSWERS));
            questions.insert(of, Arc::downgrade(&left));
            left
        })
    }
}

impl Visitor {
    /// Starts the answer to a request of this connection.
    pub(crate) fn answer(&self) -> Arc<Answer> {
        self.begin(None)
    }

    /// As [`Self::answer`], to one of the concurrent requests of its certificate. A request beyond
    /// [`MAX_OPEN_ANSWERS`] waits, and only its own stream waits with it.
    pub(crate) async fn answer_request(&self) -> Arc<Answer> {
        let question = self.connections.answers.question(self.rights().to_string()).await;
        self.begin(question)
    }

    fn begin(&self, question: Option<OwnedSemaphorePermit>) -> Arc<Answer> {
        let answers = &self.connections.answers;
        let id = answers.last.fetch_add(1, Relaxed);
        let waits = AtomicU64::new(0);
        let answer = Arc::new(Answer { id, visitor: self.clone(), waits, _question: question });
        answers.open.lock().insert(id, Arc::downgrade(&answer));
        answer
    }
}

impl Answer {
    fn gives<T>(&self, part: &Poll<Option<T>>) {
        let waits = match part {
            Poll::Ready(Some(_)) => self.visitor.connections.answers.now(),
            Poll::Ready(None) | Poll::Pending => 0,
        };
        self.waits.store(waits, Relaxed);
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.visitor.connections.answers.open.lock().remove(&self.id);
    }
}

/// The body of a response, watched until its last byte is sent.
pub(crate) struct WatchedBody {
    body: Body,
    answer: Arc<Answer>,
}

impl WatchedBody {
    /// Watches the body of a response.
    pub fn of(body: Body, answer: Arc<Answer>) -> Body {
        Body::new(Self { body, answer })
    }
}

impl http_body::Body for WatchedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        self.answer.gives(&frame);
        let answer = &self.answer;
        frame.map_ok(|frame| {
            // The transport may keep the bytes longer than this body: the answer ends when they are dropped.
            frame.map_data(|bytes| Bytes::from_owner(SentBytes { bytes, _answer: answer.clone() }))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

struct SentBytes {
    bytes: Bytes,
    _answer: Arc<Answer>,
}

impl AsRef<[u8]> for SentBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The messages of a lane, watched in the same way.
pub(crate) fn watched<S: Stream + Unpin>(
    mut messages: S,
    visitor: &Visitor,
) -> impl Stream<Item = S::Item> + Unpin {
    let answer = visitor.answer();
    futures::stream::poll_fn(move |cx| {
        let message = Pin::new(&mut messages).poll_next(cx);
        answer.gives(&message);
        message
    })
}

#[cfg(test)]
#[path = "answers_tests.rs"]
mod tests;
