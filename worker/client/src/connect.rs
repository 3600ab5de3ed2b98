//! Channels to servers, over TCP or, on the same host, over the server's Unix socket.

use hyper_util::rt::TokioIo;
use paraft_common::check_address;
use paraft_host::socket_path;
use paraft_lanes::{
    LaneError, Purpose,
    shared::{self as lanes, ReadHalf, Trust, WriteHalf},
};
use paraft_proto::{
    DescribeReply, DescribeRequest, StatusReply, StatusRequest, control_client::ControlClient, limits,
    shards_client::ShardsClient,
};
use paraft_tls::{Access, access::Expected};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::UnixStream,
    sync::OnceCell,
};
use tonic::transport::{Channel, Endpoint, Uri};

/// How to reach a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// The Unix socket and shared memory if the server is on this host and has a socket; otherwise TCP.
    #[default]
    Auto,
    /// Always TCP.
    Tcp,
}

/// HTTP/2 connections to servers without lanes: one per server, shared by the client's links.
#[derive(Debug)]
pub(crate) struct Channels {
    transport: Transport,
    open: Mutex<BTreeMap<String, Connecting>>,
    /// How many consecutive lane requests an address has left unanswered.
    silent: Mutex<BTreeMap<String, u32>>,
}

/// An open connection, or one that a task is opening.
pub(crate) type Connecting = Arc<OnceCell<Channel>>;

impl Channels {
    pub fn new(transport: Transport) -> Self {
        Self { transport, open: Mutex::default(), silent: Mutex::default() }
    }

    /// The connection to a server, opened if there is none, and the handle for [`Self::broken`].
    pub async fn get(&self, address: &str) -> Result<(Channel, Connecting), String> {
        let connecting = self.lock().entry(address.to_string()).or_default().clone();
        match connecting.get_or_try_init(|| channel(address, self.transport)).await {
            Ok(c) => Ok((c.clone(), connecting)),
            Err(e) => {
                self.broken(address, &connecting);
                Err(e)
            }
        }
    }

    /// Opens a lane to one server. Also returns [`LaneError::NoLanes`] after several consecutive requests without
    /// an answer: a device in between may drop the protocol.
    pub async fn lane(&self, address: &str) -> Result<Lane, LaneError> {
        let opened = lane(address, self.transport).await;
        let mut silent = self.silent.lock().unwrap_or_else(|e| e.into_inner());
        match opened {
            Err(LaneError::Silent(after)) => {
                let times = silent.entry(address.to_string()).or_default();
                *times += 1;
                Err(if times.is_multiple_of(SILENT_LANES) {
                    LaneError::NoLanes
                } else {
                    LaneError::Silent(after)
                })
            }
            opened => {
                silent.remove(address);
                opened
            }
        }
    }

    /// Marks a connection as broken: the next caller gets a new one.
    pub fn broken(&self, address: &str, connecting: &Connecting) {
        let mut open = self.lock();
        if open.get(address).is_some_and(|now| Arc::ptr_eq(now, connecting)) {
            open.remove(address);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Connecting>> {
        self.open.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// After this many unanswered lane requests the client tries HTTP/2. If a server hangs, it answers neither, and the
/// client moves to another server sooner.
const SILENT_LANES: u32 = 2;

/// A lane connection and, with a server on this host, the shared memory.
pub(crate) type Lane = (ReadHalf, WriteHalf, Option<Arc<lanes::Shared>>);

/// Opens a lane to one server. Its answer shows that the process runs: the kernel also accepts connections for a
/// process that hangs.
async fn lane(address: &str, transport: Transport) -> Result<Lane, LaneError> {
    async fn begin<S: AsyncRead + AsyncWrite + Unpin>(mut socket: S) -> Result<S, LaneError> {
        let begins =
            tokio::time::timeout(CONNECT_TIMEOUT, paraft_lanes::dial(&mut socket, Purpose::Exchange));
        begins.await.map_err(|_| LaneError::Silent(CONNECT_TIMEOUT))??;
        Ok(socket)
    }
    let own = socket_of(address, transport);
    let may_come = own.is_some() && matches!(Access::ours(), Access::Closed);
    let path = own.filter(|p| p.exists());
    // The socket of a killed process refuses connections. TCP then gives the cause.
    if let Some(path) = path
        && let Ok(socket) = unix(&path).await
    {
        let shared = lanes::Shared::new(Trust::Reads);
        let (read, write) = lanes::over_unix(begin(socket).await?, shared.clone())?;
        return Ok((read, write, Some(shared)));
    }
    let connects = tokio::time::timeout(CONNECT_TIMEOUT, async {
        Access::ours().dial(address, &Expected::SERVER).await
    });
    let socket = match connects.await.map_err(|_| LaneError::Silent(CONNECT_TIMEOUT))? {
        // The server may be about to open its socket.
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied && !may_come => {
            return Err(LaneError::Refused(e.to_string()));
        }
        socket => socket?,
    };
    let (read, write) = lanes::over_tcp(begin(socket).await?);
    Ok((read, write, None))
}

/// Where the Unix socket of a server on this host is, if this process may use it.
fn socket_of(address: &str, transport: Transport) -> Option<PathBuf> {
    socket_path(address).filter(|_| transport == Transport::Auto && Access::may_use_sockets())
}

async fn unix(path: &Path) -> std::io::Result<UnixStream> {
    let stream = UnixStream::connect(path).await?;
    // With the default of 208 KiB one bucket costs five wake-ups of the receiver.
    let _ = socket2::SockRef::from(&stream).set_send_buffer_size(limits::SOCKET_BUFFER_BYTES);
    Ok(stream)
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A channel to one server over TCP with the credentials `access`, connected at its first use.
pub fn lazy(address: &str, access: &Access) -> Result<Channel, String> {
    Ok(endpoint(address)?.connect_with_connector_lazy(access.connector()))
}

/// Connects to one server. The error names the cause.
pub(crate) async fn channel(address: &str, transport: Transport) -> Result<Channel, String> {
    let endpoint = endpoint(address)?;
    let socket = socket_of(address, transport).filter(|p| p.exists());
    if let Some(path) = socket {
        let connector = tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { Ok::<_, std::io::Error>(TokioIo::new(unix(&path).await?)) }
        });
        // The socket of a killed process refuses connections. TCP then gives the cause.
        if let Ok(channel) = endpoint.connect_with_connector(connector).await {
            return Ok(channel);
        }
    }
    let access = AS.try_with(Clone::clone).unwrap_or_else(|_| Access::ours());
    endpoint.connect_with_connector(access.connector()).await.map_err(|e| cause(&e))
}

tokio::task_local! {
    static AS: Access;
}

/// Runs `asks` so that its new TCP connections use the credentials `access` instead of this process's own.
pub async fn asking_by<T>(access: Access, asks: impl Future<Output = T>) -> T {
    AS.scope(access, asks).await
}

fn endpoint(address: &str) -> Result<Endpoint, String> {
    check_address(address)?;
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|_| format!("`{address}` is no address (write host:port)"))?
        .connect_timeout(CONNECT_TIMEOUT)
        .initial_stream_window_size(limits::STREAM_WINDOW_BYTES)
        .initial_connection_window_size(limits::CONNECTION_WINDOW_BYTES)
        .max_frame_size(limits::FRAME_BYTES)
        .http2_keep_alive_interval(limits::KEEPALIVE_INTERVAL)
        .keep_alive_timeout(limits::KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true);
    Ok(endpoint)
}

/// Why a call failed: the server's message, or the state of the connection.
pub(crate) fn words(address: &str, status: &tonic::Status) -> String {
    let of_the_connection =
        |why: &dyn std::error::Error| paraft_tls::refusal(address).unwrap_or_else(|| cause(why));
    std::error::Error::source(status).map_or_else(|| status.message().to_string(), of_the_connection)
}

/// The innermost cause: "transport error" alone does not help.
fn cause(e: &dyn std::error::Error) -> String {
    let mut at: &dyn std::error::Error = e;
    while let Some(next) = at.source() {
        at = next;
    }
    at.to_string()
}

/// A client for a server's status service.
pub fn shards(channel: Channel) -> ShardsClient<Channel> {
    ShardsClient::new(channel).max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
}

/// Asks a server for its status. With `digest` it also hashes its replicated state, which reads all of it.
pub async fn status(address: &str, digest: bool, within: Duration) -> Result<StatusReply, String> {
    asked(address, StatusRequest { digest, logs: false }, within).await
}

/// Like [`status`], with the workers' last log lines.
pub async fn status_with_logs(address: &str, within: Duration) -> Result<StatusReply, String> {
    asked(address, StatusRequest { digest: false, logs: true }, within).await
}

async fn asked(address: &str, request: StatusRequest, within: Duration) -> Result<StatusReply, String> {
    let ask = async {
        let mut client = shards(channel(address, Transport::Auto).await?);
        let reply = client.status(request).await;
        reply.map(|r| r.into_inner()).map_err(|s| words(address, &s))
    };
    match tokio::time::timeout(within, ask).await {
        Ok(r) => r,
        Err(_) => Err(format!("no answer within {within:?}")),
    }
}

/// Asks a server for the control group's state: servers, shards, placement. Only the leader of that group answers
/// in full. Any other server answers with `fleet` 0 and names the leader in `leader`.
pub async fn describe(address: &str, within: Duration) -> Result<DescribeReply, String> {
    let ask = async {
        let mut client = ControlClient::new(channel(address, Transport::Auto).await?);
        let reply = client.describe(DescribeRequest {}).await;
        reply.map(|r| r.into_inner()).map_err(|s| words(address, &s))
    };
    match tokio::time::timeout(within, ask).await {
        Ok(r) => r,
        Err(_) => Err(format!("no answer within {within:?}")),
    }
}
