//! The gradients of a minibatch: they arrive tensor by tensor from a user's loop, and go to the servers bucket by
//! bucket.

use super::{WorkerError, driver::Driver};
use paraft_common::{BucketId, BucketSpec, Layout, Step, TensorKind};
use std::mem;

/// Which gradients of a minibatch have arrived.
pub(super) struct Pushes {
    /// The minibatch's gradient, if a bucket has parts of several tensors or the worker has its own weights.
    gradient: Vec<f32>,
    /// Whether each tensor's gradient has arrived. Results, which come last, have none.
    ready: Vec<bool>,
    /// The number of missing values of each bucket.
    missing: Vec<usize>,
}

impl Pushes {
    /// Expects no gradient yet.
    pub fn new(layout: &Layout) -> Self {
        Self {
            gradient: Vec::new(),
            ready: vec![true; layout.tensors().partition_point(|t| t.kind != TensorKind::Result)],
            missing: vec![0; layout.buckets().len()],
        }
    }

    /// Expects the gradients of a minibatch.
    pub fn expect(&mut self, layout: &Layout) {
        self.ready.fill(false);
        for (missing, bucket) in self.missing.iter_mut().zip(layout.buckets()) {
            *missing = bucket.len;
        }
    }

    /// The whole gradient, if it is not pushed.
    pub fn gradient(&self) -> &[f32] {
        &self.gradient
    }

    /// Takes the gradient of a tensor. Pushes every bucket that is now complete, as part of `step`; without a step
    /// it pushes nothing.
    ///
    /// # Errors
    /// There is no such tensor, or its gradient was handed over before or has another length.
    pub fn take(
        &mut self,
        driver: &mut Driver,
        step: Option<Step>,
        tensor: usize,
        gradient: &[f32],
    ) -> Result<(), WorkerError> {
        let layout = &driver.layout;
        let Some(spec) = layout.tensors()[..self.ready.len()].get(tensor) else {
            return Err(misuse(format!("tensor {tensor} of a model of {}", self.ready.len())));
        };
        let range = layout.tensor_range(tensor);
        if gradient.len() != range.len() {
            let (name, got, len) = (&spec.name, gradient.len(), range.len());
            return Err(misuse(format!("a gradient of {got} values for `{name}`, which has {len}")));
        }
        if mem::replace(&mut self.ready[tensor], true) {
            return Err(misuse(format!("the gradient of `{}` was handed over before", spec.name)));
        }
        if self.gradient.is_empty() {
            // Zeroed by the kernel: pages of buckets with a single tensor are never touched, and take no memory.
            self.gradient = vec![0.0; layout.len()];
        }
        let Some(step) = step else {
            self.gradient[range].copy_from_slice(gradient);
            return Ok(());
        };
        // The bucket with the tensor's first value and the later ones, last first.
        let first = layout.buckets().partition_point(|b| b.range().end <= range.start);
        let last = layout.buckets().partition_point(|b| b.range().start < range.end);
        for i in (first..last).rev() {
            let bucket = driver.layout.buckets()[i].range();
            let shared = bucket.start.max(range.start)..bucket.end.min(range.end);
            let part = &gradient[shared.start - range.start..shared.end - range.start];
            self.missing[i] -= shared.len();
            if shared == bucket {
                driver.client.push(BucketId(i as u32), step, part);
                continue;
            }
            self.gradient[shared].copy_from_slice(part);
            if self.missing[i] == 0 {
                driver.client.push(BucketId(i as u32), step, &self.gradient[bucket]);
            }
        }
        Ok(())
    }

    /// Whether any gradient has arrived.
    pub fn begun(&self) -> bool {
        self.ready.contains(&true)
    }

    /// Leaves groups out of the step: their tensors have no gradient.
    ///
    /// # Errors
    /// A gradient has arrived.
    pub fn leave_out(&mut self, driver: &mut Driver, step: Step, groups: &[u16]) -> Result<(), WorkerError> {
        if self.begun() {
            return Err(misuse("groups are left out of a step before its first gradient"));
        }
        let layout = &driver.layout;
        let is_out = |b: &BucketSpec| b.kind == TensorKind::Param && groups.contains(&b.group);
        for (tensor, ready) in self.ready.iter_mut().enumerate() {
            let first = layout.tensor_range(tensor).start;
            let bucket = layout.buckets().partition_point(|b| b.range().end <= first);
            *ready = layout.buckets().get(bucket).is_some_and(is_out);
        }
        for (i, bucket) in layout.buckets().iter().enumerate().filter(|(_, b)| is_out(b)) {
            self.missing[i] -= bucket.len;
            driver.client.skip_bucket(BucketId(i as u32), step);
        }
        Ok(())
    }

    /// Skips the minibatch's gradients.
    ///
    /// # Errors
    /// A gradient has arrived.
    pub fn skip(&mut self, layout: &Layout) -> Result<(), WorkerError> {
        if let Some(i) = self.ready.iter().position(|ready| *ready) {
            let name = &layout.tensors()[i].name;
            return Err(misuse(format!(
                "the gradient of `{name}` is on its way: its step cannot be skipped"
            )));
        }
        self.ready.fill(true);
        Ok(())
    }

    /// Checks that every tensor's gradient has arrived.
    ///
    /// # Errors
    /// Gradients are missing.
    pub fn are_complete(&self, layout: &Layout) -> Result<(), WorkerError> {
        let missing: Vec<&str> = (layout.tensors().iter().zip(&self.ready))
            .filter_map(|(t, ready)| (!ready).then_some(t.name.as_str()))
            .collect();
        match missing.is_empty() {
            true => Ok(()),
            false => Err(misuse(format!("the gradient of {} is missing: call ready", missing.join(", ")))),
        }
    }
}

pub(super) fn misuse(why: impl Into<String>) -> WorkerError {
    WorkerError::Misuse(why.into())
}
