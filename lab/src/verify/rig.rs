//! A fleet of real server processes, each behind a proxy, on which every fault can be put.

use crate::health::{self, View};
use nix::sys::signal::Signal;
use paraft_common::{Durability, ServerId};
use paraft_fleet::{
    failure::Failure,
    faults::{FAULTS_FILE, Faults, proxy::Proxies},
    process::Process,
};
use paraft_proof::At;
use paraft_proto::{
    DescribeRequest, DrainRequest, StatusReply, StatusRequest, control_client::ControlClient,
};
use paraft_worker::exit;
use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use tonic::transport::{Channel, Endpoint};

/// What the fleet looks like.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Servers that found the fleet.
    pub servers: u32,
    /// Raft groups.
    pub shards: u32,
    /// Replicas of each.
    pub replicas: u32,
    /// Its level.
    pub durability: Durability,
    /// A follower that hears nothing for three to four times so many milliseconds stands for election.
    pub election_ms: u64,
}

/// The fleet. It ends with this.
pub struct Rig {
    shape: Shape,
    dir: PathBuf,
    program: PathBuf,
    servers: Vec<Server>,
    /// One more than servers: for the one that joins.
    proxies: Proxies,
    faults: Faults,
    /// How to ask the control group.
    asking: tokio::runtime::Runtime,
}

struct Server {
    process: Process,
    /// For questions, which come often: to where it listens itself, without its proxy.
    channel: Channel,
    /// That address.
    direct: String,
    paused: bool,
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

impl Rig {
    /// Starts every server; returns when all listen.
    pub fn start(shape: Shape, dir: &Path) -> Result<Self, Failure> {
        let io = |what: &str, e: std::io::Error| Failure::new(exit::IO, format!("{what}: {e}"));
        let asking = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let mut rig = Self {
            shape,
            dir: dir.to_path_buf(),
            program: std::env::current_exe().map_err(|e| io("own program", e))?,
            servers: Vec::new(),
            proxies: Proxies::start(shape.servers + 1, dir, None).map_err(|e| io("no proxies", e))?,
            faults: Faults::default(),
            asking: asking.map_err(|e| io("no runtime", e))?,
        };
        rig.put(Faults::default())?;
        for place in 0..shape.servers {
            let server = rig.spawn(place)?;
            rig.servers.push(server);
        }
        Ok(rig)
    }

    /// The fleet as workers see it.
    pub fn at(&self) -> At {
        let addresses = self.proxies.addresses()[..self.shape.servers as usize].to_vec();
        At { addresses, shards: self.shape.shards, replicas: self.shape.replicas }
    }

    /// Servers that were started.
    pub fn len(&self) -> usize {
        self.servers.len()
    }

    fn spawn(&self, place: u32) -> Result<Server, Failure> {
        let Shape { servers, shards, replicas, durability, election_ms } = self.shape;
        let mut command = Command::new(&self.program);
        let list = self.at().addresses.join(",");
        command.args(["server", "--supervised", "--listen", "127.0.0.1:0"]);
        if place < servers {
            command.args(["--id", &place.to_string(), "--shards", &shards.to_string()]);
            command.args(["--replicas", &replicas.to_string(), "--durability", durability.name()]);
        } else {
            let own = &self.proxies.addresses()[place as usize];
            command.args(["--join", &list, "--advertise", own, "--place", &place.to_string()]);
        }
        command.arg("--data").arg(self.dir.join(format!("server-{place}")));
        command.arg("--log-file").arg(self.dir.join(format!("server-{place}.log")));
        command.arg("--faults").arg(self.dir.join(FAULTS_FILE));
        command.args(["--election-ms", &election_ms.to_string()]);
        let mut process = Process::start(format!("server-{place}"), command, &self.dir)?;
        let direct = process.first_line()?;
        let target = direct.parse().map_err(|e| {
            Failure::new(exit::FAILED, format!("server-{place} says that it listens on `{direct}`: {e}"))
        })?;
        self.proxies.point(place, target);
        process.tell(&list)?;
        let channel = self
            .asking
            .block_on(async { Endpoint::from_shared(format!("http://{direct}")).map(|e| e.connect_lazy()) });
        let channel =
            channel.map_err(|e| Failure::new(exit::FAILED, format!("server-{place}: {direct}: {e}")))?;
        Ok(Server { process, channel, direct, paused: false })
    }

    // ---- what it looks like ----

    /// Asks every server at once what it knows of its shards.
    fn statuses(&self, digest: bool) -> Vec<Result<StatusReply, String>> {
        let ask = |s: &Server| {
            let mut client = paraft_client::connect::shards(s.channel.clone());
            within(async move { client.status(StatusRequest { digest }).await })
        };
        self.asking.block_on(futures::future::join_all(self.servers.iter().map(ask)))
    }

    /// The fleet if it is whole, else what is missing.
    pub fn whole(&self) -> Result<View, String> {
        let view = health::whole(&self.statuses(false), self.shape.shards, self.shape.replicas)?;
        let fleet = self.servers.iter().find_map(|s| {
            let mut client = ControlClient::new(s.channel.clone());
            let ask = within(async move { client.describe(DescribeRequest {}).await });
            self.asking.block_on(ask).ok().filter(|d| d.fleet != 0)
        });
        health::settled(&fleet.ok_or("the control group has no leader")?)?;
        Ok(view)
    }

    /// Pushes of the level `leader` that the servers report as lost.
    pub fn reported_lost(&self) -> u64 {
        let shards = self.statuses(false).into_iter().flatten().flat_map(|r| r.shards);
        shards.filter(|s| s.role == "leader").map(|s| s.pushes_lost).sum()
    }

    /// Whether the living replicas of every shard are the same bits at the same index.
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
        self.servers[place].process.kill();
    }

    /// Starts a killed server again, with its data folder.
    pub fn restart(&mut self, place: usize) -> Result<(), Failure> {
        self.servers[place] = self.spawn(place as u32)?;
        Ok(())
    }

    /// The process of a server, as the kernel numbers it.
    pub fn pid(&self, place: usize) -> u32 {
        self.servers[place].process.id()
    }

    /// Whether a server has ended by itself.
    pub fn has_ended(&mut self, place: usize) -> bool {
        self.servers[place].process.ended().is_some()
    }

    /// Where the servers listen, without their proxies.
    pub fn direct(&self) -> Vec<String> {
        self.servers.iter().map(|s| s.direct.clone()).collect()
    }

    /// Runs what asks the servers something.
    pub fn ask<T>(&self, what: impl Future<Output = T>) -> T {
        self.asking.block_on(what)
    }

    /// SIGSTOP.
    pub fn pause(&mut self, place: usize) {
        self.servers[place].process.signal(Signal::SIGSTOP);
        self.servers[place].paused = true;
    }

    /// SIGCONT, to whoever is paused.
    pub fn resume(&mut self) {
        for s in self.servers.iter_mut().filter(|s| s.paused) {
            s.process.signal(Signal::SIGCONT);
            s.paused = false;
        }
    }

    /// The faults of links and disks.
    pub fn faults(&self) -> Faults {
        self.faults.clone()
    }

    /// Replaces the faults of links and disks.
    pub fn put(&mut self, faults: Faults) -> Result<(), Failure> {
        let file = self.dir.join(FAULTS_FILE);
        faults.write(&file).map_err(|e| Failure::write(&file, e))?;
        self.proxies.set(&faults);
        self.faults = faults;
        Ok(())
    }

    /// A server more, which joins the running fleet. Once.
    pub fn join(&mut self) -> Result<(), Failure> {
        let server = self.spawn(self.shape.servers)?;
        self.servers.push(server);
        Ok(())
    }

    /// Asks the control group to empty a server, or to fill it again. `Err` says why nobody took the order.
    pub fn drain(&self, server: ServerId, undo: bool) -> Result<(), String> {
        let mut why = "no server".to_string();
        for s in &self.servers {
            let mut client = ControlClient::new(s.channel.clone());
            let ask = within(async move { client.drain(DrainRequest { server: server.0, undo }).await });
            match self.asking.block_on(ask) {
                Ok(reply) if reply.accepted => return Ok(()),
                Ok(reply) => why = reply.why,
                Err(e) => why = e,
            }
        }
        Err(why)
    }

    /// The id of a server; `None` while it does not answer.
    pub fn id(&self, place: usize) -> Option<ServerId> {
        let reply = self.statuses(false).into_iter().nth(place)?;
        reply.ok().map(|r| ServerId(r.server))
    }

    /// Servers that ended though nobody killed them, with their last words.
    pub fn dead(&mut self) -> Vec<(usize, String)> {
        let words = |(i, s): (usize, &mut Server)| {
            s.process.ended()?;
            Some((i, format!("{} {}", s.process.obituary(), s.process.last_words())))
        };
        self.servers.iter_mut().enumerate().filter_map(words).collect()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.resume(); // a stopped process does not even die of its lifeline
        for s in &mut self.servers {
            s.process.kill();
        }
    }
}
