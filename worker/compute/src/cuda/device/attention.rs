//! Causal self-attention.

use super::{
    CudaDevice, Precision,
    buffers::{Floats, Values},
};
use crate::{
    cuda::{
        kernels::Unit,
        launch::{Arg, Geometry, int},
    },
    device::Attentions,
    error::{DeviceError, Result},
    shape::AttentionShape,
};

impl CudaDevice {
    pub(super) fn attention_geometry(&self, s: AttentionShape, backward: bool) -> Geometry {
        let half = self.precision.cast().is_some();
        let rows = if half { 64 } else { 32 };
        let hd = s.head;
        let other = if hd <= 64 { 64 } else { 32 };
        let shared = match (half, backward) {
            (false, false) => 384 * (hd + 4) + 4608,
            (true, false) => 640 * (hd + 8),
            (false, true) => 512 * (hd + 4) + 9472,
            (true, true) => (256 + 8 * other) * (hd + 8) + 16 * other,
        };
        Geometry::grid([s.time.div_ceil(rows), s.heads, s.batch], 128).with_shared(shared)
    }

    pub(super) fn attention_kernel(&self, name: &str, s: AttentionShape) -> Result<String> {
        if !matches!(s.head, 16 | 32 | 64 | 128) || s.heads > 65_535 || s.batch > 65_535 {
            return Err(DeviceError::Unsupported(format!(
                "attention with {} heads of {} values over {} sequences: on a GPU heads have 16, 32, 64 or 128 values, and \
                 there are at most 65535 of heads and of sequences",
                s.heads, s.head, s.batch
            )));
        }
        if self.precision == Precision::Bf16 && self.context.compute() < (8, 0) {
            return Err(DeviceError::Unsupported(format!(
                "{} has no products in bf16; use train.precision = \"f16\" or \"f32\"",
                self.context.name()
            )));
        }
        Ok(format!("{name}_{}_{}", self.precision.suffix(), s.head))
    }
}

impl Attentions for CudaDevice {
    fn attention(&mut self, s: AttentionShape, qkv: &Values, out: &mut Values, stats: &mut Floats) -> Result {
        let name = self.attention_kernel("attention", s)?;
        self.sized(out, s.rows() * s.width(), "activations")?;
        // Twice the size: the backward pass keeps a sum per row in addition.
        self.floats(stats, 2 * s.rows() * s.heads, "statistics of an attention")?;
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.launch(
                Unit::Attention,
                &name,
                self.attention_geometry(s, false),
                &[
                    ("qkv", qkv.at()),
                    ("out", out.at()),
                    ("lse", stats.at(0)),
                    ("batch", int(s.batch)),
                    ("time", int(s.time)),
                    ("heads", int(s.heads)),
                    ("scale", Arg::Float(s.scale())),
                ],
            )
        }
    }

    fn attention_backward(
        &mut self,
        s: AttentionShape,
        qkv: &Values,
        out: &Values,
        stats: &Floats,
        dout: &Values,
        dqkv: &mut Values,
    ) -> Result {
        self.sized(dqkv, 3 * s.rows() * s.width(), "gradients of activations")?;
        let (lse, delta) = (stats.at(0), stats.at(s.rows() * s.heads));
        // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
        unsafe {
            self.typed(
                Unit::Attention,
                "attention_delta",
                Geometry::line((s.rows() * s.heads).div_ceil(8).min(1 << 20), 256),
                &[
                    ("dout", dout.at()),
                    ("out", out.at()),
                    ("delta", delta),
                    ("batch", int(s.batch)),
                    ("time", int(s.time)),
                    ("heads", int(s.heads)),
                    ("hd", int(s.head)),
                ],
            )
        }?;
        for pass in ["attention_backward_kv", "attention_backward_q"] {
            let name = self.attention_kernel(pass, s)?;
            // SAFETY: the arguments match the kernel; their buffers are as long as the lengths among them say.
            unsafe {
                self.launch(
                    Unit::Attention,
                    &name,
                    self.attention_geometry(s, true),
                    &[
                        ("qkv", qkv.at()),
                        ("dout", dout.at()),
                        ("lse", lse),
                        ("delta", delta),
                        ("dqkv", dqkv.at()),
                        ("batch", int(s.batch)),
                        ("time", int(s.time)),
                        ("heads", int(s.heads)),
                        ("scale", Arg::Float(s.scale())),
                    ],
                )
            }?;
        }
        Ok(())
    }
}
