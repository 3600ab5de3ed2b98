//! What the processes of one fleet share that an engine has started: how they find each other, and what they have agreed on before
//! there are servers to agree on anything. Two ways: the run's folder on a shared file system ([`Folder`]), or names that are known
//! beforehand (`--servers`, DNS), which need nothing of this module but a server's own [`Lock`].
//!
//! What it is not: the fleet's agreement, which is the control group's. Nothing here is read once a server is in its fleet, but for
//! addresses by those that look for it.

mod folder;
mod founding;
mod lock;
mod own;
mod worker;

pub use folder::{Address, Ended, Folder};
pub use founding::{Answering, Way};
pub use lock::Lock;
pub use own::own_host;
pub use worker::Worker;
