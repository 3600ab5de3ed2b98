//! The listeners. No error of `accept` ends one. tonic would retry at once, which without a free descriptor
//! takes a whole core and accepts nothing.

use super::{Connections, GuardedSocket, Lane, Origin, door::IdentifiableSocket};
use paraft_host::is_shortage;
use paraft_proto::limits;
use paraft_tls::{Need, Wire};
use std::{future::Future, io, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;

/// Pause between two tries of a listener that failed.
const PAUSE: Duration = Duration::from_millis(50);

/// A source of connections.
pub trait Listen: Send + 'static {
    /// A socket of a connection.
    type Socket: IdentifiableSocket;
    /// The next connection, and its origin. Dropping the future loses none.
    fn next(&self) -> impl Future<Output = io::Result<(Self::Socket, Origin)>> + Send;
}

/// The stream of a listener's connections.
type WireOf<L> = <<L as Listen>::Socket as IdentifiableSocket>::Wire;

impl Listen for TcpListener {
    type Socket = TcpStream;

    async fn next(&self) -> io::Result<(TcpStream, Origin)> {
        let (socket, from) = self.accept().await?;
        // Small messages must not wait for Nagle's algorithm. If it cannot be disabled, the connection has
        // ended already.
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
    /// The next connection for which there is room.
    pub(super) async fn accept<L: Listen>(self: &Arc<Self>, listener: &L) -> GuardedSocket<L::Socket> {
        let mut failing = false;
        loop {
            self.wait_until_few_closing().await;
            match listener.next().await {
                Ok((socket, from)) => {
                    failing = false;
                    // Without a place it is dropped, which closes it.
                    if let Some(visitor) = self.admit(from) {
                        return GuardedSocket::new(socket, visitor);
                    }
                }
                Err(error) => {
                    let gave_way = is_shortage(&error) && self.close_oldest_unknown();
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(%error, gave_way, "a connection could not be accepted; trying again");
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}

/// Maximum number of identified connections that wait for the service.
const MAX_IDENTIFIED: usize = 64;

/// The connections of a listener, once their peers are identified.
fn opened<L: Listen + Sync, T: Send + 'static, F>(
    listener: L,
    connections: Arc<Connections>,
    http1: bool,
    begin: impl Fn(GuardedSocket<WireOf<L>>) -> F + Clone + Send + 'static,
) -> mpsc::Receiver<T>
where
    F: Future<Output = Option<T>> + Send,
{
    let (tx, rx) = mpsc::channel(MAX_IDENTIFIED);
    tokio::spawn(async move {
        loop {
            let socket = tokio::select! {
                () = tx.closed() => return,
                socket = connections.accept(&listener) => socket,
            };
            let (tx, begin) = (tx.clone(), begin.clone());
            // Each connection is identified in its own task: a slow peer delays no other.
            tokio::spawn(async move {
                if let Some(socket) = socket.opened(http1).await
                    && let Some(begun) = begin(socket).await
                {
                    let _ = tx.send(begun).await;
                }
            });
        }
    });
    rx
}

/// Connections for tonic. They do not end, and contain no error.
type Incoming<S> = ReceiverStream<io::Result<GuardedSocket<S>>>;

/// The connections of a listener; those that ask for lanes go to `lanes`. The second part are those of peers that may only
/// read.
pub fn incoming<L: Listen + Sync>(
    listener: L,
    connections: Arc<Connections>,
    lanes: impl Fn(Lane) + Clone + Send + 'static,
) -> (Incoming<WireOf<L>>, Incoming<WireOf<L>>) {
    let (readers, read) = mpsc::channel(MAX_IDENTIFIED);
    let begun = opened(listener, connections, false, move |socket: GuardedSocket<WireOf<L>>| {
        let (lanes, readers) = (lanes.clone(), readers.clone());
        async move {
            match socket.begins().await? {
                Ok(socket) if socket.visitor().rights().only_read() => {
                    // A queue that is full closes it, and nothing waits for the threads of readers.
                    let _ = readers.try_send(Ok(socket));
                    None
                }
                Ok(socket) => Some(Ok(socket)),
                Err(lane) => {
                    lanes(lane);
                    None
                }
            }
        }
    });
    (ReceiverStream::new(begun), ReceiverStream::new(read))
}

/// A listener for axum. Its connections stay unknown: `/metrics` is for callers that may read of all jobs,
/// and its connections are closed first.
pub struct BoundedListener(mpsc::Receiver<GuardedSocket<Wire>>);

impl BoundedListener {
    /// The connections of a listener.
    pub fn new(listener: TcpListener, connections: Arc<Connections>) -> Self {
        Self(opened(listener, connections, true, |socket: GuardedSocket<Wire>| async move {
            let visitor = socket.visitor();
            if visitor.rights().are_for_all(Need::Reader) {
                return Some(socket);
            }
            visitor.denied("/metrics, which is of all jobs", Need::Reader).await;
            None
        }))
    }
}

impl axum::serve::Listener for BoundedListener {
    type Io = GuardedSocket<Wire>;
    type Addr = ();

    async fn accept(&mut self) -> (Self::Io, ()) {
        match self.0.recv().await {
            Some(socket) => (socket, ()),
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}
