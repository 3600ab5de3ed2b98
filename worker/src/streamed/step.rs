//! A step of a model whose layers come one by one.

use super::{StreamError, Streamed};
use crate::{
    exchange::{PushParts, incomplete},
    worker::WorkerError,
};
use paraft_compute::DeviceError;
use paraft_models::{CpuDevice, Flat, NetResult, Weights};

/// A step in progress.
pub(crate) struct StreamedStep<'s, 'p, 'c> {
    streamed: &'s mut Streamed,
    push: &'p mut PushParts<'c>,
    /// Buckets from this index on are pushed.
    next: usize,
    stopped: Option<StreamError>,
}

impl<'s, 'p, 'c> StreamedStep<'s, 'p, 'c> {
    /// Starts after [`Streamed::pull_between`].
    pub fn new(streamed: &'s mut Streamed, push: &'p mut PushParts<'c>) -> Self {
        let next = streamed.buckets.len();
        Self { streamed, push, next, stopped: None }
    }

    /// Ends the step; `made` is the model's result.
    pub fn end<T>(self, made: Result<T, WorkerError>) -> Result<T, StreamError> {
        match (self.stopped, made) {
            (Some(stopped), _) => Err(stopped),
            (None, Err(e)) => Err(StreamError::Failed(e)),
            (None, Ok(_)) if self.next > 0 => Err(StreamError::Failed(incomplete().into())),
            (None, Ok(made)) => Ok(made),
        }
    }

    fn bring(&mut self, layer: usize) -> NetResult {
        if self.stopped.is_none()
            && let Err(why) = self.streamed.bring(layer, self.push.client())
        {
            self.stopped = Some(why);
        }
        // `end` reports the cause.
        let over = || DeviceError::Unsupported(format!("layer {layer} has no weights"));
        if self.stopped.is_some() { Err(over()) } else { Ok(()) }
    }
}

impl Weights<CpuDevice> for StreamedStep<'_, '_, '_> {
    fn params(&mut self, layer: usize) -> NetResult<&[f32]> {
        self.bring(layer)?;
        Ok(&self.streamed.weights)
    }

    fn edition(&mut self, layer: usize) -> NetResult<u64> {
        self.bring(layer)?;
        let brought = self.streamed.layers[layer].iter().map(|b| self.streamed.brought[*b]);
        Ok(brought.max().unwrap_or_default())
    }
}

impl Flat<CpuDevice> for StreamedStep<'_, '_, '_> {
    fn layer(&mut self, layer: usize) -> NetResult<(&[f32], &mut [f32])> {
        self.bring(layer)?;
        Ok((&self.streamed.weights, &mut self.streamed.gradient))
    }

    fn ready(&mut self, offset: usize) -> NetResult {
        let Streamed { buckets, gradient, .. } = &mut *self.streamed;
        while self.next > 0 && buckets[self.next - 1].start >= offset {
            self.next -= 1;
            let range = buckets[self.next].clone();
            self.push.values(self.next, &gradient[range.clone()]);
            gradient.release(range);
        }
        Ok(())
    }
}
