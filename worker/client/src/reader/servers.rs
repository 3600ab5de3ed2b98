//! How a reader reads from the servers: which version all shards will have, and all its pieces.

use super::{
    Has, News, ReadError, Reader, Want, WholeVersion,
    ask::{Asked, Failed, Role},
    described,
    pieces::{Arrived, receive},
};
use paraft_common::BucketId;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};
use xxhash_rust::xxh3::Xxh3;

/// A server that has answered is heard each second until the version is there, and then piece by piece.
pub(super) const SILENCE: Duration = Duration::from_secs(6);
/// Before all replicas are tried again.
pub(super) const RETRY_DELAY: Duration = Duration::from_millis(100);
/// Before another version is asked for, because the job has passed one.
const PASSED_DELAY: Duration = Duration::from_millis(5);
/// A version this many steps ahead is asked for at most.
const MOST_AHEAD: u64 = 1 << 6;
/// A version that many steps ahead comes so soon, unless the job stands.
const AHEAD_TIMEOUT: Duration = Duration::from_secs(1);

impl Reader {
    /// Reads a version that is the newest after this call began.
    pub(super) async fn next_confirmed(&mut self, within: Duration) -> Result<WholeVersion, ReadError> {
        let asked = Asked { step: self.last.unwrap_or(0), confirm: true, ..Asked::NEWEST };
        self.next_of_servers(Want::MaxAge(within), asked, (within, Instant::now() + within)).await
    }

    /// How far the job is, as one of its replicas says.
    ///
    /// # Errors
    /// None answers.
    pub(super) async fn news(&self) -> Result<News, String> {
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
    pub(super) async fn next_of_servers(
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
            // By when it must begin to arrive. A follower may be cut off. A leader is not for long.
            let begins = match (is_ahead, leaders_first) {
                (true, _) => deadline.min(began + AHEAD_TIMEOUT),
                (false, true) => deadline,
                (false, false) => deadline.min(began + SILENCE),
            };
            let read = self.read(asked, leaders_first, begins);
            let mut delay = RETRY_DELAY;
            leaders_first = true;
            let why = match tokio::time::timeout_at(deadline.into(), read).await.unwrap_or(Err(Failed::Late))
            {
                Ok(version) => {
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
                Err(Failed::Error(error)) => return Err(error),
                Err(Failed::Replica(why)) => {
                    // Whatever was wrong: whole values depend on nothing.
                    self.has = None;
                    failed = Some(why.clone());
                    why
                }
                Err(Failed::Ended(last)) if is_ahead && last >= least => {
                    (asked.step, is_ahead) = (least, false);
                    continue;
                }
                Err(Failed::Ended(last)) => {
                    return Err(ReadError::Ended { job: self.name.clone(), last });
                }
                Err(Failed::OtherFounding) => return Err(ReadError::OtherFounding(self.name.clone())),
                Err(Failed::Passed(reached)) => {
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
                Err(Failed::Late) if is_ahead && Instant::now() < deadline => {
                    (asked.step, is_ahead) = (least, false);
                    continue;
                }
                // It waited in vain for the version, or for another reason before.
                Err(Failed::Late) => match failed.clone() {
                    Some(why) => why,
                    None => self.seen().await,
                },
            };
            wait(deadline, delay, || self.late(want, within, &why)).await?;
        }
    }

    pub(super) fn late(&self, want: Want, within: Duration, why: &str) -> ReadError {
        let (want, job) = (described(want), &self.name);
        ReadError::Timeout(format!("no {want} of job `{job}` within {within:.0?}: {why}"))
    }

    /// What a message about a time-out says of the job.
    pub(super) async fn seen(&self) -> String {
        match self.news().await {
            Ok(news) => format!("the job is at version {}", news.reached),
            Err(why) => why,
        }
    }

    async fn read(
        &mut self,
        asked: Asked,
        leaders_first: bool,
        begins: Instant,
    ) -> Result<WholeVersion, Failed> {
        let mut senders = match self.known.take() {
            Some(known) => known,
            None => self.senders().await?,
        };
        let known = senders.clone();
        if leaders_first {
            let order = |role| (role != Role::Relay, role != Role::Leader);
            senders.values_mut().for_each(|of| of.sort_by_key(|(role, _)| order(*role)));
        }
        let wanted: BTreeMap<u32, Vec<u32>> = self.by_shard();
        let asks = async |shard: u32, asked: Asked| {
            let answer = async { self.ask_any(shard, senders.get(&shard), asked).await?.decided().await };
            let answer = tokio::time::timeout_at(begins.into(), answer).await.unwrap_or(Err(Failed::Late))?;
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
        let parts = open
            .into_iter()
            .map(|(shard, answer)| receive(shard, answer, &wanted[&shard], (width, old), begins));
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
pub(super) async fn wait(
    deadline: Instant,
    delay: Duration,
    late: impl Fn() -> ReadError,
) -> Result<(), ReadError> {
    if Instant::now() >= deadline {
        return Err(late());
    }
    tokio::time::sleep(delay).await;
    Ok(())
}
