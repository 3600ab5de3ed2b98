//! The binary as a user meets it: real processes, real sockets, real signals.

mod bench;
mod common;
mod compare;
mod crowds;
mod gpu;
mod groups;
mod hazards;
mod jobs;
mod kept;
mod mode;
mod operator;
mod running;
mod simulate;
mod trace;
mod verify;
