//! Raft: openraft stops here, and what is replicated is not known here.
//!
//! The rest of the server sees a [`Group`]: propose in order, learn the outcome, know who leads, wait until
//! everything before this term is applied, change who takes part. No other module names an openraft type, and
//! nothing outside may assume that there is a local log: a proposal's outcome is all anyone gets.
//!
//! - `types`: the type configuration.
//! - `replica`: names of replicas and groups.
//! - `log`: the log, in memory, and on disk where the job wants it.
//! - `logs`: the log on disk that all groups of the server share. `disk_log`: one replica's part of it, of `records`.
//! - `disk`: a replica's folder. `snapshot`: the file in it. `storage`: what goes wrong with them.
//! - `replicated`: what a group replicates. `machine`: hands committed entries to it; snapshots.
//! - `image`: a snapshot as bytes. `unable`: why a replica cannot go on with what it is given.
//! - `checks`: digests of the state at agreed indices.
//! - `wire`: openraft's messages to bytes and back, payloads beside the header.
//! - `stranger`: messages of somebody who is no member, for tests.
//! - `replay`: the state of a replica that does not run, from its folder.
//! - `network`: sends them to peers. `appends`: several under way to a follower; `lane`: over a connection of their own.
//!   `received`: how it takes them.
//! - `leadership`: who leads, and who is behind. `compaction`: when a log is shortened. `incoming`: a snapshot that is being
//!   received. `asleep`: whether a replica sleeps. `belief`: which evidence of a leader's end it has believed.
//! - `group`: one replica of one group: propose, follow who leads. `membership`: who belongs to it. `answers`: what it
//!   answers its peers. `sleep`: when it sleeps, and what wakes it. `evidence`: a leader whose process has ended.
//!
//! No file here needs one that needs it (a test holds that): types lie below those who use them.

mod answers;
mod appends;
mod asleep;
mod belief;
mod checks;
mod compaction;
mod disk;
mod disk_log;
mod evidence;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod group;
mod image;
mod incoming;
mod lane;
mod leadership;
mod log;
mod logs;
mod machine;
mod membership;
mod network;
mod received;
mod records;
mod replay;
mod replica;
mod replicated;
mod sleep;
mod snapshot;
mod storage;
pub mod stranger;
#[cfg(test)]
mod testing;
mod types;
mod unable;
mod wire;

pub use checks::Digest;
pub use disk::Folder;
pub use evidence::ended_here;
pub use group::{Group, GroupOptions, ProposeError};
pub use image::RawImage;
pub use leadership::{Leadership, Role};
pub use log::LogSize;
pub use logs::Logs;
pub use membership::Membership;
pub use network::{Peers, channel};
pub use replay::{Replayed, replay};
pub use replica::{GroupName, ReplicaId};
pub use replicated::{Logged, Outdated, Replicated, StateOf};
pub use storage::FolderError;
pub use unable::Unable;
pub use wire::WireError;
