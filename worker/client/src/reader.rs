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
mod version;

pub use fetch::{Fetched, Fetcher, News};
pub use version::{ValueType, WholeVersion};

use ask::{Asked, Failed, Role, Senders};
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
/// A version that many steps ahead comes so soon, unless the job stands.
const AHEAD_TIMEOUT: Duration = Duration::from_secs(1);

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
        let unknown = ServerJob::new(name, Mode::Bsp, 1, 1);
        let mut this = Self {
            servers: servers.to_vec(),
            name: name.into(),
            dtype,
            job: String::new(),
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
            servers: self.servers.clone(),
            name: self.name.clone(),
            dtype,
            job: self.job.clone(),
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

    /// Reads a version that is the newest after this call began.
    async fn next_confirmed(&mut self, within: Duration) -> Result<WholeVersion, ReadError> {
        let asked = Asked { step: self.last.unwrap_or(0), confirm: true, ..Asked::NEWEST };
        self.next_of_servers(Want::MaxAge(within), asked, (within, Instant::now() + within)).await
    }

    /// How far the job is, as one of its replicas says.
    ///
    /// # Errors
    /// None answers.
    async fn news(&self) -> Result<News, String> {
        let senders = match self.senders().await {
            Ok(senders) => senders,
            Err(Failed::Replica(why)) => return Err(why),
            Err(_) => return Err("its servers do not answer".into()),
        };
        for (_, address) in senders.get(&0).into_iter().flatten() {
            if let Ok(answer) = self.ask(0, address, Asked::NEWEST).await {
                return Ok(News { reached: answer.of.reached, over: answer.of.over });
            }
        }
        Err("no replica of its shard 0 answers".into())
    }

    /// Reads a version from the servers, whatever other readers of this host have.
    async fn next_of_servers(
        &mut self,
        want: Want,
        mut asked: Asked,
        (within, deadline): (Duration, Instant),
    ) -> Result<WholeVersion, ReadError> {
        // Once shards have passed what was asked for: a version so many steps ahead of them.
        let (least, mut ahead, mut is_ahead) = (asked.step, 1, false);
        let mut leaders_first = asked.confirm;
        let mut failed = None;
        loop {
            let began = Instant::now();
            // A follower may be cut off. A leader is not for long.
            let until = match (is_ahead, leaders_first) {
                (true, _) => deadline.min(began + AHEAD_TIMEOUT),
                (false, true) => deadline,
                (false, false) => deadline.min(began + SILENCE),
            };
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
                Ok(Err(Failed::Ended(last))) if is_ahead && last >= least => {
                    (asked.step, is_ahead) = (least, false);
                    continue;
                }
                Ok(Err(Failed::Ended(last))) => {
                    return Err(ReadError::Ended { job: self.name.clone(), last });
                }
                Ok(Err(Failed::OtherFounding)) => return Err(ReadError::OtherFounding(self.name.clone())),
                Ok(Err(Failed::Passed(reached))) => {
                    if let Want::Exactly(step) = want {
                        return Err(ReadError::NotKept { step, reached });
                    }
                    // Another shard was faster than the request: the next one is for a version that all have yet to reach.
                    (asked.step, is_ahead) = (least.max(reached + ahead), true);
                    ahead = (2 * ahead).min(MOST_AHEAD);
                    delay = PASSED_DELAY;
                    "its shards passed each version before all were asked for it".into()
                }
                // The job stands, so that its newest version is there.
                Err(_) if is_ahead && Instant::now() < deadline => {
                    (asked.step, is_ahead) = (least, false);
                    continue;
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
        match self.news().await {
            Ok(news) => format!("the job is at version {}", news.reached),
            Err(why) => why,
        }
    }

    async fn read(&mut self, asked: Asked, leaders_first: bool) -> Result<WholeVersion, Failed> {
        let mut senders = match self.known.take() {
            Some(known) => known,
            None => self.senders().await?,
        };
        let known = senders.clone();
        if leaders_first {
            let order = |role| [Role::Relay, Role::Leader, Role::Follower].iter().position(|r| *r == role);
            senders.values_mut().for_each(|of| of.sort_by_key(|(role, _)| order(*role)));
        }
        let wanted: BTreeMap<u32, Vec<u32>> = self.by_shard();
        let asks = async |shard: u32, asked: Asked| {
            let answer = self.ask_any(shard, senders.get(&shard), asked).await?.decided().await?;
            let step = answer.of.step;
            if answer.of.over && step > answer.of.reached {
                return Err(Failed::Ended(answer.of.reached));
            }
            if asked.exactly && step != asked.step {
                let why = format!("shard {shard} sends version {step} where {} was asked for", asked.step);
                return Err(Failed::Error(ReadError::Damaged(why)));
            }
            Ok((shard, answer))
        };
        // The first shard says which version it is. The others are asked at once, since they may pass it.
        let mut shards = wanted.keys().copied();
        let Some(first) = shards.next() else {
            return Err(Failed::Error(ReadError::Damaged("the job has no weights on its servers".into())));
        };
        let first = asks(first, asked).await?;
        let step = first.1.of.step;
        let exactly = Asked { step, exactly: true, ..Asked::NEWEST };
        let mut open = vec![first];
        open.extend(futures::future::try_join_all(shards.map(|shard| asks(shard, exactly))).await?);
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
        let updates = buckets.iter().map(|(id, a)| (*id, a.version)).collect();
        let buckets: BTreeMap<_, _> = buckets.into_iter().map(|(id, a)| (id, a.values)).collect();
        self.has = self.reads_again.then(|| Has { step, buckets: buckets.clone() });
        let digest = digest.digest();
        Ok(WholeVersion { step, foundings, digest, reached, is_last, buckets, updates, received })
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
