//! A fleet of real server processes, each behind a proxy, for all kinds of faults.

use crate::health::{self, View};
use nix::sys::signal::Signal;
use paraft_client::Transport;
use paraft_common::{Durability, ServerId};
use paraft_fleet::{failure::Failure, faults::Faults, fleet::Fleet, orders, process::Process};
use paraft_proof::At;
use paraft_proto::{
    DescribeRequest, DrainRequest, StatusReply, StatusRequest, control_client::ControlClient,
};
use paraft_tls::{Access, access::As};
use paraft_worker::exit;
use std::{path::Path, time::Duration};
use tonic::transport::Channel;

/// The shape of the fleet.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The founding servers.
    pub servers: u32,
    /// Raft groups.
    pub shards: u32,
    /// Replicas of each.
    pub replicas: u32,
    /// Its durability.
    pub durability: Durability,
    /// A follower that receives nothing for three to four times this many milliseconds starts an
    /// election.
    pub election_ms: u64,
}

/// The fleet. Drop ends it.
pub struct TestCluster {
    shape: Shape,
    fleet: Fleet,
    /// Channels for frequent queries, directly to each server without its proxy.
    channels: Vec<Channel>,
    /// Stopped servers.
    paused: Vec<usize>,
    faults: Faults,
    /// The runtime for queries of the control group.
    asking: tokio::runtime::Runtime,
}

const ASK: Duration = Duration::from_secs(2);

async fn within<T>(
    ask: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, String> {
    match tokio::time::timeout(ASK, ask).await {
        Ok(Ok(reply)) => Ok(reply.into_inner()),
        Ok(Err(status)) => Err(status.message().to_string()),
        Err(_) => Err(format!("no answer within {ASK:?}")),
    }
}

impl TestCluster {
    /// Starts every server; returns when all listen.
    pub fn start(shape: Shape, dir: &Path) -> Result<Self, Failure> {
        let asking = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let asking = asking.map_err(|e| Failure::new(exit::IO, format!("no runtime: {e}")))?;
        let Shape { servers, shards, replicas, durability, election_ms } = shape;
        let flags =
            |all: &[(&str, String)]| all.iter().flat_map(|(k, v)| [k.to_string(), v.clone()]).collect();
        let all = flags(&[("--election-ms", election_ms.to_string())]);
        let founders = flags(&[
            ("--shards", shards.to_string()),
            ("--replicas", replicas.to_string()),
            ("--durability", durability.name().to_string()),
        ]);
        let fleet = Fleet::of_flags(servers, all, founders, dir)?;
        let mut cluster = Self {
            shape,
            fleet,
            channels: Vec::new(),
            paused: Vec::new(),
            faults: Faults::default(),
            asking,
        };
        (0..servers as usize).try_for_each(|place| cluster.connect(place))?;
        Ok(cluster)
    }

    /// Opens the query channel of a server.
    fn connect(&mut self, place: usize) -> Result<(), Failure> {
        let direct = &self.fleet.listens()[place];
        let lazy = async { paraft_client::connect::lazy(direct, &Access::ours()) };
        let channel = self.asking.block_on(lazy);
        let channel =
            channel.map_err(|e| Failure::new(exit::FAILED, format!("server-{place}: {direct}: {e}")))?;
        match self.channels.get_mut(place) {
            Some(old) => *old = channel,
            None => self.channels.push(channel),
        }
        Ok(())
    }

    /// Access with a server's certificate, which the proofs need to send invalid messages.
    pub fn as_server(&self) -> Result<Access, Failure> {
        self.fleet.access(As::Peer)
    }

    /// The fleet from the view of its workers.
    pub fn at(&self) -> At {
        let addresses = self.fleet.addresses.clone();
        // A Unix socket would bypass the proxies.
        At { addresses, shards: self.shape.shards, replicas: self.shape.replicas, transport: Transport::Tcp }
    }

    /// The number of started servers.
    pub fn len(&self) -> usize {
        self.fleet.servers.len()
    }

    // ---- what it looks like ----

    /// Queries the status of all servers at the same time.
    fn statuses(&self, digest: bool) -> Vec<Result<StatusReply, String>> {
        let ask = |channel: &Channel| {
            let mut client = paraft_client::connect::shards(channel.clone());
            within(async move { client.status(StatusRequest { digest, ..StatusRequest::default() }).await })
        };
        self.asking.block_on(futures::future::join_all(self.channels.iter().map(ask)))
    }

    /// The fleet's view if it is whole; otherwise what is missing.
    pub fn whole(&self) -> Result<View, String> {
        let replies = self.statuses(false);
        let fleet = self.channels.iter().find_map(|channel| {
            let mut client = ControlClient::new(channel.clone());
            let ask = within(async move { client.describe(DescribeRequest {}).await });
            self.asking.block_on(ask).ok().filter(|d| d.fleet != 0)
        });
        health::view(&fleet.ok_or("the control group has no leader")?, &replies, self.shape.shards)
    }

    /// Acknowledged pushes that the servers report as lost, at the level `leader`.
    pub fn reported_lost(&self) -> u64 {
        let shards = self.statuses(false).into_iter().flatten().flat_map(|r| r.shards);
        shards.filter(|s| s.role == "leader").map(|s| s.pushes_lost).sum()
    }

    /// Checks that the living replicas of every shard are equal bit for bit at the same index.
    pub fn replicas_agree(&self) -> Result<(), String> {
        let shards: Vec<_> = self.statuses(true).into_iter().flatten().flat_map(|r| r.shards).collect();
        for shard in 0..self.shape.shards {
            let of = || shards.iter().filter(|s| s.shard == shard && s.role != "learner");
            let Some(first) = of().next() else { return Err(format!("shard {shard} has no replica")) };
            if of().any(|s| s.applied_index != first.applied_index) {
                return Err(format!("shard {shard}: the replicas are not at the same index yet"));
            }
            if let Some(other) = of().find(|s| s.digest != first.digest) {
                return Err(format!(
                    "shard {shard} DIFFERS at index {}: {:016x} and {:016x}",
                    first.applied_index, first.digest, other.digest
                ));
            }
        }
        Ok(())
    }

    // ---- faults ----

    /// SIGKILL; returns when the process is gone.
    pub fn kill(&mut self, place: usize) {
        self.fleet.servers[place].kill();
    }

    /// Restarts a killed server with its data folder.
    pub fn restart(&mut self, place: usize) -> Result<(), Failure> {
        self.fleet.restart_server(place)?;
        self.connect(place)
    }

    /// The process id of a server.
    pub fn pid(&self, place: usize) -> u32 {
        self.fleet.servers[place].id()
    }

    /// Whether a server has ended without a kill.
    pub fn has_ended(&mut self, place: usize) -> bool {
        self.fleet.servers[place].ended().is_some()
    }

    /// The servers' own addresses, without their proxies.
    pub fn direct(&self) -> Vec<String> {
        self.fleet.listens().to_vec()
    }

    /// Runs a query of the servers.
    pub fn ask<T>(&self, what: impl Future<Output = T>) -> T {
        self.asking.block_on(what)
    }

    /// SIGSTOP.
    pub fn pause(&mut self, place: usize) {
        self.fleet.servers[place].signal(Signal::SIGSTOP);
        self.paused.push(place);
    }

    /// SIGCONT to all paused servers.
    pub fn resume(&mut self) {
        for place in self.paused.drain(..) {
            self.fleet.servers[place].signal(Signal::SIGCONT);
        }
    }

    /// The current faults of links and disks.
    pub fn faults(&self) -> Faults {
        self.faults.clone()
    }

    /// Replaces the faults of links and disks.
    pub fn put(&mut self, faults: Faults) -> Result<(), Failure> {
        self.fleet.put_faults(&faults)?;
        self.faults = faults;
        Ok(())
    }

    /// Starts one more server, which joins the running fleet. Call it once at most.
    pub fn join(&mut self) -> Result<(), Failure> {
        self.fleet.join_server()?;
        self.connect(self.fleet.servers.len() - 1)
    }

    /// Orders the control group to drain a server, or to undo that. `Err` holds the refusal.
    pub fn drain(&self, server: ServerId, undo: bool) -> Result<(), String> {
        let (mut why, token) = ("no server".to_string(), orders::token());
        for channel in &self.channels {
            let mut client = ControlClient::new(channel.clone());
            let ask =
                within(async move { client.drain(DrainRequest { server: server.0, undo, token }).await });
            match self.asking.block_on(ask) {
                Ok(reply) if reply.accepted => return Ok(()),
                Ok(reply) => why = reply.refused.map(|refused| refused.message).unwrap_or_default(),
                Err(e) => why = e,
            }
        }
        Err(why)
    }

    /// The id of a server; `None` if it does not answer.
    pub fn id(&self, place: usize) -> Option<ServerId> {
        let reply = self.statuses(false).into_iter().nth(place)?;
        reply.ok().map(|r| ServerId(r.server))
    }

    /// Servers that ended without a kill, with their last log lines.
    pub fn dead(&mut self) -> Vec<(usize, String)> {
        let words = |(i, s): (usize, &mut Process)| {
            s.ended()?;
            Some((i, format!("{} {}", s.obituary(), s.last_words())))
        };
        self.fleet.servers.iter_mut().enumerate().filter_map(words).collect()
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        self.resume(); // a stopped process does not react to its lifeline
        self.fleet.servers.iter_mut().for_each(Process::kill); // their data served this fleet only
    }
}
