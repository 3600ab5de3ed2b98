//! A fleet in simulated time: the real shards, leaders, models and data; a clock that jumps from one event to the next.
//!
//! ```text
//!  training.rs ─▶ client.rs ─▶ network.rs ─▶ servers.rs ─▶ the real leader ─▶ replication.rs ─▶ the real Shard::apply
//!      │ the real gradient         │ drawn: latency, links         │ drawn: when a majority holds an entry
//!      └── drawn: how long it takes, who fails
//! ```
//!
//! What is real: consistency, admission, rounds, state deltas, leases, sessions, optimizers, gradients, samples, the format of
//! the record. What is drawn, from one seed: how long a step takes, how long messages are under way, when a majority holds
//! an entry, who fails and when. What is not there: sockets, gRPC, files, redirects between servers, the bound on what may
//! be pushed without an ack, other programs on a host.
//!
//! It promises: the same job and setup give the same record and the same weights, bit for bit, on one machine; no time
//! passes but simulated time. It does not promise that a fleet is as fast as it says: that is as good as the setup, and
//! [`calibrate`] says how good.
//!
//! - [`setup`]: what a fleet is like. `run`: everything put together.
//! - `clock`, `chance`, `cores`, `network`, `stream`: time, random numbers, processors, links, streams.
//! - `servers`, `leading`, `replication`: the servers' side. `fleet`, `training`, `client`, `learner`: the workers'; `stages`,
//!   `lines`: of those whose ranks have a stage of the model each.
//! - [`watched`]: what the fleet says of itself to who looks on. `recording`, `step_lead`: what is written down. `world`: what all share.
//! - [`calibrate`]: a setup from a real run, and a simulated run beside a real one.

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
