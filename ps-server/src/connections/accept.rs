//! The listeners. No error of `accept` ends one: tonic would ask again at once, which with no descriptor left takes a
//! whole core and brings nothing.

use super::{Connections, Guarded, Lane, Origin, lanes::Carries};
use futures::Stream;
use paraft_host::is_shortage;
use paraft_proto::limits;
use std::{future::Future, io, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;

/// Between two tries of a listener that failed.
const PAUSE: Duration = Duration::from_millis(50);

/// What connections come from.
pub trait Listen: Send + 'static {
    /// A connection.
    type Socket: AsyncRead + AsyncWrite + Carries + Unpin + Send + 'static;
    /// The next connection, and where it comes from. Dropping the future loses none.
    fn next(&self) -> impl Future<Output = io::Result<(Self::Socket, Origin)>> + Send;
}

impl Listen for TcpListener {
    type Socket = TcpStream;

    async fn next(&self) -> io::Result<(TcpStream, Origin)> {
        let (socket, from) = self.accept().await?;
        // Small messages must not wait for Nagle's algorithm. Where it cannot be set the connection has ended already.
        let _ = socket.set_nodelay(true);
        Ok((socket, Origin::of(from.ip())))
    }
}

impl Listen for UnixListener {
    type Socket = UnixStream;

    async fn next(&self) -> io::Result<(UnixStream, Origin)> {
        let (socket, _) = self.accept().await?;
        let _ = socket2::SockRef::from(&socket).set_send_buffer_size(limits::SOCKET_BUFFER_BYTES);
        Ok((socket, Origin::Here))
    }
}

impl Connections {
    /// The next connection that there is room for.
    pub(super) async fn accept<L: Listen>(self: &Arc<Self>, listener: &L) -> Guarded<L::Socket> {
        let mut failing = false;
        loop {
            self.few_going().await;
            match listener.next().await {
                Ok((socket, from)) => {
                    failing = false;
                    // Without a place it is dropped, which closes it.
                    if let Some(visitor) = self.admit(from) {
                        return Guarded::new(socket, visitor);
                    }
                }
                Err(error) => {
                    let gave_way = is_shortage(&error) && self.give_way();
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(%error, gave_way, "a connection could not be accepted; trying again");
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}

/// Connections whose first bytes have come, and that tonic has not taken yet.
const BEGUN: usize = 64;

/// The connections of a listener, for tonic; those that ask for lanes go to `lanes`. It does not end, and there is no error
/// among them.
pub fn incoming<L: Listen + Sync>(
    listener: L,
    connections: Arc<Connections>,
    lanes: impl Fn(Lane) + Clone + Send + 'static,
) -> impl Stream<Item = io::Result<Guarded<L::Socket>>> {
    let (tx, rx) = mpsc::channel(BEGUN);
    tokio::spawn(async move {
        loop {
            let socket = tokio::select! {
                () = tx.closed() => return,
                socket = connections.accept(&listener) => socket,
            };
            let (tx, lanes) = (tx.clone(), lanes.clone());
            // What it speaks is waited for on the side: one that is slow to say it holds up no other.
            tokio::spawn(async move {
                match socket.begins().await {
                    Some(Ok(socket)) => drop(tx.send(Ok(socket)).await),
                    Some(Err(lane)) => lanes(lane),
                    None => {}
                }
            });
        }
    });
    ReceiverStream::new(rx)
}

/// The same for axum. What comes by it stays unknown: `/metrics` is for whoever reads it, and gives way first.
pub struct BoundedListener {
    /// Where they come from.
    pub listener: TcpListener,
    /// What they are counted among.
    pub connections: Arc<Connections>,
}

impl axum::serve::Listener for BoundedListener {
    type Io = Guarded<TcpStream>;
    type Addr = ();

    async fn accept(&mut self) -> (Self::Io, ()) {
        (self.connections.accept(&self.listener).await, ())
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}
