//! A shard with observers of its applies: spans, staleness and readers. Replicated state knows no clock and no
//! reader.

use super::{
    command::{Outcome, Proposal},
    staleness::Staleness,
    state::Shard,
};
use crate::raft::{ApplyError, OutdatedMemory, RawImage, Replicated};
use paraft_common::Payload;
use paraft_trace::{Moment, Span, Stage, Stages};
use std::{collections::BTreeSet, sync::Arc};
use tokio::sync::watch;

/// Forwards to the shard, records the spans of `apply`, and notifies the readers.
pub struct ObservedShard {
    /// The replicated shard.
    pub shard: Arc<Shard>,
    /// The recorder of spans.
    pub stages: Arc<Stages>,
    /// The measurements of late pushes.
    pub staleness: Arc<Staleness>,
    /// Notified after every apply or install; closes with the replica.
    pub applied: watch::Sender<()>,
}

impl ObservedShard {
    /// Proposals that were applied together share their time.
    fn note(&self, begin: Moment, proposals: &[&Proposal]) {
        let (stage, shard, end) = (Stage::Apply, self.shard.id(), Moment::now());
        for proposal in proposals {
            let Some(step) = proposal.command.latest_step() else { continue };
            let entry = proposal.command.pushes();
            let bucket = entry.map(|e| e.bucket);
            let worker = entry.map(|e| e.contributions).filter(|c| c.len() == 1).map(|c| c[0].worker);
            let bytes = proposal.payload.len() as u64;
            self.stages.note(Span { stage, begin, end, step, shard, bucket, worker, bytes, pass: None });
        }
    }
}

impl Replicated for ObservedShard {
    type Change = Proposal;
    type Outcome = Outcome;

    fn apply(&self, proposal: &Proposal) -> Result<Outcome, ApplyError> {
        let seen = self.staleness.read_before(&self.shard, proposal);
        let begin = Moment::now();
        let outcome = Replicated::apply(&*self.shard, proposal)?;
        self.note(begin, &[proposal]);
        self.staleness.read_after(&self.shard, seen);
        self.applied.send_replace(());
        Ok(outcome)
    }

    fn apply_run(&self, proposals: &[&Proposal]) -> Result<Vec<Outcome>, ApplyError> {
        let mut outcomes = Vec::with_capacity(proposals.len());
        let mut rest = proposals;
        while !rest.is_empty() {
            // Each bucket is read before each of its updates.
            let mut buckets = BTreeSet::new();
            let again = |p: &&Proposal| p.command.pushes().is_some_and(|e| !buckets.insert(e.bucket));
            let run = rest.iter().position(again).unwrap_or(rest.len());
            let (run, later) = rest.split_at(run);
            let seen: Vec<_> = run.iter().map(|p| self.staleness.read_before(&self.shard, p)).collect();
            let begin = Moment::now();
            outcomes.extend(Replicated::apply_run(&*self.shard, run)?);
            self.note(begin, run);
            seen.into_iter().for_each(|s| self.staleness.read_after(&self.shard, s));
            rest = later;
        }
        self.applied.send_replace(());
        Ok(outcomes)
    }

    fn share(&self) -> u32 {
        self.shard.share()
    }

    fn in_term(&self, term: u64) {
        self.shard.in_term(term);
    }

    fn touched(&self, proposal: &Proposal) -> u64 {
        self.shard.touched(proposal)
    }

    fn image(&self) -> RawImage {
        Replicated::image(&*self.shard)
    }

    fn install_parts(
        &self,
        head: &[u8],
        parts: &mut dyn Iterator<Item = Result<Payload, String>>,
    ) -> Result<(), ApplyError> {
        self.shard.install_parts(head, parts)?;
        self.applied.send_replace(());
        Ok(())
    }

    fn room_for(&self, head: &[u8]) -> Result<(), ApplyError> {
        self.shard.room_for(head)
    }

    fn bytes(&self) -> u64 {
        self.shard.bytes()
    }

    fn order(&self) -> Vec<u32> {
        self.shard.order()
    }

    fn outdated(&self, beyond: u64) -> OutdatedMemory {
        self.shard.outdated(beyond)
    }
}
