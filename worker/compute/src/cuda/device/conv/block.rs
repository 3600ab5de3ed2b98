//! The workspace of a convolution block.

use crate::{
    cuda::{
        device::buffers::{Floats, Values},
        launch::Arg,
        memory::Buffer,
    },
    shape::{ConvBlockAt, ConvBlockShape},
};

/// `[n, channels, height, width]`
#[derive(Debug, Default)]
pub struct Images {
    pub(super) values: Values,
}

/// The workspace of a convolution block.
#[derive(Debug)]
pub struct ConvBlock {
    pub(super) shape: ConvBlockShape,
    pub(super) at: ConvBlockAt,
    /// The convolution's output; after `backward_weight` its gradient.
    pub(super) y: Values,
    pub(super) pooled: Images,
    pub(super) dpooled: Values,
    pub(super) pick: Option<Buffer<u8>>,
    /// `[6, channels]`: scale, shift, mean, inverse of the deviation, and two for the backward pass.
    pub(super) norm: Floats,
    /// `[2, channels]`, and the number of values per channel, of this rank or of the group.
    pub(super) sums: Option<Buffer<f64>>,
}

impl ConvBlock {
    pub(super) fn new(shape: ConvBlockShape, at: ConvBlockAt) -> Self {
        Self {
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

    pub(super) fn channels(&self) -> usize {
        self.shape.conv.outputs
    }

    pub(super) fn height(&self) -> usize {
        self.shape.conv.side(self.shape.height)
    }

    pub(super) fn width(&self) -> usize {
        self.shape.conv.side(self.shape.width)
    }

    pub(super) fn pooled_len(&self, n: usize) -> usize {
        n * self.channels() * (self.height() / 2) * (self.width() / 2)
    }

    /// Values per channel in `n` images.
    pub(super) fn count(&self, n: usize) -> usize {
        n * self.height() * self.width()
    }

    pub(super) fn scale(&self) -> Arg {
        self.norm.at(0)
    }

    pub(super) fn shift(&self) -> Arg {
        self.norm.at(self.channels())
    }

    pub(super) fn mean(&self) -> Arg {
        self.norm.at(2 * self.channels())
    }

    pub(super) fn inverse(&self) -> Arg {
        self.norm.at(3 * self.channels())
    }

    pub(super) fn slopes(&self) -> Arg {
        self.norm.at(4 * self.channels())
    }

    pub(super) fn pick(&self) -> Arg {
        Arg::At(self.pick.as_ref().map_or(0, |b| b.at(0)))
    }

    pub(super) fn sums(&self) -> Arg {
        Arg::At(self.sums.as_ref().map_or(0, |b| b.at(0)))
    }

    /// Offsets of bias, gamma and beta.
    pub(super) fn channel_tensor(&self, i: usize) -> usize {
        self.at.params + self.shape.conv.weight_len() + i * self.channels()
    }

    pub(super) fn running(&self, i: usize) -> usize {
        self.at.buffers + i * self.channels()
    }
}
