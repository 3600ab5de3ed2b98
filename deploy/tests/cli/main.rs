//! The binary as a user meets it: real processes, real sockets, real signals.

mod agreement;
mod bench;
mod closed;
mod common;
mod compare;
mod crowds;
mod dashboard;
mod engines;
mod gpu;
mod groups;
mod hazards;
mod hung;
mod jobs;
mod kept;
mod memory;
mod mode;
mod operator;
mod plan;
mod running;
mod scarcity;
mod second_client;
mod simulate;
mod standing;
mod sweep;
mod trace;
mod verify;
