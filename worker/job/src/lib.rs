//! The job file: model, data, training and fleet.
//!
//! TOML; every key except `[model] kind` and `[data] kind` has a default. Unknown keys are refused. The file is
//! read and checked once; afterwards nothing about it can fail. docs/configuration.md lists every key.
//!
//! ```text
//!  text ─▶ toml ─▶ `--set` over it (set) ─▶ serde, with the key that is to blame (refused) ─▶ each section's check ─▶ Job
//!                                              └─ in words, and what may have been meant (explain, keys), on which line (place)
//! ```
//!
//! Each section has a file, with its keys and their compatibility: [`train`], [`eval`], [`checkpoint`],
//! [`cluster`], and `sections` for those with types of other crates ([`[optimizer]`](paraft_common::optim),
//! `[data]` ...). `ways` has the ways of training that exclude each other, `servers` the part of a job that the servers
//! receive, `fingerprint` the further facts on which workers must agree, [`paths`] the keys that are paths.
//!
//! Not here: what the servers read ([`paraft_common::config`]: they know no model and no data set), and how a
//! worker executes a job.

mod check;
pub mod checkpoint;
pub mod cluster;
pub mod constraints;
pub mod device;
pub mod eval;
mod explain;
mod fingerprint;
mod job;
mod keys;
mod local;
pub mod memory;
pub mod parallel;
pub mod paths;
mod place;
mod read;
mod refused;
mod sections;
mod servers;
mod set;
mod tables;
pub mod track;
pub mod train;
mod ways;

pub use checkpoint::CheckpointConfig;
pub use cluster::{ClusterConfig, TransportConfig};
pub use constraints::{ConstraintConfig, Constraints, matches};
pub use device::DeviceConfig;
pub use eval::EvalConfig;
pub use job::Job;
pub use keys::job_keys;
pub use memory::{MemoryConfig, Resident};
pub use parallel::ParallelConfig;
pub use place::line_of;
pub use read::JobError;
pub use set::assigns;
pub use track::TrackConfig;
pub use train::{Exchange, SamplerKind, TrainConfig};

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
