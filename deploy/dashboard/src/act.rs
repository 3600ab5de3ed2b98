//! The actions of the page, which use the same calls as the command line.

use crate::{facts::Facts, local::LocalControl};
use paraft_client::{Done, Order};
use paraft_common::{ModeChoice, ServerId};
use paraft_fleet::{
    faults::{Fault, Faults},
    orders,
};
use parking_lot::Mutex;
use serde::Deserialize;
use std::{path::Path, time::Duration};

/// The timeout of an action's reply. After it, the action may still take effect, and the page shows
/// that.
const REPLY_TIMEOUT: Duration = Duration::from_secs(15);
/// The delay of a slow link or disk, in milliseconds: per piece of data, or per fsync.
const SLOW_MS: u64 = 50;

/// An action of the page.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(tag = "act", rename_all = "lowercase", deny_unknown_fields)]
pub enum Act {
    /// `paraft mode`.
    Mode {
        /// The job's name.
        job: String,
        /// As on the command line.
        mode: String,
    },
    /// `paraft checkpoint save`.
    Save {
        /// The job's name.
        job: String,
    },
    /// `paraft drain`.
    Drain {
        /// The server's number.
        server: u64,
        /// Fill it again.
        #[serde(default)]
        undo: bool,
    },
    /// `paraft fleet scale`, if the workers' launcher is on this host or their engine is reachable from
    /// it.
    Workers {
        /// The job's number: another job may have its name by now.
        job: u32,
        /// The number of workers.
        workers: u32,
    },
    /// As `paraft chaos` sets and clears faults, if the fleet has fault points.
    Fault {
        /// The server's number.
        server: u32,
        /// The fault.
        fault: Fault,
        /// Clear it.
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
    /// Carries it out; returns a message. `here` is what this host's files give access to.
    ///
    /// # Errors
    ///
    /// The reason, for people.
    pub async fn carry_out(&self, facts: &Facts, here: &LocalControl) -> Result<String, String> {
        let (act, facts, here) = (self.clone(), facts.clone(), here.clone());
        // On its own thread: an order may wait for an election.
        let carried_out = tokio::task::spawn_blocking(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|e| format!("no runtime: {e}"))?;
            let done = act.done(&facts, &here);
            match here.acts.clone() {
                Some(access) => runtime.block_on(paraft_client::connect::asking_by(access, done)),
                None => runtime.block_on(done),
            }
        });
        carried_out.await.map_err(|e| e.to_string())?
    }

    async fn done(&self, facts: &Facts, here: &LocalControl) -> Result<String, String> {
        match self {
            Self::Mode { job, mode } => switch(facts, job, mode).await,
            Self::Save { job } => save(facts, job).await,
            Self::Drain { server, undo } => {
                let (server, undo) = (*server, *undo);
                order(facts, Order::Drain { server: ServerId(server), undo }).await?;
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
    // Two concurrent changes of the faults file would overwrite each other.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    let mut faults = Faults::read(points)?;
    match undo {
        true => faults.heal(fault, server),
        false => faults.put(fault, server, SLOW_MS),
    }
    faults.write(points)
}

async fn end(facts: &Facts, job: &str, delete: bool) -> Result<String, String> {
    order(facts, Order::EndJob { job: job.into(), delete }).await.map(|done| done.was)
}

async fn order(facts: &Facts, order: Order) -> Result<Done, String> {
    orders::give(&servers(facts), &order, orders::token(), REPLY_TIMEOUT)
        .await
        .map_err(|refused| refused.message)
}

async fn save(facts: &Facts, job: &str) -> Result<String, String> {
    let worker =
        orders::save(&servers(facts), job, REPLY_TIMEOUT).await.map_err(|refused| refused.message)?;
    Ok(format!("w{worker} saves a checkpoint of {job}"))
}

async fn switch(facts: &Facts, job: &str, mode: &str) -> Result<String, String> {
    let choice: ModeChoice =
        mode.parse().map_err(|e: paraft_common::auto::ParseChoiceError| e.to_string())?;
    let now = orders::switch(&servers(facts), job, choice, REPLY_TIMEOUT)
        .await
        .map_err(|refused| refused.message)?;
    Ok(format!("{job} continues in {} (switch {})", now.mode, now.number))
}

fn servers(facts: &Facts) -> Vec<String> {
    facts.servers.iter().map(|s| s.address.clone()).collect()
}
