//! The gradients of a minibatch on their way: tensor by tensor from a loop of the user's, bucket by bucket to the servers.

use super::{WorkerError, driver::Driver};
use paraft_common::{BucketId, Layout, Step};
use std::mem;

/// Which gradients of a minibatch are here.
pub(super) struct Pushes {
    /// Of the minibatch in training: where a bucket has parts of several tensors, or the worker has weights of its own.
    gradient: Vec<f32>,
    /// Whether the gradient of each tensor is here.
    ready: Vec<bool>,
    /// Values of each bucket that are missing.
    missing: Vec<usize>,
}

impl Pushes {
    /// Nothing is expected.
    pub fn new(layout: &Layout) -> Self {
        Self {
            gradient: Vec::new(),
            ready: vec![true; layout.tensors().len()],
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

    /// The whole gradient, where it is pushed nowhere.
    pub fn gradient(&self) -> &[f32] {
        &self.gradient
    }

    /// The gradient of a tensor is here: every bucket that is complete with it is pushed as one of `step`; without, nothing is.
    ///
    /// # Errors
    /// There is no such tensor, it was handed over before, or has another length.
    pub fn take(
        &mut self,
        driver: &mut Driver,
        step: Option<Step>,
        tensor: usize,
        gradient: &[f32],
    ) -> Result<(), WorkerError> {
        let layout = &driver.layout;
        let Some(spec) = layout.tensors().get(tensor) else {
            return Err(misuse(format!("tensor {tensor} of a model of {}", layout.tensors().len())));
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
            // Zeroed by the kernel: what no bucket shares among tensors is never touched, and takes no memory.
            self.gradient = vec![0.0; layout.len()];
        }
        let Some(step) = step else {
            self.gradient[range].copy_from_slice(gradient);
            return Ok(());
        };
        // The bucket that holds the tensor's first value, and those behind it, last first.
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

    /// Whether any is here.
    pub fn begun(&self) -> bool {
        self.ready.contains(&true)
    }

    /// None comes.
    ///
    /// # Errors
    /// One has come.
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

    /// Whether every tensor's gradient is here.
    ///
    /// # Errors
    /// Those that are not.
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
