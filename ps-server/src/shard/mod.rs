//! One shard of the parameters: what is replicated, and what only its leader knows.
//!
//! ```text
//!   rpc ──Event──▶ leader ──Proposal──▶ raft ──apply──▶ Shard (state.rs)
//!    ▲               │ leader-only: rounds, waiting pulls, proposals in flight
//!    └──FromShard────┘                                    ▲
//!                    └───────────── reads ────────────────┘
//! ```
//!
//! - [`command`]: what may be written to the log, and what applying it gives back.
//! - [`state`]: the replicated state machine; changes only in `apply`. `updates`: its updates of buckets.
//! - [`begin`]: how it comes to its job; [`configured`]: what is fixed then.
//! - [`bucket`]: one bucket's weights and optimizer slots.
//! - [`kept`]: what an algorithm keeps of each worker in a bucket.
//! - [`members`]: who takes part, and how far each has come.
//! - [`chunks`]: which worker has which part of the epoch's data (shard 0, leased sampler).
//! - [`delta`]: state deltas, the way into the log at the level `leader`.
//! - [`round`]: the pushes of a BSP round as one update. Pure.
//! - [`queued`]: the bytes that may wait for the leader.
//! - [`batched`]: the pushes of a round in one log entry.
//! - [`observed`]: what is applied, seen from outside: timed, and told to readers.
//! - [`staleness`]: how late each push is; measured where the replica leads.
//! - [`reads`]: weights for readers that do not train, from any replica.
//! - [`leader`]: everything leader-only: a state machine of parts, and the task that it runs in.
//!
//! Nothing here knows openraft, and nothing but `leader` and `reads` knows a wire type.

pub mod batched;
pub mod begin;
#[cfg(test)]
mod begin_tests;
pub mod bucket;
#[cfg(test)]
mod chunk_properties;
pub mod chunks;
pub mod command;
pub mod configured;
pub mod delta;
#[cfg(test)]
mod delta_properties;
pub mod image;
pub mod kept;
pub mod leader;
pub mod members;
pub mod observed;
mod progress;
#[cfg(test)]
mod properties;
pub mod queued;
pub mod reads;
mod replaced;
mod replicated;
pub mod round;
#[cfg(test)]
mod simulation;
pub mod staleness;
pub mod state;
mod updates;
mod weights;

pub use command::{Command, Contribution, InitPart, Outcome, Proposal};
pub use observed::Observed;
pub use state::Shard;
