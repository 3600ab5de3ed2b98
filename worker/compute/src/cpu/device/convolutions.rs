//! Convolution blocks, and the linear layer over their output.

use super::{CpuDevice, of, of_mut, sized};
use crate::{
    cpu::{
        blocked::{Geometry, Planes, blocks},
        conv_block::ConvBlock,
        head,
        simd::Lane,
    },
    device::Convolutions,
    error::Result,
    shape::{ConvBlockAt, ConvBlockShape, LinearAt, LinearShape},
};

impl Convolutions for CpuDevice {
    type Images = Planes;
    type ConvBlock = ConvBlock;

    fn images(&self, channels: usize, height: usize, width: usize, border: usize) -> Planes {
        Planes::new(Geometry::new(channels, height, width, border))
    }

    fn load_images(&mut self, from: &[f32], n: usize, to: &mut Planes) -> Result {
        to.pack(&self.threads, from, n);
        Ok(())
    }

    fn conv_block(&self, shape: ConvBlockShape, at: ConvBlockAt) -> ConvBlock {
        ConvBlock::new(shape, at)
    }

    fn conv_block_output(block: &ConvBlock) -> &Planes {
        &block.pooled
    }

    fn conv_block_forward(
        &mut self,
        block: &mut ConvBlock,
        x: &Planes,
        n: usize,
        params: &[f32],
        train: bool,
    ) -> Result {
        block.forward(&self.threads, x, n, params, (train, self.ranks.as_deref()))
    }

    fn conv_block_buffers(&mut self, block: &ConvBlock, params: &[f32], grads: &mut [f32]) -> Result {
        block.write_buffers(params, grads);
        Ok(())
    }

    fn conv_block_backward_norm(
        &mut self,
        block: &mut ConvBlock,
        n: usize,
        _params: &[f32],
        grads: &mut [f32],
    ) -> Result {
        block.backward_norm(&self.threads, n, grads, self.ranks.as_deref())
    }

    fn conv_block_backward_weight(
        &mut self,
        block: &mut ConvBlock,
        x: &Planes,
        n: usize,
        _params: &[f32],
        grads: &mut [f32],
    ) -> Result {
        block.backward_weight(&self.threads, x, n, grads);
        Ok(())
    }

    fn conv_block_backward_input(
        &mut self,
        block: &mut ConvBlock,
        n: usize,
        params: &[f32],
        before: &mut ConvBlock,
    ) -> Result {
        block.backward_input(&self.threads, n, params, &mut before.dpooled);
        Ok(())
    }

    fn image_linear(
        &mut self,
        shape: LinearShape,
        x: &ConvBlock,
        params: &[f32],
        at: LinearAt,
        y: &mut Vec<f32>,
    ) -> Result {
        let (weight, bias) = of(params, shape, at);
        self.lanes.resize(blocks(shape.n) * shape.outputs, Lane::ZERO);
        let threads = &self.threads;
        threads.each(self.lanes.chunks_exact_mut(shape.outputs).enumerate(), |(b, lanes)| {
            head::forward_block(threads.cpu(), &x.pooled, b, weight, bias, lanes);
        });
        head::unpack(&self.lanes, shape.outputs, sized(y, shape.n * shape.outputs));
        Ok(())
    }

    fn image_linear_backward_weight(
        &mut self,
        shape: LinearShape,
        x: &ConvBlock,
        dy: &Vec<f32>,
        at: LinearAt,
        grads: &mut [f32],
    ) -> Result {
        let (dweight, dbias) = of_mut(grads, shape, at);
        self.lanes.resize(blocks(shape.n) * shape.outputs, Lane::ZERO);
        head::pack(dy, shape.outputs, &mut self.lanes);
        head::backward_weight(self.threads.cpu(), shape.n, &x.pooled, &self.lanes, dweight, dbias);
        Ok(())
    }

    fn image_linear_backward_input(
        &mut self,
        shape: LinearShape,
        dy: &Vec<f32>,
        params: &[f32],
        at: LinearAt,
        x: &mut ConvBlock,
    ) -> Result {
        let weight = of(params, shape, at).0;
        self.lanes.resize(blocks(shape.n) * shape.outputs, Lane::ZERO);
        head::pack(dy, shape.outputs, &mut self.lanes);
        let threads = &self.threads;
        let features = x.dpooled.blocks_mut(shape.n);
        threads.each(self.lanes.chunks_exact(shape.outputs).zip(features), |(lanes, mut dx)| {
            head::backward_block(threads.cpu(), lanes, weight, &mut dx);
        });
        Ok(())
    }
}
