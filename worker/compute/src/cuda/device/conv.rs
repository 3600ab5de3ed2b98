//! Convolution blocks: convolution, BatchNorm, ReLU and pooling.

mod block;
mod channels;

use super::{CudaDevice, Precision, buffers::Values, room};
use crate::{
    cuda::{
        flat::{Gradient, Params},
        kernels::Unit,
        launch::{Arg, Geometry, int},
    },
    device::{Buffers, Convolutions, Linears},
    error::Result,
    shape::{Activation, ConvBlockAt, ConvBlockShape, LinearAt, LinearShape},
};
use block::{ConvBlock, Images};
use channels::image_chunks;

impl CudaDevice {
    /// The dimensions that every convolution kernel takes.
    fn conv_dims(block: &ConvBlock, n: usize) -> [(&'static str, Arg); 7] {
        let ConvBlockShape { conv, height, width, .. } = block.shape;
        [
            ("n", int(n)),
            ("cin", int(conv.inputs)),
            ("h", int(height)),
            ("w", int(width)),
            ("cout", int(conv.outputs)),
            ("k", int(conv.kernel)),
            ("pad", int(conv.pad)),
        ]
    }

    /// Pixels per block of the convolution kernels, and their suffix. TF32 has separate kernels, for tensor cores.
    fn conv_kernels(&self) -> (usize, &'static str) {
        match self.precision {
            Precision::Tf32 if self.context.compute() >= (8, 0) => (128, "tf32"),
            Precision::F32 | Precision::Tf32 => (256, "f32"),
            Precision::Bf16 | Precision::F16 => (128, self.precision.suffix()),
        }
    }

    /// Launches a convolution kernel, with these arguments one after the other.
    fn convolve(&self, name: &str, geometry: Geometry, args: &[&[(&str, Arg)]]) -> Result {
        let name = format!("{name}_{}", self.conv_kernels().1);
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe { self.launch(Unit::Conv, &name, geometry, &args.concat()) }
    }
}

impl Convolutions for CudaDevice {
    type Images = Images;
    type ConvBlock = ConvBlock;

    fn images(&self, _channels: usize, _height: usize, _width: usize, _border: usize) -> Images {
        Images::default()
    }

    fn load_images(&mut self, from: &[f32], _n: usize, to: &mut Images) -> Result {
        self.load_values(from, &mut to.values)
    }

    fn conv_block(&self, shape: ConvBlockShape, at: ConvBlockAt) -> ConvBlock {
        ConvBlock::new(shape, at)
    }

    fn conv_block_output(block: &ConvBlock) -> &Images {
        &block.pooled
    }

    fn conv_block_forward(
        &mut self,
        block: &mut ConvBlock,
        x: &Images,
        n: usize,
        params: &Params,
        train: bool,
    ) -> Result {
        let (c, h, w) = (block.channels(), block.height(), block.width());
        let pooled = block.pooled_len(n);
        self.sized(&mut block.y, n * c * h * w, "a convolution")?;
        self.sized(&mut block.pooled.values, pooled, "pooled images")?;
        self.floats(&mut block.norm, 6 * c, "a norm")?;
        room(&self.context, &mut block.pick, pooled, "places of maxima")?;
        self.convolve(
            "conv_forward",
            Geometry::grid([(n * h * w).div_ceil(self.conv_kernels().0), c.div_ceil(32), 1], 128),
            &[
                &[
                    ("x", x.values.at()),
                    ("weight", Arg::At(params.at(block.at.params))),
                    ("bias", Arg::At(params.f32_at(block.channel_tensor(0)))),
                    ("y", block.y.at()),
                ],
                &Self::conv_dims(block, n),
            ],
        )?;
        if train {
            let (each, chunks) = image_chunks(n, c);
            let room = room(&self.context, &mut self.work.doubles, chunks * 2 * c, "channel sums")?;
            let partial = Arg::At(room.at(0));
            // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
            unsafe {
                self.typed(
                    Unit::BatchNorm,
                    "bn_stats_partial",
                    Geometry::grid([c, chunks, 1], 256),
                    &[
                        ("y", block.y.at()),
                        ("partial", partial),
                        ("n", int(n)),
                        ("c", int(c)),
                        ("hw", int(h * w)),
                        ("images_per_chunk", int(each)),
                    ],
                )
            }?;
            self.channel_sums(block, n, chunks)?;
            self.group_sums(block)?;
            self.finalize(block, params, None)?;
        } else {
            // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
            unsafe {
                self.launch(
                    Unit::BatchNorm,
                    "bn_inference",
                    Geometry::line(c.div_ceil(256), 256),
                    &[
                        ("gamma", Arg::At(params.f32_at(block.channel_tensor(1)))),
                        ("beta", Arg::At(params.f32_at(block.channel_tensor(2)))),
                        ("running_mean", Arg::At(params.f32_at(block.running(0)))),
                        ("running_var", Arg::At(params.f32_at(block.running(1)))),
                        ("scale", block.scale()),
                        ("shift", block.shift()),
                        ("c", int(c)),
                        ("eps", Arg::Float(crate::cpu::norm::EPSILON)),
                    ],
                )
            }?;
        }
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::BatchNorm,
                "bn_relu_pool",
                Geometry::flat(4 * pooled),
                &[
                    ("y", block.y.at()),
                    ("scale", block.scale()),
                    ("shift", block.shift()),
                    ("pooled", block.pooled.values.at()),
                    ("pick", block.pick()),
                    ("n", int(n)),
                    ("c", int(c)),
                    ("h", int(h)),
                    ("w", int(w)),
                ],
            )
        }
    }

    fn conv_block_buffers(&mut self, block: &ConvBlock, params: &Params, grads: &mut Gradient) -> Result {
        self.finalize(block, params, Some(grads))
    }

    fn conv_block_backward_norm(
        &mut self,
        block: &mut ConvBlock,
        n: usize,
        _params: &Params,
        grads: &mut Gradient,
    ) -> Result {
        let (c, h, w) = (block.channels(), block.height(), block.width());
        let (each, chunks) = image_chunks(n, c);
        let partial = room(&self.context, &mut self.work.doubles, chunks * 2 * c, "channel sums")?;
        let partial = Arg::At(partial.at(0));
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::BatchNorm,
                "bn_pool_backward_partial",
                Geometry::grid([c, chunks, 1], 256),
                &[
                    ("dpooled", block.dpooled.at()),
                    ("pick", block.pick()),
                    ("y", block.y.at()),
                    ("mean", block.mean()),
                    ("inv_std", block.inverse()),
                    ("partial", partial),
                    ("n", int(n)),
                    ("c", int(c)),
                    ("h", int(h)),
                    ("w", int(w)),
                    ("images_per_chunk", int(each)),
                ],
            )
        }?;
        self.channel_sums(block, n, chunks)?;
        // From this rank's sums, because these gradients are averaged like all others.
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.launch(
                Unit::BatchNorm,
                "bn_write_grads",
                Geometry::line(c.div_ceil(256), 256),
                &[
                    ("sums", block.sums()),
                    ("dgamma", Arg::At(grads.at(block.channel_tensor(1)))),
                    ("dbeta", Arg::At(grads.at(block.channel_tensor(2)))),
                    ("c", int(c)),
                ],
            )
        }?;
        self.group_sums(block)
    }

    fn conv_block_backward_weight(
        &mut self,
        block: &mut ConvBlock,
        x: &Images,
        n: usize,
        _params: &Params,
        grads: &mut Gradient,
    ) -> Result {
        let (c, h, w) = (block.channels(), block.height(), block.width());
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.launch(
                Unit::BatchNorm,
                "bn_backward_slopes",
                Geometry::line(c.div_ceil(256), 256),
                &[
                    ("sums", block.sums()),
                    ("scale", block.scale()),
                    ("inv_std", block.inverse()),
                    ("slopes", block.slopes()),
                    ("c", int(c)),
                ],
            )
        }?;
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::BatchNorm,
                "bn_relu_pool_backward",
                Geometry::flat(8 * n * c * h.div_ceil(2) * w.div_ceil(2)),
                &[
                    ("dpooled", block.dpooled.at()),
                    ("pick", block.pick()),
                    ("y", block.y.at()),
                    ("scale", block.scale()),
                    ("mean", block.mean()),
                    ("slopes", block.slopes()),
                    ("dy", block.y.at()),
                    ("n", int(n)),
                    ("c", int(c)),
                    ("h", int(h)),
                    ("w", int(w)),
                ],
            )
        }?;
        let taps = block.shape.conv.weight_len() / c;
        let (across, down) = ((taps + 1).div_ceil(64), c.div_ceil(32));
        let pixels = block.count(n);
        let chunks = 1024usize.div_ceil(across * down).clamp(1, pixels.div_ceil(256));
        let each = pixels.div_ceil(chunks).div_ceil(32) * 32;
        let chunks = pixels.div_ceil(each);
        let partial = room(&self.context, &mut self.work.floats, chunks * c * (taps + 1), "weight sums")?;
        let partial = Arg::At(partial.at(0));
        self.convolve(
            "conv_backward_weight_partial",
            Geometry::grid([across, down, chunks], 128),
            &[
                &[("x", x.values.at()), ("dy", block.y.at()), ("partial", partial)],
                &Self::conv_dims(block, n),
                &[("pixels_per_chunk", int(each))],
            ],
        )?;
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.launch(
                Unit::Conv,
                "conv_backward_weight_final",
                Geometry::line((c * (taps + 1)).div_ceil(32), 256),
                &[
                    ("partial", partial),
                    ("dweight", Arg::At(grads.at(block.at.params))),
                    ("dbias", Arg::At(grads.at(block.channel_tensor(0)))),
                    ("chunks", int(chunks)),
                    ("cout", int(c)),
                    ("K", int(taps)),
                    ("accumulate", Arg::Int(0)),
                ],
            )
        }
    }

    fn conv_block_backward_input(
        &mut self,
        block: &mut ConvBlock,
        n: usize,
        params: &Params,
        before: &mut ConvBlock,
    ) -> Result {
        let ConvBlockShape { conv, height, width, .. } = block.shape;
        let pooled = before.pooled_len(n);
        self.sized(&mut before.dpooled, pooled, "gradients of images")?;
        self.convolve(
            "conv_backward_input",
            Geometry::grid(
                [(n * height * width).div_ceil(self.conv_kernels().0), conv.inputs.div_ceil(32), 1],
                128,
            ),
            &[
                &[
                    ("dy", block.y.at()),
                    ("weight", Arg::At(params.at(block.at.params))),
                    ("dx", before.dpooled.at()),
                ],
                &Self::conv_dims(block, n),
            ],
        )
    }

    fn image_linear(
        &mut self,
        shape: LinearShape,
        x: &ConvBlock,
        params: &Params,
        at: LinearAt,
        y: &mut Values,
    ) -> Result {
        self.linear(shape, &x.pooled.values, params, at, Activation::None, y, None)
    }

    fn image_linear_backward_weight(
        &mut self,
        shape: LinearShape,
        x: &ConvBlock,
        dy: &Values,
        at: LinearAt,
        grads: &mut Gradient,
    ) -> Result {
        self.linear_backward_weight(shape, &x.pooled.values, dy, at, grads)
    }

    fn image_linear_backward_input(
        &mut self,
        shape: LinearShape,
        dy: &Values,
        params: &Params,
        at: LinearAt,
        x: &mut ConvBlock,
    ) -> Result {
        self.linear_backward_input(shape, dy, params, at, &mut x.dpooled)
    }
}
