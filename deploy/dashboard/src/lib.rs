//! The live page of a fleet, which each of its servers may serve.
//!
//! ```text
//!  servers ◀── Describe, Status, twice a second ── facts ──▶ history ──▶ events of HTTP ──▶ pages
//!          ◀── SwitchMode, Drain, EndJob ───────── act ◀───────────────── POST, with the token
//! ```
//!
//! - [`facts`]: a snapshot of the fleet.
//! - [`history`]: bounded curves and events.
//! - [`local`]: what the files of the page's host give access to: fault points, and the launcher of
//!   workers.
//! - [`record`]: what is drawn of a run's record. [`runs`]: the runs of a folder.
//! - [`act`]: the actions of the page, which use the command line's calls.
//! - `page`: a page that a command serves itself. `serve`: HTTP. The page's files are in `page/`;
//!   charts and colours are those of the report (`paraft-record`).
//!
//! A user with the page's address and token sees everything and may do everything that this process
//! may. The servers treat the page like any other client.

pub mod act;
pub mod facts;
pub mod history;
pub mod local;
mod page;
pub mod record;
pub mod runs;
mod serve;

pub use local::LocalControl;
pub use page::Page;
pub use serve::{Options, Source, TOKEN, Token, serve};
