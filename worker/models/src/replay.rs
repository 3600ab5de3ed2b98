//! Steps of a net as CUDA graphs. The first step of a shape starts its kernels one by one and allocates memory, the
//! second is recorded, and later steps replay the graph.
//!
//! A recording ends where a part of the gradient has to leave: there the host runs, as in a step that is not
//! recorded. So both do the same work in the same order, and produce the same bits.

use crate::net::{Net, NetResult, Ready, WholeVectors};
use paraft_compute::cuda::{CudaDevice, Gradient, Graph, Params, Recording};

/// The maximum number of kept shapes, with either parameter buffer; further ones are not recorded.
const MAX_SHAPES: usize = 8;

/// The cuts of a backward pass: each time it passes one of these offsets, which rise, the completed gradient is
/// sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cuts(pub Vec<usize>);

impl Cuts {
    /// Whether to send the gradient that is ready from `offset` on; `left`: the number of cuts not yet passed.
    fn past(&self, left: &mut usize, offset: usize) -> bool {
        let now = self.0.partition_point(|c| *c < offset);
        now < std::mem::replace(left, now.min(*left))
    }
}

/// The properties that determine a step's work.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Shape {
    samples: usize,
    /// The loss scale's bits.
    scale: u32,
    cuts: Cuts,
}

/// A recorded step.
#[derive(Debug)]
struct Replay {
    shape: Shape,
    /// The index of the parameter buffer.
    params: u64,
    /// Each graph with the offset of the gradient to send after it, if any.
    pieces: Vec<(Option<Graph>, Option<usize>)>,
    step_values: usize,
}

/// The recorded steps of a net on a device.
#[derive(Debug, Default)]
pub(crate) struct Replays {
    /// The device's memory layout of the recordings.
    layout: u64,
    seen: Vec<Shape>,
    refused: Vec<Shape>,
    kept: Vec<Replay>,
}

impl Replays {
    /// Drops all recordings, for example when the group changes. No replay may be in progress.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Makes a step on the device's stream, at this scale of the loss. Calls `ready` at the cuts.
    pub fn step(
        &mut self,
        step: &mut LoadedStep<'_>,
        scale: f32,
        ready: &mut dyn FnMut(usize, &Gradient) -> NetResult,
    ) -> NetResult {
        if !step.device.uses_graphs() {
            return step.eager(ready);
        }
        if self.layout != step.device.layout() {
            // Addresses may have changed. No replay is in progress: steps end with their loss on the host.
            self.kept.clear();
            self.refused.clear();
            self.layout = step.device.layout();
        }
        let shape = Shape { samples: step.samples, scale: scale.to_bits(), cuts: step.cuts.clone() };
        // An old scale does not return soon.
        self.kept.retain(|r| r.shape.scale == shape.scale);
        self.seen.retain(|s| s.scale == shape.scale);
        let at = step.params.address();
        let known = self.kept.iter().position(|r| r.shape == shape && r.params == at);
        let known = match known {
            None if !self.seen.contains(&shape) => {
                if self.seen.len() < MAX_SHAPES {
                    self.seen.push(shape);
                }
                None
            }
            None if self.kept.len() < 2 * MAX_SHAPES && !self.refused.contains(&shape) => {
                match step.record() {
                    Ok(pieces) => {
                        let step_values = step.device.step_values();
                        self.kept.push(Replay { shape, params: at, pieces, step_values });
                        Some(self.kept.len() - 1)
                    }
                    Err(error) => {
                        // If the device itself fails, the plain step fails too.
                        tracing::debug!(%error, samples = step.samples, "this step runs without a CUDA graph");
                        self.refused.push(shape);
                        None
                    }
                }
            }
            known => known,
        };
        let Some(replay) = known.map(|i| &self.kept[i]) else {
            return step.eager(ready);
        };
        let stream = step.device.stream().clone();
        for (graph, offset) in &replay.pieces {
            graph.as_ref().map_or(Ok(()), |g| g.launch(&stream))?;
            offset.map_or(Ok(()), |offset| ready(offset, step.gradient))?;
        }
        step.device.repeats(replay.step_values);
        Ok(())
    }
}

/// A step of a batch that is on the device.
pub(crate) struct LoadedStep<'a> {
    pub net: &'a mut dyn Net<CudaDevice>,
    pub device: &'a mut CudaDevice,
    pub params: &'a Params,
    pub gradient: &'a mut Gradient,
    pub samples: usize,
    pub cuts: &'a Cuts,
}

impl LoadedStep<'_> {
    /// Starts its kernels one by one.
    fn eager(&mut self, ready: &mut dyn FnMut(usize, &Gradient) -> NetResult) -> NetResult {
        let (cuts, mut left) = (self.cuts, self.cuts.0.len());
        self.run(&mut |offset: usize, gradient: &Gradient| {
            if cuts.past(&mut left, offset) { ready(offset, gradient) } else { Ok(()) }
        })
    }

    /// Records it without running it.
    fn record(&mut self) -> NetResult<Vec<(Option<Graph>, Option<usize>)>> {
        let stream = self.device.stream().clone();
        let (cuts, mut left) = (self.cuts, self.cuts.0.len());
        let mut pieces = Vec::new();
        let mut open = Some(Recording::begin(&stream)?);
        self.run(&mut |offset: usize, _: &Gradient| {
            if cuts.past(&mut left, offset) {
                let graph = open.take().map_or(Ok(None), Recording::end)?;
                pieces.push((graph, Some(offset)));
                open = Some(Recording::begin(&stream)?);
            }
            Ok(())
        })?;
        pieces.push((open.take().map_or(Ok(None), Recording::end)?, None));
        Ok(pieces)
    }

    fn run(&mut self, ready: &mut Ready<'_, CudaDevice>) -> NetResult {
        let mut flat: WholeVectors<'_, '_, CudaDevice> =
            WholeVectors { params: self.params, grads: &mut *self.gradient, ready };
        self.net.step(self.device, &mut flat, self.samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gradient_is_let_go_where_it_comes_past_a_cut() {
        let past = |cuts: &[usize], offsets: &[usize]| -> Vec<usize> {
            let (cuts, mut left) = (Cuts(cuts.to_vec()), cuts.len());
            offsets.iter().copied().filter(|o| cuts.past(&mut left, *o)).collect()
        };
        assert_eq!(past(&[0, 10, 20], &[25, 20, 15, 12, 10, 3, 0]), [20, 10, 0]);
        assert_eq!(past(&[0, 10, 20], &[5, 0]), [5, 0]);
        assert_eq!(past(&[0], &[5, 1, 0, 0]), [0]);
        assert_eq!(past(&[], &[5, 0]), []);
    }
}
