//! Weights for processes that do not train: whole versions of a job, from any replicas, while training continues.
//!
//! ```text
//!  Reader::next(Wanted::AtLeast(7)):
//!    shard 0, a follower ──▶ "version 9 follows"      which version it is, shard 0's replica says
//!    shard 1, ...        ──▶ exactly 9 ─▶ pieces      a shard that has passed 9: all again, with a later one
//! ```
//!
//! Version `s` of each shard is what its log has at one place, so that all replicas give the same bytes, and a version is
//! the same whoever reads it, whenever.

mod ask;
mod fetch;
mod host;
mod pieces;
mod servers;
mod version;

pub use fetch::{Fetched, Fetcher, News};
pub use version::{ValueType, WholeVersion};

use ask::{Asked, Failed, Senders};
use bytes::Bytes;
use paraft_common::{Layout, Mode, TensorKind, config::ServerJob};
use serde::{Deserialize, Serialize};
use servers::{RETRY_DELAY, wait};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// What a reader asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The newest version, of this step or a later one.
    AtLeast(u64),
    /// This version.
    Exactly(u64),
    /// The version that was the newest at some time in this last while, as a majority of shard 0's replicas has confirmed. It may
    /// be the one that the reader has.
    MaxAge(Duration),
}

/// Why a version was not read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
pub enum ReadError {
    /// It was not there in time.
    #[error("{0}")]
    Timeout(String),
    /// The job has ended before it.
    #[error("job `{job}` has ended at version {last}: there will be no later one")]
    Ended {
        /// The job.
        job: String,
        /// Its last version.
        last: u64,
    },
    /// The version has been passed, and nobody kept it.
    #[error(
        "version {step} is not kept any more: the job is at {reached}. Versions are kept only while readers have them: ask for \
         the newest, or ask earlier"
    )]
    NotKept {
        /// The version.
        step: u64,
        /// The newest version.
        reached: u64,
    },
    /// The job is another one than when the reader began: it has the same name, and other state.
    #[error(
        "job `{0}` was started again under its name since this reader was opened: its versions are other weights. Open a new reader"
    )]
    OtherFounding(String),
    /// The servers refuse, and would again.
    #[error("{0}")]
    Refused(String),
    /// The server's answer is wrong.
    #[error("{0}")]
    Damaged(String),
}

/// Reads versions of one job.
#[derive(Debug)]
pub struct Reader {
    servers: Vec<String>,
    name: String,
    dtype: ValueType,
    /// The servers' job, in TOML.
    job: String,
    layout: Layout,
    shards: u32,
    only: Option<BTreeSet<u32>>,
    foundings: BTreeMap<u32, u64>,
    /// The last version: nothing older follows.
    last: Option<u64>,
    /// The servers that sent it, by shard.
    known: Option<Senders>,
    /// What the servers may send the next version as a difference to.
    has: Option<Has>,
    /// The newest version of this time.
    confirmed: Option<(Instant, WholeVersion)>,
    reads_again: bool,
    host: Option<host::Host>,
}

/// The values of the version that was read last.
#[derive(Debug)]
struct Has {
    step: u64,
    buckets: BTreeMap<u32, Bytes>,
}

fn described(want: Want) -> String {
    match want {
        Want::Exactly(step) => format!("version {step}"),
        Want::AtLeast(step) => format!("version from {step} on"),
        Want::MaxAge(age) => format!("version that is known to be at most {age:.1?} old"),
    }
}

impl Reader {
    /// Finds the job on a fleet, of which some servers suffice, and reads what its tensors are.
    ///
    /// # Errors
    /// No server answers in time, or the fleet has no such job.
    pub async fn open(
        servers: &[String],
        name: &str,
        dtype: ValueType,
        within: Duration,
    ) -> Result<Self, ReadError> {
        let deadline = Instant::now() + within;
        let mut this = Self::new(servers, name, dtype);
        loop {
            let why = match this.begin().await {
                Ok(()) => return Ok(this),
                Err(Failed::Error(error)) => return Err(error),
                Err(Failed::Replica(why)) => why,
                Err(Failed::Passed(_) | Failed::Ended(_) | Failed::OtherFounding | Failed::Late) => {
                    "its replicas change".into()
                }
            };
            let late = || ReadError::Timeout(format!("job `{name}` cannot be read: {why}"));
            wait(deadline, RETRY_DELAY, late).await?;
        }
    }

    /// A reader that has heard nothing of the job yet.
    fn new(servers: &[String], name: &str, dtype: ValueType) -> Self {
        Self {
            servers: servers.to_vec(),
            name: name.into(),
            dtype,
            job: String::new(),
            layout: ServerJob::new(name, Mode::Bsp, 1, 1).layout(),
            shards: 0,
            only: None,
            foundings: BTreeMap::new(),
            last: None,
            known: None,
            has: None,
            confirmed: None,
            reads_again: true,
            host: None,
        }
    }

    async fn begin(&mut self) -> Result<(), Failed> {
        let senders = self.senders().await?;
        let mut why = "no server has its shard 0".to_string();
        for (_, address) in senders.get(&0).into_iter().flatten() {
            match self.ask(0, address, Asked::NEWEST).await {
                Ok(answer) => {
                    let damaged = |e: String| Failed::Error(ReadError::Damaged(e));
                    self.shards = answer.of.shards;
                    self.foundings.insert(0, answer.of.founding);
                    let job = ServerJob::from_toml(&answer.of.job).map_err(|e| damaged(e.to_string()))?;
                    let named = job.named_layout().map_err(|e| damaged(e.to_string()))?;
                    self.layout = named.unwrap_or_else(|| job.layout());
                    self.job = answer.of.job;
                    return Ok(());
                }
                Err(Failed::Replica(other)) => why = format!("{address}: {other}"),
                Err(other) => return Err(other),
            }
        }
        Err(Failed::Replica(why))
    }

    /// The tensors, and where each lies. A job whose client named none has one tensor with the values of each kind.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The job's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The founding of shard 0, which tells the job from others of its name.
    pub fn founding(&self) -> u64 {
        self.foundings.get(&0).copied().unwrap_or(0)
    }

    /// The shards of the job.
    pub fn shards(&self) -> u32 {
        self.shards
    }

    /// The servers' job, in TOML.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// Reads only the buckets with values of tensors whose names `chosen` accepts. Returns how many tensors those are.
    pub fn only(&mut self, chosen: impl Fn(&str) -> bool) -> usize {
        let tensors: Vec<_> = (0..self.layout.tensors().len())
            .filter(|i| chosen(&self.layout.tensors()[*i].name))
            .map(|i| self.layout.tensor_range(i))
            .collect();
        let buckets = (0u32..).zip(self.layout.buckets());
        let chosen = buckets.filter(|(_, b)| {
            b.kind != TensorKind::Rows
                && tensors.iter().any(|t| t.start < b.range().end && b.range().start < t.end)
        });
        self.only = Some(chosen.map(|(id, _)| id).collect());
        tensors.len()
    }

    /// The next version will be the only one: the servers need not remember it for a difference to a later one.
    pub fn once(&mut self) {
        self.reads_again = false;
    }

    /// From now on, readers of this host and user that read the same values, and call this too, read each version once: one of
    /// them receives it, and the others map its memory, which is sealed. Call it after [`Self::only`]. A version that is asked for
    /// [exactly](Want::Exactly) is read by itself.
    ///
    /// # Errors
    /// The host has no directory for their socket that only this user can open.
    pub fn share(&mut self) -> Result<(), ReadError> {
        let host = host::Host::of(self.again(self.dtype));
        let host = host.map_err(|e| ReadError::Refused(format!("readers of this host cannot share: {e}")))?;
        self.host = Some(host);
        Ok(())
    }

    /// A reader of the same tensors in this type, which has no version yet.
    pub fn again(&self, dtype: ValueType) -> Self {
        Self {
            job: self.job.clone(),
            layout: self.layout.clone(),
            shards: self.shards,
            only: self.only.clone(),
            foundings: self.foundings.clone(),
            ..Self::new(&self.servers, &self.name, dtype)
        }
    }

    /// The reader need not hold the values twice: these are those it read last.
    fn has_now(&mut self, version: &WholeVersion) {
        self.confirmed = None;
        self.has = Some(Has { step: version.step, buckets: version.buckets.clone() });
    }

    /// Reads a version. It is never older than the one before.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub async fn next(&mut self, want: Want, within: Duration) -> Result<WholeVersion, ReadError> {
        let deadline = Instant::now() + within;
        if let Want::MaxAge(age) = want
            && let Some((at, version)) = &self.confirmed
            && at.elapsed() <= age
            && Some(version.step) >= self.last
        {
            return Ok(version.clone());
        }
        let least = self.last.unwrap_or(0);
        let asked = match want {
            Want::Exactly(step) => Asked { step, exactly: true, ..Asked::NEWEST },
            Want::AtLeast(step) => Asked { step: least.max(step), ..Asked::NEWEST },
            Want::MaxAge(_) => Asked { step: least, confirm: true, ..Asked::NEWEST },
        };
        let Some(host) = self.host.as_mut().filter(|_| !asked.exactly) else {
            return self.next_of_servers(want, asked, (within, deadline)).await;
        };
        let age = if let Want::MaxAge(age) = want { Some(age) } else { None };
        let Some(version) = host.next(asked.step, age, deadline).await else {
            return Err(self.late(want, within, &self.seen().await));
        };
        self.last = version.as_ref().map_or(self.last, |version| Some(version.step));
        version
    }
}
