//! What a reader asks of replicas, and which ones there are.

use super::{ReadError, Reader, pieces::next};
use crate::connect::{Transport, channel, describe, shards, status};
use paraft_common::{BucketId, TensorKind, placement};
use paraft_proto::{
    Candidates, PROTOCOL, ReadVersionRequest, Refused, StatusReply, VersionMessage, VersionOf, WireKind,
    version_message::Kind,
};
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
    /// If the newest version is not kept: one to come, from this step on.
    pub else_from: u64,
    /// Only of a replica that leads, as a majority has confirmed.
    pub confirm: bool,
}

impl Asked {
    /// The newest version.
    pub const NEWEST: Self = Self { step: 0, exactly: false, else_from: 0, confirm: false };
}

/// One shard's answer.
pub(super) struct Answer {
    pub of: VersionOf,
    pub stream: Streaming<VersionMessage>,
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
            else_from: asked.else_from,
            confirm: asked.confirm,
            dtype: self.dtype.name().into(),
            only,
            have: self.has.as_ref().map(|has| has.step),
            remember: self.reads_again,
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
    pub(super) async fn replicas(&self) -> Result<BTreeMap<u32, Vec<String>>, Failed> {
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
