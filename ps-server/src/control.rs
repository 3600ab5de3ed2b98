//! The control plane: a Raft group on the same servers that agrees on who they are, where each shard is, which job
//! they train and which checkpoints of it there are. No coordinator to lose.
//!
//! ```text
//!  every server ──Report (what it holds)──▶ leader of the control group ──plan──▶ agreed (log)
//!        ▲                                                  │
//!        └────────────────── directives ────────────────────┘
//! ```
//!
//! - `state`: what is agreed on; `jobs`: the part of it that is about jobs and checkpoints.
//! - `plan`: what should happen next; a pure function.
//! - `groups`: which ranks act as one worker; only the leader knows it.
//! - `agent`: this server's part: forming the fleet, reporting, leading.

mod admit;
mod agent;
mod groups;
#[cfg(test)]
mod groups_tests;
mod jobs;
#[cfg(test)]
mod jobs_tests;
mod plan;
#[cfg(test)]
mod plan_properties;
#[cfg(test)]
mod plan_tests;
mod state;

pub use agent::{Agent, AgentOptions, Identity};
pub use groups::{Answer, Asks, Groups, Holds, Key, Overview, Refused, Then};
pub use jobs::{Difference, Job, JobFacts, JobState, Jobs, MAX_PATH_BYTES, is_in};
pub use plan::{Directive, Do, Health, Heard, JobReport, Patience, ReplicaReport, Report};
pub use state::{Agreed, Command, Member, Outcome, Place, Shape, State};
