//! The halves of a lane's socket. Over a Unix socket descriptors come and go with the bytes.

use super::{Shared, lock};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::BorrowedFd,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::{TcpStream, UnixStream, tcp, unix},
};

/// Descriptors that may have come and not been used: each side has one memory to show.
const DESCRIPTORS: usize = 2;

/// The half that is read.
#[derive(Debug)]
pub enum ReadHalf {
    /// Of a connection over TCP.
    Tcp(tcp::OwnedReadHalf),
    /// Of one over a Unix socket, and where descriptors go.
    Unix(unix::OwnedReadHalf, Arc<Shared>),
}

/// The half that is written.
#[derive(Debug)]
pub enum WriteHalf {
    /// Of a connection over TCP.
    Tcp(tcp::OwnedWriteHalf),
    /// Of one over a Unix socket.
    Unix(unix::OwnedWriteHalf),
}

/// Both halves of a connection over TCP.
pub fn over_tcp(socket: TcpStream) -> (ReadHalf, WriteHalf) {
    let (read, write) = socket.into_split();
    (ReadHalf::Tcp(read), WriteHalf::Tcp(write))
}

/// Both halves of a connection over a Unix socket, whose ends share this.
pub fn over_unix(socket: UnixStream, shared: Arc<Shared>) -> (ReadHalf, WriteHalf) {
    let (read, write) = socket.into_split();
    (ReadHalf::Unix(read, shared), WriteHalf::Unix(write))
}

impl ReadHalf {
    /// What the ends of the lane share, if they can.
    pub(crate) fn shared(&self) -> Option<&Arc<Shared>> {
        match self {
            Self::Tcp(_) => None,
            Self::Unix(_, shared) => Some(shared),
        }
    }
}

impl AsyncRead for ReadHalf {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let (socket, shared) = match self.get_mut() {
            Self::Tcp(half) => return Pin::new(half).poll_read(cx, buf),
            Self::Unix(half, shared) => (AsRef::<UnixStream>::as_ref(&*half), shared),
        };
        let most = buf.remaining();
        loop {
            ready!(socket.poll_read_ready(cx))?;
            let into = buf.initialize_unfilled_to(most);
            match socket.try_io(Interest::READABLE, || receive(socket, into, shared)) {
                Ok(n) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }
}

/// Reads bytes, and keeps the descriptors that came with them; those that nobody expects are closed.
fn receive(socket: &UnixStream, into: &mut [u8], shared: &Shared) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(socket, &mut [IoSliceMut::new(into)], &mut beside, RecvFlags::CMSG_CLOEXEC)?;
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            let mut fds = lock(&shared.fds);
            let room = DESCRIPTORS.saturating_sub(fds.len());
            fds.extend(came.take(room));
        }
    }
    Ok(got.bytes)
}

impl WriteHalf {
    /// Sends bytes with a descriptor.
    pub(crate) async fn send_with(&self, bytes: &[u8], fd: BorrowedFd<'_>) -> io::Result<usize> {
        let Self::Unix(half) = self else { return Err(io::ErrorKind::Unsupported.into()) };
        let send = || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut beside = SendAncillaryBuffer::new(&mut space);
            let fds = [fd];
            beside.push(SendAncillaryMessage::ScmRights(&fds));
            Ok(sendmsg(half.as_ref(), &[IoSlice::new(bytes)], &mut beside, SendFlags::NOSIGNAL)?)
        };
        half.as_ref().async_io(Interest::WRITABLE, send).await
    }
}

impl AsyncWrite for WriteHalf {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(half) => Pin::new(half).poll_write(cx, buf),
            Self::Unix(half) => Pin::new(half).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(half) => Pin::new(half).poll_write_vectored(cx, bufs),
            Self::Unix(half) => Pin::new(half).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(half) => Pin::new(half).poll_flush(cx),
            Self::Unix(half) => Pin::new(half).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(half) => Pin::new(half).poll_shutdown(cx),
            Self::Unix(half) => Pin::new(half).poll_shutdown(cx),
        }
    }
}
