//! Local steps: what a worker pushes of its own weights, and what it takes over.

use super::Driver;
use crate::{exchange::PushParts, worker::WorkerError};
use paraft_common::Step;
use std::ops::Range;

impl Driver {
    /// The range of these buckets' values.
    pub(super) fn values(&self, buckets: &Range<usize>) -> Range<usize> {
        let of = &self.layout.buckets()[buckets.clone()];
        of.first().map_or(0, |b| b.offset)..of.last().map_or(0, |b| b.range().end)
    }

    /// Copies the user's weights of this range to the worker's.
    pub(super) fn copy_from_user(&mut self, range: Range<usize>) {
        if let (Some(user_weights), Some(local)) = (&mut self.user_weights, &mut self.local) {
            local.moved(range.clone(), &user_weights.weights()[range]);
        }
    }

    /// Copies the worker's weights of this range to the user's.
    pub(super) fn copy_to_user(&mut self, range: Range<usize>) -> Result<(), WorkerError> {
        if let (Some(user_weights), Some(local)) = (&mut self.user_weights, &self.local) {
            user_weights.buffer()?[range.clone()].copy_from_slice(&local.weights()[range]);
        }
        Ok(())
    }

    pub(super) fn push(&mut self, center: &[f32], step: Step, samples: usize, ask_ahead: bool) {
        if ask_ahead {
            self.client.ask_ahead(step);
        }
        let Some(local) = &mut self.local else { return };
        let values = local.push(center);
        let mut push = PushParts::new(&mut self.client, step, samples);
        for (i, bucket) in self.layout.buckets().iter().enumerate().rev() {
            push.values(i, &values[bucket.range()]);
        }
    }

    pub(super) fn push_fragment(&mut self, step: Step, buckets: Range<usize>, samples: usize) {
        let Some(local) = &mut self.local else { return };
        let mut push = PushParts::new(&mut self.client, step, samples);
        for i in buckets.rev() {
            push.values(i, local.push_fragment(self.layout.buckets()[i].range()));
        }
    }

    pub(super) fn take_over(&mut self, center: &[f32], buckets: Range<usize>) {
        let Some(local) = &mut self.local else { return };
        for bucket in &self.layout.buckets()[buckets] {
            local.take_over(center, bucket.range());
        }
    }
}
