//! Orders to a fleet: the one place that finds who takes one, and gives it again until it is done or refused for good.
//!
//! Final is what the order's leader refuses by its advice. A server that does not lead, one that is not reached, and one that does not
//! answer say nothing about the order: it is given again, with the same token, until its time is over.

use crate::{ask, failure::Failure};
use paraft_client::{Done, Order};
use paraft_common::ModeChoice;
use paraft_proto::{PROTOCOL, RefusalKind, Refused, ShardStatus, SwitchModeRequest, no_leader};
use paraft_worker::exit;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// One try: a server takes up to 5 s to find that it has no majority.
const TRY: Duration = Duration::from_secs(6);
/// An order as a whole: some elections, each with a try that a leader has left unanswered.
pub const WITHIN: Duration = Duration::from_secs(30);
/// Before a leader is looked for again.
const BETWEEN: Duration = Duration::from_millis(100);
/// Where no server answers for longer than an election takes, nothing comes of waiting.
const ANYBODY: Duration = Duration::from_secs(2);

/// A token for an order.
pub fn token() -> u64 {
    rand::random_range(1..u64::MAX)
}

/// Gives an order to whoever leads the control group of the fleet that one of these servers belongs to.
///
/// # Errors
/// The leader's refusal; or, with another advice than a final one, that the order may be done or not when its time is over.
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
                if answers.iter().all(|(_, reply)| reply.is_err()) && began.elapsed() > ANYBODY {
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
        tokio::time::sleep(BETWEEN).await;
    }
}

/// Who is asked names who leads now; each is asked once.
async fn try_at(leader: &str, order: &Order, token: u64) -> Result<Done, (String, Refused)> {
    let (mut at, mut asked) = (leader.to_string(), BTreeSet::new());
    loop {
        asked.insert(at.clone());
        match paraft_client::order(&at, order, token, TRY).await {
            Err(refused) if !refused.leader.is_empty() && !asked.contains(&refused.leader) => {
                at = refused.leader
            }
            done => return done.map_err(|refused| (at, refused)),
        }
    }
}

/// [`give`], with a token of its own, for who has no runtime.
///
/// # Errors
/// As [`give`]'s.
pub fn given(servers: &[String], order: &Order) -> Result<Done, Refused> {
    given_again(servers, order, token(), WITHIN)
}

/// Likewise, as a try of the order that has this token.
///
/// # Errors
/// As [`give`]'s.
pub fn given_again(servers: &[String], order: &Order, token: u64, within: Duration) -> Result<Done, Refused> {
    block_on(give(servers, order, token, within))
}

/// Waits for something that is asked, where there is no runtime.
///
/// # Errors
/// Its own.
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

/// What came of a switch of the mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Switched {
    /// The mode before, as shard 0 said.
    pub before: String,
    /// The mode in force.
    pub mode: String,
    /// The switch's number, the same on every shard.
    pub number: u64,
    /// The shards that have switched.
    pub shards: usize,
}

/// Switches the mode in which a job trains. Shard 0 is asked first; the number that it gives to the switch is the same on every shard.
///
/// # Errors
/// The refusal of a shard's leader; or that one was not heard in time.
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
        let (number, mode) = paraft_client::switch_mode(&address, request, TRY).await?;
        Ok((mode, number))
    })
    .await
    .map(|((mode, number), seen)| (mode, number, seen))?;
    if choice != ModeChoice::Auto && mode != choice.to_string() {
        return Err(Refused::unheard(format!("{job} goes on in {mode}: another switch came between")));
    }
    for shard in seen.shards.iter().copied().filter(|s| *s > 0) {
        at_leader(servers, job, shard, deadline, async |address: String| {
            let (job, mode) = (job.to_string(), mode.clone());
            let request = SwitchModeRequest { protocol: PROTOCOL, shard, job, mode, number };
            paraft_client::switch_mode(&address, request, TRY).await
        })
        .await
        .map_err(|refused| {
            let message = format!("{}. The shards before it have switched: ask again", refused.message);
            Refused { message, ..refused }
        })?;
    }
    Ok(Switched { before: seen.mode, mode, number, shards: seen.shards.len().max(1) })
}

/// Has a worker of a job write a checkpoint behind its next step; gives which.
///
/// # Errors
/// The refusal of the leader of shard 0; or that it was not heard in time.
pub async fn save(servers: &[String], job: &str, within: Duration) -> Result<u32, Refused> {
    let deadline = Instant::now() + within;
    let saves = async |address: String| paraft_client::save(&address, job, TRY).await;
    at_leader(servers, job, 0, deadline, saves).await.map(|(worker, _)| worker)
}

/// Asks the leader of a job's shard until it has answered; gives also what was seen of the job before.
async fn at_leader<T>(
    servers: &[String],
    job: &str,
    shard: u32,
    deadline: Instant,
    asks: impl AsyncFn(String) -> Result<T, Refused>,
) -> Result<(T, Seen), Refused> {
    let (began, mut known, mut asked) = (Instant::now(), servers.to_vec(), false);
    loop {
        let seen = seen(&mut known, job).await?;
        let why = match seen.leaders.get(&shard) {
            None if seen.answers == 0 => {
                let unchanged = if asked { "" } else { "; nothing has changed" };
                let why = format!("no server answered at {}{unchanged}", servers.join(", "));
                if began.elapsed() > ANYBODY {
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
        tokio::time::sleep(BETWEEN).await;
    }
}

/// What a fleet's servers say of a job.
struct Seen {
    /// The servers that have answered.
    answers: usize,
    /// As shard 0's leader says.
    mode: String,
    /// Those with a part of the model: a small one leaves some without.
    shards: BTreeSet<u32>,
    /// The addresses of the shards' leaders.
    leaders: BTreeMap<u32, String>,
}

/// Asks the fleet's servers, given ones and others, which are `known` from then on.
///
/// # Errors
/// The fleet has no such job.
async fn seen(known: &mut Vec<String>, job: &str) -> Result<Seen, Refused> {
    let fleet = ask::described(known).await;
    if let Some(fleet) = &fleet {
        *known = ask::whom(fleet, known);
    }
    let replies = ask::statuses(known, false, ask::TIMEOUT).await;
    let replies: Vec<_> = replies.into_iter().flatten().collect();
    let named = replies.iter().flat_map(|r| &r.shards).any(|s| s.job_name == job);
    if let Some(fleet) = fleet.filter(|f| !named && f.fleet != 0 && f.can_agree()) {
        // One without a name is named by its first worker, of which the control group hears a moment later.
        let may_be = fleet.jobs.iter().any(|j| j.name == job || j.name.is_empty());
        if !may_be {
            let there = fleet.jobs.iter().filter(|j| !j.released).map(|j| format!("`{}`", j.name)).collect();
            return Err(RefusalKind::NoSuchJob { asked: job.into(), there }.into());
        }
    }
    // Where no server trains it, those of the job that the fleet was founded for say what they train.
    let ours = |s: &&ShardStatus| if named { s.job_name == job } else { s.job == 0 };
    let shards = replies.iter().flat_map(|r| &r.shards).filter(ours);
    let shards = shards.filter(|s| s.buckets > 0).map(|s| s.shard).collect();
    let mut seen = Seen { answers: replies.len(), mode: String::new(), shards, leaders: BTreeMap::new() };
    let mut terms: BTreeMap<u32, u64> = BTreeMap::new();
    for reply in &replies {
        for s in reply.shards.iter().filter(ours).filter(|s| s.role == "leader") {
            // Of two that believe to lead, the one with the later term does.
            if terms.get(&s.shard).is_none_or(|term| *term < s.term) {
                terms.insert(s.shard, s.term);
                seen.leaders.insert(s.shard, reply.address.clone());
                if s.shard == 0 {
                    seen.mode = s.mode.clone();
                }
            }
        }
    }
    Ok(seen)
}
