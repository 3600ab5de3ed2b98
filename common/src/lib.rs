//! The domain of Paraft: ids, the layout of parameters, placement, optimizers, the consistency rule, the
//! servers' part of a job. Pure: no I/O, no clock, no async, no randomness of its own; time and random numbers are arguments.
//!
//! What it is not: it knows no wire format (that is `paraft-proto`) and no process (that is `paraft-deploy`).

mod address;
pub mod algorithm;
pub mod auto;
pub mod checkpoint;
pub mod codec;
pub mod config;
pub mod consistency;
pub mod constraint;
pub mod difference;
pub mod draws;
pub mod durability;
pub mod encoding;
pub mod group;
pub mod histogram;
pub mod id;
pub mod kind;
pub mod layout;
pub mod local;
pub mod modes;
pub mod need;
pub mod optim;
pub mod payload;
pub mod pipeline;
pub mod placement;
pub mod retry;
pub mod round;
pub mod share;
mod simd;
pub mod table;

pub use address::check_address;
pub use auto::{AutoConfig, ModeChoice};
pub use consistency::{InForce, Mode};
pub use durability::{Durability, LeaderWindow};
pub use encoding::Encoding;
pub use id::{BucketId, JobId, JobShard, Seq, ServerId, SessionId, ShardId, Step, Version, WorkerId};
pub use layout::{BucketSpec, Layout, ParamGroup, TensorKind, TensorSpec};
pub use payload::Payload;
pub use share::Share;
pub use table::TableSpec;
