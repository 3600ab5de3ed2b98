//! A fleet in simulated time: the real shards, leaders, models and data; a clock that jumps from one
//! event to the next.
//!
//! ```text
//!  training.rs ─▶ client.rs ─▶ network.rs ─▶ servers.rs ─▶ the real leader ─▶ replication.rs ─▶ the real Shard::apply
//!      │ the real gradient         │ drawn: latency, links         │ drawn: when a majority holds an entry
//!      └── drawn: how long it takes, which process fails
//! ```
//!
//! Real: consistency, admission, rounds, state deltas, leases, sessions, optimizers, gradients,
//! samples, the format of the record. Drawn from one seed: the time of steps and messages, when a
//! majority holds an entry, which process fails and when. Absent: sockets, gRPC, files, redirects
//! between servers, the limit on unacknowledged pushes, other programs on a host.
//!
//! The same job and setup give the same record and the same weights, bit for bit, on one machine, and
//! only simulated time passes. The predicted speed is only as good as the setup; [`calibrate`] measures
//! how good.
//!
//! - [`setup`]: the parameters of a fleet. `run`: a whole run.
//! - `clock`, `chance`, `cores`, `network`, `stream`: time, random numbers, processors, links, streams.
//! - `servers`, `leaders`, `replication`: the servers' side. `fleet`, `training`, `speed`, `client`,
//!   `learner`: the workers'; `stages`, `lines`: workers with pipeline stages.
//! - [`watched`]: the status of the fleet for observers. `recording`, `step_lead`: the record. `world`:
//!   the shared state.
//! - [`calibrate`]: fits a setup to a real run, and compares a simulated run with a real one.

pub mod calibrate;
mod chance;
mod client;
mod clock;
mod cores;
mod error;
mod fleet;
mod leaders;
mod learner;
mod lines;
mod network;
mod recording;
mod replication;
mod run;
mod servers;
pub mod setup;
mod speed;
mod stages;
mod step_lead;
mod stream;
mod training;
pub mod watched;
mod world;

pub use error::SimError;
pub use paraft_worker::slow::Straggle;
pub use recording::Sink;
pub use run::{Outcome, StageOutcome, check, simulate, simulate_watched};
pub use setup::Setup;
