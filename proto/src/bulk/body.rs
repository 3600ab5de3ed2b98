//! Messages with bulk as bodies of HTTP/2 requests and responses.

use super::{Bulk, WithBulk, decode::Inbox, encode::Outbox};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream::BoxStream};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header};
use http_body::{Body as _, Frame};
use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tonic::{Code, Status, body::Body, transport::Channel};
use tower::Service;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// Headers and small messages that are ready at the same time share a frame, up to this many bytes.
const SHARED_FRAME: usize = 16 << 10;

/// The outgoing messages of a stream.
struct Outgoing<S> {
    messages: S,
    out: Outbox,
    end: End,
    /// A response ends with its status.
    trailers: bool,
}

enum End {
    /// More messages may follow.
    Open,
    /// No message follows; ready ones go out first.
    Due(Status),
    Said,
}

impl<S> Outgoing<S> {
    fn new(messages: S, trailers: bool) -> Self {
        Self { messages, out: Outbox::default(), end: End::Open, trailers }
    }
}

impl<S, M> http_body::Body for Outgoing<S>
where
    S: Stream<Item = Result<WithBulk<M>, Status>> + Unpin,
    M: Bulk,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let mut waits = false;
        while matches!(this.end, End::Open) && !waits {
            if this.out.has_ready() || this.out.open_bytes() >= SHARED_FRAME {
                break;
            }
            match this.messages.poll_next_unpin(cx) {
                Poll::Ready(Some(Ok(m))) => this.out.put(&m),
                Poll::Ready(Some(Err(status))) => this.end = End::Due(status),
                Poll::Ready(None) => this.end = End::Due(Status::new(Code::Ok, "")),
                Poll::Pending => waits = true,
            }
        }
        if let Some(piece) = this.out.pop() {
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        match std::mem::replace(&mut this.end, End::Said) {
            End::Open => {
                this.end = End::Open;
                Poll::Pending
            }
            End::Due(status) if this.trailers => {
                let mut trailers = HeaderMap::new();
                let added = status.add_header(&mut trailers);
                Poll::Ready(Some(added.map(|()| Frame::trailers(trailers))))
            }
            End::Due(status) if status.code() != Code::Ok => Poll::Ready(Some(Err(status))),
            End::Due(_) | End::Said => Poll::Ready(None),
        }
    }
}

/// Sends a request with these messages and returns the messages of its response. `path` names service and
/// method.
///
/// # Errors
/// The server's error, or why it could not be reached.
pub async fn call<Q, A, S>(
    channel: &Channel,
    path: &'static str,
    messages: S,
    limit: usize,
) -> Result<Incoming<A>, Status>
where
    Q: Bulk,
    A: Bulk,
    S: Stream<Item = WithBulk<Q>> + Send + Unpin + 'static,
{
    let mut request = Request::new(Body::new(Outgoing::new(messages.map(Ok), false)));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = Uri::from_static(path);
    *request.version_mut() = Version::HTTP_2;
    request.headers_mut().insert(header::TE, HeaderValue::from_static("trailers"));
    request.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    let failed = |e: tonic::transport::Error| Status::unavailable(innermost(&e));
    let mut channel = channel.clone();
    poll_fn(|cx| channel.poll_ready(cx)).await.map_err(failed)?;
    let response = channel.call(request).await.map_err(failed)?;
    if let Some(status) = Status::from_header_map(response.headers()).filter(|s| s.code() != Code::Ok) {
        return Err(status);
    }
    if response.status() != StatusCode::OK {
        return Err(Status::unavailable(format!("it answered with HTTP status {}", response.status())));
    }
    Ok(Incoming::new(response.into_body(), limit))
}

/// The innermost cause: "transport error" alone helps no reader.
fn innermost(e: &dyn std::error::Error) -> String {
    let mut at = e;
    while let Some(next) = at.source() {
        at = next;
    }
    at.to_string()
}

/// A response with these messages; it ends with the stream, or with its first error.
pub fn respond<M, S>(messages: S) -> Response<Body>
where
    M: Bulk,
    S: Stream<Item = Result<WithBulk<M>, Status>> + Send + Unpin + 'static,
{
    let mut response = Response::new(Body::new(Outgoing::new(messages, true)));
    response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    response
}

/// Incoming messages. Dropping a future of [`Self::message`] loses nothing.
pub struct Incoming<M> {
    from: From<M>,
    over: bool,
}

enum From<M> {
    Body(Body, Inbox),
    Other(BoxStream<'static, Result<WithBulk<M>, Status>>),
}

impl<M: Bulk> Incoming<M> {
    /// The messages of a body, each of at most `limit` bytes.
    pub fn new(body: Body, limit: usize) -> Self {
        Self { from: From::Body(body, Inbox::new(limit)), over: false }
    }

    /// Messages from another transport.
    pub fn of(messages: impl Stream<Item = Result<WithBulk<M>, Status>> + Send + 'static) -> Self {
        Self { from: From::Other(messages.boxed()), over: false }
    }

    /// The next message; `None` at the end.
    ///
    /// # Errors
    /// The peer's final status, or what is wrong with its bytes; nothing follows an error.
    pub async fn message(&mut self) -> Result<Option<WithBulk<M>>, Status> {
        self.next().await.transpose()
    }

    /// The only message, and the end after it. (Dropping a stream before its end resets it; HTTP/2 takes many
    /// resets for an attack, and closes the connection.)
    ///
    /// # Errors
    /// As [`Self::message`]; also if there is no message, or a second one.
    pub async fn only(mut self) -> Result<WithBulk<M>, Status> {
        let message = self.message().await?.ok_or_else(|| Status::invalid_argument("no message"))?;
        match self.message().await? {
            None => Ok(message),
            Some(_) => Err(Status::invalid_argument("more than one message")),
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<WithBulk<M>, Status>>> {
        let refused = |e: super::decode::BulkError| Some(Err(Status::invalid_argument(e.to_string())));
        while !self.over {
            let (body, inbox) = match &mut self.from {
                From::Body(body, inbox) => (body, inbox),
                From::Other(messages) => {
                    let next = ready!(messages.poll_next_unpin(cx));
                    self.over = !matches!(next, Some(Ok(_)));
                    return Poll::Ready(next);
                }
            };
            match inbox.message() {
                Ok(Some(m)) => return Poll::Ready(Some(Ok(m))),
                Ok(None) => {}
                Err(e) => {
                    self.over = true;
                    return Poll::Ready(refused(e));
                }
            }
            match ready!(Pin::new(body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => inbox.put(data),
                    Err(frame) => {
                        let status = frame.trailers_ref().and_then(Status::from_header_map);
                        if let Some(status) = status.filter(|s| s.code() != Code::Ok) {
                            self.over = true;
                            return Poll::Ready(Some(Err(status)));
                        }
                    }
                },
                Some(Err(status)) => {
                    self.over = true;
                    return Poll::Ready(Some(Err(status)));
                }
                None => {
                    self.over = true;
                    if !inbox.is_empty() {
                        return Poll::Ready(refused(super::decode::BulkError::CutShort));
                    }
                }
            }
        }
        Poll::Ready(None)
    }
}

impl<M: Bulk> Stream for Incoming<M> {
    type Item = Result<WithBulk<M>, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll(cx)
    }
}
