//! What the promises are checked against: gradients that tell how often each was applied, and one process that does
//! what a fleet of n workers must come to. Shared by `paraft verify` and the tests of the whole system.
//!
//! - [`Ledger`]: a job with one entry for each step of a worker; what the tests use.
//! - [`Book`]: one entry for each push, that is each bucket of each step; what `paraft verify ledger` uses.
//! - [`oracle()`]: plain minibatch training in one thread.

mod book;
mod ledger;
mod oracle;

pub use book::{Book, Fate, Tally};
pub use ledger::{At, Ledger, Page};
pub use oracle::{OracleError, Order, distance, oracle};
