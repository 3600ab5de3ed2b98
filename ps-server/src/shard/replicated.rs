//! A shard as Raft's state machine.

use super::{
    bucket::Bucket,
    command::{Outcome, Proposal},
    cut::Cut,
    state::Shard,
    versions::may_run_together,
};
use crate::raft::{ApplyError, OutdatedMemory, RawImage, Replicated};
use paraft_common::Payload;
use std::sync::atomic::Ordering::Release;

impl Replicated for Shard {
    type Change = Proposal;
    type Outcome = Outcome;

    fn apply(&self, proposal: &Proposal) -> Result<Outcome, ApplyError> {
        Replicated::apply_run(self, &[proposal])
            .map(|outcomes| outcomes.into_iter().next().unwrap_or(Outcome::Done))
    }

    fn apply_run(&self, proposals: &[&Proposal]) -> Result<Vec<Outcome>, ApplyError> {
        let _applying = self.versions.applying();
        if !self.versions.any() {
            return self.noted(Shard::apply_run(self, proposals));
        }
        // A reader may have come while entries were applied without regard to it.
        self.keep_versions(None);
        let mut outcomes = Vec::with_capacity(proposals.len());
        for run in proposals.chunk_by(|a, b| may_run_together(a, b)) {
            let before = self.version_step();
            outcomes.extend(self.noted(Shard::apply_run(self, run))?);
            self.keep_versions(Some(before));
        }
        Ok(outcomes)
    }

    fn in_term(&self, term: u64) {
        self.term.fetch_max(term, Release);
    }

    fn touched(&self, proposal: &Proposal) -> u64 {
        self.bytes_of(proposal)
    }

    /// The share of the job.
    fn share(&self) -> u32 {
        self.name().job().0
    }

    fn image(&self) -> RawImage {
        self.cut().into_raw()
    }

    fn install_parts(
        &self,
        head: &[u8],
        parts: &mut dyn Iterator<Item = Result<Payload, String>>,
    ) -> Result<(), ApplyError> {
        let _applying = self.versions.applying();
        let header = Cut::header_of(head)?;
        let aside = self.noted(self.set_aside(&header.meta.job))?;
        if aside.is_some() {
            self.is_here();
        }
        self.install_into(aside, &self.noted(Cut::assemble(header, parts))?)
    }

    fn room_for(&self, head: &[u8]) -> Result<(), ApplyError> {
        self.noted(self.set_aside(&Cut::header_of(head)?.meta.job)).map(drop)
    }

    fn bytes(&self) -> u64 {
        self.configured().map_or(0, |c| c.bytes())
    }

    /// A backward pass pushes the last bucket first, so the next updates are of the buckets before, from the end.
    fn order(&self) -> Vec<u32> {
        let Some(conf) = self.configured() else { return Vec::new() };
        let mut first = 0;
        let of_bucket = |b: &Bucket| {
            let parts = first..first + b.image().vectors() as u32;
            first = parts.end;
            (b.version(), parts)
        };
        let mut buckets: Vec<_> = conf.buckets.iter().map(of_bucket).collect();
        buckets.reverse();
        buckets.sort_by_key(|(version, _)| *version); // stable: keeps the order of buckets with one version
        buckets.into_iter().flat_map(|(_, parts)| parts).collect()
    }

    fn outdated(&self, beyond: u64) -> OutdatedMemory {
        self.configured().map_or(OutdatedMemory::default(), |c| c.outdated(beyond))
    }
}
