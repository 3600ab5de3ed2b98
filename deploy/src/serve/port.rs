//! The ports that a server listens on.

use super::args::ServerArgs;
use paraft_fleet::failure::Failure;
use paraft_worker::{exit, job::line_of};
use std::{
    fs, io,
    net::SocketAddr,
    time::{Duration, Instant},
};
use tokio::net::{TcpListener, TcpSocket};

/// A client that dials an absent server of this host may briefly get that server's port as its own
/// source port.
const PORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Pending connections of the listener, as tokio's.
const BACKLOG: u32 = 1024;

/// A port that is taken.
pub enum Port {
    /// Connections wait until they are served.
    Listens(TcpListener),
    /// Connections are refused.
    Held(TcpSocket),
}

impl Port {
    /// The address with the port.
    pub fn address(&self) -> io::Result<SocketAddr> {
        match self {
            Port::Listens(listener) => listener.local_addr(),
            Port::Held(socket) => socket.local_addr(),
        }
    }

    /// Listens from now on.
    pub fn listen(self) -> io::Result<TcpListener> {
        match self {
            Port::Listens(listener) => Ok(listener),
            Port::Held(socket) => socket.listen(BACKLOG),
        }
    }
}

/// Takes the port there. Retries for a while if it is in use.
///
/// `returns`: the server has been here before. While it reads its disk, it refuses connections: its groups may be
/// looking for its last process, and an address that accepts and does not answer would make them wait.
pub async fn bind(address: &str, returns: bool) -> io::Result<Port> {
    let began = Instant::now();
    loop {
        let bound = match returns {
            true => hold(address).await.map(Port::Held),
            false => TcpListener::bind(address).await.map(Port::Listens),
        };
        match bound {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && began.elapsed() < PORT_TIMEOUT => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            bound => return bound,
        }
    }
}

async fn hold(address: &str) -> io::Result<TcpSocket> {
    let mut last = io::ErrorKind::AddrNotAvailable.into();
    for place in tokio::net::lookup_host(address).await? {
        let socket = if place.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        match socket.bind(place) {
            Ok(()) => return Ok(socket),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// The error for a port in use: which port, where it is configured, and what to do.
pub fn taken(args: &ServerArgs, address: &str, e: &io::Error) -> Failure {
    let line =
        args.job.as_ref().filter(|_| args.listen.is_none() && args.servers.is_empty()).and_then(|path| {
            let text = fs::read_to_string(path).ok()?;
            Some(format!("{}:{}: ", path.display(), line_of(&text, "cluster.addresses")?))
        });
    let line = line.unwrap_or_default();
    match e.kind() {
        io::ErrorKind::AddrInUse => Failure::new(exit::CONFIG, format!("{line}{address} is in use by another process"))
            .help("stop that process (ss -ltnp shows it), or choose another port on every host"),
        io::ErrorKind::AddrNotAvailable => {
            Failure::new(exit::CONFIG, format!("{line}{address} is no address of this host"))
                .help("--listen 0.0.0.0:PORT listens on every interface; the list of servers keeps the address that others use")
        }
        _ => Failure::new(exit::CONFIG, format!("{line}cannot listen on {address}: {e}")),
    }
}
