//! How gradients leave: bucket by bucket, as the backward pass reports them.

use bytes::Bytes;
use paraft_client::Client;
use paraft_common::{
    BucketId, Step,
    codec::{F32_BYTES, get_f32_le},
};
use paraft_models::PinnedBytes;
use paraft_trace::{Moment, Span, Stage};

/// Pushes the buckets of one step, the last one first, each as soon as its gradient is complete.
pub(crate) struct PushParts<'a> {
    client: &'a mut Client,
    step: Step,
    /// Buckets `next..` are on their way.
    next: usize,
    /// Since when the model computes.
    since: Moment,
    /// Values that a device has copied to the host as they are.
    values: Vec<f32>,
}

impl<'a> PushParts<'a> {
    pub fn new(client: &'a mut Client, step: Step, samples: usize) -> Self {
        client.weigh(samples);
        client.computed_at(None);
        let next = client.layout().buckets().len();
        Self { client, step, next, since: Moment::now(), values: Vec::new() }
    }

    /// Buckets from `next` on were pushed before, in the same session.
    pub fn behind(mut self, next: usize) -> Self {
        self.next = self.next.min(next);
        self
    }

    /// From here on they are on their way.
    pub fn next(&self) -> usize {
        self.next
    }

    /// Whose pushes they are.
    pub fn client(&mut self) -> &mut Client {
        self.client
    }

    /// The step begins, or begins again: what was pushed stays pushed.
    pub fn begin(&mut self) {
        self.since = Moment::now();
    }

    /// Bucket `i` of a gradient that the model will write over.
    pub fn values(&mut self, i: usize, gradient: &[f32]) {
        if let Some(bucket) = self.is_next(i) {
            self.client.push(bucket, self.step, gradient);
            self.since = Moment::now();
        }
    }

    /// Bucket `i`, in the memory that a device has written it to: as it goes over the wire, or, where the client keeps
    /// something of each push, as f32.
    pub fn ready(&mut self, i: usize, payload: PinnedBytes) {
        if let Some(bucket) = self.is_next(i) {
            if self.client.device_encoding(bucket).is_some() {
                self.client.push_encoded(bucket, self.step, Bytes::from_owner(payload));
            } else {
                self.values.resize(self.client.layout().buckets()[i].len, 0.0);
                get_f32_le(payload.as_ref(), &mut self.values);
                self.client.push(bucket, self.step, &self.values);
            }
            self.since = Moment::now();
        }
    }

    /// Notes that the bucket's gradient is computed; `None` where it was pushed already.
    fn is_next(&mut self, i: usize) -> Option<BucketId> {
        if i >= self.next {
            return None;
        }
        self.next = i;
        let (bucket, end) = (BucketId(i as u32), Moment::now());
        self.client.stages().note(Span {
            stage: Stage::Ready,
            begin: self.since.min(end),
            end,
            step: self.step,
            shard: self.client.shard_of(bucket),
            bucket: Some(bucket),
            worker: Some(self.client.worker()),
            bytes: (self.client.layout().buckets()[i].len * F32_BYTES) as u64,
            pass: None,
        });
        Some(bucket)
    }
}
