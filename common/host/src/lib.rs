//! What a process needs of its host: what it has used, how many files it may have open, where its sockets lie, its log,
//! its end, its allocator, files that it maps, memory that it gives back.

pub mod allocator;
pub mod clock;
pub mod compute;
mod descriptors;
pub mod lifeline;
pub mod logs;
mod mapped;
pub mod memory;
mod repeats;
mod sealed;
mod socket;
mod usage;
mod values;

pub use descriptors::{descriptor_limit, is_shortage, open_descriptors, raise_descriptor_limit};
pub use mapped::Mapped;
pub use repeats::Repeats;
pub use sealed::Sealed;
pub use socket::{socket_dir, socket_path, sweep_sockets};
pub use usage::{Usage, cpu_seconds_of, name, storage, usage};
pub use values::{Pages, Scratch};
