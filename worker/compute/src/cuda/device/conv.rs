//! Convolution blocks: convolution, BatchNorm, ReLU and pooling.

use super::{
    CudaDevice, Precision,
    buffers::{Floats, Values},
    room,
};
use crate::{
    cuda::{
        flat::{Gradient, Params},
        kernels::Unit,
        launch::{Arg, Geometry, int},
        memory::Buffer,
    },
    device::{Buffers, Convolutions, Linears},
    error::Result,
    shape::{Activation, ConvBlockAt, ConvBlockShape, LinearAt, LinearShape},
};

/// `[n, channels, height, width]`
#[derive(Debug, Default)]
pub struct Images {
    values: Values,
}

/// The workspace of a convolution block.
#[derive(Debug)]
pub struct ConvBlock {
    shape: ConvBlockShape,
    at: ConvBlockAt,
    /// The convolution's output; after `backward_weight` its gradient.
    y: Values,
    pooled: Images,
    dpooled: Values,
    pick: Option<Buffer<u8>>,
    /// `[6, channels]`: scale, shift, mean, inverse of the deviation, and two for the backward pass.
    norm: Floats,
    /// `[2, channels]`, and the number of values per channel, of this rank or of the group.
    sums: Option<Buffer<f64>>,
}

impl ConvBlock {
    fn channels(&self) -> usize {
        self.shape.conv.outputs
    }

    fn height(&self) -> usize {
        self.shape.conv.side(self.shape.height)
    }

    fn width(&self) -> usize {
        self.shape.conv.side(self.shape.width)
    }

    fn pooled_len(&self, n: usize) -> usize {
        n * self.channels() * (self.height() / 2) * (self.width() / 2)
    }

    /// Values per channel in `n` images.
    fn count(&self, n: usize) -> usize {
        n * self.height() * self.width()
    }

    fn scale(&self) -> Arg {
        self.norm.at(0)
    }

    fn shift(&self) -> Arg {
        self.norm.at(self.channels())
    }

    fn mean(&self) -> Arg {
        self.norm.at(2 * self.channels())
    }

    fn inverse(&self) -> Arg {
        self.norm.at(3 * self.channels())
    }

    fn slopes(&self) -> Arg {
        self.norm.at(4 * self.channels())
    }

    fn pick(&self) -> Arg {
        Arg::At(self.pick.as_ref().map_or(0, |b| b.at(0)))
    }

    fn sums(&self) -> Arg {
        Arg::At(self.sums.as_ref().map_or(0, |b| b.at(0)))
    }

    /// Offsets of bias, gamma and beta.
    fn channel_tensor(&self, i: usize) -> usize {
        self.at.params + self.shape.conv.weight_len() + i * self.channels()
    }

    fn running(&self, i: usize) -> usize {
        self.at.buffers + i * self.channels()
    }
}

/// Images per chunk, and number of chunks, in sums over channels.
fn image_chunks(n: usize, channels: usize) -> (usize, usize) {
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

    /// The dimensions that every convolution kernel takes.
    pub(super) fn conv_dims(block: &ConvBlock, n: usize) -> [(&'static str, Arg); 7] {
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

    /// Launches a convolution kernel.
    fn convolve(&self, name: &str, geometry: Geometry, args: &[(&str, Arg)]) -> Result {
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe { self.launch(Unit::Conv, &format!("{name}_{}", self.conv_kernels().1), geometry, args) }
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
        ConvBlock {
            shape,
            at,
            y: Values::default(),
            pooled: Images::default(),
            dpooled: Values::default(),
            pick: None,
            norm: Floats::default(),
            sums: None,
        }
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
        let [n_arg, rest @ ..] = Self::conv_dims(block, n);
        let [cin, hh, ww, cout, k, pad] = rest;
        self.convolve(
            "conv_forward",
            Geometry::grid([(n * h * w).div_ceil(self.conv_kernels().0), c.div_ceil(32), 1], 128),
            &[
                ("x", x.values.at()),
                ("weight", Arg::At(params.at(block.at.params))),
                ("bias", Arg::At(params.f32_at(block.channel_tensor(0)))),
                ("y", block.y.at()),
                n_arg,
                cin,
                hh,
                ww,
                cout,
                k,
                pad,
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
        let [n_arg, rest @ ..] = Self::conv_dims(block, n);
        let [cin, hh, ww, cout, k, pad] = rest;
        self.convolve(
            "conv_backward_weight_partial",
            Geometry::grid([across, down, chunks], 128),
            &[
                ("x", x.values.at()),
                ("dy", block.y.at()),
                ("partial", partial),
                n_arg,
                cin,
                hh,
                ww,
                cout,
                k,
                pad,
                ("pixels_per_chunk", int(each)),
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
        let [n_arg, rest @ ..] = Self::conv_dims(block, n);
        let [cin, hh, ww, cout, k, pad] = rest;
        self.convolve(
            "conv_backward_input",
            Geometry::grid(
                [(n * height * width).div_ceil(self.conv_kernels().0), conv.inputs.div_ceil(32), 1],
                128,
            ),
            &[
                ("dy", block.y.at()),
                ("weight", Arg::At(params.at(block.at.params))),
                ("dx", before.dpooled.at()),
                n_arg,
                cin,
                hh,
                ww,
                cout,
                k,
                pad,
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
