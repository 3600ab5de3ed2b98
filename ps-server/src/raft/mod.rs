//! Raft for shards and for the control group: openraft stops here.
//!
//! The rest of the server sees a [`Group`]: propose in order, learn the outcome, know who leads, wait until
//! everything before this term is applied, change who takes part. No other module names an openraft type, and
//! nothing outside may assume that there is a local log: a proposal's outcome is all anyone gets.
//!
//! - `types`: the type configuration.
//! - `replica`: names of replicas and groups.
//! - `log`: the log, in memory, and on disk where the job wants it.
//! - `logs`: the log on disk that all groups of the server share. `disk`: a replica's folder. `snapshot`: the file in it.
//! - `machine`: hands committed entries to a [`Replicated`] state; snapshots.
//! - `image`: a snapshot as bytes. `unable`: why a replica cannot go on with what it is given.
//! - `parity`: digests of the state at agreed indices.
//! - `wire`: openraft's messages to bytes and back, payloads beside the header.
//! - `stranger`: messages of somebody who is no member, for tests.
//! - `replay`: the state of a replica that does not run, from its folder.
//! - `network`: sends them to peers.
//! - `group`: one replica of one group: propose, follow who leads. `membership`: who belongs to it. `answers`: what it
//!   answers its peers. `compaction`: when its log is shortened.

mod answers;
mod compaction;
mod disk;
mod disk_log;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod group;
mod image;
mod log;
mod logs;
mod machine;
mod membership;
mod network;
mod parity;
mod replay;
mod replica;
mod sleep;
mod snapshot;
pub mod stranger;
mod types;
mod unable;
mod wire;

pub use disk::{Folder, FolderError};
pub use group::{Group, GroupOptions, Leadership, ProposeError, Replication, Role, Waits};
pub use image::RawImage;
pub use log::LogSize;
pub use logs::Logs;
pub use machine::{Applied, Change, Outdated, Replicated};
pub use membership::Membership;
pub use network::{Peers, endpoint};
pub use parity::Digest;
pub use replay::{Replayed, replay};
pub use replica::{GroupId, ReplicaId};
pub use unable::Unable;
