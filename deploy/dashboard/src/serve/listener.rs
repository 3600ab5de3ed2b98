//! A listener with a bounded number of connections.

use axum::{
    extract::connect_info::Connected,
    serve::{IncomingStream, Listener},
};
use std::{
    collections::VecDeque,
    convert::Infallible,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::Sleep,
};

/// The maximal number of connections.
const MAX_CONNECTIONS: usize = 256;
/// Connections that may be open without the token: a new one closes the oldest.
const MAX_STRANGERS: usize = 128;
/// A browser must read some of its data within this time.
const TAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The client of a connection.
#[derive(Clone, Debug)]
pub struct From {
    /// Its address.
    pub address: SocketAddr,
    /// The client has sent the token.
    pub is_known: Arc<AtomicBool>,
}

impl Connected<IncomingStream<'_, BoundedListener>> for From {
    fn connect_info(stream: IncomingStream<'_, BoundedListener>) -> Self {
        Self { address: *stream.remote_addr(), is_known: stream.io().is_known.clone() }
    }
}

/// A listener with a bounded number of connections; further clients wait. The bound protects the file
/// descriptors of the training.
pub struct BoundedListener {
    listener: TcpListener,
    room: Arc<Semaphore>,
    /// Connections without the token, the oldest first, each with a sender that closes it when dropped.
    strangers: VecDeque<(Arc<AtomicBool>, oneshot::Sender<Infallible>)>,
}

impl BoundedListener {
    /// Bounds the connections of this listener.
    pub fn new(listener: TcpListener) -> Self {
        Self { listener, room: Arc::new(Semaphore::new(MAX_CONNECTIONS)), strangers: VecDeque::new() }
    }
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
pub struct BoundedStream {
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

#[cfg(test)]
#[path = "listener_tests.rs"]
mod tests;
