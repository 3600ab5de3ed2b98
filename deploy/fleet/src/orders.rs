//! Orders to a fleet. This module alone finds the leader for an order, and retries until the order is
//! done or finally refused.
//!
//! Only the order's leader refuses finally, and its advice says so. A reply from another server, an
//! unreachable server and a timeout say nothing about the order. The order is then sent again, with the
//! same token, until its time is over.

use crate::{ask, failure::Failure};
use paraft_client::{Done, Order};
use paraft_common::ModeChoice;
use paraft_proto::{Candidates, PROTOCOL, RefusalKind, Refused, ShardStatus, SwitchModeRequest, no_leader};
use paraft_worker::exit;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// The timeout of one attempt: a server needs up to 5 s to notice that it has no majority.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(6);
/// The time for an order: several elections, each with an attempt that a failed leader did not answer.
pub const ORDER_TIMEOUT: Duration = Duration::from_secs(30);
/// The delay before the next search for a leader.
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// If no server answers for longer than an election takes, waiting is useless.
const NO_REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// A random token for an order.
pub fn token() -> u64 {
    rand::random_range(1..u64::MAX)
}

/// Sends an order to the leader of the control group of the fleet of `servers`.
///
/// # Errors
///
/// The leader's refusal. With an advice that is not final, the order may still take effect after its
/// time is over.
pub async fn give(servers: &[String], order: &Order, token: u64, within: Duration) -> Result<Done, Refused> {
    let (began, deadline) = (Instant::now(), Instant::now() + within);
    let mut known = servers.to_vec();
    loop {
        let answers = ask::everyone(&known).await;
        let why = match ask::leads(&answers).filter(|fleet| fleet.can_agree()) {
            Some(fleet) => {
                known = ask::whom(fleet, &known);
                match try_at(&fleet.leader, order, token).await {
                    Err((at, refused)) if !refused.is_final() => format!("{at}: {}", refused.message),
                    done => return done.map_err(|(_, refused)| refused),
                }
            }
            None => {
                let why = no_leader(&answers);
                if answers.iter().all(|(_, reply)| reply.is_err()) && began.elapsed() > NO_REPLY_TIMEOUT {
                    return Err(Refused::unheard(why));
                }
                why
            }
        };
        if Instant::now() >= deadline {
            return Err(Refused::unheard(format!(
                "no server took the order within {} s: {why}. It may be done or not",
                within.as_secs()
            )));
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

/// Each server names the leader that it knows; each named server is asked once.
async fn try_at(leader: &str, order: &Order, token: u64) -> Result<Done, (String, Refused)> {
    let mut candidates = Candidates::of([leader.to_string()]);
    let mut last = (leader.to_string(), Refused::unheard("no server was asked"));
    while let Some(at) = candidates.next() {
        match paraft_client::order(&at, order, token, ATTEMPT_TIMEOUT).await {
            Ok(done) => return Ok(done),
            Err(refused) => {
                candidates.failed(&at, refused.message.clone(), &refused.leader);
                last = (at, refused);
            }
        }
    }
    Err(last)
}

/// As [`give`], with a new token, for callers without an async runtime.
///
/// # Errors
///
/// As [`give`]'s.
pub fn given(servers: &[String], order: &Order) -> Result<Done, Refused> {
    given_again(servers, order, token(), ORDER_TIMEOUT)
}

/// As [`given`], with the token of an earlier attempt of the same order.
///
/// # Errors
///
/// As [`give`]'s.
pub fn given_again(servers: &[String], order: &Order, token: u64, within: Duration) -> Result<Done, Refused> {
    block_on(give(servers, order, token, within))
}

/// Waits for a request without an async runtime.
///
/// # Errors
///
/// Those of the request.
pub fn block_on<T>(asks: impl Future<Output = Result<T, Refused>>) -> Result<T, Refused> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|e| Refused::unheard(format!("no runtime: {e}")))?.block_on(asks)
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Self {
        match refused.is_final() {
            true => Self::new(exit::CONFIG, refused.message),
            false => Self::new(exit::UNAVAILABLE, refused.message)
                .help("ask again; `paraft status` shows which servers answer"),
        }
    }
}

/// The result of a switch of the mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Switched {
    /// The previous mode, as shard 0 reports it.
    pub before: String,
    /// The mode in force.
    pub mode: String,
    /// The switch's number, the same on every shard.
    pub number: u64,
    /// The shards that have switched.
    pub shards: usize,
}

/// Switches the mode of a job. Shard 0 comes first: the number that it assigns to the switch is used on
/// every shard.
///
/// # Errors
///
/// The refusal of a shard's leader, or a shard's leader that did not answer in time.
pub async fn switch(
    servers: &[String],
    job: &str,
    choice: ModeChoice,
    within: Duration,
) -> Result<Switched, Refused> {
    let deadline = Instant::now() + within;
    let (mode, number, seen) = at_leader(servers, job, 0, deadline, async |address: String| {
        let (job, mode) = (job.to_string(), choice.to_string());
        let request = SwitchModeRequest { protocol: PROTOCOL, shard: 0, job, mode, number: 0 };
        let (number, mode) = paraft_client::switch_mode(&address, request, ATTEMPT_TIMEOUT).await?;
        Ok((mode, number))
    })
    .await
    .map(|((mode, number), seen)| (mode, number, seen))?;
    if choice != ModeChoice::Auto && mode != choice.to_string() {
        return Err(Refused::unheard(format!("{job} continues in {mode}: another switch came between")));
    }
    for shard in seen.shards.iter().copied().filter(|s| *s > 0) {
        at_leader(servers, job, shard, deadline, async |address: String| {
            let (job, mode) = (job.to_string(), mode.clone());
            let request = SwitchModeRequest { protocol: PROTOCOL, shard, job, mode, number };
            paraft_client::switch_mode(&address, request, ATTEMPT_TIMEOUT).await
        })
        .await
        .map_err(|refused| {
            let message = format!("{}. The shards before it have switched: ask again", refused.message);
            Refused { message, ..refused }
        })?;
    }
    Ok(Switched { before: seen.mode, mode, number, shards: seen.shards.len().max(1) })
}

/// Makes a worker of the job write a checkpoint after its next step; returns the worker.
///
/// # Errors
///
/// The refusal of shard 0's leader, or a leader that did not answer in time.
pub async fn save(servers: &[String], job: &str, within: Duration) -> Result<u32, Refused> {
    let deadline = Instant::now() + within;
    let saves = async |address: String| paraft_client::save(&address, job, ATTEMPT_TIMEOUT).await;
    at_leader(servers, job, 0, deadline, saves).await.map(|(worker, _)| worker)
}

/// Retries at the leader of a job's shard until it answers. Also returns what the fleet reported of the
/// job before.
pub(crate) async fn at_leader<T>(
    servers: &[String],
    job: &str,
    shard: u32,
    deadline: Instant,
    asks: impl AsyncFn(String) -> Result<T, Refused>,
) -> Result<(T, JobView), Refused> {
    let (began, mut known, mut asked) = (Instant::now(), servers.to_vec(), false);
    loop {
        let seen = seen(&mut known, job).await?;
        let why = match seen.leaders.get(&shard) {
            None if seen.answers == 0 => {
                let unchanged = if asked { "" } else { "; nothing has changed" };
                let why = format!("no server answered at {}{unchanged}", servers.join(", "));
                if began.elapsed() > NO_REPLY_TIMEOUT {
                    return Err(Refused::unheard(why));
                }
                why
            }
            None => format!("shard {shard} has no leader"),
            Some(address) => {
                asked = true;
                match asks(address.clone()).await {
                    Ok(done) => return Ok((done, seen)),
                    Err(refused) if refused.is_final() => {
                        let message = format!("shard {shard}: {}", refused.message);
                        return Err(Refused { message, ..refused });
                    }
                    Err(refused) => format!("shard {shard} at {address}: {}", refused.message),
                }
            }
        };
        if Instant::now() >= deadline {
            return Err(Refused::unheard(why));
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

/// What a fleet's servers report of a job.
pub(crate) struct JobView {
    /// The number of servers that answered.
    pub answers: usize,
    /// The mode, as shard 0's leader reports it.
    mode: String,
    /// Shards with a part of the model: a small model leaves some empty.
    pub shards: BTreeSet<u32>,
    /// The addresses of each shard's replicas, its leader last.
    pub replicas: BTreeMap<u32, Vec<String>>,
    /// The addresses of the shards' leaders.
    leaders: BTreeMap<u32, String>,
}

/// Queries the fleet's servers: those in `known`, and those that they name, which are added to it.
///
/// # Errors
///
/// The fleet has no such job.
pub(crate) async fn seen(known: &mut Vec<String>, job: &str) -> Result<JobView, Refused> {
    let fleet = ask::described(known).await;
    if let Some(fleet) = &fleet {
        *known = ask::whom(fleet, known);
    }
    let replies = ask::statuses(known, false, ask::TIMEOUT).await;
    let replies: Vec<_> = replies.into_iter().flatten().collect();
    let named = replies.iter().flat_map(|r| &r.shards).any(|s| s.job_name == job);
    if let Some(fleet) = fleet.filter(|f| !named && f.fleet != 0 && f.can_agree()) {
        // A job's first worker names it, and the control group learns the name a moment later.
        let may_be = fleet.jobs.iter().any(|j| j.name == job || j.name.is_empty());
        if !may_be {
            let there = fleet.jobs.iter().filter(|j| !j.released).map(|j| format!("`{}`", j.name)).collect();
            return Err(RefusalKind::NoSuchJob { asked: job.into(), there }.into());
        }
    }
    // If no server knows the name, the shards of the founding job report what they train.
    let ours = |s: &&ShardStatus| if named { s.job_name == job } else { s.job == 0 };
    let shards = replies.iter().flat_map(|r| &r.shards).filter(ours);
    let shards = shards.filter(|s| s.buckets > 0).map(|s| s.shard).collect();
    let (mode, leaders) = (String::new(), BTreeMap::new());
    let mut seen = JobView { answers: replies.len(), mode, shards, replicas: BTreeMap::new(), leaders };
    let mut terms: BTreeMap<u32, u64> = BTreeMap::new();
    for reply in &replies {
        for s in reply.shards.iter().filter(ours).filter(|s| s.role == "leader") {
            // Of two servers that claim to lead, the one with the later term is right.
            if terms.get(&s.shard).is_none_or(|term| *term < s.term) {
                terms.insert(s.shard, s.term);
                seen.leaders.insert(s.shard, reply.address.clone());
                if s.shard == 0 {
                    seen.mode = s.mode.clone();
                }
            }
        }
    }
    for reply in &replies {
        for s in reply.shards.iter().filter(ours) {
            let replicas = seen.replicas.entry(s.shard).or_default();
            let leads = seen.leaders.get(&s.shard) == Some(&reply.address);
            replicas.insert(if leads { replicas.len() } else { 0 }, reply.address.clone());
        }
    }
    Ok(seen)
}
