//! How gradients leave and weights come back: bucket by bucket, as the backward pass reports them.

use paraft_client::Client;
use paraft_common::{BucketId, Step};

/// Pushes the buckets of one step, last layer first, each as soon as its gradient is complete.
pub struct StepPush<'a> {
    client: &'a mut Client,
    step: Step,
    /// Buckets `next..` are on their way.
    next: usize,
}

impl<'a> StepPush<'a> {
    pub fn new(client: &'a mut Client, step: Step) -> Self {
        let next = client.layout().buckets().len();
        Self { client, step, next }
    }

    /// `gradients[offset..]` will not change any more: what lies whole in it goes out.
    pub fn ready(&mut self, offset: usize, gradients: &[f32]) {
        while self.next > 0 {
            let spec = self.client.layout().buckets()[self.next - 1];
            if spec.offset < offset {
                break;
            }
            self.next -= 1;
            self.client.push(BucketId(self.next as u32), self.step, &gradients[spec.range()]);
        }
    }

    /// Whether every bucket went out; a model that did not report everything is broken.
    pub fn complete(&self) -> bool {
        self.next == 0
    }
}
