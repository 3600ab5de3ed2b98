//! A worker's local steps.

use super::Training;
use crate::{clock::nanos, error::SimError};
use paraft_common::{BucketId, Step};
use std::ops::Range;

impl Training<'_> {
    /// A minibatch at the local weights, after `clock` earlier ones. Returns its loss times its
    /// samples.
    pub(super) async fn local_minibatch(
        &mut self,
        step: Step,
        clock: u64,
        samples: &[u32],
    ) -> Result<f64, SimError> {
        let mut sum = 0.0;
        if let Some(local) = &mut self.local {
            let mut learner = self.world.learner.lock();
            let (loss, gradient) = learner.gradient((self.worker, step), local.weights(), samples)?;
            let not_finite = |_| SimError::NotFinite { loss, step, worker: self.worker };
            local.step(clock, gradient).map_err(not_finite)?;
            sum = f64::from(loss) * samples.len() as f64;
        }
        let time = self.speed.step(self.world);
        self.worked += time;
        self.world.cores.work(nanos(time)).await;
        Ok(sum)
    }

    /// Pushes the local steps since the last push.
    pub(super) fn push(&mut self, step: Step, samples: usize) {
        self.client.weigh(samples);
        let Some(local) = &mut self.local else { return };
        let values = local.push(&self.weights);
        for (i, bucket) in self.world.layout.buckets().iter().enumerate().rev() {
            let id = BucketId(i as u32);
            let payload = self.client.encode(id, step, &values[bucket.range()]);
            self.client.push(id, step, payload);
        }
    }

    /// Pushes the local steps of these buckets.
    pub(super) fn push_fragment(&mut self, step: Step, buckets: Range<usize>, samples: usize) {
        self.client.weigh(samples);
        let Some(local) = &mut self.local else { return };
        for b in buckets.rev() {
            let (id, range) = (BucketId(b as u32), self.world.layout.buckets()[b].range());
            let payload = self.client.encode(id, step, local.push_fragment(range));
            self.client.push(id, step, payload);
        }
    }

    /// Continues these buckets from the pulled weights.
    pub(super) fn take_over(&mut self, buckets: Range<usize>) {
        let Some(local) = &mut self.local else { return };
        for bucket in &self.world.layout.buckets()[buckets] {
            local.take_over(&self.weights, bucket.range());
        }
    }
}
