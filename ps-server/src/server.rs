//! A server: its replicas, their leaders, the services. Parses, builds, runs.

mod error;
mod identity;
mod options;
mod readers;
mod relay;

pub use error::ServerError;
pub(crate) use error::data_failed;
pub use identity::IDENTITY;
pub(crate) use identity::remembered;
pub use options::{Place, ServerOptions};
pub use relay::relay;

use crate::{
    connections::{self, Connections, TAKE_TIMEOUT},
    control::{Agent, AgentOptions, Agreed, ControlReplica, Identity},
    metrics,
    raft::{Folder, GroupOptions, Logs, Peers, ReplicaId},
    replicas::{Replicas, ReplicasOptions},
    replicated::GroupId,
    rpc::{
        Lanes,
        audit::Audit,
        control::{ControlService, GrpcCalls, ask_to_join},
        peers::PeersService,
        rights::RightsLayer,
        shape::shape_of,
        shards::{MAX_UNOPENED_STREAMS, ShardsService},
        status::StatusService,
    },
    settings,
};
use error::control_failed;
use identity::{files_without_identity, remember};
use paraft_common::ServerId;
use paraft_lanes::Pool;
use paraft_proto::{control_server::ControlServer, limits, services::Route};
use paraft_tls::Access;
use paraft_trace::Stages;
use readers::ReaderThreads;
use std::{future::Future, path::Path, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::watch,
};

/// Factor on the control group's election timeout. No push waits for the control group, whose heartbeats
/// never pause: it notices a leader's death later, and an idle server costs half.
const CONTROL_ELECTIONS: u32 = 2;

/// How a server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Transfers its leaderships first.
    HandOver,
    /// At once: the whole fleet ends.
    AtOnce,
}

/// A server that is ready to serve.
pub struct Server {
    options: ServerOptions,
    agent: Arc<Agent>,
    audit: Arc<Audit>,
    replicas: Arc<Replicas>,
    shards: ShardsService,
    peers: PeersService,
    status: StatusService,
    connections: Arc<Connections>,
    logs: Logs,
}

impl Server {
    /// Starts the control group's replica, and the shard replicas that are on disk. The rest follows in
    /// [`Self::run`], when the other servers run.
    pub async fn start(mut options: ServerOptions) -> Result<Self, ServerError> {
        options.validate()?;
        let folder = Folder::new(options.disk.clone(), &options.data);
        let known = remembered(&folder)?;
        if known.is_some() {
            settings::compare_options(&folder, &options)?;
        } else if let Some(there) = files_without_identity(&folder)? {
            return Err(ServerError::Data(format!(
                "{}: the file `{IDENTITY}`, which says whose it is, is gone, and {there} is there. Put the file back from a \
                 copy, or start a new server with another --data folder",
                options.data.display()
            )));
        }
        let told_before = known.is_some() && matches!(options.place, Place::Joins(_));
        let identity = identify(known, &mut options).await?;
        // On disk before any other server learns the name: a vote must never be given twice under one name.
        remember(&folder, identity).map_err(data_failed)?;
        let peers = Arc::new(Peers::new(options.access.clone()));
        peers.belong(identity.fleet);
        let agreed = Arc::new(Agreed::default());
        let logs = Logs::new(options.disk.clone(), &options.data);
        let control = GroupOptions {
            group: GroupId::Control.into(),
            me: identity.node,
            folder: Some(Folder::within(&logs, options.data.join("control"))),
            election: options.election * CONTROL_ELECTIONS,
            check_every: None, // the leader compares
        };
        let control = ControlReplica::start(control, agreed.clone(), peers.clone())
            .await
            .map(Arc::new)
            .map_err(control_failed)?;
        let replicas = ReplicasOptions {
            server: identity.server,
            data: options.data.clone(),
            logs: logs.clone(),
            election: options.election,
            check_every: options.check_every,
        };
        let replicas = Arc::new(Replicas::new(replicas, peers.clone()));
        if let Err(e) = replicas.reopen().await {
            // Release what was opened: the caller may start the server again in this process.
            replicas.shutdown().await;
            control.shutdown().await;
            return Err(data_failed(e));
        }
        let agent = AgentOptions {
            server: identity.server,
            address: options.address.clone(),
            servers: match &options.place {
                Place::Listed(_) => options.servers.clone(),
                Place::Joins(at) => at.clone(),
            },
            // A joining server was told the shape once; its current options say nothing of its fleet.
            shape: (!told_before).then_some(options.shape),
            election: options.election,
            timeouts: options.timeouts,
            job_memory: options.job_memory,
        };
        let started = settings::Settings::of(&options);
        let keep = Box::new(move |fleet| {
            // Write the start settings once it belongs to a fleet; a joining server was told them.
            started.iter().try_for_each(|s| s.write(&folder))?;
            Ok(remember(&folder, Identity { fleet, ..identity })?)
        });
        let calls = Box::new(GrpcCalls::new(options.access.clone()));
        let agent = Arc::new(Agent::new(
            agent,
            control.clone(),
            agreed,
            replicas.clone(),
            calls,
            identity.fleet,
            keep,
        ));
        let connections = {
            let (replicas, agent) = (replicas.clone(), agent.clone());
            let room = move || {
                let servers = agent.agreed.read(|s| s.servers.len()).max(agent.listed_count());
                connections::room(paraft_host::descriptor_limit(), replicas.count(), servers)
            };
            Connections::new(room, options.access.clone())
        };
        let audit = Arc::new(Audit::of(options.disk.clone(), &options.data));
        let status = StatusService {
            server: identity.server.0,
            address: options.address.clone(),
            replicas: replicas.clone(),
            control: control.clone(),
            connections: connections.clone(),
            digests: Arc::default(),
            page: options.page.clone(),
            data: options.data.clone(),
        };
        Ok(Self {
            shards: ShardsService {
                server: identity.server.0,
                replicas: replicas.clone(),
                agent: agent.clone(),
                status: status.clone(),
                streams: Arc::default(),
                unopened: Arc::new(tokio::sync::Semaphore::new(MAX_UNOPENED_STREAMS)),
                readers: Arc::default(),
                audit: audit.clone(),
                access: options.access.clone(),
            },
            peers: PeersService { replicas: replicas.clone(), control, peers },
            agent,
            audit,
            replicas,
            status,
            connections,
            logs,
            options,
        })
    }

    /// The replicas that it hosts, now and later.
    pub fn replicas(&self) -> Arc<Replicas> {
        self.replicas.clone()
    }

    /// The time that it spends in the stages of gradients; a trace of them begins there.
    pub fn stages(&self) -> Arc<Stages> {
        self.replicas.stages().clone()
    }

    /// Its id.
    pub fn id(&self) -> ServerId {
        self.agent.server()
    }

    /// The id of its fleet, now and later; 0 before it has one.
    pub fn fleet(&self) -> impl Fn() -> u64 + Send + Sync + 'static + use<> {
        let agent = self.agent.clone();
        move || agent.fleet()
    }

    /// Serves workers and peers on `listener` (and `/metrics` on the other) until `shutdown` resolves, then
    /// stops the replicas.
    pub async fn run(
        self,
        listener: TcpListener,
        metrics_listener: Option<TcpListener>,
        shutdown: impl Future<Output = Ending> + Send + 'static,
    ) -> Result<(), ServerError> {
        let part = tokio::spawn(self.agent.clone().run());
        let (stop, stopped) = watch::channel(());
        let agent = self.agent.clone();
        tokio::spawn(async move {
            if shutdown.await == Ending::HandOver {
                agent.hand_over().await;
            }
            drop(stop);
        });
        tokio::spawn(expire(self.connections.clone(), self.options.access.clone(), stopped.clone()));
        tokio::spawn(close_stalled(self.connections.clone(), stopped.clone()));
        let until = |mut s: watch::Receiver<()>| async move { while s.changed().await.is_ok() {} };
        if let Some(l) = metrics_listener {
            let listener = connections::BoundedListener::new(l, self.connections.clone());
            tokio::spawn(metrics::serve(listener, self.status.clone(), until(stopped.clone())));
        }
        let lanes = {
            let pool = Pool::new(if paraft_host::memory::memory().is_scarce() { 0 } else { RECEIVED_BYTES });
            let lanes = Lanes { shards: self.shards.clone(), peers: self.peers.clone(), pool };
            let stopped = stopped.clone();
            move |lane| {
                let (lanes, end) = (lanes.clone(), until(stopped.clone()));
                tokio::spawn(async move {
                    tokio::select! { () = lanes.serve(lane) => {}, () = end => {} }
                });
            }
        };
        let own_socket = self.options.socket.as_deref().and_then(|path| Some((path, bind_socket(path)?)));
        let own_path = own_socket.map(|(path, listener)| {
            // Every peer that can reach this socket has all rights: the file's mode is the check.
            let (incoming, _) = connections::incoming(listener, self.connections.clone(), lanes.clone());
            tokio::spawn(self.router().serve_with_incoming_shutdown(incoming, until(stopped.clone())));
            path
        });
        let (incoming, readers) = connections::incoming(listener, self.connections.clone(), lanes);
        let reader_threads =
            ReaderThreads::start().map_err(|e| ServerError::Io("no threads for readers".into(), e))?;
        reader_threads.spawn(self.router().serve_with_incoming_shutdown(readers, until(stopped.clone())));
        let served = self.router().serve_with_incoming_shutdown(incoming, until(stopped.clone()));
        let mut misfit = Ok(());
        tokio::select! {
            r = served => r?,
            Ok(Err(differs)) = part => misfit = Err(ServerError::Settings(differs)),
            // Workers' streams stay open; a graceful end must not wait for them for ever.
            () = async { until(stopped.clone()).await; tokio::time::sleep(Duration::from_millis(200)).await } => {}
        }
        if let Some(path) = own_path {
            let _ = std::fs::remove_file(path);
        }
        self.agent.control.shutdown().await;
        self.replicas.shutdown().await;
        let logs = self.logs.clone();
        // Without its mark the log opens as after a crash. On this thread: there may be no memory for
        // another.
        logs.close();
        misfit
    }

    fn router(
        &self,
    ) -> tonic::transport::server::Router<tower::layer::util::Stack<RightsLayer, tower::layer::util::Identity>>
    {
        limited()
            .layer(RightsLayer(Some(self.audit.clone())))
            .add_service(ControlServer::new(ControlService {
                agent: self.agent.clone(),
                audit: self.audit.clone(),
            }))
            .add_service(Route(self.shards.clone()))
            .add_service(Route(self.peers.clone()))
    }

    /// This server's status.
    pub fn status(&self) -> StatusService {
        self.status.clone()
    }
}

/// gRPC within our limits.
fn limited() -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .initial_stream_window_size(limits::STREAM_WINDOW_BYTES)
        .initial_connection_window_size(limits::CONNECTION_WINDOW_BYTES)
        .max_frame_size(limits::FRAME_BYTES)
        .max_concurrent_streams(limits::MAX_STREAMS)
        .http2_max_header_list_size(limits::HEADER_BYTES)
        .http2_keepalive_interval(Some(limits::SERVER_KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(limits::KEEPALIVE_TIMEOUT))
}

/// Who this server is, by its data folder (`known`), by its options or, if it joins a fleet, by the fleet's answer.
async fn identify(known: Option<Identity>, options: &mut ServerOptions) -> Result<Identity, ServerError> {
    let (server, fleet) = match (known, &options.place) {
        (Some(known), Place::Listed(id)) if known.server != *id => {
            return Err(ServerError::Data(format!(
                "{} belongs to {}, not to {id}: give each server its own --data",
                options.data.display(),
                known.server
            )));
        }
        (Some(known), _) => return Ok(known),
        (None, Place::Listed(id)) => (*id, 0),
        (None, Place::Joins(at)) => {
            let reply = ask_to_join(at, &options.address, &options.access, JOIN_TIMEOUT)
                .await
                .map_err(ServerError::Join)?;
            options.shape = shape_of(reply.shape.as_ref())
                .ok_or_else(|| ServerError::Join("its settings are of another version".into()))?;
            (ServerId(reply.server), reply.fleet)
        }
    };
    Ok(Identity { server, node: ReplicaId::new_incarnation(server), fleet })
}

/// Listens at this path, for workers of this host; `None`: it cannot.
fn bind_socket(path: &Path) -> Option<UnixListener> {
    // A socket that no process answers was left by a killed one.
    let bound = match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => {
            Err(std::io::Error::new(std::io::ErrorKind::AddrInUse, "another server of this address lives"))
        }
        Err(_) => {
            let _ = std::fs::remove_file(path);
            UnixListener::bind(path)
        }
    };
    bound
        .inspect_err(
            |error| tracing::warn!(path = %path.display(), %error, "no Unix socket: workers of this host come over TCP"),
        )
        .ok()
}

/// Interval of checks on open connections: certificates expire, and authorities are withdrawn.
const EXPIRY_CHECK_INTERVAL: Duration = Duration::from_millis(500);

async fn expire(connections: Arc<Connections>, access: Access, mut stopped: watch::Receiver<()>) {
    let Access::Certificates(credentials) = access else { return };
    let mut withdrawn = credentials.withdrawn();
    while tokio::time::timeout(EXPIRY_CHECK_INTERVAL, stopped.changed()).await.is_err() {
        let now = credentials.withdrawn();
        connections.expire(std::mem::replace(&mut withdrawn, now) != now);
    }
}

async fn close_stalled(connections: Arc<Connections>, mut stopped: watch::Receiver<()>) {
    let mut pause = TAKE_TIMEOUT;
    while tokio::time::timeout(pause, stopped.changed()).await.is_err() {
        pause = connections.close_stalled(TAKE_TIMEOUT);
    }
}

/// Bytes of buffers that are kept for later pushes and appends: as much as one shard's log in memory.
const RECEIVED_BYTES: usize = 32 << 20;

/// A new server gives up after this long if no fleet answers.
const JOIN_TIMEOUT: Duration = Duration::from_secs(30);
