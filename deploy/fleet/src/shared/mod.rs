//! The shared state of a fleet's processes that an engine starts one by one: how they find each other
//! before any server runs. There are two ways: the run's folder on a shared file system ([`Folder`]),
//! or names that are known in advance (`--addresses`, DNS). The second needs only a server's own
//! [`Lock`].
//!
//! The fleet's agreement is the control group's. Once a server is in its fleet, only processes that
//! search for it read its address here.

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
