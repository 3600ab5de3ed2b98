//! A socket that is counted, that must begin to speak in time, and that can be closed from elsewhere.

use super::Visitor;
use std::{
    future::Future,
    io::{self, ErrorKind, IoSlice},
    pin::Pin,
    sync::atomic::Ordering::Relaxed,
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Sleep,
};
use tonic::transport::server::Connected;

/// HTTP/2's preface; the shortest request of HTTP/1.1 is longer.
const PREFACE_BYTES: usize = 24;

/// A connection of the table; it leaves the table when it is dropped.
pub struct Guarded<S> {
    socket: S,
    visitor: Visitor,
    /// Until it has begun to speak: the bytes that are missing, and until when they may come.
    silent: Option<(usize, Pin<Box<Sleep>>)>,
}

impl<S> Guarded<S> {
    pub(super) fn new(socket: S, visitor: Visitor) -> Self {
        let limit = visitor.connections.preface;
        let silent = Some((PREFACE_BYTES, Box::pin(tokio::time::sleep(limit))));
        Self { socket, visitor, silent }
    }

    /// An error where it must go. Whoever polls it is woken when that becomes so.
    fn stays(&self, cx: &Context<'_>) -> io::Result<()> {
        self.visitor.held.waker.register(cx.waker());
        match self.visitor.is_shed() {
            true => Err(io::Error::new(ErrorKind::ConnectionAborted, "closed to make room for another")),
            false => Ok(()),
        }
    }

    fn speaks(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let Some((_, limit)) = &mut self.silent else { return Ok(()) };
        if limit.as_mut().poll(cx).is_pending() {
            return Ok(());
        }
        self.visitor.connections.silent.fetch_add(1, Relaxed);
        Err(io::Error::new(ErrorKind::TimedOut, "it did not begin to speak in time"))
    }

    fn heard(&mut self, bytes: usize) {
        let Some((missing, _)) = &mut self.silent else { return };
        *missing = missing.saturating_sub(bytes);
        if *missing == 0 {
            self.silent = None;
        }
    }
}

impl<S> Drop for Guarded<S> {
    fn drop(&mut self) {
        self.visitor.connections.closed(self.visitor.held.id);
    }
}

impl<S> Connected for Guarded<S> {
    type ConnectInfo = Visitor;

    fn connect_info(&self) -> Visitor {
        self.visitor.clone()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        this.stays(cx)?;
        let before = buf.filled().len();
        if let Poll::Ready(read) = Pin::new(&mut this.socket).poll_read(cx, buf) {
            this.heard(buf.filled().len() - before);
            return Poll::Ready(read);
        }
        // Only now: what has arrived in time counts, whoever was busy meanwhile.
        this.speaks(cx)?;
        Poll::Pending
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.stays(cx)?;
        Pin::new(&mut self.socket).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stays(cx)?;
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // One that must go is closed without waiting for what its reader does not take.
        self.stays(cx)?;
        ready!(Pin::new(&mut self.socket).poll_shutdown(cx))?;
        Poll::Ready(Ok(()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stays(cx)?;
        Pin::new(&mut self.socket).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }
}
