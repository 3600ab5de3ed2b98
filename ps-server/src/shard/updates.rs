//! Applying updates: decide, change the weights, record. Updates of different buckets run on all cores.

use super::{
    batched::BatchedPushes,
    bucket::BucketUpdate,
    command::{Command, Contribution, Outcome, Proposal, PushEntry},
    members::Member,
    shard_config::ShardConfig,
    state::{Meta, Shard},
};
use crate::{compute, raft::ApplyError};
use paraft_common::{
    BucketId, Encoding, Payload, TensorKind, Version, WorkerId,
    codec::F32_BYTES,
    optim::{Gradient, Overrides},
    table::Rows,
};
use std::{collections::BTreeSet, sync::Arc};

/// Below this payload in bytes, waking other threads costs more than it saves. (Tests have small buckets, and must
/// take this path too.)
const PARALLEL_BYTES: usize = if cfg!(test) { 1 } else { 256 << 10 };

/// An update that will be applied.
struct Update<'a> {
    conf: Arc<ShardConfig>,
    /// The local bucket.
    b: usize,
    contributions: &'a [Contribution],
    pushes: PushPayload,
    closes: bool,
    encoding: Encoding,
    factor: f32,
    overrides: Overrides,
    /// Number of members that train.
    members: usize,
    /// Workers with kept state that no longer train.
    gone: Vec<WorkerId>,
    /// The bucket's version.
    before: Version,
}

/// The checked content of an update.
pub(super) enum PushPayload {
    Rows(Rows),
    One(Payload),
    Batched(BatchedPushes),
}

impl Update<'_> {
    /// Changes the weights: the bulk of the work.
    fn run(&self) -> Result<Version, ApplyError> {
        let bucket = &self.conf.buckets[self.b];
        let (conf, contributions) = (&self.conf, self.contributions);
        let (payload, encoding) = match &self.pushes {
            PushPayload::Rows(_) => (Payload::EMPTY, Encoding::F32),
            PushPayload::One(payload) => (payload.clone(), self.encoding),
            PushPayload::Batched(batched) => (batched.sum(), Encoding::F32),
        };
        let gradient = Gradient { payload: &payload, encoding, scale: self.factor };
        let (members, gone, overrides) = (self.members, self.gone.as_slice(), self.overrides);
        let update = BucketUpdate { job: &conf.job, gradient, contributions, overrides, members, gone };
        match &self.pushes {
            PushPayload::Rows(rows) => bucket.update_rows(rows, update),
            _ => Ok(bucket.update(update, conf)),
        }
    }

    /// Payload bytes of the pushes, as their workers sent them.
    fn pushed(&self) -> u64 {
        match &self.pushes {
            PushPayload::Rows(rows) => rows.bytes() as u64,
            PushPayload::One(payload) => payload.len() as u64,
            // An f32 entry does not record the pushes behind its sum.
            PushPayload::Batched(_) if self.encoding == Encoding::F32 => {
                let len = self.conf.buckets[self.b].spec.len;
                (self.conf.encoding(self.b).encoded_len(len) * self.contributions.len()) as u64
            }
            PushPayload::Batched(batched) => batched.pushed(),
        }
    }
}

/// Records pushes of a local bucket after the weights have changed: a reader that sees the step sees the weights.
fn are_in(meta: &mut Meta, conf: &ShardConfig, b: usize, contributions: &[Contribution], closes: bool) {
    for c in contributions {
        meta.members.pushed(c.worker, c.session, c.seq, b, c.step);
    }
    let Some(last) = contributions.iter().map(|c| c.step).max() else { return };
    if conf.buckets[b].spec.kind == TensorKind::Result {
        meta.members.is_written(b, last);
    } else if conf.job.round.drops_late() && closes {
        meta.dropped += meta.members.drop_late(b, last);
    }
}

impl Shard {
    /// Applies consecutive proposals, with the outcomes of applying them one by one. Updates of different buckets
    /// share only counts, so adjacent ones run on all cores.
    ///
    /// # Errors
    /// As [`Self::carry_out`]; earlier proposals may have been applied.
    pub fn apply_run(&self, proposals: &[&Proposal]) -> Result<Vec<Outcome>, ApplyError> {
        let mut outcomes = Vec::with_capacity(proposals.len());
        let mut rest = proposals;
        while let [first, ..] = rest {
            let mut buckets = BTreeSet::new();
            let apart = |p: &&&Proposal| p.command.pushes().is_some_and(|e| buckets.insert(e.bucket));
            let run = rest.iter().take_while(apart).count();
            if run < 2 || !self.is_large(&rest[..run]) {
                outcomes.push(self.carry_out(first)?);
                rest = &rest[1..];
                continue;
            }
            let begun: Vec<_> = rest[..run].iter().map(|p| self.begin_update(p)).collect::<Result<_, _>>()?;
            let mut versions = vec![Ok(Version(0)); run];
            let updates = begun.iter().zip(&mut versions).filter_map(|(u, v)| Some((u.as_ref().ok()?, v)));
            compute::each(updates, |(u, v)| *v = u.run());
            for (u, version) in begun.into_iter().zip(versions) {
                outcomes.push(match u {
                    Ok(update) => self.end_update(&update, version?),
                    Err(outcome) => outcome,
                });
            }
            rest = &rest[run..];
        }
        Ok(outcomes)
    }

    /// Whether updates are large enough for several threads: by their payloads, or the decoded size.
    fn is_large(&self, updates: &[&Proposal]) -> bool {
        updates.iter().map(|p| self.bytes_of(p)).sum::<u64>() >= PARALLEL_BYTES as u64
    }

    /// Approximate bytes that applying a proposal reads or writes: its payload, or the decoded size. Admitting a
    /// job builds its whole state.
    pub(super) fn bytes_of(&self, proposal: &Proposal) -> u64 {
        let touched = match &proposal.command {
            Command::Admit { .. } | Command::Delta { .. } => {
                return compute::LARGE_BYTES;
            }
            command => command
                .pushes()
                .zip(self.configured())
                .and_then(|(e, c)| Some(c.buckets[c.local(e.bucket)?].spec.len * F32_BYTES))
                .unwrap_or_default(),
        };
        touched.max(proposal.payload.len()) as u64
    }

    pub(super) fn update(&self, proposal: &Proposal) -> Result<Outcome, ApplyError> {
        Ok(match self.begin_update(proposal)? {
            Ok(update) => self.end_update(&update, update.run()?),
            Err(outcome) => outcome,
        })
    }

    /// Decides on an update; returns the outcome if it changes nothing.
    fn begin_update<'a>(&self, proposal: &'a Proposal) -> Result<Result<Update<'a>, Outcome>, ApplyError> {
        let update = self.decide_update(proposal);
        if let Ok(update) = &update {
            // Usually it is allocated already, with its initial weights.
            update.conf.buckets[update.b].allocate(&self.room)?;
        }
        Ok(update)
    }

    fn decide_update<'a>(&self, proposal: &'a Proposal) -> Result<Update<'a>, Outcome> {
        let Some(entry) = proposal.command.pushes() else {
            return Err(Outcome::Refused("no update".into()));
        };
        let PushEntry { bucket: id, contributions, encoding, factor, closes, overrides } = entry;
        let (conf, b, pushes) =
            self.pushes(id, &proposal.payload, encoding, contributions).map_err(Outcome::Refused)?;
        let (members, gone) = self.admit_pushes(&conf, b, contributions)?;
        let before = conf.buckets[b].version();
        Ok(Update {
            conf,
            b,
            contributions,
            pushes,
            encoding,
            factor,
            overrides,
            closes,
            members,
            gone,
            before,
        })
    }

    /// Whether pushes of a local bucket are new, and none is late. Returns the number of members that train and the
    /// workers with kept state that do not, or the outcome if the pushes change nothing.
    fn admit_pushes(
        &self,
        conf: &ShardConfig,
        b: usize,
        contributions: &[Contribution],
    ) -> Result<(usize, Vec<WorkerId>), Outcome> {
        let bucket = &conf.buckets[b];
        let mut meta = self.meta_mut();
        // The last defence of exactly-once: an update that contains an applied push changes nothing, whatever the
        // leader proposed.
        let member = |c: &Contribution| meta.members.in_session(c.worker, c.session);
        let late = |c: &Contribution| member(c).is_some_and(|m| m.is_dropped(b, c.step));
        let is_in = |c: &Contribution| member(c).is_some_and(|m| m.step(b) >= Some(c.step)) && !late(c);
        let duplicate = contributions.iter().any(is_in);
        let orphan = contributions.iter().all(|c| member(c).is_none());
        if duplicate || orphan || contributions.iter().any(late) {
            meta.duplicates += u64::from(duplicate);
            return Err(Outcome::Updated { version: bucket.version(), applied: false });
        }
        let keeps = conf.job.keeps().of_workers() && bucket.spec.kind == TensorKind::Param;
        let active = |w| meta.members.get(w).is_some_and(Member::is_active);
        let gone = if keeps { bucket.gone(active) } else { Vec::new() };
        Ok((meta.members.active_count(), gone))
    }

    /// Records pushes that are not applied.
    pub(super) fn skip(
        &self,
        id: BucketId,
        contributions: &[Contribution],
        closes: bool,
    ) -> Result<Outcome, ApplyError> {
        let refused = |why: &str| Ok(Outcome::Refused(why.into()));
        let Some(conf) = self.configured() else { return refused("no job is configured") };
        let Some(b) = conf.local(id) else { return refused("the bucket is not on this shard") };
        let members = match self.admit_pushes(&conf, b, contributions) {
            Ok((members, _)) => members,
            Err(outcome) => return Ok(outcome),
        };
        conf.buckets[b].allocate(&self.room)?;
        let version = conf.buckets[b].skip_update(contributions.len(), members);
        let mut meta = self.meta_mut();
        for c in contributions {
            if b == 0 && meta.members.in_session(c.worker, c.session).is_some() {
                *meta.skipped.entry(c.worker).or_default() += 1;
            }
        }
        are_in(&mut meta, &conf, b, contributions, closes);
        Ok(Outcome::Updated { version, applied: true })
    }

    /// Records an update after its weights have changed.
    fn end_update(&self, update: &Update<'_>, version: Version) -> Outcome {
        let Update { b, contributions, before, .. } = update;
        let b = *b;
        let mut meta = self.meta_mut();
        meta.bytes_pushed += update.pushed();
        for c in *contributions {
            // Each push is in the weights, even if its worker has left since the round closed.
            meta.delays.record(before.0.saturating_sub(c.pulled.0));
            meta.pushes += 1;
        }
        are_in(&mut meta, &update.conf, b, contributions, update.closes);
        Outcome::Updated { version, applied: true }
    }

    /// A bucket's place on this shard.
    pub(super) fn place(&self, id: BucketId) -> Result<(Arc<ShardConfig>, usize), String> {
        let conf = self.configured().ok_or("no job is configured")?;
        let i = conf.local(id).ok_or_else(|| format!("{id} is not on {}", self.id()))?;
        Ok((conf, i))
    }

    /// The bucket of an entry, and its decoded payload.
    pub(super) fn pushes(
        &self,
        id: BucketId,
        payload: &Payload,
        encoding: Encoding,
        contributions: &[Contribution],
    ) -> Result<(Arc<ShardConfig>, usize, PushPayload), String> {
        let (conf, i) = self.place(id)?;
        let len = conf.buckets[i].spec.len;
        if let Some(partition) = conf.buckets[i].rows() {
            let rows = Rows::read(payload, partition.spec(), partition.place().1)
                .map_err(|e| format!("the entry does not fit {id}: {e}"))?;
            return Ok((conf, i, PushPayload::Rows(rows)));
        }
        let held = match contributions.len() {
            0 | 1 => encoding
                .check(payload, len)
                .map(|()| PushPayload::One(payload.clone()))
                .map_err(|e| e.to_string()),
            n => BatchedPushes::read(payload, encoding, n, len)
                .map(PushPayload::Batched)
                .map_err(|e| e.to_string()),
        };
        let held = held.map_err(|e| format!("the entry does not fit {id}: {e}"))?;
        Ok((conf, i, held))
    }
}
