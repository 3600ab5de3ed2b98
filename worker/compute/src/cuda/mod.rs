//! NVIDIA GPUs, through cudarc's bindings; all libraries are opened at run time.
//!
//! ```text
//!  library   the CUDA libraries of this machine, and their functions
//!  driver    context, streams, events ── memory: buffers on the device, pinned ones on the host
//!  compile   a .cu ─▶ NVRTC ─▶ cubin, cached on disk ── kernels: the sources, and functions by name
//!  launch    a kernel with its arguments; an error names them ── blas: matrix products, lt: with epilogues
//!  device    CudaDevice: the operators ── flat: parameters and gradients; inbox, outbox: their transfers
//!  graph     a step's work, recorded and replayed
//!  optim     the servers' optimizers, for jobs without servers
//!  nccl      a group of ranks with a GPU each: means of gradients, sums of norms, weights from rank 0
//! ```
//!
//! No function of cudarc is called before [`library::find`] has found its library and functions: cudarc panics if
//! one is missing. Work is started on a stream and completes later; the host waits by an event before it reads
//! results. Memory is freed only when the device has finished with it.

mod blas;
mod compile;
mod device;
mod driver;
mod flat;
mod graph;
mod inbox;
mod kernels;
mod launch;
pub mod library;
mod lt;
pub mod measure;
mod memory;
mod nccl;
mod optim;
mod outbox;
mod shelf;

pub use compile::version as nvrtc_version;
pub use device::{CudaDevice, CudaOptions, Precision, StepResult};
pub use driver::{Context, Event, Stream, count, version};
pub use flat::{Gradient, Params};
pub use graph::{Graph, Recording};
pub use inbox::Inbox;
pub use memory::{Buffer, Pinned};
pub use nccl::{Nccl, UniqueId, version as nccl_version};
pub use optim::{Rule, Slots, Update};
pub use outbox::{GradientPart, Outbox, PinnedBytes, Wire};
pub use shelf::{Keep, ReceivedPart, Shelf};
