//! The control plane: a Raft group on the same servers that agrees on their membership, the place of each
//! shard, the jobs and their checkpoints. There is no coordinator that could fail.
//!
//! ```text
//! every server ──Report (what it holds)──▶ leader of the control group ──plan──▶ agreed (log)
//!       ▲                                                  │
//!       └────────────────── directives ────────────────────┘
//! ```
//!
//! - `state`: the agreed state; `jobs`: its part about jobs and checkpoints; `format`: its layout in
//!   snapshots.
//! - `plan`: what should happen next; a pure function.
//! - `auto`: the rule that chooses a job's staleness bound.
//! - `groups`: which ranks act as one worker; only the leader knows it.
//! - `orders`: what a person asks for, each once.
//! - `membership`: which servers the fleet admits, and which it removes.
//! - `reachability`: which servers this one reaches; only those get a vote.
//! - `replica`: this server's replica of the group, which restarts after its storage failed.
//! - `agent`: this server's part: forming the fleet, reporting, leading. `calls`: its requests to the others,
//!   which `rpc` transports.

mod agent;
mod auto;
#[cfg(test)]
mod auto_tests;
mod calls;
mod format;
mod groups;
#[cfg(test)]
mod groups_tests;
mod job_admission;
mod jobs;
#[cfg(test)]
mod jobs_tests;
mod membership;
mod orders;
mod plan;
#[cfg(test)]
mod plan_properties;
#[cfg(test)]
mod plan_tests;
mod reachability;
mod replica;
mod state;

pub use agent::{Agent, AgentOptions, HAND_OVER, Identity, ReportRefusal, report_interval};
pub use calls::{Calls, Hello, ReportAnswer, SentReport};
pub use groups::{Advice, Answer, Groups, Heartbeat, JoinRequest, Key, Overview, Refused};
pub use jobs::{Difference, Job, JobFacts, JobState, Jobs, MAX_PATH_BYTES, Submission, is_in};
pub use orders::{Done, MAX_ORDERS, Order, Orders};
pub use plan::{
    Action, AsideReport, Directive, Health, JobReport, LastReport, ReplicaReport, Report, Timeouts,
};
pub use replica::ControlReplica;
pub use state::{Agreed, Command, Member, Outcome, Place, Refusal, Shape, State};

/// What tests of other modules need, too.
#[cfg(test)]
pub(crate) mod tests {
    pub(crate) use super::agent::tests::an_agent;
}
