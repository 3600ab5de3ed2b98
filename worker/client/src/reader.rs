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

mod pieces;
mod version;

pub use version::{ValueType, WholeVersion};

use crate::connect::{Transport, channel, describe, shards, status};
use paraft_common::{BucketId, Layout, Mode, TensorKind, config::ServerJob, placement};
use paraft_proto::{
    Candidates, PROTOCOL, ReadVersionRequest, Refused, StatusReply, VersionMessage, VersionOf, VersionPiece,
    WireKind, version_message::Kind,
};
use pieces::{next, receive};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};
use tonic::Streaming;
use xxhash_rust::xxh3::Xxh3;

/// Servers answer a request for a version at once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
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
}

/// Why a version was not read.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
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
}

/// What is asked of a shard.
#[derive(Clone, Copy)]
struct Asked {
    step: u64,
    exactly: bool,
    /// If the newest version is not kept: one to come, from this step on.
    else_from: u64,
}

impl Asked {
    /// The newest version.
    const NEWEST: Self = Self { step: 0, exactly: false, else_from: 0 };
}

fn described(want: Want) -> String {
    match want {
        Want::Exactly(step) => format!("version {step}"),
        Want::AtLeast(step) => format!("version from {step} on"),
    }
}

/// One shard's answer.
struct Answer {
    of: VersionOf,
    stream: Streaming<VersionMessage>,
}

enum Failed {
    /// Another replica may do.
    Replica(String),
    /// The shard has passed the version; what it has reached.
    Passed(u64),
    /// The job has ended before the version, at this one.
    Ended(u64),
    /// The replica has other state than the reader has seen, or is behind.
    OtherFounding,
    Error(ReadError),
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
            wait(deadline, RETRY_DELAY, || format!("job `{name}` cannot be read: {why}")).await?;
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

    /// Reads a version. It is never older than the one before.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub async fn next(&mut self, want: Want, within: Duration) -> Result<WholeVersion, ReadError> {
        let deadline = Instant::now() + within;
        let mut asked = Asked { step: self.last.unwrap_or(0), exactly: false, else_from: 0 };
        match want {
            Want::AtLeast(step) => asked.step = asked.step.max(step),
            Want::Exactly(step) => asked = Asked { step, exactly: true, else_from: 0 },
        }
        let mut ahead = 1;
        let mut leaders_first = false;
        let mut failed = None;
        loop {
            // A follower may be cut off. A leader is not for long.
            let until = if leaders_first { deadline } else { deadline.min(Instant::now() + SILENCE) };
            let read = self.read(asked, leaders_first);
            let mut delay = RETRY_DELAY;
            leaders_first = true;
            let why = match tokio::time::timeout_at(until.into(), read).await {
                Ok(Ok(version)) => {
                    self.last = Some(version.step);
                    return Ok(version);
                }
                Ok(Err(Failed::Error(error))) => return Err(error),
                Ok(Err(Failed::Replica(why))) => {
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
            let late = || format!("no {} of job `{}` within {within:.0?}: {why}", described(want), self.name);
            wait(deadline, delay, late).await?;
        }
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
            asked = Asked { step, exactly: true, else_from: 0 };
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
        let parts = open.into_iter().map(|(shard, answer)| receive(shard, answer, &wanted[&shard]));
        let parts = futures::future::try_join_all(parts).await?;
        let mut buckets: BTreeMap<u32, VersionPiece> = BTreeMap::new();
        let (reached, is_last) =
            parts.first().map_or((step, false), |(of, _)| (of.reached, of.over && of.reached == step));
        parts.into_iter().for_each(|(_, pieces)| buckets.extend(pieces.into_iter().map(|p| (p.bucket, p))));
        let mut digest = Xxh3::new();
        for piece in buckets.values() {
            let len = self.layout.bucket(BucketId(piece.bucket)).map_or(0, |b| b.len);
            if piece.payload.len() != len * self.dtype.bytes() {
                let (got, bucket) = (piece.payload.len(), piece.bucket);
                let why =
                    format!("bucket {bucket} has {got} bytes, not {len} values in {}", self.dtype.name());
                return Err(Failed::Error(ReadError::Damaged(why)));
            }
            [u64::from(piece.bucket), piece.version, piece.digest]
                .iter()
                .for_each(|word| digest.update(&word.to_le_bytes()));
        }
        self.foundings.extend(&foundings);
        self.known = Some(known);
        let received = buckets.values().map(|p| p.payload.len() as u64).sum();
        let buckets = buckets.into_iter().map(|(id, piece)| (id, piece.payload)).collect();
        let digest = digest.digest();
        Ok(WholeVersion { step, foundings, digest, reached, is_last, buckets, received })
    }

    /// The buckets to read, by shard.
    fn by_shard(&self) -> BTreeMap<u32, Vec<u32>> {
        let mut all = BTreeMap::<u32, Vec<u32>>::new();
        for (id, bucket) in (0u32..).zip(self.layout.buckets()) {
            if bucket.kind != TensorKind::Rows && self.only.as_ref().is_none_or(|only| only.contains(&id)) {
                let shard = placement::shard_of(&self.layout, BucketId(id), self.shards);
                all.entry(shard.0).or_default().push(id);
            }
        }
        all
    }

    async fn ask_any(
        &self,
        shard: u32,
        replicas: Option<&Vec<String>>,
        asked: Asked,
    ) -> Result<Answer, Failed> {
        let mut why = format!("no server has shard {shard}");
        let (mut passed, mut other) = (None, false);
        for address in replicas.into_iter().flatten() {
            match self.ask(shard, address, asked).await {
                Ok(answer) => return Ok(answer),
                Err(Failed::Replica(other)) => why = format!("shard {shard} at {address}: {other}"),
                // Another replica may keep it for another reader, or be behind.
                Err(Failed::Passed(reached)) => passed = passed.max(Some(reached)),
                // The last one leads, and knows.
                Err(Failed::OtherFounding) => other = true,
                Err(error) => return Err(error),
            }
        }
        if other {
            return Err(Failed::OtherFounding);
        }
        Err(passed.map_or(Failed::Replica(why), Failed::Passed))
    }

    async fn ask(&self, shard: u32, address: &str, asked: Asked) -> Result<Answer, Failed> {
        let only = match &self.only {
            Some(_) => self.by_shard().remove(&shard).unwrap_or_default(),
            None => Vec::new(),
        };
        let request = ReadVersionRequest {
            protocol: PROTOCOL,
            shard,
            job: self.name.clone(),
            founding: self.foundings.get(&shard).copied().unwrap_or(0),
            step: asked.step,
            exactly: asked.exactly,
            else_from: asked.else_from,
            dtype: self.dtype.name().into(),
            only,
        };
        let asks = async {
            let channel = channel(address, Transport::Auto).await.map_err(Failed::Replica)?;
            let reply = shards(channel).read_version(request).await;
            let mut stream =
                reply.map_err(|s| self.refused(crate::orders::refused(address, &s)))?.into_inner();
            let of = match next(&mut stream).await?.and_then(|m| m.kind) {
                Some(Kind::Of(of)) => of,
                Some(Kind::Refused(refused)) => return Err(self.refused(refused)),
                _ => return Err(Failed::Replica("its answer does not begin".into())),
            };
            Ok(Answer { of, stream })
        };
        let late = |_| Err(Failed::Replica(format!("no answer within {ANSWER_TIMEOUT:?}")));
        tokio::time::timeout(ANSWER_TIMEOUT, asks).await.unwrap_or_else(late)
    }

    fn refused(&self, refused: Refused) -> Failed {
        match refused.kind() {
            WireKind::OtherFounding => Failed::OtherFounding,
            _ if refused.is_final() => Failed::Error(ReadError::Refused(refused.message)),
            _ => Failed::Replica(refused.message),
        }
    }

    /// The servers with each shard, leaders last.
    async fn replicas(&self) -> Result<BTreeMap<u32, Vec<String>>, Failed> {
        let mut known = Candidates::of(self.servers.iter().cloned());
        let (mut all, mut jobs) = (self.servers.clone(), Vec::new());
        while let Some(server) = known.next() {
            let Ok(fleet) = describe(&server, ANSWER_TIMEOUT).await else { continue };
            jobs =
                fleet.jobs.iter().filter(|job| !job.released).map(|job| format!("`{}`", job.name)).collect();
            all.extend(fleet.servers.iter().map(|s| s.address.clone()));
            if fleet.fleet != 0 {
                break; // it leads the control group, and knows all
            }
            known.failed(&server, "", &fleet.leader);
        }
        let mut known = BTreeSet::new();
        all.retain(|address| known.insert(address.clone()));
        let asks = all.iter().map(|address| status(address, false, ANSWER_TIMEOUT));
        let replies = futures::future::join_all(asks).await;
        let seen: Vec<StatusReply> = replies.iter().filter_map(|r| r.as_ref().ok()).cloned().collect();
        if seen.is_empty() {
            let why = replies.into_iter().find_map(Result::err).unwrap_or_default();
            return Err(Failed::Replica(format!("no server answers: {why}")));
        }
        let mut replicas = BTreeMap::<u32, Vec<String>>::new();
        for reply in &seen {
            for shard in reply.shards.iter().filter(|s| s.job_name == self.name) {
                let of = replicas.entry(shard.shard).or_default();
                of.insert(if shard.role == "leader" { of.len() } else { 0 }, reply.address.clone());
            }
        }
        if replicas.is_empty() {
            jobs.retain(|name| name != "``");
            let there = if jobs.is_empty() { "none".into() } else { jobs.join(", ") };
            return Err(Failed::Replica(format!(
                "no server has it: it has not begun, was deleted, or the certificate is not for it; jobs there: {there}"
            )));
        }
        Ok(replicas)
    }
}

/// Waits a little; an error: the time is over.
async fn wait(deadline: Instant, delay: Duration, why: impl Fn() -> String) -> Result<(), ReadError> {
    if Instant::now() >= deadline {
        return Err(ReadError::Timeout(why()));
    }
    tokio::time::sleep(delay).await;
    Ok(())
}
