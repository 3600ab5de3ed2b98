//! What a process needs of its host: what it has used, where its sockets lie, its log, its end.

pub mod clock;
pub mod lifeline;
pub mod logs;
pub mod memory;
mod socket;
mod usage;

pub use socket::{is_local, socket_path, sweep_sockets};
pub use usage::{Usage, cpu_seconds_of, usage};
