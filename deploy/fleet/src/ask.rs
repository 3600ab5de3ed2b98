//! Queries of a fleet's servers: each about its own shards, and the control group's leader about all.

use crate::failure::Failure;
use futures::{StreamExt, future::join_all, stream::FuturesUnordered};
use paraft_proto::{DescribeReply, JobInfo, ShardStatus, StatusReply, no_leader};
use paraft_worker::exit;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// The timeout of a status query.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(3);

/// Queries every server at the same time; `Err` says why one did not answer.
pub fn ask_all(addresses: &[String], digest: bool) -> Vec<Result<StatusReply, String>> {
    ask_within(addresses, digest, TIMEOUT)
}

/// As [`ask_all`], with a shorter timeout for replies that are optional.
pub fn ask_within(addresses: &[String], digest: bool, time: Duration) -> Vec<Result<StatusReply, String>> {
    block_on(statuses(addresses, digest, time))
        .unwrap_or_else(|| vec![Err("no runtime".into()); addresses.len()])
}

/// As [`ask_within`], in an async runtime.
pub(crate) async fn statuses(
    addresses: &[String],
    digest: bool,
    time: Duration,
) -> Vec<Result<StatusReply, String>> {
    join_all(addresses.iter().map(|a| paraft_client::status(a, digest, time))).await
}

/// The leader of each shard, by job and number, according to the servers themselves.
pub fn led<'a>(replies: impl IntoIterator<Item = &'a StatusReply>) -> BTreeMap<(u32, u32), &'a ShardStatus> {
    let mut led: BTreeMap<(u32, u32), &ShardStatus> = BTreeMap::new();
    for s in replies.into_iter().flat_map(|r| &r.shards).filter(|s| s.role == "leader") {
        let known = led.entry((s.job, s.shard)).or_insert(s);
        // A deposed leader that does not know it yet has the lower term.
        if known.term < s.term {
            *known = s;
        }
    }
    led
}

/// A slower reply means that the server is stopped.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// Longer than an election in a healthy fleet.
const ELECTION_TIME: Duration = Duration::from_secs(2);

pub(crate) type Answers = Vec<(String, Result<DescribeReply, String>)>;

/// Queries these servers for the control group's state, then those that they name, until `enough`.
async fn control_of(servers: &[String], enough: impl Fn(&DescribeReply) -> bool) -> Answers {
    let ask = async |a: String| {
        let reply = paraft_client::describe(&a, REPLY_TIMEOUT).await;
        (a, reply)
    };
    let mut asked: BTreeSet<String> = servers.iter().cloned().collect();
    let mut waiting: FuturesUnordered<_> = asked.iter().cloned().map(ask).collect();
    let mut answers = Answers::new();
    while let Some((address, reply)) = waiting.next().await {
        let last = reply.as_ref().is_ok_and(&enough);
        if let Ok(d) = &reply {
            let named = d.servers.iter().map(|s| &s.address).chain([&d.leader]).filter(|a| !a.is_empty());
            waiting.extend(named.filter(|a| asked.insert((*a).clone())).cloned().map(ask));
        }
        answers.push((address, reply));
        if last {
            break;
        }
    }
    answers
}

fn block_on<T>(what: impl Future<Output = T>) -> Option<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.ok().map(|r| r.block_on(what))
}

pub(crate) fn leads(answers: &Answers) -> Option<&DescribeReply> {
    let known = || answers.iter().filter_map(|(_, r)| r.as_ref().ok()).filter(|d| d.fleet != 0);
    known().find(|d| d.can_agree()).or_else(|| known().next())
}

/// The state in the reply of the control group's leader, or of one that has lost its majority.
pub fn describe(servers: &[String]) -> Option<DescribeReply> {
    block_on(described(servers))?
}

/// As [`describe`], within a time.
pub(crate) fn describe_within(servers: &[String], time: Duration) -> Option<DescribeReply> {
    block_on(async { tokio::time::timeout(time, described(servers)).await.ok().flatten() })?
}

/// As [`describe`], in an async runtime.
pub(crate) async fn described(servers: &[String]) -> Option<DescribeReply> {
    let answers = control_of(servers, |d| d.fleet != 0 && d.can_agree()).await;
    leads(&answers).cloned()
}

/// The jobs that the leader of the control group knows, or else those that a server knows that answers: they are agreed
/// on.
///
/// # Errors
/// No server answers, with the reason.
pub fn jobs(servers: &[String]) -> Result<Vec<JobInfo>, Failure> {
    let answers = block_on(control_of(servers, |d| d.fleet != 0 && d.can_agree()));
    let answers = answers.ok_or_else(|| Failure::new(exit::IO, "no runtime"))?;
    let leader = leads(&answers).map(|d| d.jobs.clone());
    let known = leader.or_else(|| answers.iter().any(|(_, r)| r.is_ok()).then(|| jobs_of(&answers)));
    known.ok_or_else(|| Failure::new(exit::UNAVAILABLE, no_leader(&answers)))
}

fn jobs_of(answers: &Answers) -> Vec<JobInfo> {
    let known = answers.iter().filter_map(|(_, r)| r.as_ref().ok()).map(|d| &d.jobs);
    known.max_by_key(|jobs| jobs.len()).cloned().unwrap_or_default()
}

/// Nothing can be agreed on.
pub struct NoMajority {
    /// What a leader knows that has lost its majority and does not know it, where there is one.
    pub fleet: Option<Box<DescribeReply>>,
    /// The jobs, as far as a server knows that answers.
    pub jobs: Vec<JobInfo>,
    /// Which servers do not answer, and what to do.
    pub why: String,
}

impl From<NoMajority> for Failure {
    fn from(none: NoMajority) -> Self {
        Self::new(exit::UNAVAILABLE, none.why)
    }
}

/// What a leader knows that has a majority behind it: one that answers now, since a leader notices a crash only after a
/// while. One that is being elected is waited for.
pub fn agreeing(servers: &[String]) -> Result<DescribeReply, NoMajority> {
    let deadline = Instant::now() + ELECTION_TIME;
    loop {
        let answers = block_on(everyone(servers)).unwrap_or_default();
        match leads(&answers) {
            Some(d) if d.can_agree() => return Ok(d.clone()),
            known if Instant::now() > deadline => {
                let fleet = known.cloned().map(Box::new);
                return Err(NoMajority { fleet, jobs: jobs_of(&answers), why: no_leader(&answers) });
            }
            _ => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Asks these servers, and those of their fleet that are not among them. A server that does not answer is noted as silent.
pub(crate) async fn everyone(servers: &[String]) -> Answers {
    let mut answers = control_of(servers, |_| false).await;
    let answered: BTreeSet<String> =
        answers.iter().filter(|(_, r)| r.is_ok()).map(|(a, _)| a.clone()).collect();
    for fleet in answers.iter_mut().filter_map(|(_, r)| r.as_mut().ok()) {
        let silent: Vec<u64> =
            fleet.servers.iter().filter(|s| !answered.contains(&s.address)).map(|s| s.server).collect();
        silent.into_iter().for_each(|s| fleet.note_silent(s));
    }
    answers
}

/// Waits until every server that answers knows this job: a server that does not yet would take its workers for those of
/// the job that the fleet was founded for. Gives up after [`ELECTION_TIME`]: a server may be away for long.
pub(crate) fn wait_for_job(servers: &[String], name: &str) {
    let deadline = Instant::now() + ELECTION_TIME;
    loop {
        let answers = block_on(everyone(servers)).unwrap_or_default();
        let knows = |d: &DescribeReply| d.jobs.iter().any(|job| job.name == name && !job.released);
        if answers.iter().filter_map(|(_, r)| r.as_ref().ok()).all(knows) || Instant::now() > deadline {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Whom to give an order: the leader first, then the others of the fleet, then those of `given` that it does not know.
pub fn whom(fleet: &DescribeReply, given: &[String]) -> Vec<String> {
    let leader = Some(fleet.leader.as_str()).filter(|l| !l.is_empty());
    let known = fleet.servers.iter().map(|s| s.address.as_str());
    let mut all: Vec<String> = Vec::new();
    for address in leader.into_iter().chain(known).chain(given.iter().map(String::as_str)) {
        if !all.iter().any(|a| a == address) {
            all.push(address.to_string());
        }
    }
    all
}
