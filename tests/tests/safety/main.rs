//! The safety of the whole system: servers, clients and workers in this process, over loopback.

mod checkpoints;
mod checks;
mod crowds;
mod durability_leader;
mod elastic;
mod encodings;
mod equality;
mod evaluations;
mod exactly_once;
mod failover;
mod groups;
mod history;
mod hostile;
mod idle;
mod lanes;
mod layout;
mod leases;
mod local_steps;
mod membership;
mod memory;
mod modes;
mod own_loop;
mod pages;
mod reads;
mod replicas;
mod switches;
