//! The laboratory: what measures a fleet, compares runs, attacks them, and proves the promises. Commands of `paraft` run it.
//!
//! - [`mod@bench`]: figures, as ratios to something in the same run.
//! - [`verify`], [`chaos`]: promises under faults; faults on a running fleet. `fault_schedule`: which fault comes next; `health`: whether a
//!   fleet can bear it; `scarce`, `stranger`, `hanging`: resources that run out, who speaks from outside, and readers that take nothing.
//! - [`compare`]: one job in many ways; [`sweep`]: with many settings. [`mod@simulate`]: a job on a fleet that does not exist.
//!
//! What it is not: nothing that a fleet needs to train.

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
