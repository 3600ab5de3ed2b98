//! Dials an address, to see whether a process listens there.

use std::{io, time::Duration};

/// A dial without a result in this time proves nothing. Longer than a busy or distant host takes.
const DIAL_TIMEOUT: Duration = Duration::from_millis(500);

/// What a dial shows of the process at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DialResult {
    /// The host is up, and no process listens.
    Refused,
    /// A process listens.
    Taken,
    /// Neither: no answer, or no route.
    Unknown,
}

/// Whether a process listens at this address, by a connection that is closed at once.
pub(super) async fn dial(address: &str) -> DialResult {
    tokio::time::timeout(DIAL_TIMEOUT, connect(address)).await.unwrap_or(DialResult::Unknown)
}

async fn connect(address: &str) -> DialResult {
    let Ok(places) = tokio::net::lookup_host(address).await else { return DialResult::Unknown };
    let mut said = DialResult::Unknown;
    for place in places {
        match tokio::net::TcpStream::connect(place).await {
            Ok(_) => return DialResult::Taken,
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => said = DialResult::Refused,
            Err(_) => return DialResult::Unknown,
        }
    }
    said
}
