//! The stages of a gradient's road: their names, how long they take, and a trace that browsers show.
//!
//! ```text
//!  client, worker, server ──Span──▶ Stages ──sums──▶ /metrics
//!                                     └─(--trace)─▶ trace/worker-0.jsonl ──merge──▶ trace.json
//! ```
//!
//! - [`Stage`]: the names, and what each begins and ends with.
//! - [`Stages`]: where a process notes its spans. The sums are always kept: a span costs the two clock reads of who
//!   notes it and two additions. A trace is written only where one was asked for, by a thread of its own.
//! - [`Span`]: one bucket of one step in one stage.
//! - [`merge`]: the files of several processes as one file in Chrome's Trace Event format. [`otlp`]: as OpenTelemetry has them.
//!
//! What is noted here is looked at by people and never by the program: nothing depends on it.

// A test that unwraps fails with the place and the value; that is what it should do.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod chrome;
mod file;
mod merge;
mod moment;
pub mod otlp;
mod span;
mod stage;
mod stages;

pub use file::{DEFAULT_STEPS, MAX_SPANS, MAX_STEPS, Tracing};
pub use merge::{Merged, TraceError, merge, spans};
pub use moment::Moment;
pub use span::{Pass, Span};
pub use stage::Stage;
pub use stages::{Stages, Total};

/// In a run's folder: what its processes have recorded.
pub const TRACE_FOLDER: &str = "trace";
/// In a run's folder: what browsers show.
pub const TRACE_FILE: &str = "trace.json";
