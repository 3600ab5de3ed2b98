//! A TCP proxy in front of each server. Servers and workers know only the proxies, so every link can be
//! blocked, delayed or reset, without root and without a change to either side.
//!
//! The proxy of a dead server refuses connections, as the kernel of its host would: no listener is
//! bound until the server returns. A blocked connection is a black hole, as behind a dead switch:
//! nothing is refused and nothing passes. Data in flight continues when the fault is cleared, if its
//! sender has not given up. The kernel's socket table identifies the client: a loopback connection
//! belongs to a process, and a server's command line contains its place in the fleet.

use super::{
    Faults,
    link::{self, Links},
    process,
};
use parking_lot::Mutex;
use socket2::{Domain, SockRef, Socket, Type};
use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    runtime::{Builder, Runtime},
    sync::watch,
};

/// The proxies of this process, one per server. Drop ends them.
pub struct Proxies {
    addresses: Vec<String>,
    shared: Arc<Shared>,
    /// Dropped last: its threads carry the bytes.
    _runtime: Runtime,
}

struct Shared {
    /// The address of each server, once it listens.
    targets: watch::Sender<Vec<Option<SocketAddr>>>,
    fronts: Vec<Front>,
    faults: watch::Sender<Faults>,
    links: Links,
    run_dir: PathBuf,
    /// The last known process of each server: a search through all processes takes milliseconds.
    pids: Mutex<Vec<(u32, u32)>>,
}

/// The proxy of one server: its address, with or without a listener.
struct Front {
    address: SocketAddr,
    /// Holds the port while no listener is bound, so it refuses connections and no other process takes
    /// it.
    _holder: Socket,
    /// The server has ended.
    dead: watch::Sender<bool>,
    listens: watch::Sender<bool>,
}

/// The interval of checks whether a dead server has returned.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// The timeout until a listening server is reachable through its proxy.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);

impl Front {
    fn new() -> io::Result<Self> {
        let holder = bound(SocketAddr::from(([127, 0, 0, 1], 0)))?;
        let address = holder.local_addr()?.as_socket().ok_or(io::ErrorKind::AddrNotAvailable)?;
        let (dead, listens) = (watch::Sender::new(false), watch::Sender::new(false));
        Ok(Self { address, _holder: holder, dead, listens })
    }

    fn listen(&self) -> io::Result<TcpListener> {
        let socket = bound(self.address)?;
        socket.listen(1024)?;
        socket.set_nonblocking(true)?;
        TcpListener::from_std(socket.into())
    }

    /// Returns when connections are refused.
    async fn dies(&self) {
        self.dead.send_replace(true);
        let _ = self.listens.subscribe().wait_for(|l| !l).await;
    }
}

fn bound(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

impl Proxies {
    /// Starts `count` proxies on free loopback ports, for servers with data folders in `run_dir`.
    pub fn start(count: u32, run_dir: &Path, links: Links) -> io::Result<Self> {
        let runtime =
            Builder::new_multi_thread().worker_threads(2).thread_name("paraft-proxy").enable_all().build()?;
        let shared = Arc::new(Shared {
            targets: watch::Sender::new(vec![None; count as usize]),
            fronts: (0..count).map(|_| Front::new()).collect::<io::Result<_>>()?,
            faults: watch::Sender::new(Faults::default()),
            links,
            run_dir: run_dir.to_path_buf(),
            pids: Mutex::default(),
        });
        let addresses = shared.fronts.iter().map(|f| f.address.to_string()).collect();
        for to in 0..count {
            runtime.spawn(serve(shared.clone(), to));
        }
        Ok(Self { addresses, shared, _runtime: runtime })
    }

    /// The proxies' addresses, in the order of the servers.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Sets the address of a server, which may not listen yet.
    pub fn aim(&self, server: u32, target: SocketAddr) {
        if self.shared.fronts.len() > server as usize {
            self.shared.targets.send_modify(|all| all[server as usize] = Some(target));
        }
    }

    /// Sets the address of a server; returns when it is reachable through its proxy.
    pub fn point(&self, server: u32, target: SocketAddr) {
        let Some(front) = self.shared.fronts.get(server as usize) else { return };
        self.aim(server, target);
        let began = Instant::now();
        while !*front.listens.borrow() && began.elapsed() < OPEN_TIMEOUT {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Replaces the faults.
    pub fn set(&self, faults: &Faults) {
        self.shared.faults.send_if_modified(|old| {
            let differs = old != faults;
            if differs {
                old.clone_from(faults);
            }
            differs
        });
    }
}

impl Shared {
    fn target(&self, server: u32) -> Option<SocketAddr> {
        self.targets.borrow().get(server as usize).copied().flatten()
    }

    /// Returns when the server listens, and no fault refuses its connections.
    async fn opens(&self, server: u32) {
        let (mut targets, mut faults) = (self.targets.subscribe(), self.faults.subscribe());
        loop {
            let refused = faults.borrow_and_update().refused.contains(&server);
            targets.mark_unchanged();
            let lives = async { TcpStream::connect(self.target(server)?).await.ok() };
            if !refused && lives.await.is_some() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(POLL_INTERVAL) => {}
                _ = targets.changed() => {}
                _ = faults.changed() => {}
            }
        }
    }

    /// The server whose connection has this local port.
    fn server_behind(&self, port: u16) -> Option<u32> {
        let known = self.pids.lock().clone();
        let count = self.targets.borrow().iter().flatten().count();
        let current = known.len() == count && known.iter().all(|(_, pid)| process::lives(*pid));
        let pids = match current {
            true => known,
            false => {
                let found = process::servers_of(&self.run_dir);
                self.pids.lock().clone_from(&found);
                found
            }
        };
        process::owner_of(&pids, port)
    }
}

/// Accepts the connections to one server, while it lives and no fault refuses them.
async fn serve(shared: Arc<Shared>, to: u32) {
    let front = &shared.fronts[to as usize];
    let (mut faults, mut dead) = (shared.faults.subscribe(), front.dead.subscribe());
    loop {
        shared.opens(to).await;
        let Ok(listener) = front.listen() else {
            tokio::time::sleep(POLL_INTERVAL).await;
            continue;
        };
        front.dead.send_replace(false);
        front.listens.send_replace(true);
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = faults.wait_for(|f| f.refused.contains(&to)) => break,
                _ = dead.wait_for(|d| *d) => break,
            };
            match accepted {
                Ok((client, peer)) => drop(tokio::spawn(carry(shared.clone(), client, peer, to))),
                // For example too many open files, which is temporary.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
        drop(listener);
        front.listens.send_replace(false);
    }
}

/// One connection: its server and its client, which is looked up on demand.
struct Connection {
    shared: Arc<Shared>,
    to: u32,
    /// The client's local port.
    port: u16,
    from: tokio::sync::OnceCell<Option<u32>>,
}

impl Connection {
    /// The client's server; `None`: a worker. Looked up only if a fault depends on it, since the
    /// kernel's table is long.
    async fn from(&self) -> Option<u32> {
        let look = || async {
            let (shared, port) = (self.shared.clone(), self.port);
            tokio::task::spawn_blocking(move || shared.server_behind(port)).await.ok().flatten()
        };
        *self.from.get_or_init(look).await
    }

    async fn blocked(&self, faults: &Faults) -> bool {
        match faults.isolated.is_empty() && faults.cut.is_empty() {
            true => false,
            false => faults.blocks(self.from().await, self.to),
        }
    }

    /// Returns when no fault blocks the connection.
    async fn passable(&self, faults: &mut watch::Receiver<Faults>) {
        loop {
            let now = faults.borrow_and_update().clone();
            if !self.blocked(&now).await || faults.changed().await.is_err() {
                return;
            }
        }
    }

    async fn delay(&self, faults: &Faults) -> Duration {
        if faults.slow_link_ms.is_empty() {
            return Duration::ZERO;
        }
        let of = |s: u32| faults.slow_link_ms.get(&s).copied().unwrap_or(0);
        Duration::from_millis(of(self.to) + self.from().await.map_or(0, of))
    }

    /// Returns when a fault resets the connection.
    async fn reset(&self, faults: &mut watch::Receiver<Faults>) {
        let before = faults.borrow_and_update().resets.clone();
        while faults.changed().await.is_ok() {
            let now = faults.borrow_and_update().resets.clone();
            if now == before {
                continue;
            }
            let differs = |s: u32| now.get(&s) != before.get(&s);
            if differs(self.to) || self.from().await.is_some_and(differs) {
                return;
            }
        }
    }

    async fn pump(
        &self,
        mut read: ReadHalf<'_>,
        mut write: WriteHalf<'_>,
        mut faults: watch::Receiver<Faults>,
    ) {
        let Links { workers, servers } = self.shared.links;
        if workers.is_some() || servers.is_some() {
            let link = if self.from().await.is_none() { workers } else { servers };
            if let Some(link) = link {
                return link::carry(link, read, write).await;
            }
        }
        let mut buffer = vec![0; 64 << 10];
        loop {
            let Ok(n @ 1..) = read.read(&mut buffer).await else { return };
            let now = faults.borrow().clone();
            let delay = self.delay(&now).await;
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            self.passable(&mut faults).await;
            if write.write_all(&buffer[..n]).await.is_err() {
                return;
            }
        }
    }
}

/// Serves one connection to its end.
async fn carry(shared: Arc<Shared>, mut client: TcpStream, peer: SocketAddr, to: u32) {
    let mut faults = shared.faults.subscribe();
    let target = shared.target(to);
    let connection = Connection { shared: shared.clone(), to, port: peer.port(), from: Default::default() };
    connection.passable(&mut faults).await;
    let Some(target) = target else { return reset(&client) };
    let server = TcpStream::connect(target).await.ok();
    let Some(mut server) = server else {
        shared.fronts[to as usize].dies().await;
        return reset(&client);
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    {
        let (cr, cw) = client.split();
        let (sr, sw) = server.split();
        let mut watched = faults.clone();
        tokio::select! {
            () = connection.pump(cr, sw, faults.clone()) => {}
            () = connection.pump(sr, cw, faults) => {}
            () = connection.reset(&mut watched) => {}
        }
    }
    // A client that sees the end of its connection and dials again must be refused if the server is
    // dead too.
    if shared.target(to) == Some(target) && TcpStream::connect(target).await.is_err() {
        shared.fronts[to as usize].dies().await;
    }
    reset(&client);
    reset(&server);
}

/// Makes the close send a reset, at once.
fn reset(stream: &TcpStream) {
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}
