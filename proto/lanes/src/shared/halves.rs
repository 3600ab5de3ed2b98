//! The halves of a lane's socket. Over a Unix socket, descriptors travel with the bytes.

use super::{Shared, lock};
use paraft_tls::{Wire, stream as tls};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, recvmsg, sendmsg, shutdown,
};
use std::{
    borrow::Borrow,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf, unix::AsyncFd},
    net::{TcpStream, UnixStream, tcp},
};

/// Maximum number of received, unused descriptors: each side has one memory to offer.
const MAX_DESCRIPTORS: usize = 2;

/// The read half.
#[derive(Debug)]
pub enum ReadHalf {
    /// Of a TCP connection.
    Tcp(tcp::OwnedReadHalf),
    /// Of a TLS connection.
    Tls(Box<tls::ReadHalf>),
    /// Of a Unix socket, and the place for received descriptors. It waits only for reads: for writes, the
    /// kernel would wake the task whenever the peer has read anything.
    Unix(AsyncFd<Arc<OwnedFd>>, Arc<Shared>),
}

/// The write half.
#[derive(Debug)]
pub enum WriteHalf {
    /// Of a TCP connection.
    Tcp(tcp::OwnedWriteHalf),
    /// Of a TLS connection.
    Tls(tls::WriteHalf),
    /// Of a Unix socket, and the registration that waits for room in it, while there is none.
    Unix(Arc<OwnedFd>, Option<AsyncFd<OwnedFd>>),
}

/// Both halves of a TCP connection.
pub fn over_tcp(wire: Wire) -> (ReadHalf, WriteHalf) {
    match wire {
        Wire::Plain(socket) => {
            let (read, write) = socket.into_split();
            (ReadHalf::Tcp(read), WriteHalf::Tcp(write))
        }
        Wire::Tls(stream) => {
            let (read, write) = stream.into_split();
            (ReadHalf::Tls(Box::new(read)), WriteHalf::Tls(write))
        }
    }
}

/// Both halves of a Unix socket, whose ends share memory.
///
/// # Errors
/// The runtime cannot wait for it.
pub fn over_unix(socket: UnixStream, shared: Arc<Shared>) -> io::Result<(ReadHalf, WriteHalf)> {
    let socket = Arc::new(OwnedFd::from(socket.into_std()?));
    let read = wait_for(socket.clone(), Interest::READABLE)?;
    Ok((ReadHalf::Unix(read, shared), WriteHalf::Unix(socket, None)))
}

fn wait_for<T: AsRawFd + Borrow<OwnedFd>>(socket: T, what: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: an owner of a descriptor keeps it open, and unchanged, for as long as the runtime waits for it.
    Ok(unsafe { AsyncFd::register_with_interest(socket, what)? })
}

impl ReadHalf {
    /// What the ends of the lane share, if they can.
    pub(crate) fn shared(&self) -> Option<&Arc<Shared>> {
        match self {
            Self::Tcp(_) | Self::Tls(_) => None,
            Self::Unix(_, shared) => Some(shared),
        }
    }
}

impl AsyncRead for ReadHalf {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let (socket, shared) = match self.get_mut() {
            Self::Tcp(half) => return Pin::new(half).poll_read(cx, buf),
            Self::Tls(half) => return Pin::new(half).poll_read(cx, buf),
            Self::Unix(socket, shared) => (socket, shared),
        };
        let most = buf.remaining();
        loop {
            let mut there = ready!(socket.poll_read_ready(cx))?;
            let into = buf.initialize_unfilled_to(most);
            match there.try_io(|socket| receive(socket.get_ref(), into, shared)) {
                Ok(read) => {
                    buf.advance(read?);
                    return Poll::Ready(Ok(()));
                }
                Err(_would_block) => {}
            }
        }
    }
}

/// Reads bytes, and keeps the descriptors that came with them; unexpected ones are closed.
fn receive(socket: &OwnedFd, into: &mut [u8], shared: &Shared) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(socket, &mut [IoSliceMut::new(into)], &mut beside, RecvFlags::CMSG_CLOEXEC)?;
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            let mut fds = lock(&shared.fds);
            let room = MAX_DESCRIPTORS.saturating_sub(fds.len());
            fds.extend(came.take(room));
        }
    }
    Ok(got.bytes)
}

impl WriteHalf {
    /// Writes as much as there is room for, from any thread, without waiting. Under TLS some of it may wait
    /// for [`Self::try_send`].
    pub(crate) fn try_write(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(half) => half.try_write_vectored(bufs),
            Self::Tls(half) => half.try_write(bufs),
            Self::Unix(socket, _) => {
                Ok(sendmsg(socket, bufs, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?)
            }
        }
    }

    /// Sends the written bytes that wait; `WouldBlock`: some are left.
    pub(crate) fn try_send(&self) -> io::Result<()> {
        match self {
            Self::Tls(half) => half.try_send(),
            Self::Tcp(_) | Self::Unix(..) => Ok(()),
        }
    }

    /// As [`Self::try_write`], with a descriptor.
    pub(crate) fn try_write_with(&self, bytes: &[u8], fd: BorrowedFd<'_>) -> io::Result<usize> {
        let Self::Unix(socket, _) = self else { return Err(io::ErrorKind::Unsupported.into()) };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        let fds = [fd];
        beside.push(SendAncillaryMessage::ScmRights(&fds));
        Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut beside, SendFlags::NOSIGNAL)?)
    }

    /// Runs a write once there is room.
    pub(crate) fn poll_io<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&Self) -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        loop {
            let done = match self {
                Self::Tcp(half) => {
                    let socket: &TcpStream = AsRef::as_ref(&*half);
                    ready!(socket.poll_write_ready(cx))?;
                    write(self)
                }
                // Its sealed bytes go first, and may fill all the room.
                Self::Tls(_) => write(self),
                Self::Unix(_, None) => write(self),
                Self::Unix(_, Some(waits)) => {
                    ready!(waits.poll_write_ready(cx))?.clear_ready();
                    write(self)
                }
            };
            match done {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => match self {
                    Self::Tls(half) => ready!(half.poll_ready(cx))?,
                    _ => self.wait()?,
                },
                done => {
                    if let Self::Unix(_, waits) = self {
                        *waits = None;
                    }
                    return Poll::Ready(done);
                }
            }
        }
    }

    /// From now on the task is woken when there is room.
    fn wait(&mut self) -> io::Result<()> {
        if let Self::Unix(socket, waits @ None) = self {
            *waits = Some(wait_for(socket.try_clone()?, Interest::WRITABLE)?);
        }
        Ok(())
    }
}

impl AsyncWrite for WriteHalf {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().poll_io(cx, |half| half.try_write(&[IoSlice::new(buf)]))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().poll_io(cx, Self::try_send)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(half) => Pin::new(half).poll_shutdown(cx),
            Self::Tls(half) => Pin::new(half).poll_shutdown(cx),
            Self::Unix(socket, _) => Poll::Ready(Ok(shutdown(&*socket, Shutdown::Write)?)),
        }
    }
}
