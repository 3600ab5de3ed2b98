//! The path of a server's Unix socket, which workers on the same host use instead of TCP at about half
//! the CPU cost. It is derived from the TCP address, so it needs no configuration.

use std::{
    net::{IpAddr, UdpSocket},
    path::{Path, PathBuf},
    time::Duration,
};

/// Whether an address such as `10.0.0.1:7070` belongs to this host (in a container: to this network
/// namespace). A name other than `localhost` never counts, since its address may change.
fn is_local(address: &str) -> bool {
    match ip_of(address) {
        Some((ip, _)) if ip.is_loopback() => true,
        // Only an address of this host can be bound.
        Some((ip, _)) => !ip.is_unspecified() && !ip.is_multicast() && UdpSocket::bind((ip, 0)).is_ok(),
        None => false,
    }
}

fn ip_of(address: &str) -> Option<(IpAddr, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    let ip = if host == "localhost" { IpAddr::from([127, 0, 0, 1]) } else { host.parse().ok()? };
    Some((ip, port.parse().ok()?))
}

/// The kernel's maximal length of a socket path, including the final zero.
const SUN_LEN: usize = 108;

/// The socket for an address of this host; `None` for any other, off Linux, and where the temporary folder's path is too long
/// for a socket.
///
/// It lies in a directory of the user's own, and its name holds the network namespace: two namespaces may both
/// have a 127.0.0.1:7070 over one file system.
pub fn socket_path(address: &str) -> Option<PathBuf> {
    let (ip, port) = ip_of(address).filter(|_| is_local(address))?;
    let namespace = std::fs::read_link("/proc/self/ns/net").ok()?;
    let namespace: String = namespace.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    let ip = match ip {
        IpAddr::V4(v4) => v4.to_string(),
        IpAddr::V6(v6) => v6.to_string().replace(':', "_"),
    };
    let path = socket_dir()?.join(format!("{namespace}-{ip}-{port}.sock"));
    (path.as_os_str().len() < SUN_LEN).then_some(path)
}

/// Removes the sockets of killed servers: those without a listener, unless they are so new that a
/// server may be about to listen.
#[cfg(unix)]
pub fn sweep_sockets() {
    if let Some(dir) = socket_dir() {
        sweep(&dir, Duration::from_secs(10));
    }
}

#[cfg(not(unix))]
pub fn sweep_sockets() {}

#[cfg(unix)]
fn sweep(dir: &Path, older: Duration) {
    let nobody = |path: &Path| {
        let answer = std::os::unix::net::UnixStream::connect(path);
        answer.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused)
    };
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let age = entry.metadata().and_then(|m| m.modified()).ok().and_then(|at| at.elapsed().ok());
        let path = entry.path();
        if path.extension().is_some_and(|e| e == "sock") && age.is_some_and(|a| a >= older) && nobody(&path) {
            let _ = std::fs::remove_file(&path);
        }
    }
}

/// A directory of this user alone, for sockets between processes of this host. `None`: there is none that is safe.
#[cfg(unix)]
pub fn socket_dir() -> Option<PathBuf> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};
    let me = std::fs::metadata("/proc/self").ok()?.uid();
    let dir = std::env::temp_dir().join(format!("paraft-{me}"));
    let _ = std::fs::DirBuilder::new().mode(0o700).create(&dir);
    // Another user's directory under this name is a trap: use TCP.
    let m = std::fs::symlink_metadata(&dir).ok()?;
    (m.is_dir() && m.uid() == me && m.mode() & 0o077 == 0).then_some(dir)
}

/// Likewise.
#[cfg(not(unix))]
pub fn socket_dir() -> Option<PathBuf> {
    None
}

#[cfg(test)]
#[path = "socket_tests.rs"]
mod tests;
