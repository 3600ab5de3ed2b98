//! The connections to the other servers.

use paraft_common::ServerId;
use paraft_proto::limits;
use paraft_tls::Access;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};
use tokio::sync::broadcast;
use tonic::transport::{Channel, Endpoint};

/// Connections that may close at once. If a group misses one, it still checks its leader.
const CLOSINGS_CAPACITY: usize = 64;

/// Maximum of open channels: two for each server of a large fleet, and for those that have left.
const MAX_CHANNELS: usize = 1024;

/// A server without lanes is tried again after this long, with the next stream: it may have a newer release by now.
const LANES_RETRY_DELAY: Duration = Duration::from_secs(60);

/// The connections to the other servers, one set per process.
pub struct Peers {
    access: Access,
    channels: Mutex<HashMap<(String, bool), Channel>>,
    /// Addresses that support gRPC and no lanes, and since when that is known.
    http_alone: Mutex<HashMap<String, Instant>>,
    /// The last known address of each server. A group's membership may hold old addresses: if all members have
    /// moved at once, no leader can update it.
    heard_at: Mutex<HashMap<ServerId, String>>,
    fleet: AtomicU64,
    began: Instant,
    /// Servers whose connection to this one has closed.
    closings: broadcast::Sender<ServerId>,
}

#[cfg(test)]
impl Default for Peers {
    fn default() -> Self {
        Self::new(Access::Insecure)
    }
}

impl Peers {
    /// No connections yet. `access`: how to reach the servers.
    pub fn new(access: Access) -> Self {
        let closings = broadcast::channel(CLOSINGS_CAPACITY).0;
        Self {
            access,
            channels: Mutex::default(),
            http_alone: Mutex::default(),
            heard_at: Mutex::default(),
            fleet: AtomicU64::default(),
            began: Instant::now(),
            closings,
        }
    }

    /// Sets the fleet of this server: every message names it from now on.
    pub fn belong(&self, fleet: u64) {
        self.fleet.store(fleet, Relaxed);
    }

    /// The fleet's number, or 0.
    pub fn fleet(&self) -> u64 {
        self.fleet.load(Relaxed)
    }

    /// Records that a server of this fleet has answered at this address.
    pub fn is_at(&self, server: ServerId, address: &str) {
        let mut all = self.heard_at.lock();
        if all.len() >= MAX_CHANNELS {
            all.clear();
        }
        if all.get(&server).is_none_or(|a| a != address) {
            all.insert(server, address.to_string());
        }
    }

    /// Where a server of this fleet has answered last.
    pub(super) fn last_address(&self, server: ServerId) -> Option<String> {
        self.heard_at.lock().get(&server).cloned()
    }

    /// How to reach the servers.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// The uptime of this process.
    pub(super) fn runs(&self) -> Duration {
        self.began.elapsed()
    }

    /// Reports that a connection from this server has closed.
    pub fn closed(&self, server: ServerId) {
        let _ = self.closings.send(server); // there may be no receiver
    }

    /// Receives the servers whose connections close from now on.
    pub(super) fn closings(&self) -> broadcast::Receiver<ServerId> {
        self.closings.subscribe()
    }

    /// Whether lanes may be tried at an address.
    pub(super) fn speaks_lanes(&self, address: &str) -> bool {
        self.http_alone.lock().get(address).is_none_or(|since| since.elapsed() >= LANES_RETRY_DELAY)
    }

    /// Records that this address answered gRPC, and not a lane if one was tried.
    pub(super) fn speaks_http_alone(&self, address: &str) {
        if self.speaks_lanes(address) {
            let mut known = self.http_alone.lock();
            if known.len() >= MAX_CHANNELS {
                known.clear();
            }
            known.insert(address.to_string(), Instant::now());
        }
    }

    /// The connection to an address, opened on first use; for bulk, or for the rest.
    pub(super) fn channel(&self, address: &str, bulk: bool) -> Result<Channel, String> {
        let key = (address.to_string(), bulk);
        let mut channels = self.channels.lock();
        if let Some(c) = channels.get(&key) {
            return Ok(c.clone());
        }
        let channel = channel(address, &self.access)?;
        if channels.len() >= MAX_CHANNELS {
            channels.clear();
        }
        channels.insert(key, channel.clone());
        Ok(channel)
    }
}

/// A connection to another server, opened on first use.
pub fn channel(address: &str, access: &Access) -> Result<Channel, String> {
    Ok(endpoint(address)?.connect_with_connector_lazy(access.connector()))
}

fn endpoint(address: &str) -> Result<Endpoint, String> {
    Ok(Endpoint::from_shared(format!("http://{address}"))
        .map_err(|e| format!("`{address}` is no address: {e}"))?
        .connect_timeout(Duration::from_secs(1))
        .initial_stream_window_size(limits::STREAM_WINDOW_BYTES)
        .initial_connection_window_size(limits::CONNECTION_WINDOW_BYTES)
        .max_frame_size(limits::FRAME_BYTES)
        // Otherwise a black-holed connection would hang until the kernel gives up.
        .http2_keep_alive_interval(Duration::from_millis(500))
        .keep_alive_timeout(Duration::from_secs(1))
        // An idle connection needs no probes: a fleet has three for each pair of servers.
        .keep_alive_while_idle(false))
}
