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
mod host;
mod pieces;
mod version;

pub use version::{ValueType, WholeVersion};

use ask::{Asked, Failed};
use bytes::Bytes;
use paraft_common::{BucketId, Layout, Mode, TensorKind, config::ServerJob};
use pieces::{Arrived, receive};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};
use xxhash_rust::xxh3::Xxh3;

/// A server that has answered is heard each second until the version is there, and then piece by piece.
const SILENCE: Duration = Duration::from_secs(6);
/// Before all replicas are tried again.
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// Before another version is asked for, because the job has passed one.
const PASSED_DELAY: Duration = Duration::from_millis(5);
/// A version this many steps ahead is asked for at most.
const MOST_AHEAD: u64 = 1 << 6;

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
    layout: Layout,
    shards: u32,
    only: Option<BTreeSet<u32>>,
    foundings: BTreeMap<u32, u64>,
    /// The last version: nothing older follows.
    last: Option<u64>,
    /// The servers that sent it, by shard.
    known: Option<BTreeMap<u32, Vec<String>>>,
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
        let unknown = ServerJob::new(name, Mode::Bsp, 1, 1);
        let mut this = Self {
            servers: servers.to_vec(),
            name: name.into(),
            dtype,
            layout: unknown.layout(),
            shards: 0,
            only: None,
            foundings: BTreeMap::new(),
            last: None,
            known: None,
            has: None,
            confirmed: None,
            reads_again: true,
            host: None,
        };
        loop {
            let why = match this.begin().await {
                Ok(()) => return Ok(this),
                Err(Failed::Error(error)) => return Err(error),
                Err(Failed::Replica(why)) => why,
                Err(Failed::Passed(_) | Failed::Ended(_) | Failed::OtherFounding) => {
                    "its replicas change".into()
                }
            };
            let late = || ReadError::Timeout(format!("job `{name}` cannot be read: {why}"));
            wait(deadline, RETRY_DELAY, late).await?;
        }
    }

    async fn begin(&mut self) -> Result<(), Failed> {
        let replicas = self.replicas().await?;
        let mut why = "no server has its shard 0".to_string();
        for address in replicas.get(&0).into_iter().flatten() {
            match self.ask(0, address, Asked::NEWEST).await {
                Ok(answer) => {
                    let damaged = |e: String| Failed::Error(ReadError::Damaged(e));
                    self.shards = answer.of.shards;
                    self.foundings.insert(0, answer.of.founding);
                    let job = ServerJob::from_toml(&answer.of.job).map_err(|e| damaged(e.to_string()))?;
                    let named = job.named_layout().map_err(|e| damaged(e.to_string()))?;
                    self.layout = named.unwrap_or_else(|| job.layout());
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
        let host = host::Host::of(self.again());
        let host = host.map_err(|e| ReadError::Refused(format!("readers of this host cannot share: {e}")))?;
        self.host = Some(host);
        Ok(())
    }

    /// A reader of the same values, which has none yet.
    fn again(&self) -> Self {
        Self {
            servers: self.servers.clone(),
            name: self.name.clone(),
            dtype: self.dtype,
            layout: self.layout.clone(),
            shards: self.shards,
            only: self.only.clone(),
            foundings: self.foundings.clone(),
            last: None,
            known: None,
            has: None,
            confirmed: None,
            reads_again: true,
            host: None,
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

    /// Reads a version from the servers, whatever other readers of this host have.
    async fn next_of_servers(
        &mut self,
        want: Want,
        mut asked: Asked,
        (within, deadline): (Duration, Instant),
    ) -> Result<WholeVersion, ReadError> {
        let mut ahead = 1;
        let mut leaders_first = asked.confirm;
        let mut failed = None;
        loop {
            let began = Instant::now();
            // A follower may be cut off. A leader is not for long.
            let until = if leaders_first { deadline } else { deadline.min(Instant::now() + SILENCE) };
            let read = self.read(asked, leaders_first);
            let mut delay = RETRY_DELAY;
            leaders_first = true;
            let why = match tokio::time::timeout_at(until.into(), read).await {
                Ok(Ok(version)) => {
                    self.last = Some(version.step);
                    match want {
                        Want::MaxAge(age) if began.elapsed() > age => {
                            format!("reading the newest one took {:.1?}", began.elapsed())
                        }
                        Want::MaxAge(_) => {
                            self.confirmed = Some((began, version.clone()));
                            return Ok(version);
                        }
                        _ => return Ok(version),
                    }
                }
                Ok(Err(Failed::Error(error))) => return Err(error),
                Ok(Err(Failed::Replica(why))) => {
                    // Whatever was wrong: whole values depend on nothing.
                    self.has = None;
                    failed = Some(why.clone());
                    why
                }
                Ok(Err(Failed::Ended(last))) => {
                    return Err(ReadError::Ended { job: self.name.clone(), last });
                }
                Ok(Err(Failed::OtherFounding)) => return Err(ReadError::OtherFounding(self.name.clone())),
                Ok(Err(Failed::Passed(reached))) => {
                    if let Want::Exactly(step) = want {
                        return Err(ReadError::NotKept { step, reached });
                    }
                    // Another shard was faster than the request. Unless the job stands, the next one is for a version that
                    // all have yet to reach.
                    asked.step = asked.step.max(reached.saturating_sub(1));
                    asked.else_from = reached + ahead;
                    ahead = (2 * ahead).min(MOST_AHEAD);
                    delay = PASSED_DELAY;
                    "its shards passed each version before all were asked for it".into()
                }
                // It waited in vain for the version, or for another reason before.
                Err(_) => match failed.clone() {
                    Some(why) => why,
                    None => self.seen().await,
                },
            };
            wait(deadline, delay, || self.late(want, within, &why)).await?;
        }
    }

    fn late(&self, want: Want, within: Duration, why: &str) -> ReadError {
        let (want, job) = (described(want), &self.name);
        ReadError::Timeout(format!("no {want} of job `{job}` within {within:.0?}: {why}"))
    }

    /// What a message about a time-out says of the job.
    async fn seen(&self) -> String {
        let replicas = match self.replicas().await {
            Ok(replicas) => replicas,
            Err(Failed::Replica(why)) => return why,
            Err(_) => return "its servers do not answer".into(),
        };
        for address in replicas.get(&0).into_iter().flatten() {
            if let Ok(answer) = self.ask(0, address, Asked::NEWEST).await {
                return format!("the job is at version {}", answer.of.reached);
            }
        }
        "no replica of its shard 0 answers".into()
    }

    async fn read(&mut self, mut asked: Asked, leaders_first: bool) -> Result<WholeVersion, Failed> {
        let mut replicas = match self.known.take() {
            Some(known) => known,
            None => self.replicas().await?,
        };
        let known = replicas.clone();
        if leaders_first {
            replicas.values_mut().for_each(|addresses| addresses.reverse());
        }
        let wanted: BTreeMap<u32, Vec<u32>> = self.by_shard();
        let mut open = Vec::new();
        for shard in wanted.keys() {
            let answer = self.ask_any(*shard, replicas.get(shard), asked).await?;
            let step = answer.of.step;
            if answer.of.over && step > answer.of.reached {
                return Err(Failed::Ended(answer.of.reached));
            }
            if asked.exactly && step != asked.step {
                let why = format!("shard {shard} sends version {step} where {} was asked for", asked.step);
                return Err(Failed::Error(ReadError::Damaged(why)));
            }
            asked = Asked { step, exactly: true, ..Asked::NEWEST };
            open.push((*shard, answer));
        }
        if open.is_empty() {
            return Err(Failed::Error(ReadError::Damaged("the job has no weights on its servers".into())));
        }
        let step = asked.step;
        let foundings: BTreeMap<u32, u64> = open.iter().map(|(s, a)| (*s, a.of.founding)).collect();
        if self.foundings.iter().any(|(shard, f)| foundings.get(shard).is_some_and(|now| now != f)) {
            return Err(Failed::OtherFounding);
        }
        // All shards have promised the version: it is whole once the last of them has sent it.
        let old = self.has.as_ref().map(|has| &has.buckets);
        let width = self.dtype.bytes();
        let parts =
            open.into_iter().map(|(shard, answer)| receive(shard, answer, &wanted[&shard], (width, old)));
        let parts = futures::future::try_join_all(parts).await?;
        let mut buckets: BTreeMap<u32, Arrived> = BTreeMap::new();
        let (reached, is_last) =
            parts.first().map_or((step, false), |(of, _)| (of.reached, of.over && of.reached == step));
        parts.into_iter().for_each(|(_, arrived)| buckets.extend(arrived.into_iter().map(|a| (a.bucket, a))));
        let mut digest = Xxh3::new();
        for arrived in buckets.values() {
            let len = self.layout.bucket(BucketId(arrived.bucket)).map_or(0, |b| b.len);
            if arrived.values.len() != len * width {
                let (got, bucket) = (arrived.values.len(), arrived.bucket);
                let why =
                    format!("bucket {bucket} has {got} bytes, not {len} values in {}", self.dtype.name());
                return Err(Failed::Error(ReadError::Damaged(why)));
            }
            [u64::from(arrived.bucket), arrived.version, arrived.digest]
                .iter()
                .for_each(|word| digest.update(&word.to_le_bytes()));
        }
        self.foundings.extend(&foundings);
        self.known = Some(known);
        let received = buckets.values().map(|a| a.received).sum();
        let buckets: BTreeMap<_, _> = buckets.into_iter().map(|(id, a)| (id, a.values)).collect();
        self.has = self.reads_again.then(|| Has { step, buckets: buckets.clone() });
        let digest = digest.digest();
        Ok(WholeVersion { step, foundings, digest, reached, is_last, buckets, received })
    }
}

/// Waits a little; an error: the time is over.
async fn wait(deadline: Instant, delay: Duration, late: impl Fn() -> ReadError) -> Result<(), ReadError> {
    if Instant::now() >= deadline {
        return Err(late());
    }
    tokio::time::sleep(delay).await;
    Ok(())
}
