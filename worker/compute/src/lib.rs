//! CPU operators for training: what PyTorch's `nn.functional` does, one thread, no allocation in the step.
//!
//! Two families:
//!
//! - over plain row-major `&[f32]`: [`linear`] (matrix products) and [`loss`];
//! - over the blocked layout of [`blocked`], where sixteen samples are the lanes of a vector: [`conv`],
//!   [`conv_grad`], [`norm`] and [`norm_grad`] (BatchNorm fused with ReLU and 2x2 max pooling) and [`head`] (a linear layer on
//!   blocked features).
//!
//! [`mod@reference`] has slow, plain versions of all of them; they are the oracle in the tests of the fast ones,
//! here and on other devices.
//!
//! It promises: same machine, same inputs, same bits. It does not promise the same bits on two machines with
//! different vector instructions, nor that its operators check values for NaN.
//!
//! Shapes are the caller's duty: an operator panics when a slice has the wrong length, before it touches it.
//! Models check what comes from outside (labels, batch sizes) and return errors.

pub mod blocked;
pub mod conv;
pub mod conv_grad;
pub mod head;
pub mod linear;
pub mod loss;
pub mod norm;
pub mod norm_grad;
pub mod reference;
mod simd;

pub use simd::{Cpu, Isa, LANES, Lane};
