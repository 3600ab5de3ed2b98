//! Raft. Only this crate uses openraft, and it does not look into what is replicated.
//!
//! The rest of the server sees a [`Group`]: propose in order, get the outcome, watch the leader, wait until
//! everything before this term is applied, change the members. No other crate may use an openraft type or assume
//! that a local log exists: the outcome of a proposal is all that it gets.
//!
//! - `types`: the type configuration.
//! - `group_name`: names of groups.
//! - `log`: the log, in memory, and on disk if the job requires it.
//! - `logs`: the log on disk that all groups of the server share. `disk_log`: one replica's part of it, of
//!   `records`.
//! - `disk`: a replica's folder. `snapshot`, `vote_file`: files in it. `storage`: errors of both.
//! - `replicated`: the trait of the state that a group replicates. `machine`: applies committed entries; snapshots.
//! - `image`: a snapshot as bytes. `apply_error`: why a replica cannot apply an entry or a snapshot.
//! - `checks`: digests of the state at agreed indices.
//! - `wire`: openraft's messages to bytes and back, with payloads beside the header.
//! - `stranger`: messages of a sender that is not a member, for tests.
//! - `replay`: the state of a stopped replica, from its folder.
//! - `peers`: the connections to the other servers; `dial`: whether a process listens at an address.
//! - `network`: sends messages to peers. `snapshot_sender`: a snapshot, piece by piece. `appends`: pipelined appends
//!   to a follower; `lane`: over a separate connection. `append_receiver`: the follower's side. `voter_logs`: the
//!   ends of voters' logs.
//! - `leadership`: the leader, and members that are behind. `compaction`: when a log is purged. `incoming`: a
//!   snapshot that is being received. `sleep_state`: whether it sleeps. `belief`: accepted evidence of a leader's end.
//! - `group`: one replica of one group: propose, watch the leader. `membership`: its members. `answers`: its
//!   answers to peers. `sleep`: when it sleeps, and what wakes it. `evidence`: a leader whose process has ended.
//!   `timekeeper`: its heartbeats, and when openraft's timer runs (`ticks`). `consistency`: when it is checked.
//!
//! The files have no circular dependencies (a test checks that): types are in lower modules than their users.

mod answers;
mod append_receiver;
mod appends;
mod apply_error;
mod belief;
mod checks;
mod compaction;
mod consistency;
mod dial;
mod disk;
mod disk_log;
mod evidence;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod group;
mod group_name;
mod image;
mod incoming;
mod lane;
mod leadership;
mod log;
mod logs;
mod machine;
mod membership;
mod network;
mod peers;
mod records;
mod replay;
mod replicated;
mod sleep;
mod sleep_state;
mod snapshot;
mod snapshot_sender;
mod storage;
pub mod stranger;
#[cfg(test)]
mod testing;
mod ticks;
mod timekeeper;
mod types;
mod vote_file;
mod voter_logs;
mod wire;

pub use apply_error::ApplyError;
pub use checks::Digest;
pub use disk::Folder;
pub use evidence::ended_here;
pub use group::{Group, GroupOptions, ProposeError};
pub use group_name::GroupName;
pub use image::{ImagePart, LazyPart, RawImage};
pub use leadership::{Leadership, Role};
pub use log::LogSize;
pub use logs::Logs;
pub use membership::Membership;
pub use paraft_changes::ReplicaId;
pub use peers::{Peers, channel};
pub use replay::{ReplayResult, replay};
pub use replicated::{GroupState, OutdatedMemory, Replicated};
pub use storage::FolderError;
pub use wire::WireError;
