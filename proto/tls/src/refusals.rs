//! Which servers refuse us, and why. Under TLS 1.3 the refusal comes after the handshake; an HTTP client
//! whose connection ends before its first request only reports "connection closed".

use crate::stream::Wire;
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The reason, by address: of the last connection there on which anything arrived.
static REFUSALS: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());

/// Why the server at this address refuses us, if that ended the last connection there.
pub fn refusal(address: &str) -> Option<String> {
    REFUSALS.lock().get(address).cloned()
}

/// A connection of an HTTP client, whose first bytes are noted.
pub struct NotedConnection {
    wire: Wire,
    /// Until something has arrived.
    address: Option<String>,
}

impl NotedConnection {
    pub(crate) fn new(wire: Wire, address: &str) -> Self {
        Self { wire, address: Some(address.into()) }
    }

    fn wire(self: Pin<&mut Self>) -> Pin<&mut Wire> {
        Pin::new(&mut self.get_mut().wire)
    }
}

impl AsyncRead for NotedConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = ready!(self.as_mut().wire().poll_read(cx, buf));
        if let Some(address) = self.address.take() {
            let mut refusals = REFUSALS.lock();
            match &read {
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                    refusals.insert(address, e.to_string());
                }
                _ => _ = refusals.remove(&address),
            }
        }
        Poll::Ready(read)
    }
}

impl AsyncWrite for NotedConnection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.wire().poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.wire().poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.wire.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.wire().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.wire().poll_shutdown(cx)
    }
}
