//! The live page of a fleet, which each of its servers may serve.
//!
//! ```text
//!  servers ◀── Describe, Status, twice a second ── facts ──▶ history ──▶ events of HTTP ──▶ pages
//!          ◀── SwitchMode, Drain, EndJob ───────── act ◀───────────────── POST, with the token
//! ```
//!
//! - [`facts`]: what the fleet is at a moment.
//! - [`history`]: what has been seen so far, bounded.
//! - [`act`]: what a person does there, by the command line's calls.
//! - `serve`: HTTP. The page's files are in `page/`, charts and colours those of the report (`paraft-record`).
//!
//! Whoever has the page's address with its token sees everything and may do everything that this process may. Nothing is asked of the
//! servers' state machines: this is a client like any other.

pub mod act;
pub mod facts;
pub mod history;
mod serve;

pub use serve::{Options, Source, TOKEN, Token, serve};
