//! What a reader asks of replicas, and which ones there are.

use super::{ReadError, Reader, pieces::next};
use crate::connect::{Transport, channel, describe, shards, status};
use paraft_common::{BucketId, TensorKind, placement};
use paraft_proto::{
    Candidates, PROTOCOL, ReadVersionRequest, Refused, StatusReply, VersionMessage, VersionOf, WireKind,
    version_message::Kind,
};
use rand::seq::SliceRandom;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};
use tonic::Streaming;

/// Servers answer a request for a version at once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// What is asked of a shard.
#[derive(Clone, Copy)]
pub(super) struct Asked {
    pub step: u64,
    pub exactly: bool,
    /// Only of a replica that leads, as a majority has confirmed.
    pub confirm: bool,
}

impl Asked {
    /// The newest version.
    pub const NEWEST: Self = Self { step: 0, exactly: false, confirm: false };
}

/// Who sends versions of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    /// Another reader, which says itself if it is cut off from the servers.
    Relay,
    Follower,
    Leader,
}

/// Who sends versions of each shard, and where.
pub(super) type Senders = BTreeMap<u32, Vec<(Role, String)>>;

/// One shard's answer.
pub(super) struct Answer {
    pub of: VersionOf,
    pub stream: Streaming<VersionMessage>,
}

impl Answer {
    /// Waits until it is known which version follows.
    pub async fn decided(mut self) -> Result<Self, Failed> {
        while self.of.pending {
            if self.of.over && self.of.step > self.of.reached {
                return Err(Failed::Ended(self.of.reached));
            }
            match next(&mut self.stream).await?.and_then(|m| m.kind) {
                Some(Kind::Of(of)) => self.of = of,
                Some(Kind::Refused(refused)) => return Err(failed(refused)),
                _ => return Err(Failed::Replica("its answer ended early".into())),
            }
        }
        Ok(self)
    }
}

pub(super) enum Failed {
    /// Another replica may do.
    Replica(String),
    /// The shard has passed the version; what it has reached.
    Passed(u64),
    /// The job has ended before the version, at this one.
    Ended(u64),
    /// The replica has other state than the reader has seen, or is behind.
    OtherFounding,
    /// It has not begun to arrive in time.
    Late,
    Error(ReadError),
}

impl Reader {
    /// The buckets to read, by shard.
    pub(super) fn by_shard(&self) -> BTreeMap<u32, Vec<u32>> {
        let mut all = BTreeMap::<u32, Vec<u32>>::new();
        for (id, bucket) in (0u32..).zip(self.layout.buckets()) {
            if bucket.kind != TensorKind::Rows && self.only.as_ref().is_none_or(|only| only.contains(&id)) {
                let shard = placement::shard_of(&self.layout, BucketId(id), self.shards);
                all.entry(shard.0).or_default().push(id);
            }
        }
        all
    }

    pub(super) async fn ask_any(
        &self,
        shard: u32,
        senders: Option<&Vec<(Role, String)>>,
        asked: Asked,
    ) -> Result<Answer, Failed> {
        let mut why = format!("no server has shard {shard}");
        let (mut passed, mut other) = (None, false);
        for (_, address) in senders.into_iter().flatten() {
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

    pub(super) async fn ask(&self, shard: u32, address: &str, asked: Asked) -> Result<Answer, Failed> {
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
            confirm: asked.confirm,
            dtype: self.dtype.name().into(),
            only,
            have: self.has.as_ref().map(|has| has.step),
            remember: self.reads_again,
        };
        let asks = async {
            let channel = channel(address, Transport::Auto).await.map_err(Failed::Replica)?;
            let reply = shards(channel).read_version(request).await;
            let mut stream = reply.map_err(|s| failed(crate::orders::refused(address, &s)))?.into_inner();
            let of = match next(&mut stream).await?.and_then(|m| m.kind) {
                Some(Kind::Of(of)) => of,
                Some(Kind::Refused(refused)) => return Err(failed(refused)),
                _ => return Err(Failed::Replica("its answer does not begin".into())),
            };
            Ok(Answer { of, stream })
        };
        let late = |_| Err(Failed::Replica(format!("no answer within {ANSWER_TIMEOUT:?}")));
        tokio::time::timeout(ANSWER_TIMEOUT, asks).await.unwrap_or_else(late)
    }

    /// Who has each shard: relays, followers, leaders.
    pub(super) async fn senders(&self) -> Result<Senders, Failed> {
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
        let seen: Vec<(&String, &StatusReply)> =
            all.iter().zip(&replies).filter_map(|(at, reply)| Some((at, reply.as_ref().ok()?))).collect();
        if seen.is_empty() {
            let why = replies.into_iter().find_map(Result::err).unwrap_or_default();
            return Err(Failed::Replica(format!("no server answers: {why}")));
        }
        let mut senders = Senders::new();
        for (at, reply) in seen {
            for shard in reply.shards.iter().filter(|s| s.job_name == self.name) {
                // A relay may not know under which address it is reached.
                let sender = match shard.role.as_str() {
                    "relay" => (Role::Relay, at.clone()),
                    "leader" => (Role::Leader, reply.address.clone()),
                    _ => (Role::Follower, reply.address.clone()),
                };
                senders.entry(shard.shard).or_default().push(sender);
            }
        }
        // Many readers do not all ask the same follower.
        let mut rng = rand::rng();
        senders.values_mut().for_each(|of| of.shuffle(&mut rng));
        senders.values_mut().for_each(|of| of.sort_by_key(|(role, _)| *role));
        if senders.is_empty() {
            jobs.retain(|name| name != "``");
            let there = if jobs.is_empty() { "none".into() } else { jobs.join(", ") };
            return Err(Failed::Replica(format!(
                "no server has it: it has not begun, was deleted, or the certificate is not for it; jobs there: {there}"
            )));
        }
        Ok(senders)
    }
}

fn failed(refused: Refused) -> Failed {
    match refused.kind() {
        WireKind::OtherFounding => Failed::OtherFounding,
        _ if refused.is_final() => Failed::Error(ReadError::Refused(refused.message)),
        _ => Failed::Replica(refused.message),
    }
}
