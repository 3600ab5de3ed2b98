//! Tensors on a device: the operators of PyTorch's `nn.functional`, forward and backward, without an autograd
//! graph.
//!
//! | module | what it is |
//! |---|---|
//! | [`device`] | [`Device`]: the operators that a model's code is written against |
//! | [`mod@shape`] | the shapes that they take, and where tensors lie in the flat vectors |
//! | [`cpu`] | [`CpuDevice`], and the operators over slices |
//! | [`cuda`] | [`CudaDevice`](cuda::CudaDevice): NVIDIA's GPUs, with the kernels of `kernels/` |
//! | [`mod@reference`] | slow, plain versions in double precision: the oracle in the tests of the fast ones, on every device |
//! | [`collective`] | [`Group`](collective::Group): ranks that reduce among themselves, over sockets |
//! | [`parity`] | the same cases on every device against that oracle |
//!
//! It guarantees: same device, same inputs, same bits. It does not guarantee the same bits on machines with
//! different vector instructions, nor that its operators check values for NaN.
//!
//! The caller guarantees shapes: an operator panics if a slice has the wrong length, before it touches it. Models
//! check external input (labels, batch sizes) and return errors.

pub mod collective;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod error;
pub mod parity;
pub mod reference;
pub mod shape;

pub use cpu::{Cpu, CpuDevice, Isa, LANES, Lane, Threads};
pub use device::{Device, Sums};
pub use error::DeviceError;
