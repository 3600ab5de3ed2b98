//! Helpers for the tests of the whole system. No test is here; see `tests/`.
//!
//! - [`fleet`]: servers in this process, on ports of the system's choice, each on a runtime of its own so
//!   that one can be killed.
//! - [`train`]: jobs on the embedded digits, workers in threads, and the single-process trainer that is the
//!   oracle for the cluster.
//! - [`ledger`]: gradients made so that the final weights tell how often each push was applied.
//! - [`raw`]: raw HTTP/2, for bytes that are not messages.
//! - [`stream`]: a scripted worker's stream, for messages that no client sends.
//! - [`wait`]: waits for a condition, with a deadline and the last state in the message.

pub mod closed;
pub mod fleet;
pub mod raw;
pub mod stream;
pub mod train;
pub mod wait;

pub use paraft_proof as ledger;
