//! The engines that start, place and restart the processes of a fleet: Slurm, Kubernetes, compose, systemd, torchrun and others.
//!
//! - [`mod@place`]: what this process is among those that an engine has started, from its variables alone.
//! - [`engine`]: the interface to one: its files rendered, submitted, asked for, ended. [`fleet`]: what is to be run, without an
//!   engine; [`certs`]: by what its processes know each other. [`slurm`],
//!   [`kubernetes`], [`compose`], [`systemd`], [`ssh`].
//! - [`error`]: why that can't be, or an engine's command failed.
//!
//! What it is not: it starts and restarts nothing by itself, and knows neither servers nor workers. Engines place and restart; what
//! a process then does with its place is `paraft-fleet`'s.

pub mod certs;
pub mod compose;
pub mod engine;
pub mod error;
pub mod fleet;
#[cfg(test)]
mod golden;
pub mod kubernetes;
pub mod place;
pub mod slurm;
pub mod ssh;
pub mod systemd;

pub use certs::Certs;
pub use engine::{Artifact, Engine, Handle, Member, ProcessOutput};
pub use error::{EngineError, Kind};
pub use fleet::{Fleet, Mount, Part};
pub use place::{HostContext, Place, PlaceFlags, Role, place, variables};

/// The engine of this name, as [`Engine::name`] and a [`Handle`] have it.
pub fn named(name: &str) -> Option<Box<dyn Engine>> {
    let all: [Box<dyn Engine>; 7] = [
        Box::new(slurm::Slurm),
        Box::new(kubernetes::Kubernetes::Sets),
        Box::new(kubernetes::Kubernetes::JobSet),
        Box::new(kubernetes::Kubernetes::Trainer),
        Box::new(compose::Compose),
        Box::new(systemd::Systemd),
        Box::new(ssh::Ssh),
    ];
    all.into_iter().find(|engine| engine.name() == name)
}
