//! What the promises are checked against: gradients that tell how often each was applied, and one process that does
//! what a fleet of n workers must come to. Shared by `paraft verify` and the tests of the whole system.
//!
//! - [`Ledger`]: a job whose final weights tell of every push; with [`Fate`]s, a [`Tally`] of them.
//! - [`oracle()`]: plain minibatch training in one thread.

mod ledger;
mod oracle;
mod rows;
mod tally;

pub use ledger::{At, Ledger, Page};
pub use oracle::{OracleError, Order, distance, oracle};
pub use rows::LedgerRows;
pub use tally::{Fate, Tally};
