//! Updates as they are applied: decided over, carried out, recorded. Those of different buckets run on all cores.

use super::{
    batched::Batched,
    bucket::Incoming,
    command::{Command, Contribution, Outcome, Proposal, PushEntry},
    configured::Configured,
    members::Member,
    state::{Meta, Shard},
};
use crate::{compute, raft::Unable};
use paraft_common::{
    BucketId, Encoding, Payload, TensorKind, Version, WorkerId, codec::F32_BYTES, optim::Gradient,
};
use std::{collections::BTreeSet, sync::Arc};

/// Below this many bytes of payload, waking other threads costs more than it saves.
/// (Tests have small buckets, and are to go this way too.)
const PARALLEL_BYTES: usize = if cfg!(test) { 1 } else { 256 << 10 };

/// An update that will be applied.
struct Update<'a> {
    conf: Arc<Configured>,
    /// The local bucket.
    b: usize,
    contributions: &'a [Contribution],
    pushes: Pushes,
    closes: bool,
    encoding: Encoding,
    factor: f32,
    rate: Option<f64>,
    /// Members that train.
    members: usize,
    /// Those of whom something is kept, and who train no more.
    gone: Vec<WorkerId>,
    /// The bucket's version.
    before: Version,
}

/// What an update brings, checked.
pub(super) enum Pushes {
    One(Payload),
    Batched(Batched),
}

impl Update<'_> {
    /// The bulk of the work.
    fn run(&self) -> Version {
        let bucket = &self.conf.buckets[self.b];
        let (conf, contributions) = (&self.conf, self.contributions);
        let (payload, encoding) = match &self.pushes {
            Pushes::One(payload) => (payload.clone(), self.encoding),
            Pushes::Batched(batched) => (batched.sum(), Encoding::F32),
        };
        let gradient = Gradient { payload: &payload, encoding, scale: self.factor };
        let (members, gone, rate) = (self.members, self.gone.as_slice(), self.rate);
        let update = Incoming { job: &conf.job, gradient, contributions, rate, members, gone };
        bucket.update(update, conf)
    }

    /// Payload bytes of the pushes, as their workers sent them.
    fn pushed(&self) -> u64 {
        match &self.pushes {
            Pushes::One(payload) => payload.len() as u64,
            // An entry in f32 says nothing of what was added up.
            Pushes::Batched(_) if self.encoding == Encoding::F32 => {
                let len = self.conf.buckets[self.b].spec.len;
                (self.conf.encoding(self.b).encoded_len(len) * self.contributions.len()) as u64
            }
            Pushes::Batched(batched) => batched.pushed(),
        }
    }
}

/// Records pushes of a local bucket, after the weights have changed: who sees the step sees the weights.
fn are_in(meta: &mut Meta, conf: &Configured, b: usize, contributions: &[Contribution], closes: bool) {
    for c in contributions {
        meta.members.pushed(c.worker, c.session, c.seq, b, c.step);
    }
    if let Some(last) = contributions.iter().map(|c| c.step).max()
        && conf.job.round.drops_late()
        && closes
    {
        meta.dropped += meta.members.drop_late(b, last);
    }
}

impl Shard {
    /// Applies proposals that follow each other, with the outcomes of applying one after the other. Updates of different
    /// buckets touch nothing in common but counts, so those that lie next to each other run on all cores.
    ///
    /// # Errors
    /// As [`Self::carry_out`]; the proposals before may have been applied.
    pub fn apply_run(&self, proposals: &[&Proposal]) -> Result<Vec<Outcome>, Unable> {
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
            let mut versions = vec![Version(0); run];
            rayon::in_place_scope(|s| {
                let mut jobs =
                    begun.iter().zip(&mut versions).filter_map(|(u, v)| Some((u.as_ref().ok()?, v)));
                let own = jobs.next();
                jobs.for_each(|(u, v)| s.spawn(|_| *v = u.run()));
                if let Some((u, v)) = own {
                    *v = u.run();
                }
            });
            outcomes.extend(begun.into_iter().zip(versions).map(|(u, version)| match u {
                Ok(update) => self.end_update(&update, version),
                Err(outcome) => outcome,
            }));
            rest = &rest[run..];
        }
        Ok(outcomes)
    }

    /// Whether updates touch so much that several threads are worth while: their payloads, or what they are decoded to.
    fn is_large(&self, updates: &[&Proposal]) -> bool {
        updates.iter().map(|p| self.bytes_of(p)).sum::<u64>() >= PARALLEL_BYTES as u64
    }

    /// Bytes that applying a proposal reads or writes, about: its payload, or what that is decoded to. To take a job is to
    /// build its whole state.
    pub(super) fn bytes_of(&self, proposal: &Proposal) -> u64 {
        let touched = match &proposal.command {
            Command::Admit { .. } | Command::Delta { .. } => {
                return compute::SMALL_BYTES;
            }
            command => command
                .pushes()
                .zip(self.configured())
                .and_then(|(e, c)| Some(c.buckets[c.local(e.bucket)?].spec.len * F32_BYTES))
                .unwrap_or_default(),
        };
        touched.max(proposal.payload.len()) as u64
    }

    pub(super) fn update(&self, proposal: &Proposal) -> Result<Outcome, Unable> {
        Ok(match self.begin_update(proposal)? {
            Ok(update) => self.end_update(&update, update.run()),
            Err(outcome) => outcome,
        })
    }

    /// Decides over an update; the outcome, where it changes nothing.
    fn begin_update<'a>(&self, proposal: &'a Proposal) -> Result<Result<Update<'a>, Outcome>, Unable> {
        let update = self.decide_update(proposal);
        if let Ok(update) = &update {
            // As a rule its initial weights are in.
            update.conf.buckets[update.b].allocate(&self.room)?;
        }
        Ok(update)
    }

    fn decide_update<'a>(&self, proposal: &'a Proposal) -> Result<Update<'a>, Outcome> {
        let Some(entry) = proposal.command.pushes() else {
            return Err(Outcome::Refused("no update".into()));
        };
        let PushEntry { bucket: id, contributions, encoding, factor, closes, rate } = entry;
        let (conf, b, pushes) =
            self.pushes(id, &proposal.payload, encoding, contributions).map_err(Outcome::Refused)?;
        let (members, gone) = self.admit_pushes(&conf, b, contributions)?;
        let before = conf.buckets[b].version();
        Ok(Update { conf, b, contributions, pushes, encoding, factor, rate, closes, members, gone, before })
    }

    /// Whether pushes of a local bucket are new, and none too late. Gives how many members train, and those of whom something
    /// is kept and who train no more; or the outcome, where they change nothing.
    fn admit_pushes(
        &self,
        conf: &Configured,
        b: usize,
        contributions: &[Contribution],
    ) -> Result<(usize, Vec<WorkerId>), Outcome> {
        let bucket = &conf.buckets[b];
        let mut meta = self.meta_mut();
        // The last line of defence for exactly-once: whatever the leader proposed, an update that holds a
        // push which is in already changes nothing.
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

    /// Takes pushes in that are not applied.
    pub(super) fn skip(
        &self,
        id: BucketId,
        contributions: &[Contribution],
        closes: bool,
    ) -> Result<Outcome, Unable> {
        let refused = |why: &str| Ok(Outcome::Refused(why.into()));
        let Some(conf) = self.configured() else { return refused("no job is configured") };
        let Some(b) = conf.local(id) else { return refused("the bucket is not on this shard") };
        let members = match self.admit_pushes(&conf, b, contributions) {
            Ok((members, _)) => members,
            Err(outcome) => return Ok(outcome),
        };
        conf.buckets[b].allocate(&self.room)?;
        let version = conf.buckets[b].pass(contributions.len(), members);
        let mut meta = self.meta_mut();
        for c in contributions {
            if b == 0 && meta.members.in_session(c.worker, c.session).is_some() {
                *meta.skipped.entry(c.worker).or_default() += 1;
            }
        }
        are_in(&mut meta, &conf, b, contributions, closes);
        Ok(Outcome::Updated { version, applied: true })
    }

    /// Records an update whose weights are in.
    fn end_update(&self, update: &Update<'_>, version: Version) -> Outcome {
        let Update { b, contributions, before, .. } = update;
        let b = *b;
        let mut meta = self.meta_mut();
        meta.bytes_pushed += update.pushed();
        for c in *contributions {
            // Each of them is in the weights, also that of a worker that has left since its round was closed.
            meta.delays.record(before.0.saturating_sub(c.pulled.0));
            meta.pushes += 1;
        }
        are_in(&mut meta, &update.conf, b, contributions, update.closes);
        Outcome::Updated { version, applied: true }
    }

    /// The bucket of an entry, and what its payload holds for it.
    pub(super) fn pushes(
        &self,
        id: BucketId,
        payload: &Payload,
        encoding: Encoding,
        contributions: &[Contribution],
    ) -> Result<(Arc<Configured>, usize, Pushes), String> {
        let conf = self.configured().ok_or("no job is configured")?;
        let i = conf.local(id).ok_or_else(|| format!("{id} is not on {}", self.id()))?;
        let len = conf.buckets[i].spec.len;
        let held = match contributions.len() {
            0 | 1 => {
                encoding.check(payload, len).map(|()| Pushes::One(payload.clone())).map_err(|e| e.to_string())
            }
            n => Batched::read(payload, encoding, n, len).map(Pushes::Batched).map_err(|e| e.to_string()),
        };
        let held = held.map_err(|e| format!("the entry does not fit {id}: {e}"))?;
        Ok((conf, i, held))
    }
}
