//! The one-hot ledger: jobs whose final weights tell how often each push was applied.
//!
//! - [`Ledger`]: the job, and one entry for each step of a worker; what the tests of the whole system use.
//! - [`Book`]: one entry for each push, that is each bucket of each step; what `paraft verify ledger` uses.

mod book;
mod ledger;

pub use book::{Book, Fate, Tally};
pub use ledger::{At, Ledger, Page};
