//! A connection under TLS for tokio, as a whole or in two halves; the half that is written also writes on any thread, without
//! waiting.

use crate::{
    credentials::Credentials,
    handshake::{Handshake, TlsError},
    record::{Opener, Outbox, Sealer},
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

/// Made into records at a time: what waits for the socket then.
const SEAL: usize = 256 << 10;
/// Read at a time, where little comes.
const LITTLE: usize = 20 << 10;
/// Read at a time, where much comes.
const MUCH: usize = 256 << 10;

struct Inner {
    socket: TcpStream,
    sealer: Mutex<Sealer>,
}

/// Sends what waits; `WouldBlock`: some of it is left.
fn send(socket: &TcpStream, out: &mut Outbox) -> io::Result<()> {
    while !out.waiting().is_empty() {
        match socket.try_write(out.waiting()) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => out.sent(n),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

impl Inner {
    fn try_send(&self) -> io::Result<()> {
        send(&self.socket, self.sealer.lock().out())
    }

    fn try_write(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut sealer = self.sealer.lock();
        send(&self.socket, sealer.out())?;
        let taken = sealer.seal(bufs, SEAL)?;
        match send(&self.socket, sealer.out()) {
            // It is taken, and goes with what comes next.
            Err(e) if e.kind() != ErrorKind::WouldBlock => Err(e),
            _ => Ok(taken),
        }
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

/// What has come and is not read yet.
#[derive(Default)]
struct Incoming {
    /// As it came, from `start` to `end`.
    raw: Vec<u8>,
    start: usize,
    end: usize,
    /// What it said, from `at` on.
    plain: Vec<u8>,
    at: usize,
    over: bool,
    /// The last read filled its room.
    much: bool,
}

impl Incoming {
    fn give(&mut self, buf: &mut ReadBuf<'_>) -> bool {
        let rest = &self.plain[self.at..];
        let n = rest.len().min(buf.remaining());
        buf.put_slice(&rest[..n]);
        self.at += n;
        if self.at == self.plain.len() {
            self.plain.clear();
            self.at = 0;
            if self.plain.capacity() > MUCH {
                self.plain = Vec::new();
            }
        }
        n > 0
    }

    /// Opens the records that are whole, into `buf`, and what has no room there into `plain`.
    fn open(&mut self, inner: &Inner, opener: &mut Opener, buf: &mut ReadBuf<'_>) -> Result<(), TlsError> {
        let plain = &mut self.plain;
        let mut hear = |said: &[u8]| {
            let n = if plain.is_empty() { said.len().min(buf.remaining()) } else { 0 };
            buf.put_slice(&said[..n]);
            plain.extend_from_slice(&said[n..]);
        };
        let came = opener.open(&mut self.raw[self.start..self.end], &mut hear)?;
        self.used(came.used);
        self.over = came.end;
        if came.asks {
            let mut sealer = inner.sealer.lock();
            sealer.update(false)?;
            let _ = send(&inner.socket, sealer.out()); // or with what is said next
        }
        Ok(())
    }

    fn used(&mut self, bytes: usize) {
        self.start += bytes;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Takes what the socket has.
    fn fill(&mut self, socket: &TcpStream) -> io::Result<()> {
        self.raw.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let room = if self.much { MUCH } else { LITTLE };
        if self.raw.len() != room && self.end <= room {
            self.raw.resize(room, 0);
            if room == LITTLE {
                self.raw.shrink_to_fit();
            }
        }
        if self.end == self.raw.len() {
            self.raw.resize(self.end + LITTLE, 0);
        }
        match socket.try_read(&mut self.raw[self.end..]) {
            Ok(0) => Err(io::Error::new(ErrorKind::UnexpectedEof, crate::access::ENDED)),
            Ok(n) => {
                self.end += n;
                self.much = self.end == self.raw.len() || (self.much && n > LITTLE);
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    fn poll_read(
        &mut self,
        inner: &Inner,
        opener: &mut Opener,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buf.remaining() == 0 || self.give(buf) {
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        loop {
            if self.over {
                return Poll::Ready(Ok(()));
            }
            if self.end > self.start {
                self.open(inner, opener, buf)?;
                if buf.filled().len() > before {
                    return Poll::Ready(Ok(()));
                }
                if self.over {
                    continue;
                }
            }
            match self.fill(&inner.socket) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => ready!(inner.socket.poll_read_ready(cx))?,
                filled => filled?,
            }
        }
    }
}

/// See the module.
pub struct Stream {
    inner: Arc<Inner>,
    opener: Opener,
    incoming: Incoming,
}

/// The half that is read.
pub struct ReadHalf {
    inner: Arc<Inner>,
    opener: Opener,
    incoming: Incoming,
}

/// The half that is written.
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

/// A handshake that failed: why, and the socket, on which the other side was told.
pub struct Failed {
    /// Why.
    pub why: TlsError,
    /// On which a last word may still be on its way.
    pub socket: TcpStream,
    /// What the other side had said, where it does not speak TLS.
    pub said: Vec<u8>,
}

impl Stream {
    /// Makes a connection of one that was just made, to `to`.
    ///
    /// # Errors
    /// One does not take the other, or the socket's.
    pub async fn dial(socket: TcpStream, credentials: &Credentials, to: &Expected) -> Result<Self, TlsError> {
        let handshake = Handshake::dials(credentials, to)?;
        let (stream, _) = Self::begin(socket, handshake).await.map_err(|f| f.why)?;
        Ok(stream)
    }

    /// The same of one that came; with what the other side may do.
    ///
    /// # Errors
    /// As there; the other side was told why.
    pub async fn accept(
        socket: TcpStream,
        credentials: &Credentials,
        from: &Expected,
    ) -> Result<(Self, Rights), Failed> {
        Self::accept_as(socket, credentials, from, false).await
    }

    /// As [`Self::accept`]; `http1`: HTTP/1.1 is spoken where anything of HTTP is asked for, and not HTTP/2.
    ///
    /// # Errors
    /// As there.
    pub async fn accept_as(
        socket: TcpStream,
        credentials: &Credentials,
        from: &Expected,
        http1: bool,
    ) -> Result<(Self, Rights), Failed> {
        let handshake = match Handshake::accepts(credentials, from, http1) {
            Ok(handshake) => handshake,
            Err(why) => return Err(Failed { why, socket, said: Vec::new() }),
        };
        Self::begin(socket, handshake).await
    }

    async fn begin(socket: TcpStream, mut handshake: Handshake) -> Result<(Self, Rights), Failed> {
        let mut incoming = Incoming::default();
        let met = incoming.meet(&socket, &mut handshake).await;
        match met.and_then(|rights| Ok((rights, handshake.over()?))) {
            Ok((rights, (sealer, opener))) => {
                let inner = Arc::new(Inner { socket, sealer: Mutex::new(sealer) });
                Ok((Self { inner, opener, incoming }, rights))
            }
            Err(why) => {
                let said = incoming.raw[incoming.start..incoming.end].to_vec();
                Err(Failed { why, socket, said })
            }
        }
    }

    /// In halves.
    pub fn into_split(self) -> (ReadHalf, WriteHalf) {
        let Self { inner, opener, incoming } = self;
        (ReadHalf { inner: inner.clone(), opener, incoming }, WriteHalf { inner })
    }
}

impl Incoming {
    /// The handshake; with what the other side may do.
    async fn meet(&mut self, socket: &TcpStream, handshake: &mut Handshake) -> Result<Rights, TlsError> {
        loop {
            let came = &self.raw[self.start..self.end];
            if handshake.begins_plain(came) {
                return Err(TlsError::Plain);
            }
            let plain = &mut self.plain;
            let mut hear = |said: &[u8]| plain.extend_from_slice(said);
            let read = handshake.read(&mut self.raw[self.start..self.end], &mut hear);
            // Also where it has failed: the other side is told why.
            loop {
                match send(socket, &mut handshake.out) {
                    Err(e) if e.kind() == ErrorKind::WouldBlock => socket.writable().await?,
                    sent if read.is_ok() => break sent?,
                    _ => break,
                }
            }
            let (used, over) = read?;
            self.used(used);
            if over {
                return handshake.rights();
            }
            loop {
                match self.fill(socket) {
                    Err(e) if e.kind() == ErrorKind::WouldBlock => socket.readable().await?,
                    filled => break filled?,
                }
            }
        }
    }
}

impl WriteHalf {
    /// Takes what there is room for, on any thread, and waits for nothing. What it has taken may wait for [`Self::try_send`].
    ///
    /// # Errors
    /// `WouldBlock`: what was taken before has not gone out yet.
    pub fn try_write(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        self.inner.try_write(bufs)
    }

    /// Sends what was taken.
    ///
    /// # Errors
    /// `WouldBlock`: some of it is left.
    pub fn try_send(&self) -> io::Result<()> {
        self.inner.try_send()
    }

    /// Returns when there may be room.
    pub fn poll_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner.socket.poll_write_ready(cx)
    }
}

/// The other side sees the end at once, also while somebody still reads.
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
                this.incoming.poll_read(&this.inner, &mut this.opener, cx, buf)
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

/// A connection over TCP, under TLS or not.
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
