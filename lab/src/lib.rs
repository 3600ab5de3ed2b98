//! The laboratory measures a fleet, compares runs, injects faults, and proves the promises. Commands of
//! `paraft` run it.
//!
//! - [`mod@bench`]: figures, as ratios to a reference in the same run.
//! - [`verify`], [`chaos`]: promises under faults; faults on a running fleet. `fault_schedule`: the
//!   sequence of faults; `health`: whether a fleet can bear the next one; `limits`, `stranger`,
//!   `stalled_readers`: exhausted resources, a client outside the fleet, and readers that read no
//!   reply.
//! - [`compare`]: one job in many ways; [`sweep`]: with many settings. [`mod@simulate`]: a job on a
//!   fleet that does not exist.
//!
//! A fleet needs nothing of it to train.

#[macro_use]
extern crate paraft_fleet;

pub mod bench;
pub mod chaos;
pub mod compare;
mod fault_schedule;
mod health;
mod limits;
pub mod simulate;
mod stalled_readers;
mod statistics;
mod stranger;
pub mod sweep;
pub mod verify;
