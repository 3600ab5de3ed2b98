//! A worker's protocol as a state machine: its messages to the leaders of its shards, what it keeps until
//! acknowledged, and its reaction when a stream breaks, a leader moves or a session is lost.
//!
//! No sockets, no threads, no clock, no randomness: inputs go in with their time of arrival, effects come
//! out. The owner of a [`Session`] is its I/O. `paraft-client` does that for a real worker; the simulator and
//! the leaders' simulation drive the same code.
//!
//! ```text
//! training loop                       Session                              I/O
//! push, pull, settle, ... ──────────▶ what is kept, asked, waited for ───▶ Effect: Dial, Send, HangUp, ...
//! poll ◀── Event: Weights, Pulled ───  a Link for each shard      ◀─────── Input: Message, Broken, Tick
//! ```
//!
//! - [`session`]: the worker's side, over all shards.
//! - `link`: one shard: finds the leader, keeps unacknowledged pushes, sends them again after a break; asks
//!   others about a silent leader.
//! - `io`: inputs and effects.
//! - `search`: which server to ask next for the leader.
//! - `norms`: the norm of a gradient over all shards, some of which other processes of the worker may have.
//! - [`fetch`]: the vectors of a shard from whichever server has them. [`serve`]: its other half, for readers.
//! - [`encoders`]: how a worker's pushes are encoded, and their state from one to the next.
//! - [`error`]: few kinds, which say what to do.

pub mod encoders;
pub mod error;
pub mod fetch;
mod io;
mod link;
mod norms;
mod search;
pub mod serve;
pub mod session;

pub use encoders::Encoders;
pub use error::SessionError;
pub use io::{Acked, Effect, Input};
pub use norms::sum_of_parts;
pub use session::{Arrived, Event, HANDOVER, Next, Options, Pull, Pulled, Reported, Session};
