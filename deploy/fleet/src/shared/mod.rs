//! What the processes of one fleet share that an engine has started: how they find each other, and what they have agreed on before
//! there are servers to agree on anything. Two ways: the run's folder on a shared file system ([`Folder`]), or names that are known
//! beforehand (`--servers`, DNS), which need nothing of this module but a server's own [`Lock`].
//!
//! What it is not: the fleet's agreement, which is the control group's. Nothing here is read once a server is in its fleet, but for
//! addresses by those that look for it.

mod bootstrap;
mod folder;
mod host;
mod lock;
mod worker;

pub use bootstrap::{JoinDecision, RunningFleet};
pub use folder::{Address, Folder, JobEnd};
pub use host::own_host;
pub use lock::Lock;
pub use worker::Worker;
