//! A TCP proxy before each server. Servers and workers know only the proxies, so that what passes between any two of
//! them can be held up, slowed down or cut, without root and without a change to either.
//!
//! A blocked connection is a black hole, as behind a dead switch: nothing is refused, nothing passes, and what was
//! sent goes on when it is healed, if its sender has not given up. Who connects is found out from the kernel's table
//! of sockets: a connection on loopback belongs to a process, and a server's command line has its place in the fleet.

use super::{Faults, process};
use parking_lot::Mutex;
use std::{
    io,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    runtime::{Builder, Runtime},
    sync::watch,
};

/// Proxies in this process, one before each server. They end when this is dropped.
pub struct Proxies {
    addresses: Vec<String>,
    shared: Arc<Shared>,
    /// Dropped last of all: its threads carry the bytes.
    _runtime: Runtime,
}

struct Shared {
    /// Where each server listens, once it does.
    targets: Mutex<Vec<Option<SocketAddr>>>,
    faults: watch::Sender<Faults>,
    run_dir: PathBuf,
}

impl Proxies {
    /// `count` proxies on free ports of loopback, for servers whose data folders are in `run_dir`.
    pub fn start(count: u32, run_dir: &Path) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("paraft-proxy")
            .enable_all()
            .build()?;
        let shared = Arc::new(Shared {
            targets: Mutex::new(vec![None; count as usize]),
            faults: watch::Sender::new(Faults::default()),
            run_dir: run_dir.to_path_buf(),
        });
        let mut addresses = Vec::new();
        for to in 0..count {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            addresses.push(listener.local_addr()?.to_string());
            listener.set_nonblocking(true)?;
            let shared = shared.clone();
            runtime.spawn(async move {
                let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
                loop {
                    match listener.accept().await {
                        Ok((client, peer)) => drop(tokio::spawn(carry(shared.clone(), client, peer, to))),
                        // Too many open files, say: they will be fewer.
                        Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                    }
                }
            });
        }
        Ok(Self { addresses, shared, _runtime: runtime })
    }

    /// By which servers and workers reach the servers, in their order.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Says where a server listens.
    pub fn point(&self, server: u32, target: SocketAddr) {
        if let Some(t) = self.shared.targets.lock().get_mut(server as usize) {
            *t = Some(target);
        }
    }

    /// From now on there are these faults.
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

/// One connection, from its beginning to its end.
async fn carry(shared: Arc<Shared>, mut client: TcpStream, peer: SocketAddr, to: u32) {
    let (dir, port) = (shared.run_dir.clone(), peer.port());
    let from = tokio::task::spawn_blocking(move || process::server_behind(&dir, port)).await.ok().flatten();
    let mut faults = shared.faults.subscribe();
    let resets = |f: &Faults| {
        let of = |s: u32| f.resets.get(&s).copied().unwrap_or(0);
        of(to) + from.map_or(0, of)
    };
    let before = resets(&faults.borrow());
    passable(&mut faults, from, to).await;
    let target = shared.targets.lock().get(to as usize).copied().flatten();
    let server = match target {
        Some(target) => TcpStream::connect(target).await.ok(),
        None => None,
    };
    // A server that is dead refuses connections; this is as near as a proxy comes to that.
    let Some(mut server) = server else { return reset(&client) };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    {
        let (cr, cw) = client.split();
        let (sr, sw) = server.split();
        let mut watched = faults.clone();
        tokio::select! {
            () = pump(cr, sw, faults.clone(), from, to) => {}
            () = pump(sr, cw, faults, from, to) => {}
            _ = watched.wait_for(|f| resets(f) != before) => {}
        }
    }
    reset(&client);
    reset(&server);
}

/// Closing then sends a reset, at once.
fn reset(stream: &TcpStream) {
    let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

async fn passable(faults: &mut watch::Receiver<Faults>, from: Option<u32>, to: u32) {
    let _ = faults.wait_for(|f| !f.blocks(from, to)).await;
}

async fn pump(
    mut read: ReadHalf<'_>,
    mut write: WriteHalf<'_>,
    mut faults: watch::Receiver<Faults>,
    from: Option<u32>,
    to: u32,
) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(n @ 1..) = read.read(&mut buffer).await else { return };
        let delay = {
            let f = faults.borrow();
            let of = |s: u32| f.slow_link_ms.get(&s).copied().unwrap_or(0);
            of(to) + from.map_or(0, of)
        };
        if delay > 0 {
            tokio::time::sleep(Duration::from_millis(delay)).await;
        }
        passable(&mut faults, from, to).await;
        if write.write_all(&buffer[..n]).await.is_err() {
            return;
        }
    }
}
