//! The ports that a server listens on.

use super::args::ServerArgs;
use paraft_fleet::failure::Failure;
use paraft_worker::{exit, job::line_of};
use std::{
    fs, io,
    time::{Duration, Instant},
};
use tokio::net::TcpListener;

/// A client that dials an absent server of this host may briefly get that server's port as its own
/// source port.
const PORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Listens there. Retries for a while if the port is in use.
pub async fn bind(address: &str) -> io::Result<TcpListener> {
    let began = Instant::now();
    loop {
        match TcpListener::bind(address).await {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && began.elapsed() < PORT_TIMEOUT => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            bound => return bound,
        }
    }
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
