//! What an engine's server does besides serving.

use paraft_common::ServerId;
use paraft_fleet::failure::Failure;
use paraft_server::{Server, server::Place};
use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering::Relaxed},
    },
    time::Duration,
};

/// How an engine's server joins its fleet, when it ends by itself, and how long it may hand over its
/// leaders. `crate::role` builds one.
pub struct ServerHooks {
    /// Maps the address that the server listens on to its place in the fleet and its public address.
    pub meet: JoinHook,
    /// Polled while the server runs: returns the exit code if the server must end now.
    pub watch: WatchHook,
    /// After a signal, the time to hand over leaders and replicas.
    pub grace: Duration,
}

/// How a server finds the other servers.
pub type JoinHook = Box<dyn Fn(SocketAddr) -> Result<JoinPlan, Failure>>;

/// Polled while a server runs.
pub type WatchHook = Arc<dyn Fn(&RunningServer) -> Option<i32> + Send + Sync>;

/// The place of a server in its fleet.
pub struct JoinPlan {
    /// How it joins its fleet.
    pub place: Place,
    /// The address for other servers and for workers.
    pub address: String,
    /// The founding servers, if it is one of them.
    pub servers: Vec<String>,
}

/// A running server.
pub struct RunningServer {
    /// Its id.
    pub id: ServerId,
    /// Its fleet; 0 before it has joined one.
    pub fleet: u64,
    /// The address for other servers and for workers.
    pub address: String,
}

/// The poll interval of [`ServerHooks::watch`].
const WATCH_INTERVAL: Duration = Duration::from_millis(200);

/// No exit code: the server continues.
pub const CONTINUES: i32 = i32::MIN;

/// Resolves when `ServerHooks::watch` requests the end, with the exit code in `over`.
pub fn watched(
    conduct: Option<&ServerHooks>,
    server: &Server,
    address: &str,
    over: Arc<AtomicI32>,
) -> impl Future<Output = ()> + use<> {
    let watch = conduct.map(|c| c.watch.clone());
    let (id, fleet, address) = (server.id(), server.fleet(), address.to_string());
    async move {
        let Some(watch) = watch else { return std::future::pending().await };
        loop {
            tokio::time::sleep(WATCH_INTERVAL).await;
            let (watch, now) =
                (watch.clone(), RunningServer { id, fleet: fleet(), address: address.clone() });
            // The check may block, so it does not run on a thread that serves.
            if let Ok(Some(code)) = tokio::task::spawn_blocking(move || watch(&now)).await {
                over.store(code, Relaxed);
                return;
            }
        }
    }
}
