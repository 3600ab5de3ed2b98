//! A server: its replicas, their owners, the services. Parse, build, run.

use crate::{
    metrics,
    raft::{Group, GroupOptions, Peers},
    rpc::{
        exchange::{Hosted, ShardsService},
        peers::PeersService,
        status::{StatusService, Watched},
    },
    shard::{
        Shard,
        owner::{self, Counters},
    },
};
use futures::StreamExt;
use paraft_common::{ServerId, ShardId, placement};
use paraft_proto::{limits, peers_server::PeersServer, shards_server::ShardsServer};
use std::{collections::BTreeMap, future::Future, path::PathBuf, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::watch,
};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};

/// How to start a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// This server's place in `servers`.
    pub id: ServerId,
    /// The addresses of all servers, the same list in the same order on each.
    pub servers: Vec<String>,
    /// Shards of the job: Raft groups over the whole fleet.
    pub shards: u32,
    /// Replicas of each shard: 1 or 3 (any odd number that is not more than the servers).
    pub replicas: u32,
    /// A follower that hears nothing for between once and twice this long stands for election.
    pub election: Duration,
    /// Also listen on this Unix socket, for workers on the same host.
    pub socket: Option<PathBuf>,
}

/// Why a server does not start or run.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The options contradict each other.
    #[error("{0}")]
    Options(String),
    /// A replica did not start.
    #[error("the replica of {shard} did not start: {why}")]
    Replica {
        /// Which shard.
        shard: ShardId,
        /// openraft's words.
        why: String,
    },
    /// The network failed.
    #[error("the server stopped: {0}")]
    Transport(#[from] tonic::transport::Error),
    /// A socket failed.
    #[error("{0}: {1}")]
    Io(String, std::io::Error),
}

/// A server that is ready to serve.
pub struct Server {
    options: ServerOptions,
    shards: ShardsService,
    peers: PeersService,
    groups: Arc<BTreeMap<ShardId, Group>>,
    status: StatusService,
}

impl ServerOptions {
    /// Checks what can be checked without the other servers.
    pub fn validate(&self) -> Result<(), ServerError> {
        let bad = |m: String| Err(ServerError::Options(m));
        let n = self.servers.len() as u64;
        if self.id.0 >= n {
            return bad(format!(
                "--id {} names no server: --servers lists {n} (ids are 0 to {})",
                self.id.0,
                n.saturating_sub(1)
            ));
        }
        if self.shards == 0 || self.shards > 64 {
            return bad(format!("--shards {} is not within 1 to 64", self.shards));
        }
        if self.replicas == 0 || u64::from(self.replicas) > n {
            return bad(format!("--replicas {} needs as many servers; --servers lists {n}", self.replicas));
        }
        if self.replicas.is_multiple_of(2) {
            return bad(format!(
                "--replicas {} is even: it survives no more failures than {} and costs more; use an odd number",
                self.replicas,
                self.replicas - 1
            ));
        }
        Ok(())
    }
}

impl Server {
    /// Starts the replicas. `incarnation` is a random number of this process.
    pub async fn start(options: ServerOptions, incarnation: u64) -> Result<Self, ServerError> {
        options.validate()?;
        let peers = Arc::new(Peers::new(options.id, incarnation, options.servers.clone()));
        let (mut hosted, mut groups, mut watched) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for id in (0..options.shards).map(ShardId) {
            let replicas = placement::replicas_of(id, options.servers.len() as u32, options.replicas);
            if !replicas.contains(&options.id) {
                continue;
            }
            let shard = Arc::new(Shard::new(id, options.shards));
            let group = GroupOptions {
                shard: id,
                shards: options.shards,
                me: options.id,
                replicas,
                election: options.election,
            };
            let group = Group::start(group, shard.clone(), peers.clone())
                .await
                .map_err(|why| ServerError::Replica { shard: id, why })?;
            let counters = Arc::new(Counters::default());
            let owner = owner::spawn(shard.clone(), group.clone(), counters.clone());
            hosted.insert(id, Hosted { shard: shard.clone(), owner });
            groups.insert(id, group.clone());
            watched.insert(id, Watched { shard, group, counters });
        }
        let address = options.servers[options.id.0 as usize].clone();
        let status = StatusService { server: options.id.0, address, watched: Arc::new(watched) };
        let groups = Arc::new(groups);
        Ok(Self {
            shards: ShardsService {
                server: options.id.0,
                hosted: Arc::new(hosted),
                status: status.clone(),
                streams: Arc::default(),
            },
            peers: PeersService { groups: groups.clone(), peers },
            groups,
            status,
            options,
        })
    }

    /// Serves workers and peers on `listener` (and `/metrics` on the other) until `shutdown` resolves, then
    /// stops the replicas.
    pub async fn run(
        self,
        listener: TcpListener,
        metrics_listener: Option<TcpListener>,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), ServerError> {
        let (stop, stopped) = watch::channel(());
        tokio::spawn(async move {
            shutdown.await;
            drop(stop);
        });
        let until = |mut s: watch::Receiver<()>| async move { while s.changed().await.is_ok() {} };
        if let Some(l) = metrics_listener {
            tokio::spawn(metrics::serve(l, self.status.clone(), until(stopped.clone())));
        }
        if let Some(path) = &self.options.socket {
            let _ = std::fs::remove_file(path); // left by a process that was killed
            let l = UnixListener::bind(path).map_err(|e| ServerError::Io(path.display().to_string(), e))?;
            let incoming = UnixListenerStream::new(l).map(|s| {
                let s = s?;
                let _ = socket2::SockRef::from(&s).set_send_buffer_size(limits::SOCKET_BUFFER_BYTES);
                Ok::<_, std::io::Error>(s)
            });
            let serve = self.router().serve_with_incoming_shutdown(incoming, until(stopped.clone()));
            tokio::spawn(serve);
        }
        let incoming = TcpListenerStream::new(listener).map(|s| {
            let s = s?;
            s.set_nodelay(true)?; // small messages must not wait for Nagle's algorithm
            Ok::<_, std::io::Error>(s)
        });
        let served = self.router().serve_with_incoming_shutdown(incoming, until(stopped.clone()));
        tokio::select! {
            r = served => r?,
            // Streams of workers stay open; a graceful end must not wait for them for ever.
            () = async { until(stopped.clone()).await; tokio::time::sleep(Duration::from_millis(200)).await } => {}
        }
        if let Some(path) = &self.options.socket {
            let _ = std::fs::remove_file(path);
        }
        for group in self.groups.values() {
            group.shutdown().await;
        }
        Ok(())
    }

    fn router(&self) -> tonic::transport::server::Router {
        tonic::transport::Server::builder()
            .initial_stream_window_size(limits::STREAM_WINDOW_BYTES)
            .initial_connection_window_size(limits::CONNECTION_WINDOW_BYTES)
            .max_frame_size(limits::FRAME_BYTES)
            .http2_keepalive_interval(Some(limits::KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(limits::KEEPALIVE_TIMEOUT))
            .add_service(
                ShardsServer::new(self.shards.clone()).max_decoding_message_size(limits::MAX_MESSAGE_BYTES),
            )
            .add_service(
                // A peer's message holds up to 1 MiB of entries, or one larger entry, and their headers.
                PeersServer::new(self.peers.clone()).max_decoding_message_size(4 * limits::MAX_MESSAGE_BYTES),
            )
    }

    /// This server's status.
    pub fn status(&self) -> StatusService {
        self.status.clone()
    }
}
