//! The door: identifies the peer of a connection before anything is read from it.
//!
//! Over TCP a certificate identifies it, over a Unix socket the kernel. A refused peer is told why, counted
//! and logged. Its connection is held for a while, so that it does not reconnect at once.

use super::{GuardedSocket, Origin, Visitor, lanes::LaneSocket};
use paraft_lanes::ONLY_TLS;
use paraft_tls::{Access, Need, Rights, TlsError, Wire};
use std::{
    future::Future,
    io,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpStream, UnixStream},
};

/// How long a refused connection is held; it takes an unknown place meanwhile.
pub const REFUSAL_HOLD: Duration = Duration::from_secs(1);

/// The end of an HTTP/2 connection: its settings, and a GOAWAY because plain text is refused.
const HTTP2_ONLY_TLS: &[u8] = b"\0\0\0\x04\0\0\0\0\0\0\0\x10\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0cTLS only";
const HTTP1_ONLY_TLS: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\n\r\nThis port speaks TLS only.\n";

/// How a peer leaves.
const LEFT: [io::ErrorKind; 4] = [
    io::ErrorKind::UnexpectedEof,
    io::ErrorKind::ConnectionReset,
    io::ErrorKind::ConnectionAborted,
    io::ErrorKind::BrokenPipe,
];

/// A socket whose peer can be identified.
pub trait IdentifiableSocket: Send + 'static {
    /// The stream of the connection.
    type Wire: AsyncRead + AsyncWrite + LaneSocket + Unpin + Send + 'static;
    /// Identifies the peer.
    fn open(
        self,
        access: &Access,
        http1: bool,
    ) -> impl Future<Output = Result<(Self::Wire, Rights), RefusedPeer>> + Send;
}

/// A refused peer.
pub struct RefusedPeer {
    /// `None`: it left, as a client does that only checks for a listener, or waited too long for a busy server.
    why: Option<String>,
    /// Its last message, and the socket for it.
    last: Option<(TcpStream, &'static [u8])>,
}

impl IdentifiableSocket for TcpStream {
    type Wire = Wire;

    async fn open(self, access: &Access, http1: bool) -> Result<(Wire, Rights), RefusedPeer> {
        access.accept(self, http1).await.map_err(|failed| {
            let tells: &'static [u8] = match (&failed.why, &failed.said[..]) {
                (TlsError::Plain, [b'P', b'A', ..]) => ONLY_TLS,
                (TlsError::Plain, [b'P', b'R', b'I', ..]) => HTTP2_ONLY_TLS,
                (TlsError::Plain, [b'G' | b'H' | b'P', ..]) => HTTP1_ONLY_TLS,
                _ => b"",
            };
            let why = match failed.why {
                TlsError::Plain => Some("it does not speak TLS".into()),
                TlsError::Io(e) if LEFT.contains(&e.kind()) => None,
                why => Some(why.to_string()),
            };
            RefusedPeer { why, last: Some((failed.socket, tells)) }
        })
    }
}

impl IdentifiableSocket for UnixStream {
    type Wire = UnixStream;

    async fn open(self, _: &Access, _: bool) -> Result<(UnixStream, Rights), RefusedPeer> {
        let ours = rustix::process::geteuid().as_raw();
        match self.peer_cred().map(|of| of.uid()) {
            Ok(uid) if uid == ours || uid == 0 => {
                Ok((self, Rights::all(&format!("user {uid} of this host"))))
            }
            Ok(uid) => Err(RefusedPeer {
                why: Some(format!("it is of user {uid}, and this server of {ours}")),
                last: None,
            }),
            Err(e) => Err(RefusedPeer {
                why: Some(format!("the kernel does not say whose it is: {e}")),
                last: None,
            }),
        }
    }
}

impl RefusedPeer {
    /// Sends the last message, and waits.
    async fn leaves(self) {
        let over = tokio::time::sleep(REFUSAL_HOLD);
        if let Some((mut socket, tells)) = self.last {
            let tells = async {
                socket.write_all(tells).await?;
                socket.shutdown().await?;
                // Unread data would make the kernel discard that message.
                let mut rest = [0; 4096];
                while socket.read(&mut rest).await? > 0 {}
                Ok::<_, io::Error>(())
            };
            let _ = tokio::time::timeout(REFUSAL_HOLD, tells).await;
        }
        over.await;
    }
}

impl<S: IdentifiableSocket> GuardedSocket<S> {
    /// Identifies the peer; `None`: it is refused, or its connection is being closed.
    pub(super) async fn opened(self, http1: bool) -> Option<GuardedSocket<S::Wire>> {
        let (socket, place) = self.apart();
        let connections = place.0.connections.clone();
        let opens = tokio::time::timeout(connections.preface, socket.open(&connections.access, http1));
        let opened = tokio::select! {
            opened = opens => opened,
            () = place.until_closing() => return None,
        };
        match opened {
            Ok(Ok((wire, rights))) => {
                let _ = place.0.held.rights.set(Arc::new(rights));
                Some(GuardedSocket::at(wire, place))
            }
            Ok(Err(stranger)) => {
                if let Some(why) = &stranger.why {
                    connections.refusals.note(place.0.held.origin, why);
                }
                tokio::select! { () = stranger.leaves() => {}, () = place.until_closing() => {} }
                None
            }
            Err(_) => {
                connections.silent.fetch_add(1, Relaxed);
                None
            }
        }
    }
}

impl Visitor {
    /// The peer's rights.
    pub fn rights(&self) -> &Rights {
        static NONE: std::sync::OnceLock<Rights> = std::sync::OnceLock::new();
        self.held.rights.get().map_or_else(|| NONE.get_or_init(Rights::none), |r| &**r)
    }

    /// Where the connection comes from.
    pub fn origin(&self) -> Origin {
        self.held.origin
    }

    /// Logs that the peer lacks a right, and holds it for a while.
    pub async fn denied(&self, what: &str, need: Need) {
        let rights = self.rights();
        let said = format!("{rights} asked for {what}, which needs the role {need}");
        self.connections.refusals.note(self.held.origin, said);
        tokio::time::sleep(REFUSAL_HOLD).await;
    }
}
