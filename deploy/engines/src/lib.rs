//! The engines that start, place and restart the processes of a fleet: Slurm, Kubernetes, compose, systemd, torchrun and others.
//!
//! - [`mod@place`]: what this process is among those that an engine has started, from its variables alone.
//! - [`wrong`]: why that can't be, or an engine's command failed.
//!
//! What it is not: it starts and restarts nothing by itself, and knows neither servers nor workers. Engines place and restart; what
//! a process then does with its place is `paraft-fleet`'s.

pub mod place;
pub mod wrong;

pub use place::{Asked, Place, Role, Surroundings, place, variables};
pub use wrong::{Kind, Wrong};
