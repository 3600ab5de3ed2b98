//! A socket that is counted, has a timeout for its first bytes, and can be closed from outside.

use super::{Lane, Visitor, lanes::LaneSocket, place::Place};
use paraft_lanes::Purpose;
use std::{
    future::Future,
    io::{self, ErrorKind, IoSlice},
    pin::Pin,
    sync::atomic::Ordering::Relaxed,
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf},
    time::Sleep,
};
use tonic::transport::server::Connected;

/// HTTP/2's preface; the shortest request of HTTP/1.1 is longer.
const PREFACE_BYTES: usize = 24;

/// A connection of the table; it leaves the table when it is dropped.
pub struct GuardedSocket<S> {
    socket: S,
    place: Place,
    /// Until its first bytes have arrived: how many are missing, and the deadline.
    silent: Option<(usize, Pin<Box<Sleep>>)>,
    /// The bytes that were read to detect the protocol, and how many of them were read again.
    begun: ([u8; PREFACE_BYTES], usize),
}

impl<S> GuardedSocket<S> {
    pub(super) fn new(socket: S, visitor: Visitor) -> Self {
        Self::at(socket, Place(visitor))
    }

    pub(super) fn at(socket: S, place: Place) -> Self {
        let limit = place.0.connections.preface;
        let silent = Some((PREFACE_BYTES, Box::pin(tokio::time::sleep(limit))));
        Self { socket, place, silent, begun: ([0; PREFACE_BYTES], PREFACE_BYTES) }
    }

    pub(super) fn apart(self) -> (S, Place) {
        (self.socket, self.place)
    }

    pub(super) fn visitor(&self) -> Visitor {
        self.place.0.clone()
    }

    fn stays(&self, cx: &Context<'_>) -> io::Result<()> {
        self.place.stays(cx)
    }

    fn speaks(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let Some((_, limit)) = &mut self.silent else { return Ok(()) };
        if limit.as_mut().poll(cx).is_pending() {
            return Ok(());
        }
        self.place.0.connections.silent.fetch_add(1, Relaxed);
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

impl<S: AsyncRead + AsyncWrite + Unpin> GuardedSocket<S> {
    /// Waits for its first bytes. `Err`: it asks for a lane; `None`: it has ended, or must.
    pub(super) async fn begins(mut self) -> Option<Result<Self, Lane>>
    where
        S: LaneSocket,
    {
        let mut first = [0; PREFACE_BYTES];
        self.read_exact(&mut first).await.ok()?;
        let Some(purpose) = Purpose::of(&first) else {
            self.begun = (first, 0);
            return Some(Ok(self));
        };
        Some(Err(Lane { purpose, halves: self.socket.halves().ok()?, place: self.place }))
    }
}

impl<S> Connected for GuardedSocket<S> {
    type ConnectInfo = Visitor;

    fn connect_info(&self) -> Visitor {
        self.place.0.clone()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for GuardedSocket<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let (begun, again) = &mut this.begun;
        if let rest @ [_, ..] = &begun[*again..] {
            let n = rest.len().min(buf.remaining());
            buf.put_slice(&rest[..n]);
            *again += n;
            return Poll::Ready(Ok(()));
        }
        this.stays(cx)?;
        let before = buf.filled().len();
        if let Poll::Ready(read) = Pin::new(&mut this.socket).poll_read(cx, buf) {
            this.heard(buf.filled().len() - before);
            return Poll::Ready(read);
        }
        // Only now: bytes that arrived in time count, even if this task was busy meanwhile.
        this.speaks(cx)?;
        Poll::Pending
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for GuardedSocket<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.stays(cx)?;
        Pin::new(&mut self.socket).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stays(cx)?;
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A connection that must close does not wait for a reader that does not read.
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
