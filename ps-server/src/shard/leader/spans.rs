//! Spans of the stages that a push goes through in a leader.

use super::{Leader, ProposalSpan};
use paraft_common::{BucketId, Step, WorkerId};
use paraft_trace::{Moment, Span, Stage};

impl Leader {
    /// Records the span of a stage, which ends now.
    pub(super) fn note(
        &self,
        stage: Stage,
        begin: Moment,
        (bucket, step, worker): (usize, Step, Option<WorkerId>),
        bytes: u64,
    ) {
        let bucket = self.shard.configured().map(|c| c.buckets[bucket].id);
        let (shard, end) = (self.shard.id(), self.now.moment);
        self.counters.stages.note(Span { stage, begin, end, step, shard, bucket, worker, bytes, pass: None });
    }

    /// Records the span of an applied update or delta.
    pub(super) fn note_replicated(
        &self,
        of: ProposalSpan,
        bucket: Option<BucketId>,
        worker: Option<WorkerId>,
    ) {
        let (stage, shard, end) = (Stage::Replicate, self.shard.id(), self.now.moment);
        let ProposalSpan { began: begin, step, bytes } = of;
        self.counters.stages.note(Span { stage, begin, end, step, shard, bucket, worker, bytes, pass: None });
    }
}
