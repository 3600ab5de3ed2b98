//! The address of this host for other hosts.

use super::folder::{Address, Folder};
use crate::failure::Failure;
use paraft_engines::Place;
use paraft_worker::exit;
use std::{
    fs,
    net::{IpAddr, Ipv4Addr, ToSocketAddrs, UdpSocket},
};

/// The address of this host on the route to `peer`, or to anywhere; it sends nothing. Without a route,
/// the first address that is not loopback.
pub fn own_host(peer: Option<&str>) -> IpAddr {
    let towards = |to: &str| {
        let to = to.to_socket_addrs().ok()?.find(|a| a.is_ipv4())?;
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
        socket.connect(to).ok()?;
        Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified())
    };
    let trie = || fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
    let found = peer.and_then(towards).or_else(|| towards("192.0.2.1:9")); // a documentation address: only the route is looked up
    found.or_else(|| first_local(&trie()).map(IpAddr::V4)).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// The first address in the kernel's routing table that is not loopback.
fn first_local(trie: &str) -> Option<Ipv4Addr> {
    let mut last = None;
    for line in trie.lines() {
        match line.trim().strip_prefix("|-- ") {
            Some(address) => last = address.parse::<Ipv4Addr>().ok(),
            None if line.contains("host LOCAL") => {
                if let Some(own) = last.filter(|a| !a.is_loopback()) {
                    return Some(own);
                }
            }
            None => {}
        }
    }
    None
}

/// This host's own name, which tells whether two processes share a host.
pub fn host_name() -> String {
    paraft_host::name()
}

impl Address {
    /// The location of this process.
    pub fn here(address: String, place: &Place) -> Self {
        Self { address, host: host_name(), node: place.node.clone(), attempt: place.attempt }
    }

    fn is_loopback(&self) -> bool {
        let host = self.address.rsplit_once(':').map_or(&*self.address, |(host, _)| host);
        host == "localhost"
            || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}

impl Folder {
    /// Fails if one of two servers on different hosts has a loopback address, which the other host
    /// cannot reach.
    pub fn can_meet(&self, own: &Address) -> Result<(), Failure> {
        for (number, other) in self.servers()? {
            if other.host == own.host {
                continue;
            }
            let (who, at) = match (own.is_loopback(), other.is_loopback()) {
                (true, _) => ("this server".to_string(), own),
                (_, true) => (format!("s{number}"), &other),
                _ => continue,
            };
            return Err(Failure::new(
                exit::CONFIG,
                format!(
                    "{who} is at {}, an address of the loopback, and there are servers on {} and {}",
                    at.address, own.host, other.host
                ),
            )
            .help(format!("add --advertise HOST with the address by which the others reach {}", at.host)));
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
