//! NVIDIA GPUs, by cudarc's bindings, everything opened at run time.
//!
//! ```text
//!  library   which of CUDA's libraries are there, and have what we call
//!  driver    context, streams, events ── memory: buffers on the device, pinned ones on the host
//!  compile   a .cu ─▶ NVRTC ─▶ cubin, kept on the disk ── kernels: the sources, and functions by name
//!  launch    a kernel with its arguments; an error names them ── blas: matrix products, lt: with what follows them
//!  device    CudaDevice: the operators ── flat: parameters and gradients, and their ways to and from the host
//!  graph     a step's work, begun at once
//!  optim     the servers' optimizers, for ranks that have none
//!  nccl      a group of ranks with a GPU each: means of gradients, sums of norms, weights from rank 0
//! ```
//!
//! Nothing of cudarc is called before [`library::find`] has seen the library and the functions: cudarc panics where one is
//! missing. Everything is begun on a stream and done later; what the host reads it waits for by an event. A value's memory is
//! given back only when the device has nothing left to do.

mod blas;
mod compile;
mod device;
mod driver;
mod flat;
mod graph;
mod kernels;
mod launch;
pub mod library;
mod lt;
pub mod measure;
mod memory;
mod nccl;
mod optim;
mod shelf;

pub use compile::version as nvrtc_version;
pub use device::{CudaDevice, CudaOptions, Precision, StepResult};
pub use driver::{Context, Event, Stream, count, version};
pub use flat::{Gradient, GradientPart, Inbox, Outbox, Params, PinnedBytes, Wire};
pub use graph::{Graph, Recording};
pub use memory::{Buffer, Pinned};
pub use nccl::{Nccl, UniqueId, version as nccl_version};
pub use optim::{Rule, Slots, Update};
pub use shelf::{Keep, ReceivedPart, Shelf};
