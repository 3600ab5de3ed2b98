//! One shard of the parameters: its replicated state, and the state of its leader.
//!
//! ```text
//!   rpc ──Event──▶ leader ──Proposal──▶ raft ──apply──▶ Shard (state.rs)
//!    ▲               │ leader-only: rounds, waiting pulls, proposals in flight
//!    └──FromShard────┘                                    ▲
//!                    └───────────── reads ────────────────┘
//! ```
//!
//! - [`command`]: the commands of the log, and their outcomes (of `paraft-changes`).
//! - [`state`]: the replicated state machine; changes only in `apply`. `updates`: its updates of buckets.
//! - [`begin`]: how it gets its job; [`shard_config`]: the part that is fixed then.
//! - [`bucket`]: one bucket's weights and optimizer slots.
//! - [`partition`]: one partition of a sparse table: the content of a bucket of rows.
//! - [`worker_state`]: state that an algorithm keeps per worker in a bucket.
//! - [`members`]: the members, and the progress of each.
//! - [`chunks`]: which worker has which part of the epoch's data (shard 0, leased sampler).
//! - [`cut`]: the state at one moment, for checkpoints, snapshots and digests.
//! - [`delta`]: state deltas, which replicate pushes at the level `leader`; [`staged_delta`]: the parts that wait.
//! - [`round`]: the pushes of a BSP round as one update (pure functions).
//! - [`payload_queue`]: the bound on bytes that wait for the leader.
//! - [`batched`]: the pushes of a round in one log entry.
//! - [`observed_shard`]: observers of the applies: spans, staleness and readers.
//! - [`staleness`]: the delay of each push; measured on the leader.
//! - `reads`: weights for readers that do not train, from any replica.
//! - [`versions`]: weights of one moment for readers, from any replica.
//! - [`leader`]: all leader-only state: a state machine, its modules, and the task that runs it.
//!
//! Nothing here depends on openraft, and only `leader` uses wire types.

pub mod batched;
pub mod begin;
#[cfg(test)]
mod begin_tests;
pub mod bucket;
#[cfg(test)]
mod chunk_properties;
pub mod chunks;
mod counts;
pub mod cut;
pub mod delta;
#[cfg(test)]
mod delta_properties;
pub mod leader;
pub mod members;
pub mod observed_shard;
pub mod partition;
pub mod payload_queue;
mod progress;
#[cfg(test)]
mod properties;
mod reads;
mod replaced_vectors;
mod replicated;
pub mod round;
pub mod shard_config;
#[cfg(test)]
mod simulation;
pub mod staged_delta;
pub mod staleness;
pub mod state;
mod updates;
pub mod versions;
mod weights;
pub mod worker_state;

pub use paraft_changes::shard as command;

pub use command::{Command, Contribution, InitPart, Outcome, Proposal};
pub use observed_shard::ObservedShard;
pub use state::Shard;
