//! How gradients leave and weights come back: bucket by bucket, as the backward pass reports them.

use paraft_client::Client;
use paraft_common::{BucketId, Step, codec::F32_BYTES};
use paraft_trace::{Moment, Span, Stage};

/// Pushes the buckets of one step, last layer first, each as soon as its gradient is complete.
pub struct StepPush<'a> {
    client: &'a mut Client,
    step: Step,
    /// Buckets `next..` are on their way.
    next: usize,
    /// Since when the model computes.
    since: Moment,
}

impl<'a> StepPush<'a> {
    pub fn new(client: &'a mut Client, step: Step) -> Self {
        let next = client.layout().buckets().len();
        Self { client, step, next, since: Moment::now() }
    }

    /// `gradients[offset..]` will not change any more: what lies whole in it goes out.
    pub fn ready(&mut self, offset: usize, gradients: &[f32]) {
        let mut reported = None;
        while self.next > 0 {
            let spec = self.client.layout().buckets()[self.next - 1];
            if spec.offset < offset {
                break;
            }
            self.next -= 1;
            let bucket = BucketId(self.next as u32);
            let end = *reported.get_or_insert_with(Moment::now);
            self.client.stages().note(Span {
                stage: Stage::Ready,
                begin: self.since.min(end),
                end,
                step: self.step,
                shard: self.client.shard_of(bucket),
                bucket: Some(bucket),
                worker: Some(self.client.worker()),
                bytes: (spec.len * F32_BYTES) as u64,
            });
            self.client.push(bucket, self.step, &gradients[spec.range()]);
            // What is reported with it was ready with it.
            self.since = end;
        }
        if reported.is_some() {
            self.since = Moment::now();
        }
    }

    /// Whether every bucket went out; a model that did not report everything is broken.
    pub fn complete(&self) -> bool {
        self.next == 0
    }
}
