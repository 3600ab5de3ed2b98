//! This server's part in the control plane: it forms or joins the fleet, reports what it holds, does what it
//! is told, and, while it leads the control group, plans.

use super::{
    groups::Groups,
    jobs::{JobFacts, Retired},
    joining,
    plan::{
        AsideReport, ControlChange, Directive, Do, Health, Heard, JobReport, Patience, Plan, ReplicaReport,
        Report, View, plan,
    },
    reach::Reach,
    replica::ControlReplica,
    state::{Agreed, Command, Outcome, Shape, State, UNKNOWN_JOB},
};
use crate::{
    raft::{Applied, Change, Group, Membership, ReplicaId, endpoint},
    replicas::{Aside, Replicas},
    rpc::control::{from_directive, to_report},
    shard::Shard,
};
use paraft_common::{ServerId, ShardId, checkpoint::KnownCheckpoint};
use paraft_proto::{HelloReply, HelloRequest, ReportReply, control_client::ControlClient};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::Notify;
use tonic::transport::Channel;

/// Who this server is; kept in its data folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Identity {
    /// Its id.
    pub server: ServerId,
    /// Its replica of the control group.
    pub node: ReplicaId,
    /// The fleet that it belongs to; 0: none yet.
    pub fleet: u64,
}

/// How to take part.
pub struct AgentOptions {
    /// This server's id.
    pub server: ServerId,
    /// Its address, as the others reach it.
    pub address: String,
    /// The servers that form the fleet, by id; or those that a new server asks.
    pub servers: Vec<String>,
    /// What a founding fixes. `None`: the fleet's, which this server was told in an earlier life and learns again from
    /// the control group's log.
    pub shape: Option<Shape>,
    /// Timing.
    pub election: Duration,
    /// Timing of repairs.
    pub patience: Patience,
}

/// The agent. One for the process.
pub struct Agent {
    options: AgentOptions,
    /// The control group's replica.
    pub control: Arc<ControlReplica>,
    /// The agreed state.
    pub agreed: Arc<Agreed>,
    replicas: Arc<Replicas>,
    pub(super) fleet: AtomicU64,
    remember: Box<dyn Fn(u64) -> Result<(), String> + Send + Sync>,
    pub(super) leading: Mutex<Leading>,
    /// Of this term of leadership.
    pub groups: Mutex<Groups>,
    /// A report came: plan now.
    news: Notify,
    /// The latest generation that this server was told of.
    generation: AtomicU64,
    busy: Mutex<BTreeSet<ShardId>>,
    channels: Mutex<HashMap<String, ControlClient<Channel>>>,
    complained: AtomicBool,
    /// Since when the leader has said that this server cannot take part.
    kept_out: Mutex<Option<Instant>>,
    pub(super) reach: Reach,
    /// Addresses that asked to join lately, and when first.
    pub(super) joins: Mutex<HashMap<String, Instant>>,
    pub(super) admitted: super::admit::Last,
}

/// What only the leader of the control group knows; lost with the leadership.
#[derive(Default)]
pub(super) struct Leading {
    pub since: Option<Instant>,
    pub heard: BTreeMap<ServerId, Heard>,
    pub health: BTreeMap<ShardId, (Health, String)>,
    lost_since: BTreeMap<ShardId, Instant>,
    /// Servers that too few of the others reach.
    pub unreached: BTreeMap<ServerId, String>,
    /// The last plan's directives, and when it was made.
    planned: Option<(Instant, BTreeMap<ServerId, Vec<Directive>>)>,
}

/// Servers that may be known and not heard of, at most: more of them are not taken in.
pub(super) const MAX_NEWCOMERS: usize = 16;

/// Servers that found a fleet without all that are listed wait this long for the others.
const FOUND_PATIENCE: Duration = Duration::from_secs(2);
/// How long a server that is asked to end tries to hand over what it leads.
pub const HAND_OVER: Duration = Duration::from_secs(2);
const CALL: Duration = Duration::from_secs(1);
/// What keeps a server out for this long is worth a line in its log. Servers are asked whether they are reached every 2 s.
const KEPT_OUT: Duration = Duration::from_secs(5);
/// Connections that are kept: more than a fleet's, and they are made anew.
const MAX_CHANNELS: usize = 1024;
/// Reports that come so soon after a plan are answered from it: the next plan, which they cause, has what they say. A
/// server reports a few times in an election's time; who sends thousands a second must not have the leader plan for each.
const PLAN_PAUSE: Duration = Duration::from_millis(5);

impl Agent {
    /// `fleet`: the one that this server belongs to already, or 0. `remember` keeps it on disk.
    pub fn new(
        options: AgentOptions,
        control: Arc<ControlReplica>,
        agreed: Arc<Agreed>,
        replicas: Arc<Replicas>,
        fleet: u64,
        remember: Box<dyn Fn(u64) -> Result<(), String> + Send + Sync>,
    ) -> Self {
        Self {
            options,
            control,
            agreed,
            replicas,
            fleet: AtomicU64::new(fleet),
            remember,
            leading: Mutex::default(),
            groups: Mutex::default(),
            news: Notify::new(),
            generation: AtomicU64::new(0),
            busy: Mutex::default(),
            channels: Mutex::default(),
            complained: AtomicBool::new(false),
            kept_out: Mutex::default(),
            reach: Reach::default(),
            joins: Mutex::default(),
            admitted: Default::default(),
        }
    }

    /// The servers that it was told of when it was started.
    pub(super) fn listed(&self) -> &[String] {
        &self.options.servers
    }

    pub(super) fn patience(&self) -> Patience {
        self.options.patience
    }

    /// The addresses of servers that report and that nobody has agreed on, or not at this address.
    pub(super) fn asking(&self) -> Vec<String> {
        let leading = self.leading.lock();
        self.agreed.read(|s| {
            let known =
                |id: &ServerId, h: &Heard| s.servers.get(id).is_some_and(|m| m.address == h.report.address);
            let asking = leading.heard.iter().filter(|(id, h)| !known(id, h));
            asking.map(|(_, h)| h.report.address.clone()).take(MAX_NEWCOMERS).collect()
        })
    }

    /// The fleet, or 0.
    pub fn fleet(&self) -> u64 {
        self.fleet.load(Relaxed)
    }

    /// The control group's replica, as it runs or ran last.
    pub fn group(&self) -> Group {
        self.control.get()
    }

    /// This server.
    pub fn server(&self) -> ServerId {
        self.options.server
    }

    /// The shards' replicas here.
    pub(super) fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    /// How many servers it was told of when it was started.
    pub fn listed_count(&self) -> usize {
        self.options.servers.len()
    }

    /// Its address.
    pub fn address(&self) -> &str {
        &self.options.address
    }

    /// The agreed one, or else what it was started with. `None`: not known yet; whoever needs it must wait.
    pub fn shape(&self) -> Option<Shape> {
        self.agreed.read(|s| s.shape).or(self.options.shape)
    }

    /// Runs until the control replica shuts down.
    ///
    /// # Errors
    /// What differs, where it was started with other settings than the fleet that it finds.
    pub async fn run(self: Arc<Self>) -> Result<(), String> {
        let mut ended = self.control.starts();
        tokio::spawn(self.control.clone().supervise());
        tokio::spawn(self.replicas.clone().supervise());
        let leader = tokio::spawn(self.clone().lead());
        if let Err(differs) = self.form().await {
            leader.abort();
            return Err(differs);
        }
        let mut every = tokio::time::interval(self.interval());
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = every.tick() => {
                    self.look_around();
                    if let Err(differs) = self.report().await {
                        leader.abort();
                        return Err(differs);
                    }
                }
                () = async { drop(ended.wait_for(Option::is_none).await) } => break,
            }
        }
        leader.abort();
        Ok(())
    }

    /// Reports come often enough that a fleet starts at once, and seldom enough to cost nothing.
    fn interval(&self) -> Duration {
        (self.options.election / 4).clamp(Duration::from_millis(20), Duration::from_millis(250))
    }

    // ---- forming ----

    /// Returns when this server belongs to a fleet; what differs where that was founded with other settings.
    async fn form(self: &Arc<Self>) -> Result<(), String> {
        let began = Instant::now();
        let Some(ours) = self.options.shape else { return Ok(()) }; // it has been in a fleet
        while self.fleet() == 0 {
            // Another has founded it while this one was looking: whoever leads the control group does when the founder has died.
            if let (fleet @ 1.., fleets) = self.agreed.read(|s| (s.fleet, s.shape)) {
                return self.belong(fleet, fleets);
            }
            let mut fresh = BTreeMap::from([(self.group().me(), self.options.address.clone())]);
            for (id, address) in (0u64..).zip(&self.options.servers) {
                if ServerId(id) == self.options.server || *address == self.options.address {
                    continue;
                }
                match self.hello(address).await {
                    Ok(hello) if hello.fleet != 0 => {
                        self.reach.heard(address, &hello);
                        tracing::info!(peer = %address, "joining its fleet");
                        let fleets = crate::rpc::control::shape_of(hello.shape.as_ref());
                        return self.belong(hello.fleet, fleets);
                    }
                    Ok(hello) => {
                        let theirs = crate::rpc::control::shape_of(hello.shape.as_ref());
                        if theirs != Some(ours) {
                            if !self.complained.swap(true, Relaxed) {
                                let theirs = theirs.map(|s| s.to_string()).unwrap_or_default();
                                tracing::error!(peer = %address, theirs, %ours,
                                    "it was started with other settings; start all servers with the same");
                            }
                            continue;
                        }
                        self.reach.heard(address, &hello);
                        fresh.insert(ReplicaId(hello.node), address.clone());
                    }
                    Err(e) => tracing::debug!(peer = %address, error = %e, "no answer yet"),
                }
            }
            self.look_around();
            let all = fresh.len() == self.options.servers.len();
            let enough = fresh.len() * 2 > self.options.servers.len() && began.elapsed() > FOUND_PATIENCE;
            let first = self.options.servers.first() == Some(&self.options.address);
            if first && (all || enough) {
                if let Err(e) = self.found(&fresh, ours).await {
                    tracing::warn!(error = %e, "the fleet cannot be founded yet");
                } else {
                    return Ok(());
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// The first server of the list founds the fleet with those that are there; the others are admitted later.
    async fn found(&self, members: &BTreeMap<ReplicaId, String>, shape: Shape) -> Result<(), String> {
        self.group().found(members).await?;
        let mut leadership = self.group().leadership();
        let led = leadership.wait_for(|l| l.leader.is_some());
        let _ = tokio::time::timeout(Duration::from_secs(5), led).await;
        let fleet = rand::random_range(1..u64::MAX);
        let servers = members.iter().map(|(n, a)| (n.server(), a.clone())).collect();
        let command = Command::Found { fleet, shape, servers };
        // If the leadership went elsewhere at once, the leader's own loop founds (see `lead`).
        if self.propose(command).await.is_ok() {
            tracing::info!(servers = members.len(), %shape, "the fleet is founded");
        }
        Ok(())
    }

    /// This server belongs to the fleet from now on, unless it was started with other settings: a founding fixes them for
    /// good.
    fn belong(&self, fleet: u64, fleets: Option<Shape>) -> Result<(), String> {
        if let (Some(own), Some(fleets)) = (self.options.shape, fleets) {
            own.must_be(fleets)?;
        }
        if self.fleet.swap(fleet, Relaxed) == fleet {
            return Ok(());
        }
        self.replicas.peers().belong(fleet);
        if let Err(e) = (self.remember)(fleet) {
            tracing::error!(error = %e, "this server's identity cannot be written");
        }
        Ok(())
    }

    pub(super) async fn hello(&self, address: &str) -> Result<HelloReply, String> {
        let mut client = self.client(address)?;
        match tokio::time::timeout(CALL, client.hello(HelloRequest {})).await {
            Ok(Ok(r)) => Ok(r.into_inner()),
            Ok(Err(s)) => Err(s.message().to_string()),
            Err(_) => Err(format!("no answer within {CALL:?}")),
        }
    }

    pub(super) fn client(&self, address: &str) -> Result<ControlClient<Channel>, String> {
        let mut channels = self.channels.lock();
        if let Some(c) = channels.get(address) {
            return Ok(c.clone());
        }
        let client = ControlClient::new(endpoint(address)?.connect_lazy());
        if channels.len() >= MAX_CHANNELS {
            channels.clear();
        }
        channels.insert(address.to_string(), client.clone());
        Ok(client)
    }

    // ---- reporting ----

    fn own_report(&self) -> Report {
        let replicas = self.replicas.all().into_iter().map(|(id, r)| {
            let lead = *r.group.leadership().borrow();
            let membership = r.group.membership();
            let bytes = r.shard.configured().map_or(0, |c| c.bytes());
            // One that has ended, not been stopped, is about to wait.
            let trouble = r.group.trouble().or_else(|| r.shard.lacks_room()).unwrap_or_default();
            let waits = !trouble.is_empty() && !r.group.was_failed();
            let report = ReplicaReport {
                node: r.group.me(),
                origin: r.origin,
                founded: !membership.members.is_empty(),
                leads: lead.leads,
                term: lead.term,
                applied: r.group.applied_index(),
                bytes,
                membership,
                stopped: (waits && r.folder.is_some()).then_some(Duration::ZERO),
                no_room: waits && r.folder.is_none() && r.shard.lacks_room().is_some(),
                trouble,
                digests: r.group.digests(),
                caught_up: if lead.leads { r.group.caught_up() } else { BTreeSet::new() },
                job: lead.leads.then(|| job_of(&r.shard)).flatten(),
            };
            (id, report)
        });
        let mut replicas: BTreeMap<ShardId, ReplicaReport> = replicas.collect();
        for (shard, waits) in self.replicas.stopped() {
            replicas.entry(shard).or_insert_with(|| ReplicaReport {
                node: waits.node.unwrap_or_default(),
                origin: waits.origin.unwrap_or_default(),
                founded: true,
                trouble: waits.why,
                no_room: waits.empty,
                // Of one that is empty there is no storage that could serve again.
                stopped: (!waits.empty).then(|| waits.since.elapsed()),
                ..ReplicaReport::default()
            });
        }
        let aside = |a: Aside| AsideReport {
            shard: a.shard,
            origin: a.origin.unwrap_or_default(),
            readable: a.last.is_ok(),
            name: a.name,
        };
        Report {
            address: self.options.address.clone(),
            node: self.group().me(),
            replicas,
            reached: self
                .agreed
                .read(|s| self.reach.reached(s.servers.iter().map(|(id, m)| (*id, m.address.as_str())))),
            asides: self.replicas.asides().map(|all| all.into_iter().map(aside).collect()),
            control_trouble: self.control.stopped().map(|(why, _)| why).unwrap_or_default(),
        }
    }

    /// Tells the leader of the control group, wherever it is, and does what the answer says. Fails as [`Self::belong`].
    async fn report(self: &Arc<Self>) -> Result<(), String> {
        if let (fleet @ 1.., fleets) = self.agreed.read(|s| (s.fleet, s.shape)) {
            self.belong(fleet, fleets)?;
        }
        let report = self.own_report();
        if self.group().leadership().borrow().leads {
            if let Ok(directives) = self.take_report(self.options.server, report) {
                self.follow(self.agreed.read(|s| s.generation), directives);
            }
            return Ok(());
        }
        // The leader, where it is known, else everyone that is known; at its own address too, where another process may be.
        let mut asked = BTreeSet::new();
        let mut next: Vec<String> =
            self.agreed.read(|s| s.servers.values().map(|m| m.address.clone()).collect());
        next.extend(self.options.servers.iter().cloned());
        next.extend(self.group().leader_address());
        while let Some(address) = next.pop() {
            if !asked.insert(address.clone()) {
                continue;
            }
            match self.send_report(&address, &report).await {
                Ok(reply) if reply.accepted => {
                    self.told(&address, &reply.why);
                    let directives = reply.directives.iter().filter_map(from_directive).collect();
                    self.follow(reply.generation, directives);
                    return Ok(());
                }
                Ok(reply) => {
                    // Who does not lead says nothing.
                    if !reply.why.is_empty() {
                        self.told(&address, &reply.why);
                    }
                    next.extend(Some(reply.leader).filter(|l| !l.is_empty()));
                }
                Err(e) => tracing::debug!(peer = %address, error = %e, "the report was not taken"),
            }
        }
        Ok(())
    }

    /// Says what keeps this server out, once, and only where it lasts: to somebody who has just come back the leader may
    /// answer for a moment as before.
    fn told(&self, peer: &str, why: &str) {
        let mut since = self.kept_out.lock();
        match *since {
            _ if why.is_empty() => *since = None,
            None => *since = Some(Instant::now()),
            Some(at) if at.elapsed() < KEPT_OUT => {}
            Some(_) if self.complained.swap(true, Relaxed) => {}
            Some(_) => tracing::error!(%peer, "{why}"),
        }
    }

    async fn send_report(&self, address: &str, report: &Report) -> Result<ReportReply, String> {
        let mut client = self.client(address)?;
        let request = to_report(self.fleet(), self.options.server, report);
        match tokio::time::timeout(CALL, client.report(request)).await {
            Ok(Ok(r)) => Ok(r.into_inner()),
            Ok(Err(s)) => Err(s.message().to_string()),
            Err(_) => Err(format!("no answer within {CALL:?}")),
        }
    }

    /// Does what it is told. Each directive may have been overtaken; what does not fit any more changes nothing.
    fn follow(self: &Arc<Self>, generation: u64, directives: Vec<Directive>) {
        if self.generation.fetch_max(generation, Relaxed) > generation {
            return; // from a leader of the past
        }
        for d in directives {
            if !self.busy.lock().insert(d.shard) {
                continue;
            }
            let this = self.clone();
            tokio::spawn(async move {
                if let Err(e) = this.carry_out(&d).await {
                    tracing::warn!(shard = d.shard.0, what = ?d.what, error = %e, "a directive failed; it will be planned again");
                }
                this.busy.lock().remove(&d.shard);
            });
        }
    }

    async fn carry_out(&self, d: &Directive) -> Result<(), String> {
        // A replica that is hosted with other settings than the fleet's would keep its log where it does not belong.
        let shape = self.shape().ok_or("this server does not know its fleet's settings yet")?;
        let group = || self.replicas.get(d.shard).map(|r| r.group).ok_or("it is not here");
        match &d.what {
            Do::Host { origin } => self.replicas.host(d.shard, shape.shards, shape.durability, *origin).await,
            Do::Found { origin, members } => {
                let replica =
                    self.replicas.get(d.shard).filter(|r| r.origin == *origin).ok_or("it is not here")?;
                if !replica.group.membership().members.is_empty() {
                    return Ok(());
                }
                replica.group.found(members).await
            }
            Do::Retire { node, index } => self.replicas.retire(d.shard, *node, *index).await,
            Do::Learner(node, address) => group()?.add_learner(*node, address).await,
            Do::Voters(voters) => {
                tracing::info!(shard = d.shard.0, ?voters, "changing who votes");
                group()?.set_members(voters).await
            }
            Do::Diverged { node, at, majority } => {
                let why = format!(
                    "it has diverged: at log index {} its state hashes to {:016x}, that of the majority to {majority:016x}; \
                     this server's memory or disk may be failing",
                    at.index, at.digest
                );
                self.replicas.fail(d.shard, *node, why).await;
                Ok(())
            }
            Do::Transfer(to) => group()?.transfer(*to).await,
        }
    }

    // ---- leading ----

    /// Takes a report, if this server leads the control group; gives what the reporter should do.
    ///
    /// # Errors
    /// Why it was not taken: another process is this server. `None`: this server does not lead.
    pub fn take_report(&self, server: ServerId, report: Report) -> Result<Vec<Directive>, Option<String>> {
        if !self.group().leadership().borrow().leads {
            return Err(None);
        }
        let members = self.group().membership().members;
        let mut leading = self.leading.lock();
        let since = leading.since.ok_or(None)?;
        let silent = self.options.patience.silent;
        let heard = leading.heard.get(&server);
        if let Some(held_at) = joining::holder(server, &report, heard, &members, since, silent) {
            return Err(Some(format!(
                "{server} is there already, at {held_at}: two processes have the same --id or --advertise, or that one has \
                 died a moment ago"
            )));
        }
        leading.heard.insert(server, Heard { report, at: Instant::now() });
        self.news.notify_one();
        if let Some((_, planned)) = leading.planned.as_ref().filter(|(at, _)| at.elapsed() < PLAN_PAUSE) {
            return Ok(planned.get(&server).cloned().unwrap_or_default());
        }
        drop(leading);
        let mut plan = self.plan().ok_or(None)?;
        Ok(plan.directives.remove(&server).unwrap_or_default())
    }

    fn plan(&self) -> Option<Plan> {
        let mut leading = self.leading.lock();
        let since = leading.since?;
        let state = self.agreed.get();
        let group = self.group();
        let (control, control_caught_up) = (group.membership(), group.caught_up());
        leading.heard.retain(|server, _| !state.forgotten.contains(server));
        let view = View {
            state: &state,
            control: &control,
            control_caught_up: &control_caught_up,
            lost_since: &leading.lost_since,
            heard: &leading.heard,
            now: Instant::now(),
            since,
            patience: self.options.patience,
            origin: rand::random::<u64>() | (1 << 63),
            unix_ms: paraft_host::clock::unix_ms(),
        };
        let plan = plan(&view);
        let unreached = view.unreached();
        leading.unreached = unreached;
        leading.health = plan.health.clone();
        leading.lost_since.retain(|shard, _| plan.all_lost.contains(shard));
        for shard in &plan.all_lost {
            leading.lost_since.entry(*shard).or_insert_with(Instant::now);
        }
        leading.planned = Some((Instant::now(), plan.directives.clone()));
        Some(plan)
    }

    async fn lead(self: Arc<Self>) {
        let mut starts = self.control.starts();
        // Until the server ends, or a start of the replica follows the last.
        while starts.borrow_and_update().is_some() {
            self.lead_at_times(self.group()).await;
            self.leading.lock().since = None;
            if starts.changed().await.is_err() {
                return;
            }
        }
    }

    /// Returns when this replica of the control group has stopped.
    async fn lead_at_times(&self, group: Group) {
        let mut leadership = group.leadership();
        loop {
            if leadership.wait_for(|l| l.leads).await.is_err() {
                return;
            }
            if let Err(e) = group.barrier().await {
                tracing::debug!(error = %e, "cannot lead the control group yet");
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
            let jobs = self.agreed.read(|s| s.jobs.iter().next().is_some());
            *self.groups.lock() = Groups::taken_over(jobs, Instant::now());
            *self.leading.lock() = Leading { since: Some(Instant::now()), ..Leading::default() };
            tracing::info!(server = %self.options.server, "leads the control group");
            while leadership.borrow_and_update().leads {
                self.step().await;
                let pause = tokio::time::sleep(self.interval());
                tokio::select! {
                    () = pause => {}
                    () = self.news.notified() => tokio::time::sleep(Duration::from_millis(5)).await,
                    changed = leadership.changed() => if changed.is_err() { return },
                }
            }
            let mut leading = self.leading.lock();
            (leading.since, leading.planned) = (None, None);
        }
    }

    async fn step(&self) {
        let state = self.agreed.get();
        if state.fleet == 0 {
            // The founder lost the leadership, or its life, before it had founded.
            let members = self.group().membership().members;
            let servers = members.iter().map(|(n, a)| (n.server(), a.clone())).collect();
            let fleet = rand::random_range(1..u64::MAX);
            if let Some(shape) = self.options.shape {
                let _ = self.propose(Command::Found { fleet, shape, servers }).await;
            }
            return;
        }
        let admit: Vec<_> = {
            let leading = self.leading.lock();
            let new = |(id, h): (&ServerId, &Heard)| {
                let known = state.servers.get(id).is_some_and(|s| s.address == h.report.address);
                let there = || self.reach.confirms(&h.report.address, *id, h.report.node);
                let forgotten = state.forgotten.contains(id);
                (!known && !forgotten && there())
                    .then(|| Command::Admit { server: *id, address: h.report.address.clone() })
            };
            leading.heard.iter().filter_map(new).collect()
        };
        let Some(plan) = self.plan() else { return };
        for command in admit.into_iter().chain(plan.commands) {
            tracing::debug!(?command, "agreeing");
            if let Err(e) = self.propose(command).await {
                tracing::warn!(error = %e, "the control group cannot agree at present");
                return;
            }
        }
        let changed = match plan.control {
            None => Ok(()),
            Some(ControlChange::Learner(node, address)) => self.group().add_learner(node, &address).await,
            Some(ControlChange::Remove(nodes)) => {
                tracing::info!(?nodes, "the control group lets members go that do not come back");
                self.group().remove_learners(&nodes).await
            }
            Some(ControlChange::Voters(voters)) => {
                tracing::info!(?voters, "changing who votes in the control group");
                self.group().set_voters(&voters).await
            }
        };
        if let Err(e) = changed {
            tracing::warn!(error = %e, "the control group's membership cannot change at present");
        }
    }

    /// Whether this server leads the control group and what only its leader knows is of this term.
    pub fn leads(&self) -> bool {
        self.leading.lock().since.is_some() && self.group().leadership().borrow().leads
    }

    /// Hands everything that this server leads to others, so that nobody has to notice that it has gone. Returns when it
    /// leads nothing, or after [`HAND_OVER`].
    pub async fn hand_over(&self) {
        let deadline = Instant::now() + HAND_OVER;
        loop {
            let groups = self.replicas.all().into_iter().map(|(_, r)| r.group).chain([self.group()]);
            let mut led = false;
            for group in groups.filter(|g| g.leadership().borrow().leads) {
                let (voters, caught_up) = (group.membership().voters, group.caught_up());
                let Some(heir) = voters.into_iter().find(|n| *n != group.me() && caught_up.contains(n))
                else {
                    continue; // nobody could take over
                };
                led = true;
                if let Err(e) = group.transfer(heir).await {
                    tracing::debug!(%heir, error = %e, "cannot hand over");
                }
            }
            if !led || Instant::now() >= deadline {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Agrees on a command.
    pub async fn propose(&self, command: Command) -> Result<Outcome, String> {
        let waits = self.group().propose(Change::Control(command)).await.map_err(|e| e.to_string())?;
        match tokio::time::timeout(Duration::from_secs(5), waits).await {
            Ok(Ok(Applied::Control(outcome))) => Ok(outcome),
            Ok(Ok(_)) => Err("an answer of another kind".into()),
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => Err("no majority of the servers answered within 5 s".into()),
        }
    }

    /// Agrees on what a folder of checkpoints holds now, if that is not agreed on already. `job` is the founding of
    /// shard 0 that the job runs in.
    pub async fn note_checkpoints(
        &self,
        job: u64,
        folder: &str,
        held: Vec<KnownCheckpoint>,
    ) -> Result<(), String> {
        let difference = self.agreed.read(|s| {
            s.jobs.get(job).ok_or(UNKNOWN_JOB)?;
            Ok::<_, String>(s.jobs.difference(job, folder, held))
        })?;
        let Some(difference) = difference else { return Ok(()) };
        match self.propose(Command::Checkpoints { job, difference }).await? {
            Outcome::Refused(why) => Err(why),
            Outcome::Done | Outcome::Joined(_) => Ok(()),
        }
    }

    /// For status: the agreed state, how each shard is, and when each server was last heard; `None` where this
    /// server does not lead the control group.
    #[allow(clippy::type_complexity)]
    pub fn overview(
        &self,
    ) -> Option<(State, Membership, BTreeMap<ServerId, (Report, bool)>, BTreeMap<ShardId, (Health, String)>)>
    {
        let leading = self.leading.lock();
        leading.since?;
        let silent = |h: &Heard| h.at.elapsed() > self.options.patience.silent;
        let heard = leading.heard.iter().map(|(s, h)| (*s, (h.report.clone(), silent(h)))).collect();
        Some((self.agreed.get(), self.group().membership(), heard, leading.health.clone()))
    }

    /// A server of a shard, from what is agreed on: where a worker that asked here should go.
    pub fn host_of(&self, shard: ShardId) -> Option<String> {
        self.agreed.read(|s| {
            let place = s.shards.get(&shard)?;
            let others = place.voters.iter().filter(|n| n.server() != self.options.server);
            others.filter_map(|n| s.servers.get(&n.server())).map(|m| m.address.clone()).next()
        })
    }
}

/// What a shard's state says of its job.
fn job_of(shard: &Shard) -> Option<JobReport> {
    let configured = shard.configured()?;
    let job = &configured.job;
    let buckets = job.params_len.div_ceil(job.bucket_len) + job.buffers_len.div_ceil(job.bucket_len);
    Some(JobReport {
        facts: JobFacts {
            name: job.name.chars().take(JobFacts::NAME_CHARS).collect(),
            mode: job.mode,
            workers: job.workers,
            durability: job.durability,
            log: Retired,
        },
        shards: u32::try_from(buckets).unwrap_or(u32::MAX),
        finished: shard.read(|m| {
            m.started && m.members.iter().next().is_some() && m.members.unfinished().next().is_none()
        }),
    })
}

#[cfg(test)]
#[path = "agent_tests.rs"]
mod tests;
