//! A snapshot of a fleet, from the replies of all its servers.

use futures::future::{join, join_all};
use job::job;
use paraft_fleet::{ask::led, faults::Fault};
use paraft_host::clock::unix_ms;
use paraft_proto::{DescribeReply, JobInfo, ShardStatus, StatusReply};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

mod job;

pub use job::{Evaluated, Job, Member, Table, Wait, tables};

/// A server that does not answer in this time counts as stopped or gone.
const REPLY_TIMEOUT: Duration = Duration::from_millis(1500);

/// A snapshot of the fleet. Times are Unix milliseconds by this host's clock.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Facts {
    /// The time of the snapshot.
    pub at: u64,
    /// The fleet is simulated: it takes no commands, and its times are simulated.
    pub simulated: bool,
    /// The server that leads the control group; `None` if there is no leader, so no command can commit.
    pub leader: Option<u64>,
    /// Sorted by number.
    pub servers: Vec<Server>,
    /// Sorted by job and number.
    pub shards: Vec<Shard>,
    /// The latest job last.
    pub jobs: Vec<Job>,
    /// The faults that are set, by server; `None` if the fleet has no fault points.
    pub faults: Option<BTreeSet<(u32, Fault)>>,
    /// Addresses of the servers that answered.
    #[serde(skip)]
    pub heard: BTreeSet<String>,
}

impl Facts {
    /// No server answers: a [`History`](crate::history::History) that receives this shows all known
    /// servers as silent.
    pub fn without_replies(self) -> Self {
        Self { servers: Vec::new(), jobs: Vec::new(), leader: None, heard: BTreeSet::new(), ..self }
    }

    /// Keeps only which servers answer: without a leader of the control group, its last view of servers
    /// and shards is stale.
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
    /// The address for other servers and for workers.
    pub address: String,
    /// up, draining, silent, unreachable.
    pub state: String,
    /// Why the server does not take part.
    pub trouble: String,
    /// Bytes of weights and optimizer state.
    pub bytes: u64,
    /// Shards led by this server.
    pub leads: u32,
    /// Replicas on this server.
    pub holds: u32,
    /// CPU time of its process; `None` if it does not answer.
    pub cpu_seconds: Option<f64>,
    /// Peak resident set of its process.
    pub peak_rss_bytes: Option<u64>,
    /// Free bytes under the tightest memory limit.
    pub free: Option<u64>,
    /// That limit in bytes.
    pub limit: Option<u64>,
    /// The address where this server serves the page; empty if it does not.
    pub page: String,
}

/// A shard.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Shard {
    /// The number of its job.
    pub job: u32,
    /// The shard's number in its job.
    pub shard: u32,
    /// placing, serving, repairing, no-majority, storage-stopped, lost.
    pub state: String,
    /// The reason for the state.
    pub trouble: String,
    /// The server that leads it.
    pub leader: Option<u64>,
    /// Its Raft term.
    pub term: u64,
    /// Servers that vote in the shard's Raft group.
    pub voters: Vec<u64>,
    /// Servers whose replicas are catching up.
    pub learners: Vec<u64>,
    /// Voters that do not answer.
    pub silent: Vec<u64>,
    /// For each server, the log entries that its replica is behind the furthest one.
    pub lag: BTreeMap<u64, u64>,
    /// Updates applied to its buckets.
    pub version: u64,
    /// Bytes of weights and optimizer state.
    pub bytes: u64,
}

/// Queries the servers at `known` and the servers that they name. Afterwards `known` holds the
/// addresses of the whole fleet. `None` if no server answers.
pub async fn ask(known: &mut Vec<String>) -> Option<Facts> {
    let describe =
        |address: String| async move { paraft_client::describe(&address, REPLY_TIMEOUT).await.ok() };
    // The query of all servers is concurrent, because a hung server must not delay the others. Counters
    // carry the time of their own reply. A refused connection shows a dead server before the control
    // group detects it.
    let status = |address: String| async move {
        let began = Instant::now();
        let reply = paraft_client::status(&address, false, REPLY_TIMEOUT).await.ok();
        let gone = reply.is_none() && began.elapsed() < REPLY_TIMEOUT / 2;
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
    // A leader without a majority may not know it yet, so a leader that can commit takes precedence.
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

/// The last log lines of a worker. The worker sends them to the leader of shard 0, which must be at
/// `address`.
pub async fn logged(address: &str, job: u32, worker: u32) -> Result<Vec<String>, String> {
    let reply = paraft_client::status_with_logs(address, REPLY_TIMEOUT).await?;
    let shard = reply.shards.into_iter().find(|s| (s.job, s.shard) == (job, 0));
    let member = shard.and_then(|s| s.members.into_iter().find(|m| m.worker == worker));
    Ok(member.ok_or_else(|| format!("job {job} has no worker {worker} at present"))?.said)
}

/// Combines the reply of the control group's leader with the replies of all servers, which are keyed by
/// address.
pub fn put_together(at: u64, fleet: &DescribeReply, replies: &BTreeMap<String, StatusReply>) -> Facts {
    // A fleet that was started without a job has one unnamed job, which its first worker may still
    // name.
    let begun = |j: &&JobInfo| !j.name.is_empty();
    let led = led(replies.values());
    let leader = fleet.servers.iter().find(|s| s.address == fleet.leader).map(|s| s.server);
    // A server without a majority of the servers has lost the shards that it led, which it may not know
    // yet.
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
        // The last reply of an absent server is stale.
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
