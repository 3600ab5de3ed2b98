//! The wire: generated messages and their conversions to and from the domain. Knows `paraft-common`;
//! `paraft-common` does not know it. Wire types stop at the server's `rpc/` and at the client.

#[allow(missing_docs, clippy::all)]
mod generated {
    tonic::include_proto!("paraft.v1");
}

pub mod bulk;
mod candidates;
mod checkpoint;
mod fleet;
mod group;
pub mod limits;
pub mod refusal;
pub mod services;

pub use bulk::{Incoming, WithBulk};
pub use candidates::Candidates;
pub use fleet::{is_trained, no_leader};
/// The wire's [`RefusalKind`], without its facts.
pub use generated::RefusalKind as WireKind;
pub use generated::*;
pub use refusal::{Refusal, RefusalKind};

/// Version of this protocol. A client and a server with different numbers refuse each other by name.
pub const PROTOCOL: u32 = 7;
