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

#[cfg(unix)]
fn socket_dir() -> Option<PathBuf> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};
    let me = std::fs::metadata("/proc/self").ok()?.uid();
    let dir = std::env::temp_dir().join(format!("paraft-{me}"));
    let _ = std::fs::DirBuilder::new().mode(0o700).create(&dir);
    // Another user's directory under this name is a trap: use TCP.
    let m = std::fs::symlink_metadata(&dir).ok()?;
    (m.is_dir() && m.uid() == me && m.mode() & 0o077 == 0).then_some(dir)
}

#[cfg(not(unix))]
fn socket_dir() -> Option<PathBuf> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_this_host_are_local() {
        for here in ["127.0.0.1:7070", "127.0.0.2:1", "[::1]:7070", "localhost:7070"] {
            assert!(is_local(here), "{here}");
        }
        // 192.0.2.0/24 is for documentation.
        for elsewhere in
            ["192.0.2.1:7070", "0.0.0.0:7070", "example.org:7070", "7070", "[::1]", "127.0.0.1:x"]
        {
            assert!(!is_local(elsewhere), "{elsewhere}");
            assert_eq!(socket_path(elsewhere), None, "{elsewhere}");
        }
    }

    #[test]
    #[cfg(unix)]
    fn sockets_without_a_listener_are_removed() {
        use std::os::unix::net::UnixListener;
        let dir = std::env::temp_dir().join(format!("paraft-sweep-{}", std::process::id()));
        std::fs::create_dir(&dir).expect("a folder");
        let at = |name: &str| dir.join(name);
        drop(UnixListener::bind(at("dead.sock")).expect("bound"));
        let lives = UnixListener::bind(at("lives.sock")).expect("bound");
        std::fs::write(at("other"), "").expect("written");
        sweep(&dir, Duration::from_secs(60));
        assert!(at("dead.sock").exists(), "it is new");
        sweep(&dir, Duration::ZERO);
        let left = ["dead.sock", "lives.sock", "other"].map(|name| at(name).exists());
        drop(lives);
        std::fs::remove_dir_all(&dir).expect("removed");
        assert_eq!(left, [false, true, true]);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn each_address_has_a_socket_of_its_own() {
        let paths = ["127.0.0.1:7070", "127.0.0.2:7070", "127.0.0.1:7071", "[::1]:7070"].map(socket_path);
        assert!(paths.iter().all(Option::is_some));
        for (i, path) in paths.iter().enumerate() {
            assert!(!paths[..i].contains(path), "{path:?}");
        }
        assert_eq!(socket_path("localhost:7070"), paths[0]);
    }
}
