//! The control plane: a Raft group on the same servers that agrees on who they are and where each shard is.
//! No coordinator to lose.
//!
//! ```text
//!  every server ──Report (what it holds)──▶ leader of the control group ──plan──▶ agreed (log)
//!        ▲                                                  │
//!        └────────────────── directives ────────────────────┘
//! ```
//!
//! - `state`: what is agreed on.
//! - `plan`: what should happen next; a pure function.
//! - `agent`: this server's part: forming the fleet, reporting, leading.

mod agent;
mod plan;
#[cfg(test)]
mod plan_properties;
#[cfg(test)]
mod plan_tests;
mod state;

pub use agent::{Agent, AgentOptions, Identity};
pub use plan::{Directive, Do, Health, Heard, Patience, ReplicaReport, Report};
pub use state::{Agreed, Command, Member, Outcome, Place, Shape, State};
