//! What a fleet is at a moment: asked of all its servers at once, and put together.

use futures::future::{join, join_all};
use paraft_common::histogram::DelayHistogram;
use paraft_fleet::{ask::led, faults::Fault};
use paraft_host::clock::unix_ms;
use paraft_proto::{DescribeReply, JobInfo, ShardStatus, StatusReply};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// Who does not answer within this time is stopped, or gone.
const PATIENCE: Duration = Duration::from_millis(1500);

/// See the module. Times are Unix milliseconds by this host's clock.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Facts {
    /// When it was asked.
    pub at: u64,
    /// The fleet is none of processes: nothing can be done to it, and times are its own.
    pub simulated: bool,
    /// Who leads the control group, by number; without, nothing can be agreed on.
    pub leader: Option<u64>,
    /// By number.
    pub servers: Vec<Server>,
    /// By job and number.
    pub shards: Vec<Shard>,
    /// The latest last.
    pub jobs: Vec<Job>,
    /// Which faults were put on which servers; none: the fleet has no fault points.
    pub faults: Option<BTreeSet<(u32, Fault)>>,
    /// Servers that have answered, by address.
    #[serde(skip)]
    pub heard: BTreeSet<String>,
}

impl Facts {
    /// Nobody answers: a [`History`](crate::history::History) that sees this shows all that it knew as silent.
    pub fn of_nobody(self) -> Self {
        Self { servers: Vec::new(), jobs: Vec::new(), leader: None, heard: BTreeSet::new(), ..self }
    }

    /// Nobody leads the control group, so what it said last of servers and shards is not so any more: what is known is who answers.
    pub(crate) fn only_heard(&mut self) {
        let Self { servers, shards, heard, .. } = self;
        for server in servers.iter_mut() {
            match (heard.contains(&server.address), server.state.as_str()) {
                (true, "silent" | "unreachable") => server.state = "up".into(),
                (true, _) => {}
                (false, _) => (server.state, server.leads) = ("silent".into(), 0),
            }
        }
        let answers = |id: &u64| servers.iter().any(|s| s.id == *id && heard.contains(&s.address));
        for shard in shards.iter_mut() {
            shard.leader = shard.leader.filter(answers);
            shard.silent = shard.voters.iter().copied().filter(|v| !answers(v)).collect();
            if 2 * shard.silent.len() >= shard.voters.len().max(1) {
                (shard.state, shard.leader) = ("no-majority".into(), None);
            }
        }
    }
}

/// A server.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Server {
    /// Its number.
    pub id: u64,
    /// Where the others and the workers reach it.
    pub address: String,
    /// up, draining, silent, unreachable.
    pub state: String,
    /// What keeps it from taking part.
    pub trouble: String,
    /// Of weights and optimizer state.
    pub bytes: u64,
    /// Shards that it leads.
    pub leads: u32,
    /// Replicas that it holds.
    pub holds: u32,
    /// Of its process; none: it does not answer.
    pub cpu_seconds: Option<f64>,
    /// Likewise, at most so far.
    pub peak_rss_bytes: Option<u64>,
    /// Of the bound on its memory that leaves least.
    pub free: Option<u64>,
    /// That bound.
    pub limit: Option<u64>,
    /// Where it serves this page; empty: nowhere.
    pub page: String,
}

/// A shard.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Shard {
    /// Its job, by number.
    pub job: u32,
    /// Of its job.
    pub shard: u32,
    /// placing, serving, repairing, no-majority, storage-stopped, lost.
    pub state: String,
    /// Why.
    pub trouble: String,
    /// The server that leads it.
    pub leader: Option<u64>,
    /// Its Raft term.
    pub term: u64,
    /// Servers.
    pub voters: Vec<u64>,
    /// Servers whose replicas are being filled.
    pub learners: Vec<u64>,
    /// Of the voters.
    pub silent: Vec<u64>,
    /// Log entries that each server's replica is behind the furthest.
    pub lag: BTreeMap<u64, u64>,
    /// Updates applied to its buckets.
    pub version: u64,
    /// Weights and optimizer state.
    pub bytes: u64,
}

/// A job, as the leaders of its shards see it. Counts are of their processes: they go back when another server leads.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Job {
    /// Its number.
    pub id: u32,
    /// Its name; empty: no worker has begun it.
    pub name: String,
    /// waiting, running, finished, stopped, lost.
    pub state: String,
    /// A person has asked that it ends.
    pub stopping: bool,
    /// In force.
    pub mode: String,
    /// The loosest mode that the rule may choose; empty: none does.
    pub auto: String,
    /// That it was made for.
    pub workers: u32,
    /// As many as it can be told to have; none: whoever started them is not on the page's host, or takes no number.
    pub most: Option<u32>,
    /// Raft groups.
    pub shards: u32,
    /// Of each.
    pub replicas: u32,
    /// quorum-disk, quorum-memory, leader.
    pub durability: String,
    /// On all servers.
    pub bytes: u64,
    /// Where its record is, HOST:FOLDER.
    pub run: String,
    /// When it was first seen.
    pub since: u64,
    /// Nobody leads its first shard: what only that one's leader knows is as it was seen last.
    pub stale: bool,
    /// Who takes part.
    pub members: Vec<Member>,
    /// All expected workers have been here.
    pub started: bool,
    /// Members that left without finishing.
    pub workers_lost: u64,
    /// That applied pushes were computed from.
    pub samples: u64,
    /// Pushes applied, of buckets.
    pub pushes: u64,
    /// Payload of them.
    pub bytes_pushed: u64,
    /// Payload of answered pulls.
    pub bytes_pulled: u64,
    /// Messages refused.
    pub refused: u64,
    /// Pushes that came again.
    pub duplicates: u64,
    /// Acknowledged pushes that went down with a leader; at the level `leader` only.
    pub pushes_lost: u64,
    /// Sum of the training losses that were said.
    pub loss_sum: f64,
    /// How many.
    pub losses: u64,
    /// Held-out.
    pub evaluated: Option<Evaluated>,
    /// `delays[d]` pushes were applied `d` versions after their weights were pulled.
    pub delays: Vec<u64>,
    /// Who has waited for whom.
    pub waits: Vec<Wait>,
    /// The latest checkpoint: its step, and when it was written.
    pub checkpoint: Option<(u64, u64)>,
}

/// A worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Member {
    /// Its number.
    pub worker: u32,
    /// Steps that it has done.
    pub clock: u64,
    /// With all of them.
    pub finished: bool,
    /// It has nothing to train at present.
    pub idle: bool,
    /// What is left of its lease.
    pub lease_ms: Option<u64>,
    /// Where it runs; empty: it has not said so to the one that leads now.
    pub host: String,
    /// What it computes on.
    pub device: String,
}

/// A held-out evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Evaluated {
    /// Finished passes over the data.
    pub epoch: u64,
    /// Mean.
    pub loss: f64,
    /// Share classified rightly; 0 where the model does not classify.
    pub accuracy: f64,
}

/// How long pulls of a worker were held up by another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Wait {
    /// Who.
    pub worker: u32,
    /// For whom.
    pub of: u32,
    /// Together.
    pub seconds: f64,
}

/// Asks the servers at these addresses, and those that they name. `known` has the addresses of the whole fleet afterwards; none
/// where nobody answers.
pub async fn ask(known: &mut Vec<String>) -> Option<Facts> {
    let describe = |address: String| async move { paraft_client::describe(&address, PATIENCE).await.ok() };
    // When each has answered: counts are of that moment, and one that hangs must not make others late. Where it is known at once that
    // nobody is there, the control group will know it only later.
    let status = |address: String| async move {
        let began = Instant::now();
        let reply = paraft_client::status(&address, false, PATIENCE).await.ok();
        let gone = reply.is_none() && began.elapsed() < PATIENCE / 2;
        (address, unix_ms(), reply, gone)
    };
    let both =
        join(join_all(known.iter().cloned().map(describe)), join_all(known.iter().cloned().map(status)));
    let (described, mut replies) = both.await;
    let mut described: Vec<DescribeReply> = described.into_iter().flatten().collect();
    // Only the leader of the control group answers in full.
    if described.iter().all(|d| d.fleet == 0)
        && let Some(leader) =
            described.iter().map(|d| &d.leader).find(|l| !l.is_empty() && !known.contains(l))
    {
        described.extend(describe(leader.clone()).await);
    }
    // Who has lost its majority does not know it yet; the one that can agree counts.
    let leads = described.iter().filter(|d| d.fleet != 0).max_by_key(|d| (d.can_agree(), d.generation));
    if let Some(fleet) = leads {
        *known = fleet.servers.iter().map(|s| s.address.clone()).filter(|a| !a.is_empty()).collect();
    }
    let mut fleet = leads.or_else(|| described.first())?.clone();
    let more = known.iter().filter(|a| replies.iter().all(|(asked, ..)| asked != *a));
    replies.extend(join_all(more.cloned().map(status)).await);
    let gone = |address: &String| replies.iter().any(|(asked, .., gone)| asked == address && *gone);
    let silent = fleet.servers.iter_mut().filter(|s| gone(&s.address));
    silent.for_each(|server| server.state = "silent".into());
    let answered =
        || replies.iter().filter(|(address, _, reply, _)| known.contains(address) && reply.is_some());
    let at = answered().map(|(_, at, ..)| *at).min().unwrap_or_else(unix_ms);
    let replies =
        answered().filter_map(|(address, _, reply, _)| Some((address.clone(), reply.clone()?))).collect();
    let mut facts = put_together(at, &fleet, &replies);
    facts.heard = replies.into_keys().collect();
    if facts.leader.is_none() {
        facts.only_heard();
    }
    Some(facts)
}

/// The last lines that a worker has logged, as it has told the server at this address, which leads shard 0 of its job.
pub async fn logged(address: &str, job: u32, worker: u32) -> Result<Vec<String>, String> {
    let reply = paraft_client::status_with_logs(address, PATIENCE).await?;
    let shard = reply.shards.into_iter().find(|s| (s.job, s.shard) == (job, 0));
    let member = shard.and_then(|s| s.members.into_iter().find(|m| m.worker == worker));
    Ok(member.ok_or_else(|| format!("job {job} has no worker {worker} at present"))?.said)
}

/// What the fleet is, by what its control group's leader says of it and by what its servers say, by their addresses.
pub fn put_together(at: u64, fleet: &DescribeReply, replies: &BTreeMap<String, StatusReply>) -> Facts {
    // A fleet that was founded for no job has one without a name, which its first worker may still begin.
    let begun = |j: &&JobInfo| !j.name.is_empty();
    let led = led(replies.values());
    let leader = fleet.servers.iter().find(|s| s.address == fleet.leader).map(|s| s.server);
    // With the majority of the servers one that led has lost those that it led, which it may not know.
    let alone = |job: u32| {
        let first = fleet.shards.iter().find(|s| (s.job, s.shard) == (job, 0));
        !fleet.can_agree() && first.is_some_and(|s| s.leader.is_none())
    };
    let as_told = |info: &JobInfo| {
        let job = job(info, &led);
        Job { stale: job.stale || alone(info.job), ..job }
    };
    Facts {
        at,
        simulated: false,
        leader: leader.filter(|_| fleet.fleet != 0 && fleet.can_agree()),
        servers: fleet.servers.iter().map(|s| server(s, replies.get(&s.address))).collect(),
        shards: fleet.shards.iter().map(|s| shard(s, replies, &led)).collect(),
        jobs: fleet.jobs.iter().filter(begun).map(as_told).collect(),
        faults: None,
        heard: BTreeSet::new(),
    }
}

fn server(info: &paraft_proto::ServerInfo, reply: Option<&StatusReply>) -> Server {
    let memory = reply.and_then(|r| r.memory.as_ref());
    let is_away = ["silent", "unreachable"].contains(&info.state.as_str());
    Server {
        id: info.server,
        address: info.address.clone(),
        state: info.state.clone(),
        trouble: info.trouble.clone(),
        bytes: info.bytes,
        // What it said last is no longer so.
        leads: if is_away { 0 } else { info.leads },
        holds: info.holds,
        cpu_seconds: reply.map(|r| r.cpu_seconds),
        peak_rss_bytes: reply.map(|r| r.peak_rss_bytes),
        free: memory.map(|m| m.free),
        limit: memory.map(|m| m.limit),
        page: reply.map(|r| r.page.clone()).unwrap_or_default(),
    }
}

fn shard(
    info: &paraft_proto::ShardInfo,
    replies: &BTreeMap<String, StatusReply>,
    led: &BTreeMap<(u32, u32), &ShardStatus>,
) -> Shard {
    let leads = led.get(&(info.job, info.shard));
    let applied: BTreeMap<u64, u64> = replies
        .values()
        .flat_map(|r| r.shards.iter().map(|s| (r.server, s)))
        .filter(|(_, s)| (s.job, s.shard) == (info.job, info.shard))
        .map(|(server, s)| (server, s.applied_index))
        .collect();
    let furthest = applied.values().copied().max().unwrap_or_default();
    Shard {
        job: info.job,
        shard: info.shard,
        state: info.state.clone(),
        trouble: info.trouble.clone(),
        leader: info.leader,
        term: leads.map_or(0, |s| s.term),
        voters: info.voters.clone(),
        learners: info.learners.clone(),
        silent: info.silent.clone(),
        lag: applied.into_iter().map(|(server, at)| (server, furthest - at)).collect(),
        version: leads.map_or(0, |s| s.version),
        bytes: leads.map_or(0, |s| s.state_bytes),
    }
}

fn job(info: &JobInfo, led: &BTreeMap<(u32, u32), &ShardStatus>) -> Job {
    let shape = info.shape.clone().unwrap_or_default();
    let of = || led.range((info.job, 0)..=(info.job, u32::MAX)).map(|(_, s)| *s);
    let first = led.get(&(info.job, 0)).copied();
    let sum = |count: fn(&ShardStatus) -> u64| of().map(count).sum::<u64>();
    let mut delays = DelayHistogram::default();
    let mut waits: BTreeMap<(u32, u32), f64> = BTreeMap::new();
    for s in of() {
        delays.merge(&DelayHistogram::from_counts(&s.delay_counts));
        for w in &s.waits {
            let seconds = waits.entry((w.worker, w.of)).or_default();
            // A worker waits for all shards at once: the longest counts.
            *seconds = seconds.max(w.seconds);
        }
    }
    let evaluated = first.and_then(|s| s.evaluated).map(|e| {
        let n = e.count.max(1) as f64;
        Evaluated { epoch: e.epoch, loss: e.loss_sum / n, accuracy: e.correct as f64 / n }
    });
    Job {
        id: info.job,
        name: info.name.clone(),
        state: info.state.clone(),
        stopping: info.stopping && info.ended_ms == 0,
        mode: first.map_or_else(|| info.mode.clone(), |s| s.mode.clone()),
        auto: first.map(|s| s.mode_auto.clone()).unwrap_or_default(),
        workers: info.workers,
        most: None,
        shards: shape.shards,
        replicas: shape.replicas,
        durability: if info.durability.is_empty() { shape.durability } else { info.durability.clone() },
        bytes: info.bytes,
        run: info.run.clone(),
        since: info.first_seen_ms,
        stale: first.is_none(),
        members: first.map(|s| s.members.iter().map(member).collect()).unwrap_or_default(),
        started: first.is_some_and(|s| s.started),
        workers_lost: first.map_or(0, |s| s.workers_lost),
        samples: first.map_or(0, |s| s.samples),
        pushes: sum(|s| s.pushes),
        bytes_pushed: sum(|s| s.bytes_pushed),
        bytes_pulled: sum(|s| s.bytes_pulled),
        refused: sum(|s| s.refused),
        duplicates: sum(|s| s.duplicates),
        pushes_lost: sum(|s| s.pushes_lost),
        loss_sum: first.map_or(0.0, |s| s.loss_sum),
        losses: first.map_or(0, |s| s.losses),
        evaluated,
        delays: delays.counts().to_vec(),
        waits: waits.into_iter().map(|((worker, of), seconds)| Wait { worker, of, seconds }).collect(),
        checkpoint: info.checkpoints.last().map(|c| (c.step, c.written_ms)),
    }
}

fn member(m: &paraft_proto::Member) -> Member {
    let paraft_proto::Member { worker, clock, finished, idle, lease_ms, .. } = *m;
    Member { worker, clock, finished, idle, lease_ms, host: m.host.clone(), device: m.device.clone() }
}
