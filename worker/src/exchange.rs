//! Pushes gradients bucket by bucket, as the backward pass completes them.

use bytes::Bytes;
use paraft_client::Client;
use paraft_common::{
    BucketId, Step,
    codec::{F32_BYTES, get_f32_le},
};
use paraft_models::{ModelError, PinnedBytes};
use paraft_trace::{Moment, Span, Stage};

/// Pushes one step's buckets, the last one first, each as soon as its gradient is complete.
pub(crate) struct PushParts<'a> {
    client: &'a mut Client,
    step: Step,
    /// Buckets `next..` are pushed.
    next: usize,
    /// When the model started computing.
    since: Moment,
    /// Unencoded values that a device has copied to the host.
    values: Vec<f32>,
}

impl<'a> PushParts<'a> {
    pub fn new(client: &'a mut Client, step: Step, samples: usize) -> Self {
        client.weigh(samples);
        client.computed_at(None);
        let next = client.layout().buckets().len();
        Self { client, step, next, since: Moment::now(), values: Vec::new() }
    }

    /// Buckets from `next` on were pushed earlier in the same session.
    pub fn behind(mut self, next: usize) -> Self {
        self.next = self.next.min(next);
        self
    }

    /// Buckets from this index on are pushed.
    pub fn next(&self) -> usize {
        self.next
    }

    /// The client that pushes.
    pub fn client(&mut self) -> &mut Client {
        self.client
    }

    /// The step starts or restarts: pushed buckets stay pushed.
    pub fn begin(&mut self) {
        self.since = Moment::now();
    }

    /// Pushes bucket `i` of a gradient that the model will overwrite.
    pub fn values(&mut self, i: usize, gradient: &[f32]) {
        if let Some(bucket) = self.is_next(i) {
            self.client.push(bucket, self.step, gradient);
            self.since = Moment::now();
        }
    }

    /// Pushes bucket `i` from the memory that a device wrote: in the wire encoding or, if the client keeps a
    /// residual of each push, as f32.
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

    /// Records that the bucket's gradient is computed; `None` if it was pushed before.
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

/// The error of a model whose backward pass leaves out a bucket.
pub(crate) fn incomplete() -> ModelError {
    ModelError::new("it did not report its whole gradient as ready")
}
