//! How gradients leave and weights come back: bucket by bucket, as the backward pass reports them.

use bytes::Bytes;
use paraft_client::Client;
use paraft_common::{BucketId, Step, codec::F32_BYTES};
use paraft_models::PinnedBytes;
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
            note_ready(self.client, self.step, bucket, (self.since.min(end), end), spec.len);
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

/// That a bucket's gradient was computed in that time.
fn note_ready(client: &Client, step: Step, bucket: BucketId, (begin, end): (Moment, Moment), values: usize) {
    client.stages().note(Span {
        stage: Stage::Ready,
        begin,
        end,
        step,
        shard: client.shard_of(bucket),
        bucket: Some(bucket),
        worker: Some(client.worker()),
        bytes: (values * F32_BYTES) as u64,
    });
}

/// The same for gradients that a device has written for the wire: each bucket as soon as it is on the host.
pub struct PushParts<'a> {
    client: &'a mut Client,
    step: Step,
    since: Moment,
}

impl<'a> PushParts<'a> {
    pub fn new(client: &'a mut Client, step: Step) -> Self {
        Self { client, step, since: Moment::now() }
    }

    /// Bucket `i` goes out, from the memory that the device has written.
    pub fn ready(&mut self, i: usize, payload: PinnedBytes) {
        let (bucket, end) = (BucketId(i as u32), Moment::now());
        let values = self.client.layout().buckets()[i].len;
        note_ready(self.client, self.step, bucket, (self.since.min(end), end), values);
        self.client.push_encoded(bucket, self.step, Bytes::from_owner(payload));
        self.since = Moment::now();
    }
}
