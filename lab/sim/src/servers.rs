//! The simulated servers: the leader of each shard, the work of each server's processor, and failures.

use crate::{
    chance::{Chance, Draws},
    clock::{Clock, nanos},
    cores::Cores,
    leaders::{Lead, deadlines},
    network::Network,
    replication::{Between, Log},
    setup::Setup,
    stream::{FromServer, Process, Stream},
};
use paraft_common::{
    ServerId, SessionId, ShardId, WorkerId,
    auto::{Steering, Switch},
    placement,
};
use paraft_server::{
    control::report_interval,
    shard::{
        Shard,
        leader::{Counters, Input, Liveness, Message, Reply, RequestedMode},
        staleness::Staleness,
    },
};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::mpsc;

/// A shard.
pub(crate) struct Host {
    pub id: ShardId,
    pub state: Arc<Shard>,
    pub counters: Arc<Counters>,
    pub(crate) log: Log,
    pub(crate) lead: Mutex<Option<Lead>>,
    /// The server that led it last.
    pub server: AtomicU64,
    /// The earliest end of the next election.
    vacant_until: AtomicU64,
    /// The number of sessions that its leaders have assigned.
    sessions: Arc<AtomicU64>,
}

/// A message for a server's processor.
type Task = Box<dyn FnOnce() + Send>;

/// All servers.
pub(crate) struct Servers {
    pub(crate) clock: Clock,
    network: Arc<Network>,
    pub hosts: BTreeMap<ShardId, Host>,
    pub(crate) replicas: u32,
    election_ms: u64,
    /// Processor nanoseconds of one push.
    push: u64,
    /// Each handles one message after the other; none if a push costs nothing.
    processors: Vec<mpsc::UnboundedSender<(u64, Task)>>,
    pub(crate) up: Mutex<Vec<bool>>,
    conns: AtomicU64,
    /// Failures of servers.
    pub failures: AtomicU64,
}

/// The placement of shards, and the servers' parameters.
pub(crate) struct Placement {
    pub servers: u32,
    pub shards: u32,
    pub replicas: u32,
    pub election_ms: u64,
    /// Shards with buckets.
    pub holding: BTreeSet<ShardId>,
}

impl Servers {
    /// Starts the servers; every shard gets its leader.
    pub fn start(
        clock: &Clock,
        network: &Arc<Network>,
        cores: &Cores,
        setup: &Setup,
        p: &Placement,
    ) -> Arc<Self> {
        let between = Between {
            clock: clock.clone(),
            network: network.clone(),
            cores: cores.clone(),
            replicas: p.replicas,
            extra: setup.replicate_ms / 1e3,
            follow: setup.follow_ms / 1e3,
        };
        let host = |id: &ShardId| {
            let state = Arc::new(Shard::new(*id, p.shards));
            let chance = Chance::new(setup.seed, Draws::Replicates(id.0));
            let staleness = Arc::new(Staleness::default());
            let log = Log::new(&between, state.clone(), staleness.clone(), chance);
            let server = placement::replicas_of(*id, p.servers, p.replicas).first().map_or(0, |s| s.0);
            let host = Host {
                id: *id,
                state,
                counters: Arc::new(Counters { staleness, ..Counters::default() }),
                log,
                lead: Mutex::new(None),
                server: AtomicU64::new(server),
                vacant_until: AtomicU64::new(0),
                sessions: Arc::default(),
            };
            (*id, host)
        };
        let push = nanos(setup.push_ms / 1e3);
        let processors = match push {
            0 => Vec::new(),
            _ => (0..p.servers).map(|_| processor(cores.clone())).collect(),
        };
        let this = Arc::new(Self {
            clock: clock.clone(),
            network: network.clone(),
            hosts: p.holding.iter().map(host).collect(),
            replicas: p.replicas,
            election_ms: p.election_ms,
            push,
            processors,
            up: Mutex::new(vec![true; p.servers as usize]),
            conns: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        });
        for host in this.hosts.values() {
            this.leads(host, host.server.load(Relaxed) as usize);
        }
        if let Some(mean) = setup.server_mttf_s {
            for server in 0..p.servers {
                let chance = Chance::new(setup.seed, Draws::ServerFails(server));
                tokio::spawn(this.clone().fails(server as usize, mean, setup.server_restart_s, chance));
            }
        }
        this
    }

    /// Opens a worker's stream to a shard's leader, with its first message.
    pub fn dial(
        self: &Arc<Self>,
        shard: ShardId,
        process: &Arc<Process>,
        heard: &mpsc::UnboundedSender<FromServer>,
        (worker, session, job): (WorkerId, Option<SessionId>, Arc<str>),
    ) -> Option<Arc<Stream>> {
        let host = self.hosts.get(&shard)?;
        let stream = Arc::new(Stream {
            conn: self.conns.fetch_add(1, Relaxed) + 1,
            shard,
            server: host.server.load(Relaxed) as usize,
            process: process.clone(),
            liveness: Arc::new(Liveness::default()),
            heard: heard.clone(),
            term: OnceLock::new(),
            gone: AtomicBool::new(false),
            up: AtomicU64::new(0),
            down: AtomicU64::new(0),
        });
        process.opens(&stream);
        let (this, opened) = (self.clone(), stream.clone());
        self.network.up(&stream, job.len() as u64, move || {
            // The close may have overtaken the first message; then the session would never end.
            let Some(host) = this.hosts.get(&opened.shard).filter(|_| !opened.gone.load(Relaxed)) else {
                return;
            };
            let term = host.lead.lock().as_mut().filter(|l| l.server == opened.server).map(|l| {
                l.opens(&opened);
                l.term
            });
            let Some(term) = term else { return this.closed(&opened) };
            let _ = opened.term.set(term);
            // A living worker sends eight heartbeats per lease, so its lease never expires. Set once.
            opened.liveness.waits(true);
            let (conn, liveness) = (opened.conn, opened.liveness.clone());
            this.hears(
                opened.shard,
                term,
                Input::Open { conn, worker, session, job: job.to_string(), liveness },
            );
        });
        Some(stream)
    }

    /// Sends a message of a worker.
    pub fn send(self: &Arc<Self>, stream: &Arc<Stream>, bytes: u64, message: Message) {
        let (this, to) = (self.clone(), stream.clone());
        self.network.up(stream, bytes, move || {
            let work = if matches!(message, Message::Push { .. }) { this.push } else { 0 };
            match this.processors.get(to.server) {
                None => this.tells(&to, Input::Message(to.conn, message)),
                Some(processor) => {
                    let deliver = {
                        let this = this.clone();
                        move || this.tells(&to, Input::Message(to.conn, message))
                    };
                    let _ = processor.send((work, Box::new(deliver)));
                }
            }
        });
    }

    /// Delivers an input to the leader that has accepted the stream; a failed leader receives nothing.
    fn tells(self: &Arc<Self>, stream: &Stream, input: Input) {
        if let Some(term) = stream.term.get() {
            self.hears(stream.shard, *term, input);
        }
    }

    /// Delivers an input to the leader of a term, if it still leads.
    pub(crate) fn hears(self: &Arc<Self>, shard: ShardId, term: u64, input: Input) {
        let Some(host) = self.hosts.get(&shard) else { return };
        if let Some(lead) = host.lead.lock().as_mut().filter(|l| l.term == term) {
            lead.hears(self, host, input);
        }
    }

    /// The next deadline of the leader of a term; `None`: it no longer leads.
    pub(crate) fn deadline(&self, shard: ShardId, term: u64) -> Option<Option<Instant>> {
        let lead = self.hosts.get(&shard)?.lead.lock();
        lead.as_ref().filter(|l| l.term == term).map(Lead::deadline)
    }

    /// A worker closes a stream, or dies.
    pub fn hang_up(self: &Arc<Self>, stream: &Arc<Stream>) {
        stream.process.closes(stream.conn);
        let (this, to) = (self.clone(), stream.clone());
        self.network.breaks(&stream.process, move || {
            // The worker's side is gone: its heartbeats stop, and the leader receives the close.
            to.liveness.waits(false);
            to.gone.store(true, Relaxed);
            this.tells(&to, Input::Closed(to.conn));
        });
    }

    /// Sends a leader's reply to the worker.
    pub(crate) fn answers(&self, stream: &Arc<Stream>, reply: Reply) {
        let reply = reply.taken();
        let bytes = match &reply {
            Reply::Weights(w) => w.payload.len() as u64,
            _ => 0,
        };
        let to = stream.clone();
        self.network.down(stream, bytes, move || {
            let _ = to.heard.send(FromServer::Reply(to.shard, to.conn, reply)); // its worker may have died
        });
    }

    /// The leader's side of a stream is gone.
    pub(crate) fn closed(&self, stream: &Arc<Stream>) {
        let to = stream.clone();
        self.network.down(stream, 0, move || _ = to.heard.send(FromServer::Closed(to.shard, to.conn)));
    }

    /// Makes a server fail and recover, again and again.
    async fn fails(self: Arc<Self>, server: usize, mean: f64, back_s: f64, mut chance: Chance) {
        loop {
            self.clock.sleep(chance.exponential(mean)).await;
            self.up.lock()[server] = false;
            self.failures.fetch_add(1, Relaxed);
            let mut ended = Vec::new();
            for host in self.hosts.values() {
                let mut lead = host.lead.lock();
                if let Some(lead) = lead.take_if(|l| l.server == server) {
                    ended.push(lead);
                    host.log.leaderless();
                    let (this, id) = (self.clone(), host.id);
                    let elected = self.clock.now().saturating_add(host.log.election(self.election_ms));
                    host.vacant_until.store(elected, Relaxed);
                    self.clock.at(elected, move || this.elect(id));
                }
            }
            ended.iter().flat_map(Lead::streams).for_each(|stream| self.closed(stream));
            drop(ended);
            self.clock.sleep(nanos(back_s)).await;
            self.up.lock()[server] = true;
            let all: Vec<ShardId> = self.hosts.keys().copied().collect();
            all.into_iter().for_each(|id| self.elect(id));
        }
    }

    /// Runs the rule that chooses the mode, as the leader of the control group does. It receives the
    /// reports of shard 0's leader and sends it the switches. Its state survives the servers here.
    pub async fn steer(self: Arc<Self>) {
        let Some(host) = self.hosts.get(&ShardId(0)) else { return };
        let interval = report_interval(Duration::from_millis(self.election_ms));
        let mut steering = Steering::default();
        loop {
            self.clock.sleep(nanos(interval.as_secs_f64())).await;
            let Some(report) = host.counters.take_auto(&host.state) else { continue };
            let Some((Switch { number, mode, loosest }, _)) = steering.hear(&report) else { continue };
            let term = host.lead.lock().as_ref().map(|l| l.term);
            let wanted = RequestedMode::Decided { mode, loosest };
            if let Some(term) = term {
                // If the leader does not accept it, the rule repeats it.
                self.hears(host.id, term, Input::SwitchMode(Some(number), wanted, None));
            }
        }
    }

    /// Elects a leader for a shard without one, if a majority of its replicas is up.
    fn elect(self: &Arc<Self>, id: ShardId) {
        let Some(host) = self.hosts.get(&id) else { return };
        if host.lead.lock().is_some() || self.clock.now() < host.vacant_until.load(Relaxed) {
            return;
        }
        let up = self.up.lock();
        let replicas = placement::replicas_of(id, up.len() as u32, self.replicas);
        let alive: Vec<usize> = replicas.iter().map(|ServerId(s)| *s as usize).filter(|s| up[*s]).collect();
        if alive.len() * 2 <= replicas.len() {
            return; // retried when a replica is back
        }
        if let Some(server) = alive.first() {
            self.leads(host, *server);
        }
    }

    /// Makes a server's replica the leader of a shard.
    fn leads(self: &Arc<Self>, host: &Host, server: usize) {
        let (term, sessions) = (host.log.elect(), host.sessions.clone());
        // Predictable session ids suffice here, and one seed must give one run.
        let draw = Box::new(move || SessionId(sessions.fetch_add(1, Relaxed) + 1));
        let lead = Lead::new(host, server, term, draw);
        host.server.store(server as u64, Relaxed);
        tokio::spawn(deadlines(self.clone(), host.id, term, lead.earlier()));
        host.lead.lock().insert(lead).begins(self, host);
    }
}

/// Executes a server's tasks in order.
fn processor(cores: Cores) -> mpsc::UnboundedSender<(u64, Task)> {
    let (give, mut take) = mpsc::unbounded_channel::<(u64, Task)>();
    tokio::spawn(async move {
        while let Some((work, task)) = take.recv().await {
            if work > 0 {
                cores.work(work).await;
            }
            task();
        }
    });
    give
}
