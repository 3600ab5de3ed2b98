//! A TLS connection for tokio, whole or in two halves. The write half also writes from any thread, without
//! waiting.

use crate::{
    credentials::Credentials,
    error::TlsError,
    handshake::Handshake,
    incoming::Incoming,
    record::{Opener, Sealer},
    role::Rights,
    verify::Expected,
};
use parking_lot::Mutex;
use socket2::SockRef;
use std::{
    io::{self, ErrorKind, IoSlice},
    net::Shutdown,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

struct Inner {
    socket: TcpStream,
    sealer: Mutex<Sealer>,
}

impl Inner {
    fn try_send(&self) -> io::Result<()> {
        self.sealer.lock().out().send(|bytes| self.socket.try_write(bytes))
    }

    fn try_write(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        self.sealer.lock().write(bufs, |bytes| self.socket.try_write(bytes))
    }

    /// Changes to the next key, if the peer asks for it.
    fn renew(&self, asks: bool) -> io::Result<()> {
        if asks {
            self.sealer.lock().update(false)?;
            let _ = self.try_send(); // or with the next bytes
        }
        Ok(())
    }

    fn poll<T>(
        &self,
        cx: &mut Context<'_>,
        mut work: impl FnMut(&Self) -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        loop {
            match work(self) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => ready!(self.socket.poll_write_ready(cx))?,
                done => return Poll::Ready(done),
            }
        }
    }
}

fn poll_read(
    inner: &Inner,
    opener: &mut Opener,
    incoming: &mut Incoming,
    cx: &mut Context<'_>,
    buf: &mut ReadBuf<'_>,
) -> Poll<io::Result<()>> {
    if buf.remaining() == 0 {
        return Poll::Ready(Ok(()));
    }
    if incoming.give(&mut |said| put(buf, said)) > 0 {
        return Poll::Ready(Ok(()));
    }
    while !incoming.is_over() {
        if incoming.has_raw() {
            let (taken, asks) = incoming.open(opener, &mut |said| put(buf, said))?;
            inner.renew(asks)?;
            if taken > 0 || incoming.is_over() {
                break;
            }
        }
        // Memory that was never written would have to be cleared first.
        let room = buf.initialized().len() - buf.filled().len();
        let read = |room: &mut [u8]| inner.socket.try_read(room);
        let came = if incoming.reads_directly(room) {
            incoming.read_to(opener, buf.initialize_unfilled_to(room), read)
        } else {
            incoming.fill(read).map(|()| (0, false))
        };
        let (contents, asks) = match came {
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                ready!(inner.socket.poll_read_ready(cx))?;
                continue;
            }
            came => came?,
        };
        buf.advance(contents);
        inner.renew(asks)?;
        if contents > 0 {
            break;
        }
    }
    Poll::Ready(Ok(()))
}

/// Appends as much as there is room for; returns how much.
fn put(buf: &mut ReadBuf<'_>, said: &[u8]) -> usize {
    let n = said.len().min(buf.remaining());
    buf.put_slice(&said[..n]);
    n
}

/// A TLS connection. See the module.
pub struct Stream {
    inner: Arc<Inner>,
    opener: Opener,
    incoming: Incoming,
}

/// The read half.
pub struct ReadHalf {
    inner: Arc<Inner>,
    opener: Opener,
    incoming: Incoming,
}

/// The write half.
pub struct WriteHalf {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TLS over {:?}", self.inner.socket)
    }
}

impl std::fmt::Debug for ReadHalf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the read half of TLS over {:?}", self.inner.socket)
    }
}

impl std::fmt::Debug for WriteHalf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the written half of TLS over {:?}", self.inner.socket)
    }
}

/// A failed handshake: the reason, and the socket, which has carried the reason to the peer.
pub struct FailedHandshake {
    /// The reason.
    pub why: TlsError,
    /// Its last bytes may still be in flight.
    pub socket: TcpStream,
    /// What the peer sent, if it does not speak TLS.
    pub said: Vec<u8>,
}

impl Stream {
    /// Makes a TLS connection of a new socket, to `to`.
    ///
    /// # Errors
    /// One side refuses the other, or the socket fails.
    pub async fn dial(socket: TcpStream, credentials: &Credentials, to: &Expected) -> Result<Self, TlsError> {
        let handshake = Handshake::dials(credentials, to)?;
        let (stream, _) = Self::begin(socket, handshake).await.map_err(|f| f.why)?;
        Ok(stream)
    }

    /// Makes a TLS connection of an accepted socket, and returns the peer's rights. `http1`: if the peer asks
    /// for HTTP, it gets HTTP/1.1, not HTTP/2.
    ///
    /// # Errors
    /// As [`dial`](Self::dial); the peer received the reason.
    pub async fn accept(
        socket: TcpStream,
        credentials: &Credentials,
        from: &Expected,
        http1: bool,
    ) -> Result<(Self, Rights), FailedHandshake> {
        let handshake = match Handshake::accepts(credentials, from, http1) {
            Ok(handshake) => handshake,
            Err(why) => return Err(FailedHandshake { why, socket, said: Vec::new() }),
        };
        Self::begin(socket, handshake).await
    }

    async fn begin(socket: TcpStream, mut handshake: Handshake) -> Result<(Self, Rights), FailedHandshake> {
        let mut incoming = Incoming::default();
        let met = meet(&mut incoming, &socket, &mut handshake).await;
        match met.and_then(|rights| Ok((rights, handshake.over()?))) {
            Ok((rights, (sealer, opener))) => {
                let inner = Arc::new(Inner { socket, sealer: Mutex::new(sealer) });
                Ok((Self { inner, opener, incoming }, rights))
            }
            Err(why) => {
                let said = incoming.raw().to_vec();
                Err(FailedHandshake { why, socket, said })
            }
        }
    }

    /// Splits it into halves.
    pub fn into_split(self) -> (ReadHalf, WriteHalf) {
        let Self { inner, opener, incoming } = self;
        (ReadHalf { inner: inner.clone(), opener, incoming }, WriteHalf { inner })
    }
}

/// The handshake; returns the peer's rights.
async fn meet(
    incoming: &mut Incoming,
    socket: &TcpStream,
    handshake: &mut Handshake,
) -> Result<Rights, TlsError> {
    loop {
        let greeted = incoming.handshake_step(handshake);
        loop {
            match handshake.out.send(|bytes| socket.try_write(bytes)) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => socket.writable().await?,
                sent if greeted.is_ok() => break sent?,
                _ => break,
            }
        }
        if greeted? {
            return handshake.rights();
        }
        loop {
            match incoming.fill(|room| socket.try_read(room)) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => socket.readable().await?,
                filled => break filled?,
            }
        }
    }
}

impl WriteHalf {
    /// Takes as many bytes as there is room for, from any thread, without waiting. Taken bytes may wait for
    /// [`Self::try_send`].
    ///
    /// # Errors
    /// `WouldBlock`: earlier bytes have not gone out yet.
    pub fn try_write(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        self.inner.try_write(bufs)
    }

    /// Sends the taken bytes.
    ///
    /// # Errors
    /// `WouldBlock`: some are left.
    pub fn try_send(&self) -> io::Result<()> {
        self.inner.try_send()
    }

    /// Returns when there may be room.
    pub fn poll_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner.socket.poll_write_ready(cx)
    }
}

/// The peer sees the end at once, even while the read half is in use.
impl Drop for WriteHalf {
    fn drop(&mut self) {
        self.inner.sealer.lock().close();
        let _ = self.inner.try_send();
        let _ = SockRef::from(&self.inner.socket).shutdown(Shutdown::Write);
    }
}

fn poll_shutdown(inner: &Inner, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
    ready!(inner.poll(cx, Inner::try_send))?;
    inner.sealer.lock().close();
    ready!(inner.poll(cx, Inner::try_send))?;
    Poll::Ready(SockRef::from(&inner.socket).shutdown(Shutdown::Write))
}

macro_rules! reads {
    ($name:ty) => {
        impl AsyncRead for $name {
            fn poll_read(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                buf: &mut ReadBuf<'_>,
            ) -> Poll<io::Result<()>> {
                let this = self.get_mut();
                poll_read(&this.inner, &mut this.opener, &mut this.incoming, cx, buf)
            }
        }
    };
}

macro_rules! writes {
    ($name:ty) => {
        impl AsyncWrite for $name {
            fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
                self.inner.poll(cx, |inner| inner.try_write(&[IoSlice::new(buf)]))
            }

            fn poll_write_vectored(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                bufs: &[IoSlice<'_>],
            ) -> Poll<io::Result<usize>> {
                self.inner.poll(cx, |inner| inner.try_write(bufs))
            }

            fn is_write_vectored(&self) -> bool {
                true
            }

            fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                self.inner.poll(cx, Inner::try_send)
            }

            fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                poll_shutdown(&self.inner, cx)
            }
        }
    };
}

reads!(Stream);
reads!(ReadHalf);
writes!(Stream);
writes!(WriteHalf);

/// A TCP connection, with or without TLS.
#[derive(Debug)]
pub enum Wire {
    /// In plain text.
    Plain(TcpStream),
    /// Under TLS.
    Tls(Box<Stream>),
}

impl AsyncRead for Wire {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(s) => Pin::new(s).poll_read(cx, buf),
            Self::Tls(s) => Pin::new(s).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(s) => Pin::new(s).poll_write(cx, buf),
            Self::Tls(s) => Pin::new(s).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(s) => Pin::new(s).poll_write_vectored(cx, bufs),
            Self::Tls(s) => Pin::new(s).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(s) => Pin::new(s).poll_flush(cx),
            Self::Tls(s) => Pin::new(s).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(s) => Pin::new(s).poll_shutdown(cx),
            Self::Tls(s) => Pin::new(s).poll_shutdown(cx),
        }
    }
}
