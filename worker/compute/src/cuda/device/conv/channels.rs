//! Sums over channels, for BatchNorm.

use super::ConvBlock;
use crate::{
    cuda::{
        device::{CudaDevice, room},
        flat::{Gradient, Params},
        kernels::Unit,
        launch::{Arg, Geometry, int},
    },
    error::Result,
};

/// Images per chunk, and number of chunks, in sums over channels.
pub(super) fn image_chunks(n: usize, channels: usize) -> (usize, usize) {
    let chunks = n.min(2048usize.div_ceil(channels));
    let each = n.div_ceil(chunks);
    (each, n.div_ceil(each))
}

impl CudaDevice {
    /// Partial sums of two values per channel, over `n` images, into `block.sums`.
    pub(super) fn channel_sums(&mut self, block: &mut ConvBlock, n: usize, chunks: usize) -> Result {
        let c = block.channels();
        room(&self.context, &mut block.sums, 2 * c + 1, "channel sums")?;
        let partial = Arg::At(room(&self.context, &mut self.work.doubles, 0, "")?.at(0));
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.launch(
                Unit::BatchNorm,
                "bn_sum",
                Geometry::line((2 * c).div_ceil(8), 256),
                &[
                    ("partial", partial),
                    ("sums", block.sums()),
                    ("chunks", int(chunks)),
                    ("m", int(2 * c)),
                    ("count", Arg::Double(block.count(n) as f64)),
                ],
            )
        }
    }

    /// Sums `block.sums` over the ranks, and also the counts, because batch sizes may differ.
    pub(super) fn group_sums(&self, block: &ConvBlock) -> Result {
        match (self.others(), &block.sums) {
            (Some(group), Some(sums)) => {
                group.all_reduce_sum(sums, 0..2 * block.channels() + 1, &self.stream)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn finalize(&self, block: &ConvBlock, params: &Params, grads: Option<&Gradient>) -> Result {
        let running = |i| Arg::At(params.f32_at(block.running(i)));
        let change = |i| Arg::At(grads.map_or(0, |g| g.at(block.running(i))));
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.launch(
                Unit::BatchNorm,
                "bn_finalize",
                Geometry::line(block.channels().div_ceil(256), 256),
                &[
                    ("sums", block.sums()),
                    ("gamma", Arg::At(params.f32_at(block.channel_tensor(1)))),
                    ("beta", Arg::At(params.f32_at(block.channel_tensor(2)))),
                    ("running_mean", running(0)),
                    ("running_var", running(1)),
                    ("scale", block.scale()),
                    ("shift", block.shift()),
                    ("mean", block.mean()),
                    ("inv_std", block.inverse()),
                    ("d_running_mean", change(0)),
                    ("d_running_var", change(1)),
                    ("c", int(block.channels())),
                    ("eps", Arg::Float(crate::cpu::norm::EPSILON)),
                    ("momentum", Arg::Float(crate::cpu::norm::MOMENTUM)),
                ],
            )
        }
    }
}
