//! What a person does on the page, by the same calls as the command line's.

use crate::{facts::Facts, here::Here};
use futures::{FutureExt, future::BoxFuture};
use paraft_common::{ModeChoice, ServerId};
use paraft_fleet::faults::{Fault, Faults};
use paraft_proto::{Advice, PROTOCOL, Refused, SwitchModeRequest};
use parking_lot::Mutex;
use serde::Deserialize;
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// A server that is asked has so long to answer.
const ANSWER: Duration = Duration::from_secs(10);
/// What a slow link or disk costs, in milliseconds: for each piece of data, or fsync.
const SLOW: u64 = 50;
/// Before a shard's leader is looked for again.
const AGAIN: Duration = Duration::from_millis(100);

/// See the module.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(tag = "act", rename_all = "lowercase", deny_unknown_fields)]
pub enum Act {
    /// `paraft mode`.
    Mode {
        /// The job's name.
        job: String,
        /// As the command line has it.
        mode: String,
    },
    /// `paraft checkpoint save`.
    Save {
        /// The job's name.
        job: String,
    },
    /// `paraft drain`.
    Drain {
        /// Its number.
        server: u64,
        /// Fill it again.
        #[serde(default)]
        undo: bool,
    },
    /// `paraft fleet scale`, where the workers' launcher is on this host, or their engine can be told from it.
    Workers {
        /// The job's number: its name may be another's too, by now.
        job: u32,
        /// How many.
        workers: u32,
    },
    /// What `paraft chaos` puts and takes back, where the fleet has fault points.
    Fault {
        /// Its number.
        server: u32,
        /// Which.
        fault: Fault,
        /// Take it back.
        #[serde(default)]
        undo: bool,
    },
    /// `paraft stop`.
    Stop {
        /// The job's name.
        job: String,
    },
    /// `paraft delete`.
    Delete {
        /// The job's name.
        job: String,
    },
}

impl Act {
    /// Does it; what was done, in words. `here` is what can be reached by the files of this host.
    ///
    /// # Errors
    /// Why it was not; for people.
    pub async fn carry_out(&self, facts: &Facts, here: &Here) -> Result<String, String> {
        match here.acts.clone() {
            Some(access) => paraft_client::connect::asking_by(access, self.done(facts, here)).await,
            None => self.done(facts, here).await,
        }
    }

    async fn done(&self, facts: &Facts, here: &Here) -> Result<String, String> {
        match self {
            Self::Mode { job, mode } => switch(facts, job, mode).await,
            Self::Save { job } => save(facts, job).await,
            Self::Drain { server, undo } => {
                let (id, undo) = (ServerId(*server), *undo);
                let ask = move |address: String| {
                    async move { paraft_client::drain(&address, id, undo, ANSWER).await }.boxed()
                };
                order(facts, ask).await?;
                Ok(match undo {
                    true => format!("s{server} is filled again"),
                    false => format!("s{server} is emptied"),
                })
            }
            Self::Workers { job, workers } => {
                let known = facts.jobs.iter().find(|j| j.id == *job);
                let known = known.ok_or_else(|| format!("this fleet has no job {job}"))?;
                let (n, here, job) = (*workers, here.clone(), known.clone());
                let set = tokio::task::spawn_blocking(move || here.scale(&job, n)).await;
                set.map_err(|e| e.to_string())??;
                let workers = if n == 1 { "1 worker".to_string() } else { format!("{n} workers") };
                Ok(format!("{} is to have {workers} from now on", known.name))
            }
            Self::Fault { server, fault, undo } => {
                if !facts.servers.iter().any(|s| s.id == u64::from(*server)) {
                    return Err(format!("this fleet has no s{server}"));
                }
                let points =
                    here.faults.as_deref().ok_or("this fleet has no fault points: start it with --faults")?;
                put(points, *server, *fault, *undo).map_err(|e| format!("{}: {e}", points.display()))?;
                let how = if *undo { "taken back from" } else { "put on" };
                Ok(format!("{} is {how} s{server}", fault.name()))
            }
            Self::Stop { job } => {
                let was = end(facts, job, false).await?;
                Ok(format!("{job} is to stop where it is; it was {was}"))
            }
            Self::Delete { job } => {
                let was = end(facts, job, true).await?;
                Ok(format!("{job} is deleted; it was {was}"))
            }
        }
    }
}

fn put(points: &Path, server: u32, fault: Fault, undo: bool) -> std::io::Result<()> {
    // Two at once would each leave out what the other puts.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    let mut faults = Faults::read(points)?;
    match undo {
        true => faults.heal(fault, server),
        false => faults.put(fault, server, SLOW),
    }
    faults.write(points)
}

async fn end(facts: &Facts, job: &str, delete: bool) -> Result<String, String> {
    let job = job.to_string();
    let ask = move |address: String| {
        let job = job.clone();
        async move { paraft_client::end_job(&address, &job, delete, ANSWER).await }.boxed()
    };
    order(facts, ask).await
}

/// An order to the leader of the control group; a refusal of it is final.
async fn order<T>(
    facts: &Facts,
    ask: impl Fn(String) -> BoxFuture<'static, Result<T, (String, String)>>,
) -> Result<T, String> {
    let leads = facts.servers.iter().find(|s| Some(s.id) == facts.leader).map(|s| s.address.clone());
    let Some(leads) = leads else {
        return Err("the control group has no leader: nothing can be agreed on".into());
    };
    match ask(leads.clone()).await {
        // It has lost the lead since.
        Err((_, other)) if !other.is_empty() && other != leads => ask(other).await,
        done => done,
    }
    .map_err(|(why, _)| why)
}

async fn save(facts: &Facts, job: &str) -> Result<String, String> {
    let known = facts.jobs.iter().rfind(|j| j.name == job);
    let known = known.ok_or_else(|| format!("this fleet has no job `{job}`"))?;
    let leads = facts.shards.iter().find(|s| (s.job, s.shard) == (known.id, 0)).and_then(|s| s.leader);
    let leads = facts.servers.iter().find(|v| Some(v.id) == leads);
    let leads = leads.ok_or("shard 0 has no leader: ask again when it has one")?;
    let worker = paraft_client::save(&leads.address, job, ANSWER).await.map_err(|r| r.message)?;
    Ok(format!("w{worker} saves a checkpoint of {job}"))
}

/// Shard 0 first; the number that it gives to the switch is the same on every shard. Where another leads than was seen last, it is looked for.
async fn switch(facts: &Facts, job: &str, mode: &str) -> Result<String, String> {
    let choice: ModeChoice =
        mode.parse().map_err(|e: paraft_common::auto::ParseChoiceError| e.to_string())?;
    let known = facts.jobs.iter().rfind(|j| j.name == job);
    let known = known.ok_or_else(|| format!("this fleet has no job `{job}`"))?;
    let (name, mut number, mut wanted) = (known.name.clone(), 0, choice.to_string());
    let of = facts.shards.iter().filter(|s| s.job == known.id);
    let shards: Vec<_> = of.map(|s| (s.shard, s.version)).collect();
    if shards.is_empty() {
        return Err(
            "nobody leads the control group, which knows the job's shards: nothing has changed".into()
        );
    }
    let (mut facts, deadline) = (facts.clone(), Instant::now() + ANSWER);
    for (shard, version) in shards {
        let (switched, in_force) = loop {
            let why = match leader(&facts, known.id, shard) {
                None => format!("shard {shard} has no leader"),
                Some(leads) => {
                    let (job, mode) = (name.clone(), wanted.clone());
                    let request = SwitchModeRequest { protocol: PROTOCOL, shard, job, mode, number };
                    match paraft_client::switch_mode(&leads, request, ANSWER).await {
                        Ok(switched) => break switched,
                        // Shards without a part of the model train nothing.
                        Err(_) if shard > 0 && version == 0 => break (number, wanted.clone()),
                        Err(refused) if is_final(&refused) => {
                            return Err(format!("shard {shard}: {}", refused.message));
                        }
                        Err(refused) => format!("shard {shard}: {}", refused.message),
                    }
                }
            };
            if Instant::now() >= deadline {
                let so = match shard {
                    0 => "nothing has changed",
                    _ => "those before it have switched; ask again",
                };
                return Err(format!("{why}: {so}"));
            }
            tokio::time::sleep(AGAIN).await;
            let mut addresses = facts.servers.iter().map(|s| s.address.clone()).collect();
            if let Some(now) = crate::facts::ask(&mut addresses).await.filter(|f| !f.servers.is_empty()) {
                facts = now;
            }
        };
        if shard == 0 {
            if choice != ModeChoice::Auto && in_force != wanted {
                return Err(format!("{name} goes on in {in_force}: somebody else has switched it"));
            }
            (number, wanted) = (switched, in_force);
        }
    }
    Ok(format!("{name} goes on in {wanted} (switch {number})"))
}

fn leader(facts: &Facts, job: u32, shard: u32) -> Option<String> {
    let leads = facts.shards.iter().find(|s| (s.job, s.shard) == (job, shard))?.leader?;
    facts.servers.iter().find(|s| s.id == leads).map(|s| s.address.clone())
}

/// Asked again it would be refused again.
fn is_final(refused: &Refused) -> bool {
    matches!(refused.advice(), Advice::Fix | Advice::Stop | Advice::Lost)
}
