//! The CPU's operators, without tensor allocation in a step, and [`CpuDevice`], which provides them to models.
//! Costly operators use several threads ([`Threads`]).
//!
//! Two families:
//!
//! - over plain row-major `&[f32]`: [`linear`] (matrix products), [`activation`], [`loss`], [`row_norm`], [`attention`] and
//!   [`embedding`];
//! - over the blocked layout of [`blocked`], where sixteen samples are the lanes of a vector: [`conv`], [`conv_grad`],
//!   [`norm`] and [`norm_grad`] (BatchNorm fused with ReLU and 2x2 max pooling), together in [`conv_block`], and [`head`] (a
//!   linear layer on blocked features).

pub mod activation;
pub mod attention;
pub mod blocked;
pub mod conv;
pub mod conv_block;
pub mod conv_grad;
mod device;
pub mod embedding;
pub mod head;
pub mod linear;
pub mod loss;
mod matrix;
pub mod norm;
pub mod norm_grad;
pub mod row_norm;
mod simd;
mod threads;
mod vector;

pub use device::CpuDevice;
pub use simd::{Cpu, Isa, LANES, Lane};
pub use threads::Threads;
