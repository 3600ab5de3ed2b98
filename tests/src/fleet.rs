//! Servers in this process.

use crate::{closed::closed, wait};
use anyhow::{Context, Result, bail, ensure};
use paraft_client::{Done, Order, Transport, connect::lazy, status};
use paraft_common::{Durability, JobId, JobShard, ServerId, ShardId};
use paraft_fleet::faults::{Faults, link::Links, proxy::Proxies};
use paraft_proto::{
    DescribeReply, FleetShape, HelloReply, HelloRequest, ShardStatus, StatusReply, SubmitRequest,
    control_client::ControlClient,
};
use paraft_server::{
    Server, ServerError, ServerOptions, Shape, Timeouts,
    replicas::{Replica, Replicas},
    server::Place,
};
use paraft_store::{RealDisk, faulty::FaultyDisk};
use paraft_tls::{Access, Credentials, access::As};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::TcpListener,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

pub use paraft_proof::At;

/// Short, so that a failover takes a fraction of a second; long enough for two busy cores.
pub const ELECTION: Duration = Duration::from_millis(200);
/// Replicas of a silent server move after this long, if there is another server.
const REPLACE: Duration = Duration::from_secs(3);
/// Replicas are compared this often.
const CHECK_EVERY: Duration = Duration::from_millis(200);
const ASK: Duration = Duration::from_secs(10);

/// Servers on loopback. They end with the fleet.
pub struct Fleet {
    /// What a worker needs to reach it.
    pub at: At,
    slots: Vec<Slot>,
    /// The disks under the servers' folders.
    disks: Vec<FaultyDisk>,
    /// Where the servers listen; if they have proxies, their addresses are those of the proxies.
    listens: Vec<String>,
    proxies: Option<Proxies>,
    durability: Durability,
    election: Duration,
    data: TempDir,
    asking: Runtime,
    access: Access,
}

/// A server's state: bound, running, dead.
enum Slot {
    /// Its port is taken; no process answers yet.
    Bound(TcpListener),
    /// Its replicas, set once its disk has let it start.
    Running(Runtime, Arc<OnceLock<Arc<Replicas>>>),
    Dead,
}

/// The shape of a fleet; `Default` is one server with one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FleetOptions {
    /// Servers.
    pub servers: u32,
    /// Raft groups.
    pub shards: u32,
    /// Replicas of each.
    pub replicas: u32,
    /// What an acknowledged push survives.
    pub durability: Durability,
    /// The election timeout.
    pub election: Duration,
    /// Each server is behind a proxy, for [`Fleet::put`].
    pub proxies: bool,
    /// The servers speak TLS, with certificates of [`closed`]'s authority. All fleets of a process do, or
    /// none.
    pub closed: bool,
}

impl Default for FleetOptions {
    fn default() -> Self {
        Self {
            servers: 1,
            shards: 1,
            replicas: 1,
            durability: Durability::default(),
            election: ELECTION,
            proxies: false,
            closed: false,
        }
    }
}

impl FleetOptions {
    /// Three servers, every shard on all of them.
    pub fn replicated(shards: u32) -> Self {
        Self { servers: 3, shards, replicas: 3, ..Self::default() }
    }
}

/// How the workers of these tests reach servers: over TCP or, if `PARAFT_TEST_LANE` is `shared`, over shared
/// memory.
pub fn transport() -> Transport {
    match std::env::var("PARAFT_TEST_LANE").as_deref() {
        Ok("shared") => Transport::Auto,
        Ok("tcp") | Err(_) => Transport::Tcp,
        Ok(other) => panic!("PARAFT_TEST_LANE is `{other}`: tcp or shared"),
    }
}

impl Fleet {
    /// Starts every server.
    pub fn start(options: FleetOptions) -> Result<Self> {
        let mut fleet = Self::bind(options)?;
        for id in 0..options.servers {
            fleet.start_server(id)?;
        }
        fleet.whole()?;
        Ok(fleet)
    }

    /// Takes the ports; no server runs yet.
    pub fn bind(options: FleetOptions) -> Result<Self> {
        let access = match options.closed {
            false => Access::Insecure,
            true => Access::Certificates(Credentials::of_folder(&closed().folder("peer"), As::Peer)?),
        };
        if !options.closed {
            Access::Insecure.set();
        }
        let listeners = (0..options.servers)
            .map(|_| TcpListener::bind("127.0.0.1:0"))
            .collect::<std::io::Result<Vec<_>>>()?;
        let listens: Vec<String> =
            listeners.iter().map(|l| Ok(l.local_addr()?.to_string())).collect::<std::io::Result<_>>()?;
        let data = tempfile::tempdir()?;
        let proxies = match options.proxies {
            true => Some(Proxies::start(options.servers, data.path(), Links::default())?),
            false => None,
        };
        let addresses = proxies.as_ref().map_or(listens.clone(), |p| p.addresses().to_vec());
        Ok(Self {
            at: At { addresses, shards: options.shards, replicas: options.replicas, transport: transport() },
            disks: listeners.iter().map(|_| FaultyDisk::new(Arc::new(RealDisk))).collect(),
            slots: listeners.into_iter().map(Slot::Bound).collect(),
            listens,
            proxies,
            durability: options.durability,
            election: options.election,
            data,
            asking: Builder::new_current_thread().enable_all().build()?,
            access,
        })
    }

    /// Starts one server for the first time.
    pub fn start_server(&mut self, id: u32) -> Result<()> {
        let slot = std::mem::replace(&mut self.slots[id as usize], Slot::Dead);
        let Slot::Bound(listener) = slot else { anyhow::bail!("server {id} was started already") };
        self.run(id, listener)
    }

    /// Starts a killed server again at its address: a new process, which knows only what its folder holds.
    pub fn restart_server(&mut self, id: u32) -> Result<()> {
        let address = &self.listens[id as usize];
        let bind = || TcpListener::bind(address);
        let listener = wait::until("the dead server's port", bind, |l| l.is_ok())?;
        self.run(id, listener)
    }

    /// As [`Self::restart_server`], for a listed server or one that joined, whose disk may fail: it tries
    /// until its disk lets it start.
    pub fn restart_on_its_disk(&mut self, id: u32, joined: bool) -> Result<()> {
        let address = &self.listens[id as usize];
        let bind = || TcpListener::bind(address);
        let listener = wait::until("the dead server's port", bind, |l| l.is_ok())?;
        let place = match joined {
            true => Place::Joins(self.at.addresses.clone()),
            false => Place::Listed(ServerId(u64::from(id))),
        };
        self.run_at(id, listener, place, true)
    }

    /// The disk under a server's folder.
    pub fn disk(&self, id: u32) -> &FaultyDisk {
        &self.disks[id as usize]
    }

    /// A new server joins the running fleet; returns its id.
    pub fn join_server(&mut self) -> Result<u32> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let (id, known) = (self.slots.len() as u32, self.at.addresses.clone());
        self.at.addresses.push(listener.local_addr()?.to_string());
        self.listens.push(listener.local_addr()?.to_string());
        self.slots.push(Slot::Dead);
        self.disks.push(FaultyDisk::new(Arc::new(RealDisk)));
        self.run_at(id, listener, Place::Joins(known), false)?;
        Ok(id)
    }

    /// A new server joins, but the other servers do not reach it: its address takes connections and answers
    /// nothing. Returns its id in this fleet, and the listener at its address.
    pub fn join_unreachable(&mut self) -> Result<(u32, TcpListener)> {
        let (deaf, listener) = (TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?);
        let (id, known) = (self.slots.len() as u32, self.at.addresses.clone());
        self.at.addresses.push(deaf.local_addr()?.to_string());
        self.listens.push(listener.local_addr()?.to_string());
        self.slots.push(Slot::Dead);
        self.disks.push(FaultyDisk::new(Arc::new(RealDisk)));
        self.run_at(id, listener, Place::Joins(known), false)?;
        Ok((id, deaf))
    }

    /// Asks the leader of the control group to drain a server, or to cancel that.
    pub fn drain(&self, id: u32, undo: bool) -> Result<()> {
        let server = ServerId(u64::from(id));
        self.order("the drain to be agreed on", &Order::Drain { server, undo }).map(drop)
    }

    /// A server's folder.
    pub fn data(&self, id: u32) -> PathBuf {
        self.data.path().join(format!("s{id}"))
    }

    fn run(&mut self, id: u32, listener: TcpListener) -> Result<()> {
        self.run_at(id, listener, Place::Listed(ServerId(u64::from(id))), false)
    }

    fn run_at(&mut self, id: u32, listener: TcpListener, place: Place, waits: bool) -> Result<()> {
        listener.set_nonblocking(true)?;
        let options = ServerOptions {
            page: String::new(),
            place,
            address: self.at.addresses[id as usize].clone(),
            servers: self.at.addresses.clone(),
            shape: Shape { shards: self.at.shards, replicas: self.at.replicas, durability: self.durability },
            data: self.data(id),
            disk: Arc::new(self.disks[id as usize].clone()),
            election: self.election,
            timeouts: Timeouts::new(self.election.min(ELECTION), REPLACE),
            check_every: Some(CHECK_EVERY),
            job_memory: None,
            socket: paraft_host::socket_path(&self.at.addresses[id as usize]),
            access: self.access.clone(),
        };
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let listener = runtime.block_on(async { tokio::net::TcpListener::from_std(listener) })?;
        let replicas = Arc::new(OnceLock::new());
        let started = replicas.clone();
        let run = async move |server: Server| {
            let _ = started.set(server.replicas());
            server.run(listener, None, std::future::pending()).await
        };
        if waits {
            runtime.spawn(async move { run(start(options, None).await?).await });
        } else {
            // After `kill`, tasks of the runtime may hold the files for a moment longer, unlike those of a
            // process that has ended.
            let server = runtime.block_on(start(options, Some(500)))?;
            runtime.spawn(run(server));
        }
        if let Some(proxies) = &self.proxies {
            proxies.point(id, self.listens[id as usize].parse()?);
        }
        self.slots[id as usize] = Slot::Running(runtime, replicas);
        Ok(())
    }

    /// Sets the faults between clients and servers; earlier ones end.
    pub fn put(&self, faults: &Faults) {
        if let Some(proxies) = &self.proxies {
            proxies.set(faults);
        }
    }

    /// Ends a server as a crash does: no task continues, connections break without a goodbye, and its memory
    /// is gone. Waits for threads in the middle of work: they could answer once more afterwards.
    pub fn kill(&mut self, id: u32) {
        if let Slot::Running(runtime, _) = std::mem::replace(&mut self.slots[id as usize], Slot::Dead) {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }

    /// Makes a server retire its replica of a shard, which the membership at log index `index` does not
    /// include.
    pub fn retire(&self, server: u32, shard: ShardId, index: u64) -> Result<()> {
        let node = self.replica(server, shard)?.group.me();
        let Slot::Running(runtime, replicas) = &self.slots[server as usize] else {
            bail!("server {server} is dead")
        };
        let replicas = replicas.get().with_context(|| format!("server {server} waits for its disk"))?;
        runtime.block_on(replicas.retire(of_job_0(shard), node, index)).map_err(|e| anyhow::anyhow!(e))
    }

    /// A replica of the first job, from inside its server.
    pub fn replica(&self, server: u32, shard: ShardId) -> Result<Replica> {
        self.replica_of(server, of_job_0(shard))
    }

    /// As [`Self::replica`], of any job.
    pub fn replica_of(&self, server: u32, shard: JobShard) -> Result<Replica> {
        let Slot::Running(_, replicas) = &self.slots[server as usize] else {
            bail!("server {server} is dead")
        };
        let replicas = replicas.get().with_context(|| format!("server {server} waits for its disk"))?;
        replicas.get(shard).with_context(|| format!("server {server} has no replica of {shard}"))
    }

    /// Ids of the servers that run.
    pub fn alive(&self) -> Vec<u32> {
        (0u32..).zip(&self.slots).filter(|(_, s)| matches!(s, Slot::Running(..))).map(|(i, _)| i).collect()
    }

    /// Submits a job with this many shards, three replicas of each.
    pub fn submit(&self, name: &str, shards: u32) -> Result<JobId> {
        let shape = FleetShape { shards, replicas: 3, durability: self.durability.name().into() };
        let (name, run) = (name.to_string(), String::new());
        let request = SubmitRequest { name, token: 0, shape: Some(shape), keep_ms: None, run };
        self.order("the job to be taken in", &Order::Submit(request)).map(|done| JobId(done.job))
    }

    /// Stops a job, or deletes it.
    pub fn end_job(&self, name: &str, delete: bool) -> Result<String> {
        let order = Order::EndJob { job: name.into(), delete };
        self.order("the job to be ended", &order).map(|done| done.was)
    }

    /// Sends an order until a server takes it.
    fn order(&self, what: &str, order: &Order) -> Result<Done> {
        let token = rand::random_range(1..u64::MAX);
        let give = |id: u32| paraft_client::order(&self.at.addresses[id as usize], order, token, ASK);
        let ask = || self.alive().into_iter().find_map(|id| self.asking.block_on(give(id)).ok());
        wait::until(what, ask, Option::is_some).context("not taken")
    }

    /// Asks the leader of the control group for the fleet's description.
    pub fn describe(&self) -> Result<DescribeReply> {
        let ask = || {
            self.alive().into_iter().find_map(|id| {
                let address = &self.at.addresses[id as usize];
                let reply = self.asking.block_on(paraft_client::describe(address, ASK)).ok()?;
                (reply.fleet != 0).then_some(reply)
            })
        };
        wait::until("a leader of the control group", ask, Option::is_some).context("no leader")
    }

    /// Waits until every shard has all its replicas, each on a living server.
    pub fn whole(&self) -> Result<DescribeReply> {
        let serves = |d: &Result<DescribeReply>| {
            d.as_ref().is_ok_and(|d| {
                d.shards.len() >= self.at.shards as usize && d.shards.iter().all(|s| s.state == "serving")
            }) && (0..self.at.shards).all(|s| self.every_voter_runs(ShardId(s)))
        };
        wait::until("every shard serving with all its replicas", || self.describe(), serves)
    }

    /// Whether every voter runs. The leader of the control group knows of a restarted server only its report
    /// from before, so this asks the servers themselves.
    fn every_voter_runs(&self, shard: ShardId) -> bool {
        let replicas: Vec<_> =
            self.alive().into_iter().filter_map(|id| Some(self.replica(id, shard).ok()?.group)).collect();
        let run: BTreeSet<_> = replicas.iter().map(|group| group.me()).collect();
        !run.is_empty() && replicas.iter().all(|group| group.membership().voters.is_subset(&run))
    }

    /// A server's identity, and the servers that it knows.
    pub fn hello(&self, id: u32) -> Result<HelloReply> {
        self.asking.block_on(async {
            let channel =
                lazy(&self.at.addresses[id as usize], &Access::ours()).map_err(|e| anyhow::anyhow!(e))?;
            let mut client = ControlClient::new(channel);
            Ok(client.hello(HelloRequest {}).await?.into_inner())
        })
    }

    /// Orders that a server will not return.
    pub fn forget(&self, id: u32) -> Result<()> {
        self.order("the server to be forgotten", &Order::Forget { server: ServerId(u64::from(id)) }).map(drop)
    }

    /// A server's own status.
    pub fn status(&self, id: u32, digest: bool) -> Result<StatusReply> {
        self.asking
            .block_on(status(&self.at.addresses[id as usize], digest, ASK))
            .map_err(|e| anyhow::anyhow!("status of server {id}: {e}"))
    }

    /// The leader's view of a shard, once there is a leader.
    pub fn leader(&self, shard: ShardId) -> (u32, ShardStatus) {
        self.leader_of(of_job_0(shard))
    }

    /// As [`Self::leader`], for a shard of any job.
    pub fn leader_of(&self, shard: JobShard) -> (u32, ShardStatus) {
        let ask = || {
            self.alive().into_iter().find_map(|id| {
                let mut shards = self.status(id, false).ok()?.shards.into_iter();
                shards.find(|s| s.name() == shard && s.role == "leader").map(|s| (id, s))
            })
        };
        let found = wait::until(&format!("a leader of {shard}"), ask, Option::is_some);
        found.unwrap_or_else(|| unreachable!("the condition was that there is one"))
    }

    /// As [`Self::leader`], for the only shard.
    pub fn shard(&self) -> ShardStatus {
        self.leader(ShardId(0)).1
    }

    /// Waits until all living replicas of every shard have applied the same entries, and fails unless their
    /// states are equal, bit for bit. Returns the digests by shard.
    pub fn replicas_agree(&self) -> Result<BTreeMap<u32, u64>> {
        let ask = || {
            let mut seen: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
            for id in self.alive() {
                for s in self.status(id, true).map(|s| s.shards).unwrap_or_default() {
                    seen.entry(s.shard).or_default().push((s.applied_index, s.digest));
                }
            }
            seen
        };
        let alive = self.alive().len();
        let level = |seen: &BTreeMap<u32, Vec<(u64, u64)>>| {
            seen.len() >= self.at.shards as usize
                && seen.values().all(|v| {
                    v.len() == alive.min(self.at.replicas as usize) && v.iter().all(|(i, _)| *i == v[0].0)
                })
        };
        let seen = wait::until("all replicas at the same index", ask, level);
        seen.into_iter()
            .map(|(shard, replicas)| {
                let (_, first) = *replicas.first().context("no replica")?;
                ensure!(replicas.iter().all(|(_, d)| *d == first), "shard {shard} differs: {replicas:x?}");
                Ok((shard, first))
            })
            .collect()
    }
}

/// Starts a server, and tries again while its storage fails: this often, or without a bound.
async fn start(options: ServerOptions, tries: Option<u32>) -> Result<Server, ServerError> {
    let mut tried = 0;
    loop {
        match Server::start(options.clone()).await {
            Err(ServerError::Storage(_)) if tries.is_none_or(|most| tried < most) => {
                tried += 1;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            started => return started,
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for id in 0..self.slots.len() {
            self.kill(id as u32);
        }
        // A killed server leaves its socket.
        for path in self.at.addresses.iter().filter_map(|a| paraft_host::socket_path(a)) {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The job that the fleet was founded for.
fn of_job_0(shard: ShardId) -> JobShard {
    JobShard::new(JobId(0), shard).unwrap_or_default()
}
