//! The live page of a fleet, which each of its servers may serve.
//!
//! ```text
//!  servers ◀── Describe, Status, twice a second ── facts ──▶ history ──▶ events of HTTP ──▶ pages
//!          ◀── SwitchMode, Drain, EndJob ───────── act ◀───────────────── POST, with the token
//! ```
//!
//! - [`facts`]: what the fleet is at a moment.
//! - [`history`]: what has been seen so far, bounded.
//! - [`local`]: what is reached by the files of the page's host: fault points, and the launcher of workers.
//! - [`runs`]: runs that have ended, from their records.
//! - [`act`]: what a person does there, by the command line's calls.
//! - `own`: a page that a command serves itself. `serve`: HTTP. The page's files are in `page/`, charts and colours those of the report (`paraft-record`).
//!
//! Whoever has the page's address with its token sees everything and may do everything that this process may. Nothing is asked of the
//! servers' state machines: this is a client like any other, and a reader of files.

pub mod act;
pub mod facts;
pub mod history;
pub mod local;
mod page;
pub mod runs;
mod serve;

pub use local::LocalControl;
pub use page::Page;
pub use serve::{Options, Source, TOKEN, Token, serve};
